"""Whether a checkpoint belongs to this model: the first difference, or every tensor that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from phalanx.checkpoint.manifest import Manifest, Stored
from phalanx.checkpoint.tensor_file import DTYPE_NAMES, StatePiece
from phalanx.errors import CheckpointError, Problem
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Parameter, rank_buffers
from phalanx.spec.model import ModelSpec

REDUCTION = "reduction"
"""The kind of state that is no part of a global tensor: what a rank has not sent yet of its gradients, where a lossy
reduction keeps that. Only the same rank of the same layout can take it up."""

# How a model is called, started and regularized may change between one run and its continuation.
_FREE = {"name", "init_std", "dropout", "attention_dropout"}


def parameters(model: ModelSpec) -> Mapping[str, Parameter]:
    """All global tensors of the model, by name: those that one rank alone would hold."""
    buffers = rank_buffers(model, Layout(), Coord(), model.max_seq_len)
    return {piece.parameter.name: piece.parameter for buffer in buffers for piece in buffer.pieces}


def expected_tensors(plan: Plan | ModulePlan, known: Iterable[str]) -> Mapping[str, Mapping[str, Parameter]]:
    """All global tensors of each kind of state, by name; a transformer has each of the `known` kinds of all its
    parameters."""
    if isinstance(plan, ModulePlan):
        return plan.kinds()
    return dict.fromkeys((kind for kind in known if kind != REDUCTION), parameters(plan.model))


def keeps_reduction(manifest: Manifest, there: Plan | ModulePlan, here: Plan | ModulePlan) -> bool:
    """Whether the checkpoint's state of kind REDUCTION can be taken up here: it has some, and each rank holds the same
    of the model, as it does under the same layout (which `job.seq_len` may balance in another way)."""
    same = there.layout == here.layout and there.job.seq_len == here.job.seq_len
    return same and any(entry.kind == REDUCTION for entry in manifest.tensors)


def check_plan(there: Plan | ModulePlan, here: Plan | ModulePlan, where: str) -> None:
    """Raises CheckpointError if the checkpoint's model is another one, as far as the plans tell."""
    if isinstance(there, ModulePlan) != isinstance(here, ModulePlan):
        what = "is of another kind of model: one of a run file, the other a module of Python"
        raise CheckpointError(what, where=where, instead="use another run folder")
    if isinstance(there, Plan) and isinstance(here, Plan):
        check_model(there.model, here.model, where)


def check_model(there: ModelSpec, here: ModelSpec, where: str) -> None:
    """Raises CheckpointError, with the first difference, if the checkpoint's model is another one."""
    for field in fields(ModelSpec):
        old, new = getattr(there, field.name), getattr(here, field.name)
        if field.name not in _FREE and old != new:
            what = f"is of another model: model.{field.name} is {old!r} in the checkpoint and {new!r} here"
            raise CheckpointError(what, where=where, instead="set the model as it was, or use another run folder")


def check_tensors(manifest: Manifest, plan: Plan | ModulePlan, pieces: Iterable[StatePiece], where: str) -> None:
    """Raises CheckpointError with all tensors that are missing, unexpected, or of another shape or type."""
    dtypes = {(piece.kind, piece.parameter.name): DTYPE_NAMES[piece.tensor.dtype] for piece in pieces}
    if not dtypes:  # as on a pipeline rank without layers, which cannot tell what kinds there are; others can
        return
    expected = expected_tensors(plan, dict.fromkeys(kind for kind, _ in dtypes))
    stored: dict[tuple[str, str], Stored] = {
        (entry.kind, entry.name): entry for entry in manifest.tensors if entry.kind != REDUCTION
    }
    kinds = {kind for kind, _ in stored}
    if kinds == {"weight"} != set(expected):
        instead = f'checkpoint.init_from = "{where}" starts with its weights'
        raise CheckpointError("holds weights alone, nothing to go on from", where=where, instead=instead)
    problems = []
    for kind, tensors in expected.items():
        if kind not in kinds:
            problems.append(f"missing: {kind} of all {len(tensors)} tensors")
            continue
        for name, parameter in tensors.items():
            problems += _differences(kind, parameter, dtypes.get((kind, name)), stored.get((kind, name)))
    for kind, name in stored:
        if name not in expected.get(kind, ()):
            problems.append(f"unexpected: {kind} of {name}, which this run does not have")
    if problems:
        raise CheckpointError([Problem(what=problem, where=where) for problem in problems])


def _differences(kind: str, parameter: Parameter, dtype: str | None, entry: Stored | None) -> list[str]:
    """`dtype`: what it is on this rank, if this rank holds some of it."""
    name = f"{kind} of {parameter.name}"
    if entry is None:
        return [f"missing: {name}"]
    found = []
    if entry.shape != parameter.shape:
        found.append(f"wrong shape: {name} is {list(entry.shape)} in the checkpoint and {list(parameter.shape)} here")
    if dtype and entry.dtype != dtype:
        found.append(f"wrong type: {name} is {entry.dtype} in the checkpoint and {dtype} here (job.precision)")
    return found
