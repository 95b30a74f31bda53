"""Load and resume: from a checkpoint of any layout into the live state of any other. Saving: see `saver`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.agreement import PURPOSE, agree, highest
from phalanx.checkpoint.manifest import MISMATCH, PLAN, Manifest
from phalanx.checkpoint.match import REDUCTION, check_plan, check_tensors, keeps_reduction
from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.errors import CheckpointError, DamagedCheckpointError, InputError
from phalanx.plan.comm import Comm
from phalanx.plan.module import ModulePlan, read_plan
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir

_Result = TypeVar("_Result")

_UNTOLD = ("job.checkpoint.", "job.comm")
"""Beginnings of the keys that do not touch what is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded: a checkpoint taken after `step` steps, what the loop kept in `extra`, and what differs between
    the plan that wrote it and this one ("job.optimizer.lr: 0.2 here, 0.1 there"). `reduction`: with what a lossy
    reduction keeps."""

    path: Path
    step: int
    extra: Mapping[str, Any]
    changes: tuple[str, ...]
    reduction: bool


def resume(
    run_dir: RunDir,
    plan: Plan | ModulePlan,
    pieces: Iterable[StatePiece],
    comm: Comm,
    *,
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> Loaded | None:
    """Load what a run has to go on from; all ranks of `comm` call it, `say` is called on rank 0 only.

    `job.checkpoint.resume` "auto" takes the newest whole checkpoint of the run folder, says which newer ones it passed
    over and why, and returns None if there are none at all. "never" starts anew. Anything else is the folder of a
    checkpoint.

    Checkpoints of the run folder that are newer than the one loaded are set aside (renamed, not deleted): from here on
    they are of another line. Raises CheckpointError if there are checkpoints of which none is whole, if they are of
    another model, or if starting anew, or from elsewhere, would mix two runs in one folder: never a silent fresh start.
    """
    pieces, device = list(pieces), device or torch.device("cpu")
    tell = say if comm.index == 0 else lambda line: None
    steps, how = _steps(run_dir, comm, device), plan.job.checkpoint.resume
    if how == "auto":
        loaded = _newest(run_dir, steps, plan, pieces, comm, tell, device)
    else:
        own = how != "never" and Path(how).resolve().parent == run_dir.checkpoints.resolve()
        if steps and not own:
            what = f"already has checkpoints, the newest of step {steps[0]}; it would hold two runs"
            instead = "--resume auto to go on from them, or another --run-dir"
            raise CheckpointError(what, where=str(run_dir.path), instead=instead)
        loaded = None if how == "never" else load(Path(how), plan, pieces, comm, device=device)
    if loaded is None:
        return None
    tell(f"going on from step {loaded.step}: {loaded.path}")
    for change in loaded.changes:
        tell(f"changed since that checkpoint: {change}")
    if comm.index == 0:
        _set_aside(run_dir, loaded.step, tell)
    return loaded


def load(
    path: Path, plan: Plan | ModulePlan, pieces: Iterable[StatePiece], comm: Comm, *, device: torch.device | None = None
) -> Loaded:
    """Fill the live `pieces` of this rank from the checkpoint at `path`; all ranks of `comm` call it.

    Pieces of kind REDUCTION are filled under the layout that wrote the checkpoint, and left as they are under others.
    Checksums of tensors are compared unless `job.checkpoint.verify` is off. Raises, on all ranks alike,
    DamagedCheckpointError if anything is missing or damaged anywhere, CheckpointError if the checkpoint is of another
    model; the pieces are then unusable.
    """
    pieces, device, check = list(pieces), device or torch.device("cpu"), plan.job.checkpoint.verify
    manifest, there = together(comm, device, DamagedCheckpointError, lambda: opened(path))
    reduction = keeps_reduction(manifest, there, plan)
    pieces = [piece for piece in pieces if reduction or piece.kind != REDUCTION]
    together(comm, device, CheckpointError, lambda: _check_fit(path, manifest, there, plan, pieces))
    together(comm, device, DamagedCheckpointError, lambda: read_pieces(path, manifest, pieces, check=check))
    changes = tuple(change for change in plan.differences(there) if not change.startswith(_UNTOLD))
    return Loaded(path=path, step=manifest.step, extra=manifest.extra, changes=changes, reduction=reduction)


def _newest(
    run_dir: RunDir,
    steps: Sequence[int],
    plan: Plan | ModulePlan,
    pieces: Sequence[StatePiece],
    comm: Comm,
    tell: Callable[[str], None],
    device: torch.device,
) -> Loaded | None:
    """The newest checkpoint that can be loaded. Raises CheckpointError if there are some, but none can."""
    passed_over = []
    for step in steps:
        try:
            return load(run_dir.checkpoint(step), plan, pieces, comm, device=device)
        except DamagedCheckpointError as error:
            tell(f"passed over, for it is not whole: {error}")
            passed_over.append(str(error))
    if passed_over:
        raise folders.none_whole(run_dir.checkpoints, passed_over)
    return None


def _set_aside(run_dir: RunDir, after: int, tell: Callable[[str], None]) -> None:
    try:
        for name in folders.set_aside(run_dir.checkpoints, after):
            tell(f"set aside as {name}: it is newer than the checkpoint that the run goes on from")
    except OSError as error:  # what comes of it is told too: saves of these steps will fail
        tell(f"newer checkpoints could not be set aside: {error.filename}: {error.strerror}")


def _steps(run_dir: RunDir, comm: Comm, device: torch.device) -> list[int]:
    """The steps of the run's checkpoints, newest first, as rank 0 sees them."""
    seen = [step for step, _ in folders.checkpoints(run_dir.checkpoints)] if comm.index == 0 else []
    count = highest(comm, len(seen), device)
    steps = torch.tensor(seen or [0] * count, dtype=torch.int64, device=device)
    if count:
        comm.broadcast(steps, root=0, purpose=PURPOSE)
    return [int(step) for step in steps.tolist()]


def opened(path: Path) -> tuple[Manifest, Plan | ModulePlan]:
    """The manifest of the checkpoint at `path` and the plan that wrote it; contents of tensors are not read.

    Raises DamagedCheckpointError.
    """
    manifest = folders.whole(path)
    known = manifest.files[PLAN]
    if zlib.crc32((path / PLAN).read_bytes()) != known.head_crc32:
        raise DamagedCheckpointError(MISMATCH, where=str(path / PLAN))
    return manifest, read_plan(path / PLAN)


def _check_fit(
    path: Path, manifest: Manifest, there: Plan | ModulePlan, plan: Plan | ModulePlan, pieces: Sequence[StatePiece]
) -> None:
    check_plan(there, plan, str(path))
    check_tensors(manifest, plan, pieces, str(path))


def together(comm: Comm, device: torch.device, kind: type[CheckpointError], act: Callable[[], _Result]) -> _Result:
    """Do the same on all ranks; if it fails on any, raise `kind`, an error for users, on all."""
    mine: InputError | None = None
    try:
        result = act()
    except InputError as error:
        mine = error
    said = agree(comm, str(mine or ""), device)
    if mine:
        raise kind(mine.problems) from mine
    if said:
        raise kind("; ".join(said))
    return result
