"""What is in a folder of checkpoints, and whether it can be believed: for people, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.manifest import MANIFEST, PLAN, Manifest, check_contents
from phalanx.errors import InputError
from phalanx.plan.module import read_plan
from phalanx.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One checkpoint. `problems` says why it is not whole; the rest is empty then."""

    step: int
    path: str
    problems: tuple[str, ...] = ()
    written_at: str = ""
    num_bytes: int = 0
    layout: str = ""


def locate(path: Path) -> list[tuple[int, Path]]:
    """The checkpoints that `path` means, newest first: those of a run folder or of a folder of checkpoints, or the one
    that it is itself, whatever its name. Raises InputError if there are none."""
    run = RunDir(path).checkpoints
    found = folders.checkpoints(run if run.is_dir() else path)
    if not found:
        found = [entry for entry in folders.checkpoints(path.resolve().parent) if entry[1].name == path.resolve().name]
    if not found and (path / MANIFEST).is_file():
        try:
            found = [(Manifest.read(path / MANIFEST).step, path)]
        except InputError:  # told by whoever looks at it
            found = [(0, path)]
    if not found:
        instead = "the folder of a run, or of one checkpoint"
        what = f"there is no checkpoint in {path}" if path.exists() else f"there is no {path}"
        raise InputError(what, instead=instead)
    return found


def survey(step: int, path: Path, *, contents: bool = False, on_bytes: Callable[[int], None] = lambda n: None) -> Seen:
    """Look at one checkpoint: manifest, plan, presence and sizes of files; with `contents` all checksums too, while
    `on_bytes` hears how much has been read."""
    try:
        manifest = folders.whole(path)
        wrong = check_contents(path, manifest, on_bytes) if contents else []
        layout = "" if wrong else str(read_plan(path / PLAN).layout)
    except InputError as error:
        return Seen(step=step, path=str(path), problems=tuple(str(problem) for problem in error.problems))
    return Seen(
        step=step,
        path=str(path),
        problems=tuple(wrong),
        written_at=manifest.written_at,
        num_bytes=manifest.num_bytes,
        layout=layout,
    )
