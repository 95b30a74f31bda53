"""Engine: everything that one rank trains with, put together from a Plan, a Coord and the Comms of its groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.data.source import Batch
from phalanx.plan.comm import Comm
from phalanx.plan.groups import data_groups
from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import Action, Schedule, forward_only, schedule
from phalanx.plan.shards import Copies, rank_stages, stage_buffers
from phalanx.plan.stages import recomputed_layers
from phalanx.trainer.blocking import BlockingComm
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.flat import COMPUTE_DTYPES, FlatBuffer
from phalanx.trainer.initial import fill
from phalanx.trainer.loss import Objective
from phalanx.trainer.loss_scale import LossScale
from phalanx.trainer.micro_batch import Documents, MicroBatch, on_device
from phalanx.trainer.model import build
from phalanx.trainer.optim import AdamW, squared_norm
from phalanx.trainer.pipeline_parallel import Pipeline
from phalanx.trainer.segments import EAGER, compiled
from phalanx.trainer.tensor_parallel import TensorParallel


class Engine:
    """The parts of one rank, and the four acts of a step, in order: `forward_backward`, `synchronize`, `totals`,
    `update`. `loop.step` calls them; `verify` calls them too and looks at the gradients between."""

    def __init__(
        self,
        plan: Plan,
        coord: Coord,
        comm: Callable[[str], Comm],
        device: torch.device,
        on_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        """`comm(name)` gives this rank's Comm of a group. Weights are drawn here."""
        model, job, layout = plan.model, plan.job, plan.layout
        self.plan, self.coord, self.device, self.comm = plan, coord, device, comm
        tensor, pipeline = comm("tensor"), comm("pipeline")
        if not layout.overlap:  # the data axis sees to it itself
            tensor, pipeline = BlockingComm(tensor), BlockingComm(pipeline)
        self.parallel = TensorParallel(tensor, layout.sequence_parallel, layout.tensor_overlap_chunks)
        dtype = COMPUTE_DTYPES[job.precision]
        cut = rank_stages(model, layout, coord, job.seq_len)
        chunks = [
            [FlatBuffer(buffer, dtype, device) for buffer in stage_buffers(model, layout, coord, stage)]
            for stage in cut
        ]
        self.buffers = [buffer for chunk in chunks for buffer in chunk]
        shards, replicas = map(comm, data_groups(layout))
        self.data = DataParallel(
            self.buffers, shards, replicas, layout, job.seed, functools.partial(fill, seed=job.seed)
        )
        embedding = next((buffer for buffer in self.buffers if buffer.layout.name == "embedding"), None)
        objective = Objective(vocab=model.vocab, label_smoothing=job.label_smoothing, z_loss=job.z_loss)
        segments = compiled() if job.compile else EAGER
        stages = [
            build(
                chunk,
                model,
                job.seq_len,
                self.parallel,
                embedding,
                self.data,
                layout.recompute,
                recomputed_layers(layout, stage),
                objective,
                segments,
            )
            for chunk, stage in zip(chunks, cut, strict=True)
        ]
        held = len(self.parallel.held_tokens(layout.micro_batch * job.seq_len))
        activations = torch.empty(held, model.hidden, dtype=dtype, device=device)
        self._pipeline_of = functools.partial(
            Pipeline, stages=stages, comm=pipeline, activations=activations, on_action=on_action
        )
        self.pipeline = self._pipeline_of(self._schedule(layout.num_micro_batches(job.global_batch)))
        self.optimizer = AdamW(self.data.slices, job.optimizer)
        self.loss_scale = LossScale(job.precision)

    def _schedule(self, num_micro_batches: int) -> Schedule:
        layout = self.plan.layout
        return schedule(layout.schedule, layout.pipeline, layout.virtual_stages, num_micro_batches)

    @property
    def positions(self) -> range:
        """The places in the global batch that this rank's data coordinate trains on."""
        share = self.plan.job.global_batch // self.plan.layout.data
        return range(self.coord.data * share, (self.coord.data + 1) * share)

    def read(self, batch: Batch, step: int, *, validates: bool = False) -> list[MicroBatch]:
        """The micro-batches of `batch`, which holds this rank's sequences. `validates`: for `validate`."""
        arrays = batch.tokens, batch.labels
        tokens, labels = (on_device(torch.from_numpy(array), self.device) for array in arrays)
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        batches = self.micro_batches(tokens, labels, batch.num_supervised, step, positions)
        return [replace(each, validates=True) for each in batches] if validates else batches

    def micro_batches(
        self, tokens: Tensor, labels: Tensor, num_supervised: int, step: int, positions: Tensor | None = None
    ) -> list[MicroBatch]:
        """Cut this rank's sequences [sequences, seq_len] into micro-batches. `num_supervised`: of the global batch;
        `positions`, on the CPU, where documents stand alone."""
        sequences = torch.arange(self.positions.start, self.positions.stop, device=self.device)
        size = self.plan.layout.micro_batch
        documents: list[Documents | None] = [None] * -(-len(tokens) // size)
        if positions is not None:
            documents = [Documents.of(piece, self.device) for piece in positions.split(size)]
        pieces = zip(tokens.split(size), labels.split(size), sequences.split(size), documents, strict=True)
        return [
            MicroBatch(
                tokens=token,
                labels=label,
                sequences=sequence,
                num_supervised=max(1, num_supervised),
                loss_scale=self.loss_scale.value,
                documents=document,
                step=step,
                seed=self.plan.job.seed,
            )
            for token, label, sequence, document in pieces
        ]

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run the schedule; gradients are summed over micro-batches and, bucket by bucket, over the data axis. Returns
        this rank's share of the loss (float64)."""
        return self._run(self.pipeline, batches)

    def without_loss(self) -> Tensor:
        """What `forward_backward` would return and leave for a global batch without supervised tokens, without running:
        gradients are zero, and what a lossy reduction keeps for the next update stays."""
        self.data.zero_gradients()
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def validate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run the forwards of the schedule alone, on what `read` gave. Returns this rank's share of the cross-entropy,
        summed over supervised tokens (float64)."""
        return self._validation.run(batches)

    @functools.cached_property
    def _validation(self) -> Pipeline:
        return self._pipeline_of(forward_only(self.pipeline.schedule))

    def run_alone(self, batch: MicroBatch) -> Tensor:
        """`forward_backward` of one micro-batch, as if the step had no other: to find the one that something is wrong
        with."""
        return self._run(self._pipeline_of(self._schedule(1)), [batch])

    def _run(self, pipeline: Pipeline, batches: Sequence[MicroBatch]) -> Tensor:
        self.data.zero_gradients()
        loss = pipeline.run(batches)
        self.data.finish()
        return loss

    def synchronize(self) -> None:
        """Take the loss scale out of gradients and make those of copies complete: after this, they are as the optimizer
        gets them.

        Values replicated over the tensor axis saw only this rank's tokens under sequence parallelism; norms of heads
        and a kv head's copies saw only this rank's query heads; each copy of a tied embedding only its use.
        """
        if self.loss_scale.value != 1.0:
            for part in self.data.slices:
                part.gradients.mul_(1.0 / self.loss_scale.value)
        if self.parallel.cuts_tokens:
            self._sum_copies("tensor", "tensor", "replicated gradients")
        self._sum_copies("heads", "tensor", "head norm gradients")
        self._sum_copies("kv", "kv", "kv copy gradients")
        tied = self.comm("tied")
        if tied.size > 1:
            wanted: Copies = "none" if tied.index == 0 else "tied"
            name = "embedding" if tied.index == 0 else "head"
            mine = [part for part in self.data.slices if part.buffer.layout.name == name and part.part.copies == wanted]
            tied.all_reduce([part.gradients for part in mine], purpose="tied gradients")

    def _sum_copies(self, copies: Copies, group: str, purpose: str) -> None:
        tensors = [part.gradients for part in self.data.slices if part.part.copies == copies]
        if tensors:
            self.comm(group).all_reduce(tensors, purpose=purpose)

    def totals(self, loss: Tensor, extra: Sequence[float] = ()) -> tuple[float, float, list[float]]:
        """Loss and gradient norm of the whole model and batch, the same bits on all ranks, in one small message. Each
        number in `extra` is summed over all ranks on the way."""
        # Every tensor rank of the last stage has computed the same loss: one of them speaks.
        mine = loss if self.coord.tensor == 0 else torch.zeros_like(loss)
        squares = squared_norm(self.data.slices, self.data.first_replica)
        both = torch.cat([torch.stack([mine, squares]), loss.new_tensor(extra)])
        self.comm("world").all_reduce(both, purpose="loss and norm")
        total, squared, *rest = both.tolist()
        return total, math.sqrt(squared), rest

    def update(self, rate: float, coefficient: float) -> None:
        """New weights from the gradients, on all ranks that hold them."""
        self.data.wait_for_parameters()
        self.optimizer.step(rate, coefficient)
        self.data.gather_parameters()

    def publish(self) -> None:
        """Carry master weights, after they were restored, to where forward reads them on all ranks."""
        self.optimizer.publish()
        self.data.gather_parameters()
