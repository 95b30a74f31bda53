"""Record: what the parts of a module compute, keep and send, seen in one forward and backward without data.

Torch itself says which products and passes over memory there are, and what is saved for backward; the module lies on
the device "meta", where nothing is computed. Attention is recorded as one kernel that stores no scores.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.errors import InputError
from phalanx.own.blocks import Blocks, names_before
from phalanx.own.cuts import Cutting
from phalanx.own.nest import Nest, cast_floats, mapped, tensors
from phalanx.own.stage import Forward, Loss
from phalanx.plan.comm import Group
from phalanx.plan.operations import Operation
from phalanx.trainer.comm import Counting, GroupComm
from phalanx.trainer.recorder import Recorder

aten = torch.ops.aten
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One part of a module (what comes before the blocks, a block, what comes after), for one micro-batch on one tensor
    rank. `kept_bytes` live from forward to backward; `output_bytes` pass to the next part; `messages` over the tensor
    axis are (operation, count, payload bytes in all), forward and backward; elements are parameters held."""

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept_bytes: int
    output_bytes: int
    messages: tuple[tuple[str, int, int], ...]
    num_elements: int
    num_trained: int


def without_data(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module on the device "meta", its floating tensors as `dtype`; no data is copied on the way."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=kind)
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if trained else empty
    return copy.deepcopy(module, memo)


def record(
    module: nn.Module,
    batch: Nest,
    loss: Loss,
    *,
    forward: Forward,
    blocks: Blocks | None,
    cuts: Mapping[str, str] | None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    micro_batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[Recorded]:
    """The parts of a module in order: what comes before its blocks, each block, what comes after, the loss included;
    without blocks, the module is one part. `batch` is an example with samples along dim 0. Blocks that hold the same
    modules, shapes and plain values, but for their number, are taken to do the same.

    Raises InputError if the module cannot be run without data.
    """
    hollow, counter = without_data(module, dtype), Recorder()
    if tensor > 1:
        group = Group(name="tensor", ranks=tuple(range(tensor)))
        comm = GroupComm(group, 0, Counting(group, 0), counter)
        Cutting(hollow, cuts or {}, comm, sequence_parallel=sequence_parallel)
    values = cast_floats(mapped(lambda each: _resized(each, micro_batch), batch), dtype)
    watch = _Watch(hollow, counter)

    def finish(output: Nest) -> Tensor:
        found = loss(output, values)
        return found[0] if isinstance(found, tuple) else found

    try:
        if blocks is None:
            return [watch.part("module", hollow.parameters(), lambda _: finish(forward(hollow, values)), None)[0]]
        return _by_blocks(hollow, blocks, values, watch, finish)
    except InputError:
        raise
    except Exception as error:  # what a user's code raises when its tensors have no data may be anything
        what = f"the module cannot be run on tensors without data, from which it is recorded: {error}"
        raise InputError(
            what, where="module", instead="let nothing depend on values (.item(), if tensor: …)"
        ) from error


def _by_blocks(
    module: nn.Module, blocks: Blocks, values: Nest, watch: _Watch, finish: Callable[[Nest], Tensor]
) -> list[Recorded]:
    listed = blocks.listed(module)
    inside = {parameter for block in listed for parameter in block.parameters()}
    early = names_before(module, blocks.path)
    outside = {name: parameter for name, parameter in module.named_parameters() if parameter not in inside}
    before = [parameter for name, parameter in outside.items() if name in early]
    after = [parameter for name, parameter in outside.items() if name not in early]
    part, nest = watch.part("before", before, lambda _: blocks.enter(module, values), None)
    found, known, settings = [part], {}, _settings(listed)
    for number, block in enumerate(listed):
        key = (
            str(block),
            settings[number],
            tuple((tuple(each.shape), each.requires_grad) for each in (*block.parameters(), *tensors(nest))),
            number == 0,
            number == len(listed) - 1,
        )  # hooks of the first and last block cut tokens and gather them
        if key not in known:
            known[key] = watch.part(f"block {number}", block.parameters(), functools.partial(blocks.block, block), nest)
        part, nest = known[key]
        found.append(part)
    last, _ = watch.part("after", after, lambda x: finish(blocks.leave(module, x, values)), nest)
    return [*found, last]


def _settings(blocks: Sequence[nn.Module]) -> list[frozenset[Any]]:
    """The plain values that the parts of each block hold: how far its attention slides, say, which no shape tells. But
    not its own number, which all of them may hold: recording each of a hundred takes long."""
    held = [
        {
            (path, name): value
            for path, part in block.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, _PLAIN)
        }
        for block in blocks
    ]
    numbers = {key for key in held[0] if all(values.get(key) == number for number, values in enumerate(held))}
    return [frozenset(item for item in values.items() if item[0] not in numbers) for values in held]


def _resized(tensor: Tensor, size: int) -> Tensor:
    shape = (size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


class _Watch:
    """Runs parts and notes what they do."""

    def __init__(self, module: nn.Module, counter: Recorder) -> None:
        self._counter = counter
        self._weights = {tensor.untyped_storage()._cdata for tensor in module.parameters()}

    def part(
        self, name: str, parameters: Iterable[nn.Parameter], run: Callable[[Nest], Nest], inputs: Nest
    ) -> tuple[Recorded, Nest]:
        """What `run(inputs)` and its backward do; and what the next part takes."""
        held = list(dict.fromkeys(parameters))
        self._counter.messages.clear()
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in self._weights:
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        forward, backward = _Operations(), _Operations()
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
            stack.enter_context(forward)
            stack.enter_context(_Attention(forward, backward))
            output = run(inputs)
        passed = [tensor for tensor in tensors(output) if tensor.requires_grad]
        with backward:
            torch.autograd.backward(passed, [torch.empty_like(tensor) for tensor in passed])
        recorded = Recorded(
            name=name,
            forward=tuple(forward.found),
            backward=tuple(backward.found),
            kept_bytes=sum(tensor.untyped_storage().nbytes() for tensor in kept.values()),
            output_bytes=sum(tensor.nbytes for tensor in tensors(output)),
            messages=tuple((key[2], count, size) for key, (count, size) in self._counter.messages.items()),
            num_elements=sum(parameter.numel() for parameter in held),
            num_trained=sum(parameter.numel() for parameter in held if parameter.requires_grad),
        )
        return recorded, mapped(lambda each: each.detach().requires_grad_(each.requires_grad), output)


class _Operations(TorchDispatchMode):
    """Notes each kernel: matrix products by their sizes, all else by the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return result  # a view
        size = sum(tensor.nbytes for tensor in tensors((args, result)))
        sizes = _product(func.overloadpacket, args, result)
        if sizes:
            times, batch, m, n, k = sizes
            operation = Operation(name=str(func), kind="matmul", bytes=size, m=m, n=n, k=k, batch=batch, count=times)
            self.found.append(operation)
        elif size:
            self.found.append(Operation(name=str(func), kind="elementwise", bytes=size))
        return result


def _product(packet: Any, args: Any, result: Any) -> tuple[int, int, int, int, int] | None:
    """(how many, batch, m, n, k) if it is a matrix product or a convolution."""
    if packet in (aten.mm, aten.addmm):
        left, right = args[-2:]
        return 1, 1, left.shape[0], right.shape[1], left.shape[1]
    if packet in (aten.bmm, aten.baddbmm):
        left, right = args[-2:]
        return 1, left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    if packet in (aten.convolution, aten.convolution_backward):
        backward = packet is aten.convolution_backward
        output, weight = (args[0], args[2]) if backward else (result, args[1])
        places = output.numel() // output.shape[1]
        groups, times = (args[9], sum(args[10][:2])) if backward else (args[8], 1)
        return times, groups, places, weight.shape[0] // groups, math.prod(weight.shape[1:])
    return None


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""What scaled_dot_product_attention takes, in order."""


class _Attention(TorchFunctionMode):
    """Attention of torch as one kernel each way (FlashAttention-2, arXiv 2307.08691: two products forward, five
    backward; under a causal mask, half of them)."""

    def __init__(self, forward: _Operations, backward: _Operations) -> None:
        super().__init__()
        self._forward, self._backward = forward, backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
        q, k, v, causal = named["query"], named["key"], named["value"], named.get("is_causal", False)
        common = {
            "kind": "attention",
            "m": q.shape[-2],
            "n": k.shape[-2] / 2 if causal else k.shape[-2],
            "k": q.shape[-1],
            "batch": math.prod(q.shape[:-2]),
        }
        size = 2 * q.nbytes + k.nbytes + v.nbytes
        self._forward.found.append(Operation(name="attention", bytes=size, products=2, **common))
        if any(tensor.requires_grad for tensor in (q, k, v)):
            self._backward.found.append(Operation(name="attention gradient", bytes=2 * size, products=5, **common))
        return _Kernel.apply(q, k, v)


class _Kernel(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        *front, heads, length, _ = map(int, (1, *q.shape))
        output = q.new_empty(*front, length, heads, v.shape[-1]).transpose(-2, -3).view(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, output)
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
