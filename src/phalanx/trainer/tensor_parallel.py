"""Tensor parallelism after Megatron-LM, with or without sequence parallelism: linear layers cut by columns or rows, and
an embedding cut by the vocabulary (`loss` has the head).

Activations are matrices [tokens, features], tokens in order of (sequence, position). Between half-blocks every tensor
rank holds all tokens; under sequence parallelism (Korthikanti et al. 2022) it holds its even slice of them, an
all-gather opens each half-block and a reduce-scatter closes it.

Weight gradients are added straight into flat buffers; autograd sees activations only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.plan.comm import Comm
from phalanx.trainer.flat import Weight, add_product

Again = Callable[[], Tensor]
"""Makes a tensor a second time, for backward, from what is kept anyway."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The layers, over the Comm of one tensor group. With a group of one they are plain layers."""

    comm: Comm
    sequence_parallel: bool = False

    @property
    def cuts_tokens(self) -> bool:
        """Whether activations between half-blocks hold only this rank's slice of the tokens."""
        return self.sequence_parallel and self.comm.size > 1

    def held_tokens(self, num_tokens: int) -> range:
        """Which of a micro-batch's tokens this rank holds between half-blocks."""
        if not self.cuts_tokens:
            return range(num_tokens)
        share = num_tokens // self.comm.size
        return range(self.comm.index * share, (self.comm.index + 1) * share)

    def column(
        self,
        inputs: Tensor,
        weights: Sequence[Weight],
        biases: Sequence[Weight] | None,
        purpose: str,
        again: Again | None = None,
    ) -> Tensor:
        """Layers whose output is cut: [tokens, hidden] → [all tokens, this rank's rows of all `weights`]. With `again`,
        `inputs` are not kept for backward but made a second time."""
        return _apply(_Column, inputs, tuple(weights), tuple(biases or ()), self, purpose, again)

    def row(
        self,
        inputs: Tensor,
        weight: Weight,
        bias: Weight | None,
        residual: Tensor | None,
        purpose: str,
        again: Again | None = None,
    ) -> Tensor:
        """A layer whose input is cut: [all tokens, columns] → [tokens, hidden], summed over ranks, plus `residual`.
        With `again`, `inputs` are not kept for backward but made a second time."""
        return _apply(_Row, inputs, residual, weight, bias, self, purpose, again)

    def embed(self, tokens: Tensor, weight: Weight, first_row: int, anchor: Tensor) -> Tensor:
        """Rows of the embedding for `tokens` [all tokens] (int64) → [tokens, hidden]. This rank holds the vocabulary
        from `first_row` on. `anchor` is any scalar that requires a gradient: it ties the result into autograd."""
        return _apply(_Embedding, anchor, tokens, weight, first_row, self)

    def gather(self, inputs: Tensor, purpose: str) -> Tensor:
        """[tokens, features] → [all tokens, features]; the input itself where tokens are not cut."""
        if not self.cuts_tokens:
            return inputs
        out = inputs.new_empty(inputs.shape[0] * self.comm.size, *inputs.shape[1:])
        self.comm.all_gather(inputs.contiguous(), out=out, purpose=purpose)
        return out

    def reduce(self, partial: Tensor, purpose: str) -> Tensor:
        """Sum [all tokens, features] over ranks → [tokens, features], in place where tokens are not cut."""
        if not self.cuts_tokens:
            self.comm.all_reduce(partial, purpose=purpose)
            return partial
        out = partial.new_empty(partial.shape[0] // self.comm.size, *partial.shape[1:])
        self.comm.reduce_scatter(partial, out=out, purpose=purpose)
        return out


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _keep(ctx: Any, inputs: Tensor, again: Again | None) -> None:
    """Keep a layer's input for backward, or only how to make it again."""
    ctx.again = again
    if again is None:
        ctx.save_for_backward(inputs)


def _kept(ctx: Any) -> Tensor:
    if ctx.again is None:
        return ctx.saved_tensors[0]
    inputs = ctx.again()
    ctx.again = _spent  # what it held is let go
    return inputs


def _spent() -> Tensor:
    raise AssertionError("backward ran twice")


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weights: tuple[Weight, ...],
        biases: tuple[Weight, ...],
        parallel: TensorParallel,
        purpose: str,
        again: Again | None,
    ) -> Tensor:
        inputs = parallel.gather(inputs, f"{purpose} input")
        _keep(ctx, inputs, again)
        ctx.weights, ctx.biases, ctx.parallel, ctx.purpose = weights, biases, parallel, purpose
        if len(weights) == 1:
            return _linear(inputs, weights[0], biases[0] if biases else None)
        return torch.cat([_linear(inputs, w, biases[i] if biases else None) for i, w in enumerate(weights)], 1)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        parallel, weights = ctx.parallel, ctx.weights
        inputs = _kept(ctx) if ctx.again is None else parallel.gather(_kept(ctx), f"{ctx.purpose} input")
        grads = output_grad.split([weight.value.shape[0] for weight in weights], 1)
        input_grad = grads[0] @ weights[0].value
        for weight, grad in zip(weights[1:], grads[1:], strict=True):
            input_grad.addmm_(grad, weight.value)
        # The weight gradient is computed while the input gradient is on its way.
        purpose = f"{ctx.purpose} input gradient"
        if parallel.cuts_tokens:
            mine = input_grad.new_empty(input_grad.shape[0] // parallel.comm.size, input_grad.shape[1])
            work = parallel.comm.reduce_scatter(input_grad, out=mine, purpose=purpose, async_op=True)
        else:
            mine = input_grad
            work = parallel.comm.all_reduce(input_grad, purpose=purpose, async_op=True)
        for weight, grad in zip(weights, grads, strict=True):
            add_product(weight, grad, inputs)
        for bias, grad in zip(ctx.biases, grads, strict=False):
            bias.grad.add_(grad.sum(0))
        work.wait()
        return mine, None, None, None, None, None


def _linear(inputs: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
    if bias is None:
        return inputs @ weight.value.t()
    return torch.addmm(bias.value, inputs, weight.value.t())


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        residual: Tensor | None,
        weight: Weight,
        bias: Weight | None,
        parallel: TensorParallel,
        purpose: str,
        again: Again | None,
    ) -> Tensor:
        _keep(ctx, inputs, again)
        ctx.weight, ctx.bias, ctx.parallel, ctx.purpose = weight, bias, parallel, purpose
        ctx.has_residual = residual is not None
        # Where all ranks hold the same residual, the first one's matrix product adds it before the sum over ranks.
        if residual is not None and not parallel.cuts_tokens and parallel.comm.index == 0:
            partial = torch.addmm(residual, inputs, weight.value.t())
        else:
            partial = inputs @ weight.value.t()
        output = parallel.reduce(partial, f"{purpose} output")
        if residual is not None and parallel.cuts_tokens:
            output.add_(residual)
        return output if bias is None else output.add_(bias.value)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        if ctx.bias is not None:
            ctx.bias.grad.add_(output_grad.sum(0))
        full = ctx.parallel.gather(output_grad, f"{ctx.purpose} output gradient")
        add_product(ctx.weight, full, _kept(ctx))
        return full @ ctx.weight.value, output_grad if ctx.has_residual else None, *[None] * 5


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tokens: Tensor, weight: Weight, first_row: int, parallel: TensorParallel
    ) -> Tensor:
        ctx.weight, ctx.parallel = weight, parallel
        if parallel.comm.size == 1:
            ctx.tokens, ctx.elsewhere = tokens, None
            return weight.value[tokens]
        local = tokens - first_row
        ctx.elsewhere = ((local < 0) | (local >= weight.value.shape[0])).unsqueeze(1)
        ctx.tokens = local.masked_fill_(ctx.elsewhere[:, 0], 0)
        rows = weight.value[ctx.tokens].masked_fill_(ctx.elsewhere, 0)
        return parallel.reduce(rows, "embedding output")

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        full = ctx.parallel.gather(output_grad, "embedding output gradient")
        if ctx.elsewhere is not None:
            full = full.masked_fill(ctx.elsewhere, 0)
        ctx.weight.grad.index_add_(0, ctx.tokens, full.to(ctx.weight.grad.dtype))
        return None, None, None, None, None
