"""ModuleStage: a module, or a part of one, as the pipeline executes it (trainer.model.Stage)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from phalanx.errors import InputError
from phalanx.own.completion import Completion
from phalanx.own.layers import write_products
from phalanx.own.nest import Nest, cast_floats, tensors
from phalanx.own.order import Order
from phalanx.own.units import Unit
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.flat import accumulation_dtype

Loss: TypeAlias = "Callable[[Nest, Nest], Tensor | tuple[Tensor, int | Tensor]]"
"""What is trained: of a module's output and the micro-batch, a mean over its samples; or a sum, and over how many items
(tokens, pixels …) the mean shall go."""

Forward: TypeAlias = Callable[[nn.Module, Nest], Nest]
"""How a module is called: its output, of the module and the micro-batch."""


def call(module: nn.Module, batch: Nest) -> Nest:
    """The usual ways: a mapping becomes keywords, of several things the first is the input, else it is all."""
    return module(**batch) if isinstance(batch, Mapping) else module(model_input(batch))


def model_input(batch: Nest) -> Nest:
    """What of a micro-batch is the input. Raises InputError for a mapping, which does not say."""
    if isinstance(batch, Mapping):
        what = f"nothing says which of {', '.join(map(repr, batch))} goes into the first block"
        raise InputError(what, where="blocks", instead="Blocks(path, before=lambda module, batch: …)")
    return batch[0] if isinstance(batch, (tuple, list)) else batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBatch:
    """One micro-batch of any kind, and the loss to take of it. `seed`: of what torch draws in it (run, step, position
    of the micro-batch in the global batch), so that all layouts with the same micro-batches draw the same.
    Gradients are those of `loss_scale` times the loss."""

    values: Nest
    loss: Loss
    seed: tuple[int, int, int] = (0, 0, 0)
    loss_scale: float = 1.0
    validates: bool = False


class Tally:
    """How many items this rank's losses went over, float64: what sums are divided by once all ranks' are known."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def take(self, output: Nest, batch: ModuleBatch) -> Tensor:
        """The sum of the loss over the items of a micro-batch."""
        loss = batch.loss(output, batch.values)
        if isinstance(loss, tuple):
            total, count = loss
        else:
            count = _num_samples(batch.values)
            total = loss * count
        _check_scalar(total)
        self.count += count
        return total


@contextmanager
def drawing(seed: Sequence[int]) -> Iterator[None]:
    """What torch draws in here begins with `seed`; outside nobody notices."""
    key = hashlib.blake2b(repr(tuple(seed)).encode(), digest_size=8).digest()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(key, "little") >> 1)
        yield


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        instead = "return a scalar tensor, the mean over samples, or a pair: the sum, and the number of its items"
        raise InputError(f"the loss is {found}", where="loss", instead=instead)


def _num_samples(batch: Nest) -> int:
    sizes = [tensor.shape[0] for tensor in tensors(batch) if tensor.dim()]
    if not sizes:
        raise InputError("the micro-batch holds no tensor", where="loss", instead="return a sum and a number of items")
    return sizes[0]


class _Bound(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, Tensor]:
        return output_grad, torch.zeros_like(ctx.saved_tensors[0])


def bound(output: Tensor, inputs: Tensor) -> Tensor:
    """`output` as it is, with a gradient of zero for `inputs`, on which it does not depend."""
    result: Tensor = _Bound.apply(output, inputs)
    return result


class Runner(Protocol):
    """What a stage runs of a module. `last`: its result is the module's output, else it is a message to the next.
    `detached`: no gradient flows back through the message from the stage before."""

    last: bool
    detached: bool

    def __call__(self, inputs: Tensor | None, values: Nest, seed: Sequence[int]) -> Nest:
        """Forward, of the message from the stage before (the first stage: None) and a micro-batch whose floating
        tensors have the type of the weights."""


class WholeModule:
    """The module as the user calls it."""

    last, detached = True, False

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module, self._forward = module, forward

    def __call__(self, inputs: Tensor | None, values: Nest, seed: Sequence[int]) -> Nest:
        """The module's output."""
        with drawing(seed):
            return self._forward(self._module, values)


