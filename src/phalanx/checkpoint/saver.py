"""Saver: writes checkpoints that appear whole or not at all, and never ends a run because it could not.

    aside      rank 0 makes step-000100.tmp-…; every rank writes the rectangles that it owns, and a part of the manifest
    agree      all ranks are done, or some failed
    publish    rank 0 joins the parts to manifest.json, forces it to the disk, and renames the folder to step-000100
    agree      it is done, or failed

A thread of its own does what waits for the disk; the main thread only agrees.

At every moment the last published checkpoint is untouched: a kill of any or all ranks leaves it, and at most a folder
aside, which the next start clears away. No rank waits in one long call for a slow disk: once a second they tell each
other whether they are done, so that no time limit on communication is met.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.agreement import PURPOSE, agree, highest
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.errors import CheckpointError
from phalanx.plan.comm import Comm
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.units import format_bytes

_HEARTBEAT_S = 1.0


@dataclass(slots=True)
class _Write:
    """One save under way on this rank. `thread` does the stage under way; `error` is what stopped it."""

    step: int
    extra: Mapping[str, Any]
    aside: Path
    since_s: float
    background: bool
    thread: threading.Thread = field(init=False)
    error: Exception | None = None
    publishing: bool = False
    remark: str = ""


class Saver:
    """Saves the live `pieces` of this rank's state together with all other ranks, which make the same calls.

    `comm` joins all ranks of the run. `say` is called on rank 0 only, with one line for a person. A save that fails
    (disk full, folder not writable, no memory, …) is said, and the next one tries again; a mistake of ours is raised on
    its rank by the call that follows.
    """

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan | ModulePlan,
        pieces: Iterable[StatePiece],
        comm: Comm,
        *,
        say: Callable[[str], None],
        device: torch.device | None = None,
    ) -> None:
        """Clears away what dead runs left; the caller holds the run folder's lock.

        Raises CheckpointError if not all ranks see the same folder.
        """
        self._run_dir, self._folder, self._plan, self._comm = run_dir, run_dir.checkpoints, plan, comm
        self._device = device or torch.device("cpu")
        self._first = comm.index == 0
        self._say = say if self._first else lambda line: None
        self._owned = tuple(piece for piece in pieces if piece.owned)
        self._snapshot: Snapshot | None = None
        self._write: _Write | None = None
        self.last_step: int | None = None
        """The step of the last checkpoint that this run has published."""
        sums = torch.tensor([sum(piece.tensor.nbytes for piece in self._owned)], device=self._device)
        comm.all_reduce(sums, purpose=PURPOSE)
        self.num_bytes = int(sums.item())
        """Bytes of a checkpoint's tensors, over all ranks."""
        self._token = self._open_folder()

    def save(self, step: int, extra: Mapping[str, Any], *, background: bool = False) -> None:
        """Save the state as it is after `step` steps; `extra` (JSON values) is kept with it.

        In the background, the call returns once the values are copied, and `poll` or `wait` completes the save. A save
        that is still under way is waited for first.
        """
        self._wait_for_the_last()
        aside = folders.unfinished(self._folder, self._run_dir.checkpoint(step).name, self._token)
        since_s = time.monotonic()
        problem = self._try(lambda: self._make(aside)) if self._first else ""
        problems = agree(self._comm, problem, self._device)
        if problems:
            self._give_up(step, aside, problems, background)
            return
        pieces: Sequence[StatePiece] = self._owned
        if background:
            self._snapshot = self._snapshot or Snapshot(self._owned)
            pieces = self._snapshot.take()
        write = self._write = _Write(step, extra, aside, since_s, background)
        self._start(write, lambda: write_part(aside, self._comm.index, step, pieces))
        if not background:
            self.wait()

    def poll(self) -> bool:
        """Take the save under way on to its next stage, or complete it, if all ranks are done with the last one.
        Whether none is under way any more."""
        write = self._write
        if write is None:
            return True
        if highest(self._comm, int(write.thread.is_alive()), self._device):
            return False
        if write.error and not isinstance(write.error, (OSError, MemoryError, CheckpointError)):
            raise write.error
        problems = agree(self._comm, _text(write.error) if write.error else "", self._device)
        if not problems and not write.publishing:
            write.publishing = True
            self._start(write, lambda: self._publish(write) if self._first else None)
            return False
        self._write = None
        if problems:
            self._give_up(write.step, write.aside, problems, write.background)
        else:
            self.last_step = write.step
            seconds = time.monotonic() - write.since_s
            target = self._run_dir.checkpoint(write.step)
            self._say(f"checkpoint {target}: {format_bytes(self.num_bytes)} in {seconds:.1f} s{write.remark}")
        return True

    def wait(self) -> None:
        """Complete the save under way, however long it takes."""
        while self._write:
            self._write.thread.join(_HEARTBEAT_S)
            self.poll()

    def _wait_for_the_last(self) -> None:
        """Complete the save under way; say so if it holds up the next one for long."""
        if self._write and not self.poll():
            step, since_s = self._write.step, time.monotonic()
            self.wait()
            waited_s = time.monotonic() - since_s
            if waited_s > _HEARTBEAT_S:
                self._say(
                    f"waited {waited_s:.1f} s for the checkpoint of step {step}: the disk is slower than the saves"
                )

    def _open_folder(self) -> str:
        """Clear the folder and make sure that all ranks see it; returns a token that no other run has."""
        number = torch.tensor([secrets.randbits(32) if self._first else 0], device=self._device)
        self._comm.broadcast(number, root=0, purpose=PURPOSE)
        token = f"{int(number.item()):08x}"
        probe = self._folder / f".shared-{token}"

        def prepare() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in folders.clear(self._folder):
                self._say(f"removed {name}, which a dead run left unfinished")
            probe.touch()
            self._check_space()

        problems = agree(self._comm, self._try(prepare) if self._first else "", self._device)
        for problem in problems:
            self._say(f"checkpoints cannot be written as things are: {problem}")
        unseen = not problems and not probe.exists()
        unseen_by = agree(self._comm, f"does not see {self._folder}" if unseen else "", self._device)
        if self._first:
            self._try(lambda: probe.unlink(missing_ok=True))
        if unseen_by:
            what = f"not all ranks see the same run folder: {'; '.join(unseen_by)}"
            raise CheckpointError(what, instead="give a --run-dir on a file system that all nodes share")
        return token

    def _make(self, aside: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            shutil.rmtree(aside)
        self._check_space()
        aside.mkdir()

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < self.num_bytes:
            raise _NoSpaceError(f"{self.num_bytes:,} bytes are needed and {free:,} are free in {self._folder}")

    def _start(self, write: _Write, act: Callable[[], object]) -> None:
        """Do `act` in a thread. It must not communicate: a Comm belongs to the main thread."""

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 (the main thread looks at it)
                write.error = error

        # A daemon: a rank that has to end must not wait for the disk.
        write.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        write.thread.start()

    def _publish(self, write: _Write) -> None:
        target = self._run_dir.checkpoint(write.step)
        publish(write.aside, target, self._plan, write.step, write.extra, self._comm.size)
        job = self._plan.job.checkpoint
        problem = self._try(lambda: folders.retain(self._folder, job.keep, job.keep_every, self._token))
        if problem:
            write.remark = f"; an old one could not be deleted: {problem}"

    def _give_up(self, step: int, aside: Path, problems: Sequence[str], background: bool) -> None:
        then = ", training goes on" if background else ""
        self._say(f"checkpoint of step {step} NOT saved{then}: {'; '.join(problems)}")
        if self._first and aside.exists():
            problem = self._try(lambda: shutil.rmtree(aside))
            if problem:
                self._say(f"its remains could not be deleted: {problem}")

    @staticmethod
    def _try(act: Callable[[], object]) -> str:
        """Do it; returns what the file system had against it."""
        try:
            act()
        except (OSError, CheckpointError) as error:
            return _text(error)
        return ""


class _NoSpaceError(OSError):
    """The disk is known to be too small before anything is written."""


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
