"""What happens to activations between layers that are cut and those that are not, forward and backward.

Activations are [..., tokens, features]. Each mapping is one collective forward and the one backward that makes the
gradients right (Megatron-LM, arXiv 1909.08053, section 3; with cut tokens, arXiv 2205.05198, section 4):

    enter    what all ranks hold goes into layers of which each has its part: nothing, and a sum of gradients
    leave    parts of a sum become the sum: a sum, and nothing
    split    what all ranks hold becomes this rank's tokens: a slice, and a gathering
    gather   this rank's tokens become all of them, to be used alike by all ranks: a gathering, and a slice
    join     features of all ranks side by side, to be used alike by all ranks: a gathering, and a slice

Under sequence parallelism `enter` gathers tokens, and reduce-scatters gradients; `leave` is the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from phalanx.errors import InputError
from phalanx.plan.comm import Comm
from phalanx.trainer.comm import Counting
from phalanx.trainer.tensor_parallel import TensorParallel

Act = Callable[[Tensor], Tensor]


class _Mapping(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, act: Act, act_backward: Act) -> Tensor:
        ctx.act_backward = act_backward
        return act(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        return ctx.act_backward(output_grad), None, None


@dataclass(frozen=True, slots=True)
class Mappings:
    """The mappings over one group. With a group of one they do nothing. On tensors without data (device "meta") they
    find shapes."""

    comm: Comm
    sequence_parallel: bool = False

    @property
    def cuts_tokens(self) -> bool:
        """Whether activations between half-blocks hold only this rank's tokens."""
        return self.sequence_parallel and self.comm.size > 1

    def enter(self, inputs: Tensor) -> Tensor:
        """[..., tokens, features], of this rank alone under sequence parallelism → [..., all tokens, features]."""
        if self.cuts_tokens:
            return self._map(inputs, self._gathered, self._scattered)
        return self._map(inputs, _same, self._summed)

    def leave(self, partial: Tensor) -> Tensor:
        """Parts of a sum [..., all tokens, features] → the sum, under sequence parallelism this rank's tokens of it."""
        if self.cuts_tokens:
            return self._map(partial, self._scattered, self._gathered)
        return self._map(partial, self._summed, _same)

    def shared(self, parameter: Tensor) -> Tensor:
        """A parameter that all ranks hold, where each computes with other tokens or heads: gradients are summed."""
        return self._map(parameter, _same, self._summed)

    def split(self, inputs: Tensor) -> Tensor:
        """[..., all tokens, features] → this rank's tokens."""
        return self._map(inputs, self._sliced, self._gathered)

    def gather(self, inputs: Tensor) -> Tensor:
        """[..., this rank's tokens, features] → all of them."""
        return self._map(inputs, self._gathered, self._sliced)

    def join(self, inputs: Tensor, width: int) -> Tensor:
        """[..., this rank's features] → [..., width]: ranks in order, all but the last ones with equally many."""
        share = -(-width // self.comm.size)
        first, last = self.comm.index * share, min((self.comm.index + 1) * share, width)

        def joined(values: Tensor) -> Tensor:
            padded = F.pad(values, (0, share - values.shape[-1]))
            return self._gathered(padded.transpose(-1, -2)).transpose(-1, -2)[..., :width]

        return self._map(inputs, joined, lambda gradient: gradient[..., first:last])

    def _map(self, inputs: Tensor, act: Act, act_backward: Act) -> Tensor:
        if self.comm.size == 1:
            return inputs
        result: Tensor = _Mapping.apply(inputs, act, act_backward)
        return result

    def _summed(self, values: Tensor) -> Tensor:
        total = values.clone().contiguous()
        if self._sends(total):
            self.comm.all_reduce(total, purpose="tensor parallel sum")
        return total

    def _gathered(self, values: Tensor) -> Tensor:
        first = values.movedim(-2, 0).contiguous()
        if not self._sends(first):
            return first.repeat(self.comm.size, *[1] * (first.dim() - 1)).movedim(0, -2)
        return self._over_tokens.gather(first, "tensor parallel gather").movedim(0, -2)

    def _scattered(self, values: Tensor) -> Tensor:
        self._check(values)
        if not self._sends(values):
            return self._sliced(values)
        return self._over_tokens.reduce(values.movedim(-2, 0).contiguous(), "tensor parallel sum").movedim(0, -2)

    def _sliced(self, values: Tensor) -> Tensor:
        self._check(values)
        held = self._over_tokens.held_tokens(values.shape[-2])
        return values[..., held.start : held.stop, :].contiguous()

    def _sends(self, values: Tensor) -> bool:
        """Of tensors without data there is nothing to send, but a Comm that only counts shall hear of it."""
        return not values.is_meta or isinstance(getattr(self.comm, "transport", None), Counting)

    @property
    def _over_tokens(self) -> TensorParallel:
        return TensorParallel(self.comm, sequence_parallel=True)

    def _check(self, values: Tensor) -> None:
        if values.shape[-2] % self.comm.size:
            what = f"{values.shape[-2]} tokens do not divide among {self.comm.size} ranks"
            raise InputError(what, where="sequence_parallel", instead="pad them, or leave sequence parallelism out")


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)
