"""ModuleEngine: everything that one rank trains a module of the user's own with (trainer.engine.Engine)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.own.linear import normalize_in_fp32
from phalanx.own.stage import Forward, ModuleBatch, ModuleStage, Tally
from phalanx.own.units import Unit, buffers, flat_layout, shares
from phalanx.plan.comm import Comm
from phalanx.plan.groups import data_groups
from phalanx.plan.layout import Coord
from phalanx.plan.module import ModulePlan, ModuleTensor
from phalanx.plan.schedule import Action, Schedule, forward_only, schedule
from phalanx.plan.shards import Rectangle
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.flat import COMPUTE_DTYPES, accumulation_dtype
from phalanx.trainer.optim import AdamW, squared_norm
from phalanx.trainer.pipeline_parallel import Pipeline
from phalanx.trainer.state import StatePiece


class ModuleEngine:
    """The parts of one rank, and the acts of a step in order: `forward_backward`, `synchronize`, `totals`, `update`.

    Gradients are sums over items, divided by the number of samples in the global batch; `correction` is what makes them
    the mean over the items that there were, known when `totals` has asked all ranks.
    """

    def __init__(
        self,
        plan: ModulePlan,
        coord: Coord,
        comm: Callable[[str], Comm],
        device: torch.device,
        module: nn.Module,
        *,
        forward: Forward,
        average_buffers: bool,
        on_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        """`module` is on `device`, and the same on all ranks."""
        job, layout = plan.job, plan.layout
        self.plan, self.coord, self.device, self.comm, self.module = plan, coord, device, comm, module
        compute = COMPUTE_DTYPES[job.precision]
        self.units = [Unit(share, flat_layout(share, layout, coord), compute, device) for share in shares(module)]
        self.buffers = [unit.buffer for unit in self.units]
        wide = _Originals(self.units, compute)
        by_buffer = {unit.buffer: unit for unit in self.units}
        shard_comm, replica_comm = map(comm, data_groups(layout))
        self.data = DataParallel(
            self.buffers, shard_comm, replica_comm, layout, job.seed, lambda buffer: by_buffer[buffer].adopt()
        )
        self.optimizer = AdamW(self.data.slices, job.optimizer)
        wide.give_to(self.data, self.optimizer)
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
        if compute == torch.bfloat16:
            normalize_in_fp32(module)
        self._tally, self._averages_buffers = Tally(device), average_buffers
        self.stages = [ModuleStage(module, self.units, self.data, forward, self._tally, 1.0 / job.global_batch)]
        self._pipeline_of = functools.partial(
            Pipeline,
            stages=self.stages,
            comm=comm("pipeline"),
            activations=torch.empty(0, dtype=compute, device=device),
            on_action=on_action,
        )
        self._pipelines: dict[int, Pipeline] = {}
        self.correction = 1.0
        self.num_items = 0.0

    def _pipeline(self, num_micro_batches: int) -> Pipeline:
        if num_micro_batches not in self._pipelines:
            self._pipelines[num_micro_batches] = self._pipeline_of(self._schedule(num_micro_batches))
        return self._pipelines[num_micro_batches]

    def _schedule(self, num_micro_batches: int) -> Schedule:
        layout = self.plan.layout
        return schedule(layout.schedule, layout.pipeline, layout.virtual_stages, num_micro_batches)

    @property
    def positions(self) -> range:
        """The places in the global batch that this rank's data coordinate trains on."""
        share = self.plan.job.global_batch // self.plan.layout.data
        return range(self.coord.data * share, (self.coord.data + 1) * share)

    def forward_backward(self, batches: Sequence[ModuleBatch]) -> Tensor:
        """Run the schedule; gradients are summed over micro-batches and, bucket by bucket, over the data axis. Returns
        this rank's share of the loss (float64)."""
        self.data.zero_gradients()
        self._tally.count.zero_()
        for stage in self.stages:
            stage.completion.forget()
        loss = self._pipeline(len(batches)).run(batches)
        self.data.finish()
        return loss

    def run_alone(self, batch: ModuleBatch) -> Tensor:
        """`forward_backward` of one micro-batch, as if the step had no other."""
        return self.forward_backward([batch])

    def validate(self, batches: Sequence[ModuleBatch]) -> tuple[Tensor, Tensor]:
        """Forwards alone, of batches made to validate. Returns this rank's sum of the loss and number of items."""
        self._tally.count.zero_()
        alone = self._pipeline_of(forward_only(self._schedule(len(batches))))
        return alone.run(batches), self._tally.count

    def synchronize(self) -> None:
        """Make replicas' buffers one: floating ones become their mean. Gradients are whole already."""
        if not self._averages_buffers:
            return
        comm = self.comm("data")
        found = [tensor for tensor in buffers(self.module).values() if tensor.is_floating_point()]
        if found and comm.size > 1:
            # In float64, three equal float32 values have themselves as their mean.
            flat = torch.cat([tensor.detach().double().flatten() for tensor in found])
            comm.all_reduce(flat, purpose="buffers")
            for tensor, mean in zip(found, (flat / comm.size).split([t.numel() for t in found]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def totals(self, loss: Tensor, extra: Sequence[float] = ()) -> tuple[float, float, list[float]]:
        """Loss and gradient norm of the whole module and batch, the same bits on all ranks, in one small message. Each
        number in `extra` is summed over all ranks on the way."""
        mine = torch.stack([loss, self._tally.count])
        if self.coord.tensor:
            mine.zero_()
        squares = squared_norm(self.data.slices, self.data.first_replica).view(1).to(mine)
        everything = torch.cat([mine, squares, loss.new_tensor(extra)])
        self.comm("world").all_reduce(everything, purpose="loss and norm")
        total, self.num_items, squared, *rest = everything.tolist()
        self.correction = self.plan.job.global_batch / self.num_items if self.num_items else 0.0
        return total * self.correction, math.sqrt(squared) * self.correction, rest

    def update(self, rate: float, coefficient: float) -> None:
        """New weights from the gradients, on all ranks that hold them."""
        self.optimizer.step(rate, coefficient * self.correction)
        self.data.gather_parameters()

    def publish(self) -> None:
        """Carry master weights, after they were restored, to where forward reads them on all ranks."""
        self.optimizer.publish()
        self.data.gather_parameters()

    def unused(self) -> list[str]:
        """Trained parameters that took part in no backward of this rank's last step."""
        return [name for stage in self.stages for name in stage.completion.unused()]

    def kept_dtype(self, tensor: ModuleTensor) -> torch.dtype:
        """The type that a tensor has where it is whole and kept: that of master weights, or its own."""
        if tensor.role == "trained":
            return accumulation_dtype(COMPUTE_DTYPES[self.plan.job.precision])
        dtype: torch.dtype = self.module.state_dict()[tensor.name].dtype
        return dtype

    def pieces(self) -> Iterator[StatePiece]:
        """What is kept beside weights and optimizer state of trained parameters: frozen ones and buffers."""
        frozen = {name: tensor for name, tensor in self.module.named_parameters() if not tensor.requires_grad}
        for kind, held in (("frozen", frozen), ("buffer", buffers(self.module))):
            for name, tensor in held.items():
                parameter = ModuleTensor(name=name, shape=tuple(tensor.shape)).parameter
                yield StatePiece(
                    kind=kind,
                    parameter=parameter,
                    rectangle=Rectangle(start=(0,) * len(parameter.shape), stop=parameter.shape),
                    tensor=tensor.detach().view(parameter.shape),
                    owned=self.coord.data == 0 and self.coord.tensor == 0,
                )


class _Originals:
    """The parameters as the user gave them, until master weights have taken them: compute may be too narrow to hold
    them."""

    def __init__(self, units: Sequence[Unit], compute: torch.dtype) -> None:
        self._values: dict[str, Tensor] = {}
        if compute != accumulation_dtype(compute):
            self._values = {held.name: held.parameter.detach() for unit in units for held in unit.held}

    @torch.no_grad()
    def give_to(self, data: DataParallel, optimizer: AdamW) -> None:
        """Set master weights."""
        if not self._values:
            return
        for part, master in zip(data.slices, optimizer.masters, strict=True):
            for piece, box, stretch in part.rectangles():
                values = self._values[piece.parameter.name].view(piece.parameter.shape)
                spans = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
                master[stretch] = values[spans].reshape(-1).to(master.dtype)
