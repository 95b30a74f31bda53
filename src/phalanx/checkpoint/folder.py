"""The folder of a run's checkpoints: which there are, which is the newest whole one, and what may be deleted.

Only `step-<number>` is a checkpoint. While one is written, or deleted, it is called `step-<number>.tmp-<token>`;
whatever carries such a name when a run starts was left by a dead one. `step-<number>.aside-<token>` is a checkpoint
that a run went back behind: kept for its owner, never read.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.manifest import MANIFEST, Manifest, check_files
from phalanx.errors import CheckpointError, DamagedCheckpointError

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".tmp-"
_ASIDE = ".aside-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest whole checkpoint, and why each newer one was passed over."""

    path: Path
    step: int
    passed_over: tuple[str, ...]


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoints by name, whole or not: (step, path), newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def whole(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in full; their contents are not read.

    Raises DamagedCheckpointError, which names all files that are missing, cut, or of another checkpoint.
    """
    if not path.is_dir():
        raise DamagedCheckpointError("there is no such folder", where=str(path))
    manifest = Manifest.read(path / MANIFEST)
    wrong = check_files(path, manifest)
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        wrong.insert(0, f"{path / MANIFEST}: is of step {manifest.step}, so of another checkpoint")
    if wrong:
        raise DamagedCheckpointError("; ".join(wrong))
    return manifest


def find(folder: Path) -> Found | None:
    """The newest whole checkpoint in `folder`; None if there is none at all. Contents are not read.

    Raises CheckpointError if there are some, but none is whole: that is no reason to start anew in silence.
    """
    passed_over = []
    for step, path in checkpoints(folder):
        try:
            whole(path)
        except DamagedCheckpointError as error:
            passed_over.append(f"{path.name}: {error}")
        else:
            return Found(path=path, step=step, passed_over=tuple(passed_over))
    if passed_over:
        raise none_whole(folder, passed_over)
    return None


def none_whole(folder: Path, passed_over: Iterable[str]) -> CheckpointError:
    """What to raise where there are checkpoints, but none is whole, for the reasons `passed_over`."""
    what = "no checkpoint is whole:\n    " + "\n    ".join(passed_over)
    return CheckpointError(what, where=str(folder), instead="to start anew, give another run folder (--run-dir)")


def unfinished(folder: Path, step_folder: str, token: str) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder / f"{step_folder}{_UNFINISHED}{token}"


def clear(folder: Path) -> list[str]:
    """Delete what dead runs left half written or half deleted. Returns the names. Raises OSError."""
    left = [path for path in folder.glob(f"step-*{_UNFINISHED}*") if path.is_dir()]
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def set_aside(folder: Path, after: int) -> list[str]:
    """Rename all checkpoints of steps later than `after`, so that none is taken for the newest of the line that goes on
    from there. Returns the new names. Raises OSError."""
    names, token = [], secrets.token_hex(4)
    for step, path in checkpoints(folder):
        if step > after:
            names.append(path.rename(path.with_name(f"{path.name}{_ASIDE}{token}")).name)
    if names:
        sync_folder(folder)
    return names


def retain(folder: Path, keep: int, keep_every: int, token: str) -> list[str]:
    """Delete all checkpoints older than the newest `keep` whole ones (0: none), but not those of steps that are
    multiples of `keep_every` (0: no such). Returns their names. Raises OSError.

    Damaged ones do not count, so that the last whole one is never deleted for their sake.
    """
    num_whole, deleted = 0, []
    for step, path in checkpoints(folder) if keep else ():
        if num_whole >= keep:
            if keep_every and step % keep_every == 0:
                continue
            # Renamed first: a kill in the midst of the deletion leaves nothing that looks like a checkpoint.
            half = path.rename(unfinished(folder, path.name, token))
            shutil.rmtree(half)
            deleted.append(path.name)
            continue
        try:
            whole(path)
            num_whole += 1
        except CheckpointError:  # told when somebody wants to load it
            continue
    return deleted
