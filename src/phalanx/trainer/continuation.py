"""When a run saves its state, and where it goes on from: the training loop's side of `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.store import resume
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.checkpoint.weights import initialize
from phalanx.errors import CheckpointError, RunError
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.any_engine import AnyEngine
from phalanx.trainer.state import state


class Continuation:
    """Saves the engine's state as `job.checkpoint` says; all ranks make the same calls, rank 0 `say`s what happens."""

    def __init__(
        self,
        engine: AnyEngine,
        run_dir: RunDir,
        say: Callable[[str], None],
        pieces: Iterable[StatePiece] | None = None,
    ) -> None:
        """`pieces`: what to keep, if it is not just the engine's weights and optimizer state."""
        self._engine, self._run_dir = engine, run_dir
        self._job, self._world = engine.plan.job, engine.comm("world")
        self._say = say if self._world.index == 0 else lambda line: None
        self._pieces = list(state(engine) if pieces is None else pieces)
        self._saver = Saver(run_dir, engine.plan, self._pieces, self._world, say=say, device=engine.device)
        self._restored = 0

    def restore(self) -> int:
        """Load what `job.checkpoint.resume` asks for, or else the weights to start with, if `init_from` names some.
        Returns the number of steps that are done already.

        Raises CheckpointError where going on would not continue that run: see `checkpoint.store.resume`.
        """
        engine, job = self._engine, self._job
        loaded = resume(self._run_dir, engine.plan, self._pieces, self._world, say=self._say, device=engine.device)
        if loaded is None:
            self._initialize()
            return 0
        before, now = loaded.extra["num_samples"], loaded.step * job.global_batch
        if before != now:
            what = (
                f"{before:,} samples were read in {loaded.step} steps; with this job.global_batch it would be {now:,}"
            )
            raise CheckpointError(what, where=str(loaded.path), instead="set job.global_batch as it was")
        engine.optimizer.num_steps = loaded.extra["optimizer_steps"]
        if job.precision == "fp16" and "loss_scale" in loaded.extra:
            engine.loss_scale.restore(loaded.extra["loss_scale"])
        engine.publish()
        if engine.data.lossy and not loaded.reduction:
            self._say(f"errors of the {engine.plan.layout.reduce} reduction begin anew: there are none of this layout")
        if job.checkpoint.init_from:
            self._say(f"checkpoint.init_from is not used, as the run goes on: {job.checkpoint.init_from}")
        self._restored = loaded.step
        if loaded.step >= job.num_steps:
            self._say(f"already at step {loaded.step} of {job.num_steps}: raise job.num_steps to train on")
        return loaded.step

    def _initialize(self) -> None:
        engine, path = self._engine, self._job.checkpoint.init_from
        if path:
            assert isinstance(engine.plan, Plan), "modules bring their weights (legality.module_problems)"
            weights = initialize(
                Path(path), engine.plan, self._pieces, self._world, say=self._say, device=engine.device
            )
            engine.publish()
            self._say(f"starting with the weights of {weights.path}")

    def after(self, step: int) -> None:
        """After each step: save in the background if one is due, and complete a save whose files are written."""
        every = self._job.checkpoint.every_steps
        if every and step % every == 0 and step < self._job.num_steps:
            self._save(step, background=True)
        else:
            self._saver.poll()

    def finish(self, step: int) -> None:
        """At the end of the run: save the last state, unless it is saved already, and wait until it is on the disk.
        Raises RunError if that failed: there is no later save to try again."""
        self._engine.data.wait_for_parameters()  # other ranks may leave after this
        self._saver.wait()
        if step in (self._restored, self._saver.last_step):
            return
        self._save(step, background=False)
        if self._saver.last_step != step:
            kept = f"the last one is of step {self._saver.last_step}" if self._saver.last_step else "there is none"
            raise RunError(f"the state after step {step} could not be saved; of this run's checkpoints {kept}")

    def _save(self, step: int, *, background: bool) -> None:
        extra: dict[str, Any] = {
            "num_samples": step * self._job.global_batch,
            "optimizer_steps": self._engine.optimizer.num_steps,
        }
        if self._job.precision == "fp16":
            extra["loss_scale"] = self._engine.loss_scale.state()
        self._saver.save(step, extra, background=background)
