"""What a layout did in its first steps, held against what one process did: every difference, with what is allowed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.reduction import NARROW
from phalanx.watch.records import Array, Moment, RankRecord, StepFacts, TensorPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two runs of one job may differ in a precision, relative to one process.

    Of the first step `total`, its loss and gradient norm, and `gradients`; `later`: the losses after it, between which
    weights have changed. `zero`: a gradient's difference that is this small a part of the gradient norm is rounding,
    whatever the gradient itself (docs/decisions/zero-gradients.md).
    """

    total: float
    gradients: float
    later: float
    zero: float


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(total=1e-5, gradients=1e-5, later=1e-4, zero=2**-23),
    "fp64": Tolerance(total=1e-10, gradients=1e-10, later=1e-9, zero=2**-52),
    "bf16": Tolerance(total=2e-3, gradients=5e-2, later=1e-2, zero=2**-16),
    "fp16": Tolerance(total=5e-4, gradients=1e-2, later=5e-3, zero=2**-18),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One comparison: `name` (a parameter, a step) differs by `error`, most on rank `where`; up to `tolerance` it may.
    `check` is the kind of comparison."""

    check: str
    name: str
    error: float
    tolerance: float
    where: str

    @property
    def ok(self) -> bool:
        """Whether it passes; what is not a number does not."""
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """Error in units of the tolerance, for ordering."""
        if self.ok:
            return self.error / self.tolerance if self.tolerance else 0.0
        return self.error / self.tolerance if self.tolerance and math.isfinite(self.error) else math.inf


def compare(plan: Plan, ranks: Sequence[RankRecord], reference: RankRecord) -> list[Finding]:
    """All comparisons of the run of `plan`, recorded by `ranks`, with that of one process."""
    allowed = TOLERANCES["bf16" if plan.layout.reduce in NARROW else plan.job.precision]
    held = _Held(plan.layout, ranks)
    findings = []
    for number, expected in enumerate(reference.steps):
        findings.append(_data(plan.layout, ranks, expected, number))
        findings += _step(plan.layout, ranks, expected, number, allowed)
    findings += held.against("initial weights", _whole(reference.of("initial weights")))
    findings.append(_norm(held))
    findings += _gradients(held, reference, allowed)
    findings += held.against("copies of weights", held.whole("last weights"), of="last weights")
    findings += _decay(held, plan.job.optimizer.weight_decay * ranks[0].decay_rate, allowed)
    return findings


class _Held:
    """What all ranks held, by moment."""

    def __init__(self, layout: Layout, ranks: Sequence[RankRecord]) -> None:
        self.layout, self.ranks = layout, ranks

    def whole(self, moment: Moment) -> dict[str, Array]:
        """Global tensors, of all copies of an element the first."""
        return _whole(piece for record in self.ranks for piece in record.of(moment))

    def distances(self, moment: Moment, expected: Mapping[str, Array]) -> Iterator[tuple[str, float, str]]:
        """Of each tensor of `expected`: ‖Δ‖ over its elements, where the copy that is farthest off stands for all
        copies of an element and an element that no rank holds is infinitely far; and the rank that is farthest off."""
        farthest = {name: np.full(values.shape, -1.0) for name, values in expected.items()}
        worst = dict.fromkeys(expected, (-1.0, 0))
        for record in self.ranks:
            for piece in record.of(moment):
                delta = np.abs(np.subtract(piece.values, expected[piece.name][piece.box], dtype=np.float64))
                there = farthest[piece.name][piece.box]
                np.maximum(there, delta, out=there)
                distance = float(np.nan_to_num(np.linalg.norm(delta), nan=np.inf))
                if distance > worst[piece.name][0]:
                    worst[piece.name] = distance, record.rank
        for name, values in farthest.items():
            distance = math.inf if (values < 0).any() else float(np.linalg.norm(values))
            rank = worst[name][1]
            yield name, distance, place(self.layout, rank)

    def against(self, check: str, expected: Mapping[str, Array], of: Moment = "initial weights") -> list[Finding]:
        """Weights that must be `expected` to the last bit."""
        return [
            Finding(check=check, name=name, error=_relative(distance, expected[name]), tolerance=0.0, where=where)
            for name, distance, where in self.distances(of, expected)
        ]


def relative_error(ours: float, alone: float) -> float:
    """How far `ours` is from what one process has."""
    return abs(ours - alone) / (abs(alone) or 1.0)


def place(layout: Layout, rank: int) -> str:
    """A rank and its coordinates."""
    return f"rank {rank} ({layout.coord(rank)})"


def _whole(pieces: Iterable[TensorPiece]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for piece in pieces:
        whole = tensors.setdefault(piece.name, np.full(piece.shape, np.nan, dtype=piece.values.dtype))
        there = whole[piece.box]
        np.copyto(there, piece.values, where=np.isnan(there))
    return tensors


def _relative(distance: float, reference: Array) -> float:
    norm = float(np.linalg.norm(reference.astype(np.float64)))
    return distance / norm if norm else distance


def _norm(held: _Held) -> Finding:
    """The gradient norm against the gradients themselves, each element once: sharp whatever the compute precision."""
    gradients = held.whole("gradients").values()
    own = math.sqrt(sum(float(np.linalg.norm(values.astype(np.float64))) ** 2 for values in gradients))
    errors = [relative_error(record.steps[0].gradient_norm, own) for record in held.ranks]
    tolerance = 100 * max(float(np.finfo(values.dtype).eps) for values in gradients)
    return _farthest(held.layout, "gradient norm", "of the gathered gradients", errors, tolerance)


def _gradients(held: _Held, reference: RankRecord, allowed: Tolerance) -> Iterator[Finding]:
    """Each parameter's gradient, relative to itself, or to the norm of all where the difference is mere rounding."""
    expected = _whole(reference.of("gradients"))
    total = reference.steps[0].gradient_norm
    for name, distance, where in held.distances("gradients", expected):
        own = float(np.linalg.norm(expected[name].astype(np.float64)))
        yield gradient_finding(name, distance, own, total, allowed, where)


