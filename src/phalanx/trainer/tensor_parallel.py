"""Tensor parallelism after Megatron-LM, with or without sequence parallelism: linear layers cut by columns or rows, and
an embedding cut by the vocabulary (`loss` has the head).

Activations are matrices [tokens, features], tokens in order of (sequence, position). Between half-blocks every tensor
rank holds all tokens; under sequence parallelism (Korthikanti et al. 2022) it holds its even slice of them, an
all-gather opens each half-block and a reduce-scatter closes it.

A matrix product and the collective beside it may be cut into chunks of tokens that alternate: while one is on its way,
the product of the next is computed.

Layers are links of chains: weight gradients are added straight into flat buffers; autograd sees activations only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.plan.comm import Comm, Work
from phalanx.trainer.chain import Kept, Repeatable
from phalanx.trainer.comm import DONE
from phalanx.trainer.flat import Weight, add_product

Multiply = Callable[..., object]
"""Computes rows of a matrix product into its first argument from the same rows of the others."""


class TensorParallel:
    """How the ranks of one tensor group work together, over its Comm. With a group of one, layers are plain layers."""

    def __init__(self, comm: Comm, sequence_parallel: bool = False, chunks: int = 1) -> None:
        """`chunks`: how many a product and its collective are cut into; it divides the tokens held between half-blocks.
        There is one where nothing is sent that could be on its way.

        `cuts_tokens`: whether activations between half-blocks hold only this rank's slice of the tokens.
        """
        self.comm = comm
        self.num_chunks = chunks if comm.size > 1 else 1
        self.cuts_tokens = sequence_parallel and comm.size > 1

    def held_tokens(self, num_tokens: int) -> range:
        """Which of a micro-batch's tokens this rank holds between half-blocks."""
        if not self.cuts_tokens:
            return range(num_tokens)
        share = num_tokens // self.comm.size
        return range(self.comm.index * share, (self.comm.index + 1) * share)

    def embed(self, tokens: Tensor, weight: Weight, first_row: int, anchor: Tensor) -> Tensor:
        """Rows of the embedding for `tokens` [all tokens] (int64) → [tokens, hidden]. This rank holds the vocabulary
        from `first_row` on. `anchor` is any scalar that requires a gradient: it ties the result into autograd."""
        result: Tensor = _Embedding.apply(anchor, tokens, weight, first_row, self)
        return result

    def gather(self, inputs: Tensor, purpose: str) -> Tensor:
        """[tokens, features] → [all tokens, features]; the input itself where tokens are not cut."""
        out, work = self.start_gather(inputs, purpose)
        work.wait()
        return out

    def start_gather(self, inputs: Tensor, purpose: str) -> tuple[Tensor, Work]:
        """As `gather`; the result is there when the work has been waited for."""
        if not self.cuts_tokens:
            return inputs, DONE
        out = inputs.new_empty(inputs.shape[0] * self.comm.size, *inputs.shape[1:])
        return out, self.comm.all_gather(inputs.contiguous(), out=out, purpose=purpose, async_op=True)

    def gather_into_product(self, inputs: Tensor, multiply: Multiply, out: Tensor, purpose: str) -> Tensor:
        """Gather `inputs` and have `multiply(out, inputs)` compute `out` [all tokens, …] from them, chunk by chunk.

        Returns what was gathered.
        """
        if not self.cuts_tokens:
            multiply(out, inputs)
            return inputs
        if self.num_chunks == 1:
            whole = self.gather(inputs, purpose)
            multiply(out, whole)
            return whole
        arriving = []
        for chunk in inputs.contiguous().chunk(self.num_chunks):
            every = chunk.new_empty(self.comm.size, *chunk.shape)
            arriving.append((every, self.comm.all_gather(chunk, out=every, purpose=purpose, async_op=True)))
        whole = inputs.new_empty(out.shape[0], inputs.shape[1])
        for ranges, (every, work) in zip(self._chunks(out.shape[0]), arriving, strict=True):
            work.wait()
            for tokens, rows in zip(ranges, every, strict=True):
                whole[tokens] = rows
                multiply(out[tokens], rows)
        return whole

    def reduce_product(
        self, multiply: Multiply, sources: Sequence[Tensor], partial: Tensor, purpose: str
    ) -> tuple[Tensor, list[Work]]:
        """Have `multiply(partial, *sources)` compute this rank's product [all tokens, features] from `sources` [all
        tokens, …] and sum it over ranks, chunk by chunk. Returns [tokens, features], there when all works have been
        waited for. `partial` is room for the product."""
        out = self._room_for_sum(partial)
        if self.num_chunks == 1:
            multiply(partial, *sources)
            return out, [self._start_reduce(partial, out, purpose)]
        works = []
        pairs = zip(partial.chunk(self.num_chunks), out.chunk(self.num_chunks), strict=True)
        for ranges, (product, mine) in zip(self._chunks(partial.shape[0]), pairs, strict=True):
            for tokens, rows in zip(ranges, product.chunk(len(ranges)), strict=True):
                multiply(rows, *(source[tokens] for source in sources))
            works.append(self._start_reduce(product, mine, purpose))
        return out, works

    def reduce(self, partial: Tensor, purpose: str) -> Tensor:
        """Sum [all tokens, features] over ranks → [tokens, features], in place where tokens are not cut."""
        out = self._room_for_sum(partial)
        self._start_reduce(partial, out, purpose).wait()
        return out

    def _room_for_sum(self, partial: Tensor) -> Tensor:
        return (
            partial.new_empty(partial.shape[0] // self.comm.size, *partial.shape[1:]) if self.cuts_tokens else partial
        )

    def _start_reduce(self, partial: Tensor, out: Tensor, purpose: str) -> Work:
        if self.cuts_tokens:
            return self.comm.reduce_scatter(partial, out=out, purpose=purpose, async_op=True)
        return self.comm.all_reduce(partial, purpose=purpose, async_op=True)

    def _chunks(self, num_tokens: int) -> Iterator[list[slice]]:
        """The tokens of each chunk: one range or, where tokens are cut, an equal one from every rank's slice."""
        parts = self.comm.size if self.cuts_tokens else 1
        length = num_tokens // (parts * self.num_chunks)
        for chunk in range(self.num_chunks):
            starts = [(part * self.num_chunks + chunk) * length for part in range(parts)]
            yield [slice(start, start + length) for start in starts]


class Column:
    """Layers whose output is cut: [tokens, hidden] → [all tokens, this rank's rows of all `weights`].

    `source`: the link before, which makes the inputs a second time in backward; None keeps them.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Weight] | None,
        parallel: TensorParallel,
        purpose: str,
        source: Repeatable | None = None,
    ) -> None:
        self.weights, self.biases, self.parallel, self.source = weights, biases or (), parallel, source
        self.widths = [weight.value.shape[0] for weight in weights]
        self.input_purpose, self.gradient_purpose = f"{purpose} input", f"{purpose} input gradient"

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        parallel = self.parallel
        num_tokens = inputs.shape[0] * (parallel.comm.size if parallel.cuts_tokens else 1)
        output = inputs.new_empty(num_tokens, sum(self.widths))
        inputs = parallel.gather_into_product(inputs, self._multiply, output, self.input_purpose)
        kept.items.append(None if self.source else inputs)
        return output

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        parallel, weights = self.parallel, self.weights
        grads = self._columns(output_grad)
        inputs = kept.items.pop()
        arrival: Work | None = None
        if self.source:  # on its way while the input gradient is computed
            inputs, arrival = parallel.start_gather(self.source.again(kept.items[-1]), self.input_purpose)
        partial = output_grad.new_empty(output_grad.shape[0], weights[0].value.shape[1])
        input_grad, works = parallel.reduce_product(self._multiply_back, grads, partial, self.gradient_purpose)
        if arrival:
            arrival.wait()
        # The weight gradient is computed while the input gradient is on its way.
        for weight, grad in zip(weights, grads, strict=True):
            add_product(weight, grad, inputs)
        for bias, grad in zip(self.biases, grads, strict=False):
            bias.grad.add_(grad.sum(0))
        for work in works:
            work.wait()
        return input_grad

    def _multiply(self, out: Tensor, rows: Tensor) -> None:
        for index, (weight, columns) in enumerate(zip(self.weights, self._columns(out), strict=True)):
            if self.biases:
                torch.addmm(self.biases[index].value, rows, weight.value.t(), out=columns)
            else:
                torch.mm(rows, weight.value.t(), out=columns)

    def _multiply_back(self, out: Tensor, *grads: Tensor) -> None:
        torch.mm(grads[0], self.weights[0].value, out=out)
        for weight, grad in zip(self.weights[1:], grads[1:], strict=True):
            out.addmm_(grad, weight.value)

    def _columns(self, whole: Tensor) -> Sequence[Tensor]:
        """Each layer's columns of what lies side by side."""
        return whole.split(self.widths, 1) if len(self.widths) > 1 else (whole,)


class Row:
    """A layer whose input is cut: [all tokens, columns] → [tokens, hidden], summed over ranks, plus the residual.
    `source` as of `Column`."""

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None,
        parallel: TensorParallel,
        purpose: str,
        source: Repeatable | None = None,
    ) -> None:
        self.weight, self.bias, self.parallel, self.source = weight, bias, parallel, source
        self.output_purpose, self.gradient_purpose = f"{purpose} output", f"{purpose} output gradient"

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        kept.items.append(None if self.source else inputs)
        parallel, residual = self.parallel, kept.residual
        # Where all ranks hold the same residual, the first one's matrix product adds it before the sum over ranks.
        adds = residual is not None and not parallel.cuts_tokens and parallel.comm.index == 0
        sources = (residual, inputs) if adds else (inputs,)
        partial = inputs.new_empty(inputs.shape[0], self.weight.value.shape[0])
        output, works = parallel.reduce_product(self._multiply, sources, partial, self.output_purpose)
        for work in works:
            work.wait()
        if residual is not None and parallel.cuts_tokens:
            output.add_(residual)
        return output if self.bias is None else output.add_(self.bias.value)

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        if self.bias is not None:
            self.bias.grad.add_(output_grad.sum(0))
        inputs = kept.items.pop()
        if self.source:
            inputs = self.source.again(kept.items[-1])
        input_grad = output_grad.new_empty(inputs.shape)
        full = self.parallel.gather_into_product(output_grad, self._multiply_back, input_grad, self.gradient_purpose)
        add_product(self.weight, full, inputs)
        return input_grad

    def _multiply(self, out: Tensor, *rows: Tensor) -> None:
        (torch.addmm if len(rows) > 1 else torch.mm)(*rows, self.weight.value.t(), out=out)

    def _multiply_back(self, out: Tensor, rows: Tensor) -> None:
        torch.mm(rows, self.weight.value, out=out)


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