class ModuleStage:
    """A stage whose gradients are followed by hooks; under ZeRO 3 hooks also tell data parallelism what runs."""

    def __init__(
        self,
        module: nn.Module,
        runner: Runner,
        units: Sequence[Unit],
        data: DataParallel,
        tally: Tally,
        compute: torch.dtype,
        scale: float,
    ) -> None:
        """`module` is whole, whatever of it `runner` runs. `scale`: what each loss is multiplied by before backward."""
        self.runner, self.blocks, self.watcher = runner, tuple(units), data
        self.completion = Completion(units, data)
        self.hollow = False
        """While it is set, the module runs on tensors without data, and nobody needs to know."""
        self._tally, self._compute, self._scale = tally, compute, scale
        self._order = Order(data.shards, tally.count.device, watches=data.zero == 3)
        self._rest = next((unit for unit in units if unit.module is None), None)
        write_products(module, self.completion.targets())
        if data.zero == 3:
            self._gather_by_hooks(module)

    def forward(self, inputs: Tensor | None, batch: ModuleBatch, *, last: bool) -> Tensor:
        """The message to the next stage, or the scaled loss of a micro-batch."""
        with self._order:
            result = self._run(inputs, batch)
        if self.runner.last:
            result = result * (self._scale * batch.loss_scale)
        if inputs is not None and self.runner.detached:
            result = bound(result, inputs)
        # Where nothing is trained up to here, backward still needs a place to begin.
        return result if result.requires_grad else result.requires_grad_()

    def validate(self, inputs: Tensor | None, batch: ModuleBatch) -> Tensor:
        """The same without a backward to come; the loss is a sum over items."""
        with torch.no_grad():
            return self._run(inputs, batch)

    def _run(self, inputs: Tensor | None, batch: ModuleBatch) -> Tensor:
        if self._rest:
            self.watcher.before_validation(self._rest, self.blocks[0] if self.blocks[0] is not self._rest else None)
        result = self.runner(inputs, cast_floats(batch.values, self._compute), batch.seed)
        if self._rest:
            self.watcher.after_validation(self._rest)
        if not self.runner.last:
            return result
        return self._tally.take(cast_floats(result, accumulation_dtype(self._compute)), batch)

    def backward(self, output: GradientEdge, output_grad: Tensor | None, *, last: bool) -> None:
        """Run backward from what `forward` returned."""
        self.completion.begin(last=last)
        if self._rest:
            self.completion.open(self._rest)
        torch.autograd.backward(output, output_grad)
        self.completion.end()

    def _gather_by_hooks(self, module: nn.Module) -> None:
        """Each element's parameters are whole while it runs, those of the rest while the module does, whoever calls."""
        for index, unit in enumerate(self.blocks):
            following = self.blocks[index + 1] if index + 1 < len(self.blocks) else None
            if following is not None and following.module is None:
                following = None
            watched = module if unit.module is None else unit.module
            watched.register_forward_pre_hook(functools.partial(self._before, unit, following))
            watched.register_forward_hook(functools.partial(self._after, unit))

    def _before(self, unit: Unit, following: Unit | None, module: nn.Module, arguments: Any) -> None:
        if self.hollow:
            return
        recomputes = self.completion.running  # what follows then is not the next element
        if not recomputes:
            self._order.note(self.blocks.index(unit), unit.name)
        self.watcher.before_validation(unit, None if recomputes else following)

    def _after(self, unit: Unit, module: nn.Module, arguments: Any, output: Nest) -> None:
        if self.hollow:
            return
        self.watcher.after_validation(unit)
        if unit.module is None or not torch.is_grad_enabled():
            return
        passed = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not passed:
            raise InputError(
                f"{unit.name} returns a {type(output).__name__} without a tensor that leads to its gradients",
                where="layout.zero",
                instead="return tensors in tuples, lists, dicts or dataclasses, or use zero = 2 or less",
            )
        for tensor in passed:
            tensor.register_hook(functools.partial(self._passed, unit))

    def _passed(self, unit: Unit, gradient: Tensor) -> None:
        self.completion.open(unit)