def gradient_finding(name: str, distance: float, own: float, total: float, allowed: Tolerance, where: str) -> Finding:
    """A gradient that is `distance` off, where its norm is `own`, and that of all gradients `total`."""
    rounding = allowed.gradients * own < distance <= allowed.zero * total
    reference = total if rounding else own or total
    return Finding(
        check="gradients",
        name=f"{name} (of the gradient norm)" if rounding else name,
        error=distance / reference if reference else distance,
        tolerance=allowed.zero if rounding else allowed.gradients,
        where=where,
    )


def _decay(held: _Held, decay: float, allowed: Tolerance) -> Iterator[Finding]:
    """Matrices shrink by `decay`, vectors (norms, biases) keep every bit."""
    before = held.whole("before decay")
    expected = {name: values * (1.0 - decay) if values.ndim > 1 else values for name, values in before.items()}
    for name, distance, where in held.distances("after decay", expected):
        matrix = expected[name].ndim > 1
        error = _relative(distance, expected[name])
        tolerance = 4 * float(np.finfo(before[name].dtype).eps) if matrix else 0.0
        yield Finding(check="weight decay", name=name, error=error, tolerance=tolerance, where=where)


def _step(
    layout: Layout, ranks: Sequence[RankRecord], expected: StepFacts, number: int, allowed: Tolerance
) -> Iterator[Finding]:
    """Loss, in the first step the gradient norm, and whether all ranks have the same numbers."""
    name = f"step {number + 1}"
    facts = [record.steps[number] for record in ranks]
    compared = [("loss", allowed.later if number else allowed.total)]
    compared += [] if number else [("gradient_norm", allowed.total)]
    for key, tolerance in compared:
        wanted = getattr(expected, key)
        errors = [relative_error(getattr(fact, key), wanted) for fact in facts]
        yield _farthest(layout, key.replace("_", " "), name, errors, tolerance)
    for key in ("loss", "gradient_norm", "learning_rate", "clip_coefficient"):
        values = [getattr(fact, key) for fact in facts]
        errors = [relative_error(value, values[0]) for value in values]
        yield _farthest(layout, "same on all ranks", f"{key.replace('_', ' ')} of {name}", errors, 0.0)


def _farthest(layout: Layout, check: str, name: str, errors: Sequence[float], tolerance: float) -> Finding:
    rank = max(range(len(errors)), key=lambda index: math.inf if math.isnan(errors[index]) else errors[index])
    return Finding(check=check, name=name, error=errors[rank], tolerance=tolerance, where=place(layout, rank))


def _data(layout: Layout, ranks: Sequence[RankRecord], expected: StepFacts, number: int) -> Finding:
    """Over the data axis every sequence of the global batch is trained on once, with the tokens that one process read;
    on every pipeline and tensor coordinate alike. The error counts sequences missing or too many."""
    wanted = Counter(zip(expected.sequences, expected.digests, strict=True))
    read: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
    first: dict[tuple[int, int], int] = {}
    for record in ranks:
        coord, facts = layout.coord(record.rank), record.steps[number]
        line = coord.pipeline, coord.tensor
        first.setdefault(line, record.rank)
        read.setdefault(line, Counter()).update(zip(facts.sequences, facts.digests, strict=True))
    errors = {line: ((wanted - found) + (found - wanted)).total() for line, found in read.items()}
    line = max(errors, key=lambda key: errors[key])
    where = place(layout, first[line])
    return Finding(check="data", name=f"step {number + 1}", error=errors[line], tolerance=0.0, where=where)
