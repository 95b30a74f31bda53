"""The first steps of a run, recorded: what `studies.verify` starts on every rank in place of training.

It calls the same four acts of the Engine as `loop.step` and looks at what lies between them.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from phalanx.data.source import NOT_SUPERVISED, Batch, Source
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Parameter, Rectangle
from phalanx.rundir import RunDir
from phalanx.trainer.engine import Engine
from phalanx.trainer.micro_batch import MicroBatch
from phalanx.trainer.optim import clip_coefficient, learning_rate
from phalanx.trainer.state import state
from phalanx.trainer.world import World, join
from phalanx.watch.records import Moment, RankRecord, StepFacts, TensorPiece

DECAY_RATE = 0.1

Held = Iterator[tuple[Parameter, Rectangle, Tensor]]


def record(plan: Plan, run_dir: RunDir) -> None:
    """Train `job.num_steps` steps and write this rank's RankRecord into the run folder."""
    world = join(plan, run_dir)
    record_in(world, plan, run_dir)
    world.close()


def record_in(world: World, plan: Plan, run_dir: RunDir) -> None:
    """The same, among ranks that have met already."""
    job = plan.job
    # A model that was scaled down has a smaller vocabulary than its data: `_read` folds the ids into it.
    source = Source.of(job, sys.maxsize)
    engine = Engine(plan, world.coord, world.comm, world.device)
    pieces = _copy("initial weights", _weights(engine))
    steps = []
    for number in range(job.num_steps):
        batches = _read(engine, source, number)
        loss = engine.forward_backward(batches)
        engine.synchronize()
        mean_loss, norm, _ = engine.totals(loss)
        if number == 0:
            pieces += _copy("gradients", _gradients(engine))
        rate = learning_rate(job.optimizer, number, job.num_steps)
        coefficient = clip_coefficient(norm, job.optimizer.clip_norm)
        engine.update(rate, coefficient)
        steps.append(_facts(batches, mean_loss, norm, rate, coefficient))
    pieces += _copy("last weights", _weights(engine)) + _decay(engine)
    facts = RankRecord(rank=world.rank, steps=tuple(steps), pieces=tuple(pieces), decay_rate=DECAY_RATE)
    facts.write(run_dir.record(world.rank))


def uneven(batch: Batch) -> Batch:
    """The global batch `batch` with part of the labels not supervised.

    Of B sequences, the one at position p keeps its first (p + 1) / B labels: no two micro-batches and no two data ranks
    have the same number, so a mean of means shows.
    """
    global_batch, seq_len = batch.labels.shape
    kept = [max(1, (position + 1) * seq_len // global_batch) for position in range(global_batch)]
    beyond = np.arange(seq_len) >= np.array(kept)[:, None]
    labels = np.where(beyond, NOT_SUPERVISED, batch.labels)
    return replace(batch, labels=labels, num_supervised=int((labels >= 0).sum()))


def _read(engine: Engine, source: Source, number: int) -> list[MicroBatch]:
    """This rank's micro-batches of step `number`."""
    batch, mine = uneven(source.batch(number, range(engine.plan.job.global_batch))), list(engine.positions)
    vocab = engine.plan.model.vocab
    tokens, labels = batch.tokens[mine], batch.labels[mine]
    positions = None if batch.positions is None else batch.positions[mine]
    folded = np.where(labels < 0, labels, labels % vocab)
    return engine.read(replace(batch, tokens=tokens % vocab, labels=folded, positions=positions), number)


def _facts(batches: Sequence[MicroBatch], loss: float, norm: float, rate: float, coefficient: float) -> StepFacts:
    read = [
        (sequence, zlib.crc32(torch.cat([tokens, labels]).cpu().numpy().tobytes()))
        for batch in batches
        for sequence, tokens, labels in zip(batch.sequences.tolist(), batch.tokens, batch.labels, strict=True)
    ]
    return StepFacts(
        loss=loss,
        gradient_norm=norm,
        learning_rate=rate,
        clip_coefficient=coefficient,
        sequences=tuple(sequence for sequence, _ in read),
        digests=tuple(digest for _, digest in read),
    )


def _weights(engine: Engine) -> Held:
    """All weights that lie on this rank between steps, those that other ranks update included."""
    if engine.data.zero == 3:  # only shards do
        for part in engine.data.slices:
            for piece, box, stretch in part.rectangles():
                yield piece.parameter, box, part.parameters[stretch]
        return
    engine.data.wait_for_parameters()
    for buffer in engine.buffers:
        for piece in buffer.layout.pieces:
            for first, box in piece.rectangles(0, buffer.layout.num_elements):
                yield piece.parameter, box, buffer.parameters[first : first + box.num_elements]


def _gradients(engine: Engine) -> Held:
    """The gradients that this rank's optimizer gets."""
    for part in engine.data.slices:
        for piece, box, stretch in part.rectangles():
            yield piece.parameter, box, part.gradients[stretch]


def _masters(engine: Engine) -> Held:
    """The weights that this rank's optimizer updates."""
    return ((piece.parameter, piece.rectangle, piece.tensor) for piece in state(engine) if piece.kind == "weight")


def _decay(engine: Engine) -> list[TensorPiece]:
    """One more update that nothing but weight decay takes part in; before and after it."""
    for part, tensors in zip(engine.data.slices, engine.optimizer.state(), strict=True):
        for values in (part.gradients, tensors["exp_avg"], tensors["exp_avg_sq"]):
            values.zero_()
    before = _copy("before decay", _masters(engine))
    engine.update(DECAY_RATE, 1.0)
    return before + _copy("after decay", _masters(engine))


def _copy(moment: Moment, held: Iterable[tuple[Parameter, Rectangle, Tensor]]) -> list[TensorPiece]:
    return [
        TensorPiece(
            moment=moment,
            name=parameter.name,
            shape=parameter.shape,
            start=box.start,
            stop=box.stop,
            values=_wide(tensor).view(box.shape).numpy(),
        )
        for parameter, box, tensor in held
    ]


def _wide(tensor: Tensor) -> Tensor:
    """A copy on the CPU in a dtype that numpy has."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(device="cpu", dtype=wide, copy=True)
