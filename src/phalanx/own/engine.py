"""ModuleEngine: everything that one rank trains a module of the user's own with (trainer.engine.Engine)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.errors import InputError
from phalanx.own.blocks import Blocks, Cut, held_stages
from phalanx.own.chain import Chain
from phalanx.own.copies import check_copies, sum_copies
from phalanx.own.cuts import Cutting
from phalanx.own.exchange import boundaries
from phalanx.own.layers import fit_types
from phalanx.own.nest import cast_floats, tensors
from phalanx.own.stage import Forward, ModuleBatch, ModuleStage, Tally, WholeModule
from phalanx.own.units import Unit, buffers, flat_layout, outermost, placed, shares
from phalanx.plan.comm import Comm
from phalanx.plan.groups import data_groups
from phalanx.plan.layout import Coord
from phalanx.plan.module import ModulePlan, ModuleTensor
from phalanx.plan.module_traffic import ModuleShape
from phalanx.plan.schedule import Action, forward_only, schedule
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.flat import COMPUTE_DTYPES, accumulation_dtype
from phalanx.trainer.loss_scale import LossScale
from phalanx.trainer.optim import AdamW, squared_norm
from phalanx.trainer.pipeline_parallel import Pipeline


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
        blocks: Blocks | None,
        cuts: Mapping[str, str] | None,
        average_buffers: bool,
        on_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        """`module` is on `device`, and the same on all ranks."""
        job, layout = plan.job, plan.layout
        self.plan, self.coord, self.device, self.comm, self.module = plan, coord, device, comm, module
        self._compute = COMPUTE_DTYPES[job.precision]
        self._cutting: Cutting | None = None
        if cuts is not None and layout.tensor > 1:
            self._cutting = Cutting(module, cuts, comm("tensor"), sequence_parallel=layout.sequence_parallel)
        self._cut = Cut(module, blocks, layout) if blocks else None
        chunks = self._chunks()
        self.units = [unit for units in chunks for unit in units]
        self.buffers = [unit.buffer for unit in self.units]
        wide = _Originals(self.units, self._compute)
        by_buffer = {unit.buffer: unit for unit in self.units}
        shard_comm, replica_comm = map(comm, data_groups(layout))
        self.data = DataParallel(
            self.buffers, shard_comm, replica_comm, layout, job.seed, lambda buffer: by_buffer[buffer].adopt()
        )
        self.optimizer = AdamW(self.data.slices, job.optimizer)
        self.loss_scale = LossScale(job.precision)
        wide.give_to(self.data, self.optimizer)
        for parameter in module.parameters():
            if not parameter.requires_grad or parameter.is_meta:  # trained ones that are held lie in flat buffers
                parameter.data = parameter.data.to(self._compute)
        if self._compute != accumulation_dtype(self._compute):
            fit_types(module)
        self._tally, self._averages_buffers = Tally(device), average_buffers
        runners = self._chains if self._cut else [WholeModule(module, forward)]
        self.stages = [
            ModuleStage(module, runner, units, self.data, self._tally, self._compute, 1.0 / job.global_batch)
            for runner, units in zip(runners, chunks, strict=True)
        ]
        self._on_action = on_action
        self._pipelines: dict[Any, Pipeline] = {}
        self.correction, self.num_items = 1.0, 0.0
        self._agreed = False

    def _chunks(self) -> list[list[Unit]]:
        """The units of each stage that this rank holds; what other ranks hold of the module is let go."""
        layout, coord, cut = self.plan.layout, self.coord, self._cut
        mine = held_stages(layout, coord)
        if cut:
            cut.let_go(set(mine))
            recompute = layout.recompute == "full"
            self._chains = [Chain(self.module, cut.blocks, cut.sections[stage], recompute) for stage in mine]
        tied = set(cut.tied.values()) if cut else set()
        every = [cut.shares(stage) for stage in mine] if cut else [shares(self.module, dict(outermost(self.module)))]
        return [
            [
                Unit(share, flat_layout(share, layout, coord, self._cutting, tied), self._compute, self.device)
                for share in held
            ]
            for held in every
        ]

    def _pipeline(self, batches: Sequence[ModuleBatch], *, backward: bool = True) -> Pipeline:
        """The pipeline for so many micro-batches of such shapes, all of which must be alike if there are stages."""
        layout = self.plan.layout
        key = (len(batches), backward, self._shapes(batches) if layout.num_stages > 1 else None)
        if key not in self._pipelines:
            order = schedule(layout.schedule, layout.pipeline, layout.virtual_stages, len(batches))
            self._pipelines[key] = Pipeline(
                order if backward else forward_only(order),
                self.stages,
                self.comm("pipeline"),
                self._set_boundaries(batches[0]),
                self._on_action,
            )
        elif layout.num_stages > 1 and key[2] != self._bounded:
            self._set_boundaries(batches[0])
        self._bounded = key[2]
        return self._pipelines[key]

    def _shapes(self, batches: Sequence[ModuleBatch]) -> tuple[Any, ...]:
        every = [_shapes(batch) for batch in batches]
        for number, shapes in enumerate(every):
            if shapes != every[0]:
                found = [[list(shape) for shape, _ in each] for each in (shapes, every[0])]
                what = f"micro-batch {number} has tensors of shapes {found[0]}, the first one {found[1]}"
                instead = "between stages shapes are fixed: drop the smaller last batch (drop_last=True) or pad it"
                raise InputError(what, where="micro_batches", instead=instead)
        return every[0]

    def _set_boundaries(self, batch: ModuleBatch) -> Tensor:
        """Find what passes between stages, and tell this rank's. Returns a tensor like those that do."""
        if self._cut is None or self.plan.layout.num_stages == 1:
            return torch.empty(0, dtype=self._compute, device=self.device)
        for stage in self.stages:
            stage.hollow = True
        values = cast_floats(batch.values, self._compute)
        found = boundaries(self.module, self._cut.blocks, self._cut.sections, values, self._compute)
        for stage in self.stages:
            stage.hollow = False
        for number, chain in zip(held_stages(self.plan.layout, self.coord), self._chains, strict=True):
            chain.into = found[number - 1] if number else None
            chain.out = found[number] if number < len(found) else None
        return torch.empty(found[0].num_lanes, dtype=found[0].wide, device=self.device)

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
        loss = self._pipeline(batches).run(batches)
        self.data.finish()
        return loss

    def run_alone(self, batch: ModuleBatch) -> Tensor:
        """`forward_backward` of one micro-batch, as if the step had no other."""
        return self.forward_backward([batch])

    def validate(self, batches: Sequence[ModuleBatch]) -> tuple[Tensor, Tensor]:
        """Forwards alone, of batches made to validate. Returns this rank's sum of the loss and number of items."""
        self._tally.count.zero_()
        alike: dict[Any, list[ModuleBatch]] = {}
        for batch in batches:
            alike.setdefault(_shapes(batch), []).append(batch)
        losses = [self._pipeline(some, backward=False).run(some) for some in alike.values()]
        return torch.stack(losses).sum(), self._tally.count

    def synchronize(self) -> None:
        """Make gradients of what tensor ranks or both ends of the pipeline share complete, and replicas' buffers one:
        floating ones become their mean. The first time, see that tensor ranks agree on the gradients of what all of
        them hold."""
        if self._cutting:
            sum_copies(self)
            if not self._agreed:
                check_copies(self)
                self._agreed = True
        tied = [part.gradients for part in self.data.slices if part.part.copies == "tied"]
        if tied:
            self.comm("tied").all_reduce(tied, purpose="tied gradients")
        comm, found = self.comm("data"), self._averaged()
        if found and comm.size > 1:
            # In float64, three equal float32 values have themselves as their mean.
            flat = torch.cat([tensor.detach().double().flatten() for tensor in found])
            comm.all_reduce(flat, purpose="buffers")
            for tensor, mean in zip(found, (flat / comm.size).split([t.numel() for t in found]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def _averaged(self) -> list[Tensor]:
        """Buffers that replicas make their mean."""
        held = self._held(buffers(self.module)) if self._averages_buffers else {}
        return [tensor for tensor in held.values() if tensor.is_floating_point()]

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
        samples = self.plan.job.global_batch / self.loss_scale.value
        self.correction = samples / self.num_items if self.num_items else 0.0
        return total * self.correction, math.sqrt(squared) * self.correction, rest

    def update(self, rate: float, coefficient: float) -> None:
        """New weights from the gradients, on all ranks that hold them."""
        self.optimizer.step(rate, coefficient * self.correction)
        self._gather()
        self.data.wait_for_parameters()

    def publish(self) -> None:
        """Carry master weights, after they were restored, to where forward reads them on all ranks."""
        self.optimizer.publish()
        self._gather()

    def _gather(self) -> None:
        """Between steps the module is the user's: they may look at its parameters, and must not see old ones."""
        self.data.gather_parameters()
        self.data.wait_for_parameters()
        self.data.wait_for_parameters()

    def shape(self) -> ModuleShape:
        """What this rank's traffic follows from. The message between stages is known once a step has run."""
        sizes = [pipeline.activations.nbytes for pipeline in self._pipelines.values()]
        return ModuleShape(
            buffers=[[unit.buffer.layout for unit in stage.blocks] for stage in self.stages],
            message_bytes=max(sizes, default=0),
            num_averaged=sum(tensor.numel() for tensor in self._averaged()),
        )

    def unused(self) -> list[str]:
        """Trained parameters that took part in no backward of this rank's last step."""
        return [name for stage in self.stages for name in stage.completion.unused()]

    def _held(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those that belong to this rank's stages."""
        if self._cut is None:
            return named
        mine = set(held_stages(self.plan.layout, self.coord))
        return {name: tensor for name, tensor in named.items() if self._cut.stage_of(name) in mine}

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
            for name, tensor in self._held(held).items():
                copied = self._cut is not None and name in self._cut.tied
                name = self._cut.tied[name] if copied else name
                parameter, boxes = placed(name, tensor, self._cutting)
                cut = self._cutting is not None and name in self._cutting.cuts
                alone = cut and not self._cutting.cuts[name].copied
                parts = tensor.detach().split([box.shape[0] for box in boxes]) if cut else [tensor.detach()]
                for box, part in zip(boxes, parts, strict=True):
                    yield StatePiece(
                        kind=kind,
                        parameter=parameter,
                        rectangle=box,
                        tensor=part.view(box.shape),
                        owned=self.coord.data == 0 and (alone or self.coord.tensor == 0) and not copied,
                    )


def _shapes(batch: ModuleBatch) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(batch.values))


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
                name = piece.parameter.name
                first = part.start + stretch.start - part.buffer.weights[name].value.storage_offset()
                values = self._values[name].reshape(-1)[first : first + box.num_elements]
                master[stretch] = values.to(master.dtype)
