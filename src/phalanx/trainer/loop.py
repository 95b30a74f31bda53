"""The training loop: every rank runs it, all in step."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping

from phalanx.data.prefetch import Batches, Prefetch
from phalanx.data.source import Source
from phalanx.plan.groups import AXIS_OF
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.continuation import Continuation
from phalanx.trainer.engine import Engine
from phalanx.trainer.guards import Guards
from phalanx.trainer.optim import clip_coefficient, learning_rate
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.validation import Validation
from phalanx.trainer.world import World, join
from phalanx.watch.actions import ActionsWriter
from phalanx.watch.metrics import AXES, MetricsWriter, StepRecord
from phalanx.watch.progress import Progress


class Clock:
    """Where this rank's time went since the last time it was asked."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.last_s = time.perf_counter()
        self.last_by_axis = self._blocked()

    def lap(self) -> list[float]:
        """Wall seconds, and of those the seconds blocked on each of AXES, since the last lap."""
        now_s, by_axis = time.perf_counter(), self._blocked()
        blocked = [by_axis.get(axis, 0.0) - self.last_by_axis.get(axis, 0.0) for axis in AXES]
        spent = [now_s - self.last_s, *blocked]
        self.last_s, self.last_by_axis = now_s, by_axis
        return spent

    def _blocked(self) -> Mapping[str, float]:
        """Seconds blocked on each axis since the rank began: loading a checkpoint counts, and is no part of a step."""
        by_axis: dict[str, float] = {}
        for group, seconds in self.recorder.seconds.items():
            axis = AXIS_OF.get(group, group)
            by_axis[axis] = by_axis.get(axis, 0.0) + seconds
        return by_axis


def step(engine: Engine, source: Batches, clock: Clock, stop: StopRequest, guards: Guards, number: int) -> StepRecord:
    """One optimizer step, `number` counting from 0: read, forward and backward, make gradients whole, update."""
    plan, job = engine.plan, engine.plan.job
    batch = source.batch(number, list(engine.positions))
    batches = engine.read(batch, number)
    loss = engine.forward_backward(batches) if batch.num_supervised else engine.without_loss()
    engine.synchronize()
    mean_loss, norm, (votes, *spent) = engine.totals(loss, [stop.vote, *clock.lap()])
    stop.count(votes)
    rate = learning_rate(job.optimizer, number, job.num_steps)
    updated = guards.allow_update(batches, mean_loss, norm) and batch.num_supervised > 0
    if updated:
        engine.update(rate, clip_coefficient(norm, job.optimizer.clip_norm))
    return StepRecord.measured(
        spent,
        num_ranks=plan.layout.num_ranks,
        tokens_per_step=job.tokens_per_step,
        step=number + 1,
        loss=mean_loss,
        gradient_norm=norm,
        learning_rate=rate,
        skipped_steps=guards.num_skipped,
        loss_scale=batches[0].loss_scale,
        updated=updated,
    )


def train(plan: Plan, run_dir: RunDir) -> None:
    """Train as the plan says; called once on every rank. Only rank 0 speaks."""
    world = join(plan, run_dir)
    train_in(world, plan, run_dir)
    world.close()


def train_in(world: World, plan: Plan, run_dir: RunDir) -> None:
    """Train from the last checkpoint, or the beginning, to the end."""
    with Prefetch(Source.of(plan.job, plan.model.vocab), plan.job.num_steps) as source:
        _train_on(source, world, plan, run_dir)


def _train_on(source: Batches, world: World, plan: Plan, run_dir: RunDir) -> None:
    job = plan.job
    engine = Engine(plan, world.coord, world.comm, world.device, world.follow)
    continuation = Continuation(engine, run_dir, _say)
    done = continuation.restore()
    metrics = MetricsWriter(run_dir.metrics, _say) if world.rank == 0 else None
    progress = Progress(job.num_steps, job.log_every_steps)
    speaks_for_stage = world.coord.data == world.coord.tensor == 0
    actions = ActionsWriter(run_dir.actions(world.rank), job.num_steps, _say) if speaks_for_stage else None
    clock, stop, guards = Clock(world.recorder), StopRequest(), Guards(engine)
    validation = Validation(engine, source, stop)
    for number in range(done, job.num_steps):
        world.recorder.step = number + 1
        record = step(engine, source, clock, stop, guards, number)
        if validation.due(number + 1):
            world.recorder.micro_batch, world.recorder.phase = -1, "validation"
            record = validation.add_to(record)
            clock.lap()  # a step's time is its own
        if metrics:
            metrics.write(record)
            if line := progress.line(record):
                _say(line)
        world.recorder.micro_batch, world.recorder.phase = -1, "check of copies"
        guards.after(number + 1)
        if actions and record.updated:
            actions.after(number + 1, engine.pipeline.times_s)
        world.recorder.phase = "checkpoint"
        if stop.agreed and number + 1 < job.num_steps:
            continuation.finish(number + 1)
            stopped = stop.leave(number + 1, f"the same command with --run-dir {shlex.quote(str(run_dir.path))}")
            if world.rank == 0:
                _say(str(stopped))
            raise stopped
        continuation.after(number + 1)
    continuation.finish(max(done, job.num_steps))
    if metrics and (summary := progress.summary()):
        _say(summary)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
