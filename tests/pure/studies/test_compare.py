"""What counts as a difference: values, copies, holes, numbers that are none, ranks that disagree, data read twice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_plan

from phalanx.plan.layout import Layout
from phalanx.studies.compare import Finding, compare
from phalanx.watch.records import RankRecord, StepFacts, TensorPiece

PLAN = tiny_plan(Layout(tensor=2, data=2), precision="fp32")
WEIGHT = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
MOMENTS = ("initial weights", "gradients", "last weights", "before decay", "after decay")
NORM = float(np.linalg.norm(WEIGHT))


def facts(positions: tuple[int, ...], **changes: object) -> StepFacts:
    values = {"loss": 2.0, "gradient_norm": NORM, "learning_rate": 0.1, "clip_coefficient": 1.0}
    return StepFacts(**{**values, "sequences": positions, "digests": tuple(p * 7 for p in positions), **changes})


def pieces(first: int, last: int) -> tuple[TensorPiece, ...]:
    """Rows `first` up to `last` of a matrix, at all moments; it decays by 1 %."""
    return tuple(
        TensorPiece(
            moment=moment,
            name="w",
            shape=(4, 2),
            start=(first, 0),
            stop=(last, 2),
            values=WEIGHT[first:last] * np.float32(0.99 if moment == "after decay" else 1.0),
        )
        for moment in MOMENTS
    )


def ranks() -> list[RankRecord]:
    """Four ranks: over the tensor axis each holds two rows, over the data axis each reads two sequences."""
    return [
        RankRecord(
            rank=rank,
            steps=(facts((2 * coord.data, 2 * coord.data + 1)),),
            pieces=pieces(2 * coord.tensor, 2 * coord.tensor + 2),
            decay_rate=0.1,
        )
        for rank, coord in enumerate(PLAN.layout.coords())
    ]


REFERENCE = RankRecord(rank=0, steps=(facts((0, 1, 2, 3)),), pieces=pieces(0, 4), decay_rate=0.1)


def found(every: list[RankRecord]) -> dict[str, Finding]:
    """What fails, by check."""
    return {finding.check: finding for finding in compare(PLAN, every, REFERENCE) if not finding.ok}


def with_values(record: RankRecord, moment: str, change: float) -> RankRecord:
    """`record`, to whose first value at `moment` something is added."""

    def changed(piece: TensorPiece) -> TensorPiece:
        values = piece.values.copy()
        values[0, 0] += change
        return replace(piece, values=values)

    return replace(record, pieces=tuple(changed(p) if p.moment == moment else p for p in record.pieces))


def test_equal_runs_have_no_differences() -> None:
    assert found(ranks()) == {}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("moment", ["initial weights", "gradients", "last weights", "after decay"])
@pytest.mark.parametrize("change", [0.1, math.nan])
def test_every_copy_of_every_value_counts(rank: int, moment: str, change: float) -> None:
    every = ranks()
    every[rank] = with_values(every[rank], moment, change)
    failed = found(every)
    check = {"last weights": "copies of weights", "after decay": "weight decay"}.get(moment, moment)
    assert check in failed
    if moment != "last weights":  # there, whichever copy is read first is held for right
        assert failed[check].where.startswith(f"rank {rank} ")
    if moment == "gradients" and math.isfinite(change):
        assert failed["gradients"].error == pytest.approx(0.1 / NORM, rel=1e-5)


def test_a_value_that_no_rank_holds_is_a_difference() -> None:
    every = [replace(record, pieces=pieces(0, 2)) for record in ranks()]
    assert {"initial weights", "gradients"} <= set(found(every))


def test_a_difference_that_is_rounding_is_held_against_the_gradient_norm() -> None:
    every = ranks()
    small = [replace(p, values=p.values * np.float32(1e-9)) if p.moment == "gradients" else p for p in every[0].pieces]
    alone = replace(REFERENCE, pieces=tuple(replace(p, values=p.values * 0) for p in REFERENCE.pieces))
    findings = compare(PLAN, [replace(every[0], pieces=tuple(small)), *every[1:]], alone)
    assert not all(finding.ok for finding in findings)  # the others are not small
    zero = [
        replace(record, pieces=tuple(replace(p, values=p.values * np.float32(1e-9)) for p in record.pieces))
        for record in every
    ]
    gradients = [finding for finding in compare(PLAN, zero, alone) if finding.check == "gradients"]
    assert [(finding.name, finding.ok) for finding in gradients] == [("w (of the gradient norm)", True)]


@pytest.mark.parametrize("key", ["loss", "gradient_norm", "learning_rate", "clip_coefficient"])
def test_ranks_must_have_the_same_numbers(key: str) -> None:
    every = ranks()
    every[3] = replace(every[3], steps=(replace(every[3].steps[0], **{key: getattr(every[3].steps[0], key) + 1e-7}),))
    failed = found(every)
    assert failed["same on all ranks"].where.startswith("rank 3 ")


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        (facts((0, 1)), 4),  # trained on twice, and two others not at all
        (facts((2, 3), digests=(14, 0)), 2),  # other tokens
        (facts((2,)), 1),
    ],
)
def test_every_sequence_is_trained_on_once(steps: StepFacts, count: int) -> None:
    every = ranks()
    every[3] = replace(every[3], steps=(steps,))
    assert found(every)["data"].error == count


def test_vectors_must_not_decay() -> None:
    vector = [
        replace(p, name="v", shape=(8,), start=(0,), stop=(8,), values=p.values.reshape(-1)) for p in REFERENCE.pieces
    ]
    every = [replace(record, pieces=record.pieces + tuple(vector)) for record in ranks()]
    both = replace(REFERENCE, pieces=REFERENCE.pieces + tuple(vector))
    failed = [
        finding.name for finding in compare(PLAN, every, both) if finding.check == "weight decay" and not finding.ok
    ]
    assert failed == ["v"]


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    REFERENCE.write(tmp_path / "records" / "rank.npz")
    again = RankRecord.read(tmp_path / "records" / "rank.npz")
    assert (again.rank, again.steps, again.decay_rate) == (0, REFERENCE.steps, 0.1)
    for piece, original in zip(again.pieces, REFERENCE.pieces, strict=True):
        assert (piece.moment, piece.name, piece.shape, piece.box) == (
            original.moment,
            original.name,
            original.shape,
            original.box,
        )
        assert piece.values.dtype == np.float32
        assert (piece.values == original.values).all()
