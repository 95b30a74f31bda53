"""RunDir: the name of every file that a run can produce, and the lock that keeps two runs out of one folder.

plan.json                    what was decided
lock                         held while any process of the run lives
metrics.jsonl                one line per step
logs/rank-00003.log          what rank 3 wrote to its standard output and error
logs/rank-00003.stack        its Python stack, if it was asked for one (SIGQUIT)
rings/rank-00003.ring        its last communication records (see watch.events)
actions/rank-00003.json      when its pipeline actions ran (see watch.actions)
outcomes/rank-00003.json     what it says itself about its end (see watch.outcomes)
endings.json                 how the node's agent saw each rank end
checkpoints/step-000100/     see checkpoint.store
records/rank-00003.npz       what it did in the first steps (see watch.records)
request.json                 what processes that generate text were asked for
failure.json, failure.txt    why the run failed, if it did
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from phalanx.errors import InputError


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run. Building one touches nothing on disk; `create` makes the folders."""

    path: Path

    @classmethod
    def default(cls, name: str, base: Path = Path("runs")) -> RunDir:
        """A new folder `base/<name>-<date>-<time>`, created here and thus ours even if another run starts this second.
        What of `name` is no letter, digit, "." or "_" becomes "-", so that it is one folder and that in `base`.

        Raises InputError if `base` cannot be written to.
        """
        stem = f"{file_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
        number = 1
        while True:
            path = base / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise _not_writable(path, error) from error

    def check(self) -> None:
        """See that the folder is there or could be made, without making it. Raises InputError if not."""
        path = self.path.absolute()
        try:
            nearest = next(folder for folder in (path, *path.parents) if folder.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def create(self) -> None:
        """Make the folder and its sub-folders. Raises InputError if that is not possible."""
        try:
            for folder in (self.logs, self.rings, self.actions_folder, self.outcomes, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def forget_last_attempt(self) -> None:
        """Remove what told how an earlier run in this folder ended, so that nobody takes it for the next one's end.
        Logs, metrics and checkpoints stay."""
        told = [self.endings, self.failure_json, self.failure_text]
        for path in (*told, *self.outcomes.glob("*.json"), *self.rings.glob("*.ring"), *self.logs.glob("*.stack")):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this folder for one run. Raises InputError, naming the holder, if another run has it.

        The file is left unlocked by the kernel when the last process that inherited it is gone, however it ended: the
        descriptor is inheritable on purpose, so that the lock lives as long as any agent or rank does.
        """
        self.create()
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _not_writable(self.path, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise InputError(
                    f"the run folder {self.path} is in use by {holder}",
                    instead="wait for that run, end it, or give another folder with --run-dir",
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
            os.set_inheritable(descriptor, True)
            yield
        finally:
            os.close(descriptor)

    @property
    def plan(self) -> Path:
        """What was decided."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.logs / f"{_name(rank)}.log"

    def stack(self, rank: int) -> Path:
        """Python stacks that one rank dumped when asked to."""
        return self.logs / f"{_name(rank)}.stack"

    @property
    def rings(self) -> Path:
        """Folder of the copies of the ranks' ring files."""
        return self.path / "rings"

    def ring(self, rank: int) -> Path:
        """Copy of one rank's ring file."""
        return self.rings / f"{_name(rank)}.ring"

    @property
    def actions_folder(self) -> Path:
        """Folder of the times of pipeline actions."""
        return self.path / "actions"

    def actions(self, rank: int) -> Path:
        """When one rank ran its pipeline actions, in the latest step that was kept."""
        return self.actions_folder / f"{_name(rank)}.json"

    @property
    def outcomes(self) -> Path:
        """Folder of what the ranks say about their own ends."""
        return self.path / "outcomes"

    def outcome(self, rank: int) -> Path:
        """What one rank says about its own end."""
        return self.outcomes / f"{_name(rank)}.json"

    def record(self, rank: int) -> Path:
        """What one rank read, computed and held in its first steps."""
        return self.path / "records" / f"{_name(rank)}.npz"

    @property
    def endings(self) -> Path:
        """How the agent saw each rank end."""
        return self.path / "endings.json"

    @property
    def request(self) -> Path:
        """What processes that generate text were asked for."""
        return self.path / "request.json"

    @property
    def failure_json(self) -> Path:
        """Why the run failed, for programs."""
        return self.path / "failure.json"

    @property
    def failure_text(self) -> Path:
        """Why the run failed, for people."""
        return self.path / "failure.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint taken after `step` steps."""
        return self.checkpoints / f"step-{step:06d}"


def file_name(name: str) -> str:
    """`name` as one part of a path."""
    return re.sub(r"[^\w.]+", "-", name).strip(".-") or "run"


def write_whole(path: Path, text: str, *, synced: bool = False) -> None:
    """Write a file that appears whole or not at all to whoever reads it meanwhile; `synced`, once it is on the disk.
    Raises OSError, and then leaves nothing."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _not_writable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write the run folder {path}: {error.strerror}", instead="give another folder with --run-dir"
    )
