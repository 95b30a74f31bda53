"""A plain transformer stage: embedding, layers, head. It knows local sizes and the layers it was given, not ranks.

Activations are matrices [tokens, hidden]; tokens run over (sequence, position) of one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from phalanx.plan.layout import Recompute
from phalanx.plan.shards import Leaf, Piece
from phalanx.spec.model import ModelSpec
from phalanx.trainer import dropout, kernels
from phalanx.trainer.attention import Attention, rotation_table
from phalanx.trainer.chain import Link, Repeatable, chain
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.loss import Objective, cross_entropy, head_loss
from phalanx.trainer.micro_batch import MicroBatch, held_places, held_positions
from phalanx.trainer.recompute import checkpointed
from phalanx.trainer.segments import EAGER, Segments
from phalanx.trainer.tensor_parallel import Column, Row, TensorParallel


class Block(Protocol):
    """One link of a stage: takes activations (the first one: None) and returns activations (the last one: the loss).

    `reads` are the buffers that forward needs whole, `reads_in_backward` those that backward does.
    `backward_within_forward`: forward already computes gradients, backward only hands them on.
    """

    buffer: FlatBuffer
    reads: tuple[FlatBuffer, ...]
    reads_in_backward: tuple[FlatBuffer, ...]
    backward_within_forward: bool

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Forward."""


class Watcher(Protocol):
    """Is told what a stage is about to run and has run; data parallelism lives on it."""

    def before_forward(self, block: Block, following: Block | None) -> None:
        """`block` runs next, then `following` (None: unknown)."""

    def after_forward(self, block: Block) -> None:
        """`block` has run."""

    def before_backward(self, block: Block, following: Block | None) -> None:
        """The backward of `block` runs next, then that of `following` (None: unknown)."""

    def after_backward(self, block: Block, *, last: bool) -> None:
        """The backward of `block` has run; with `last`, nothing will be added to its gradients in this step."""

    def before_validation(self, block: Block, following: Block | None) -> None:
        """`block` runs next, without a backward, then `following` (None: unknown)."""

    def after_validation(self, block: Block) -> None:
        """`block` has run, and nothing of it is needed any more."""


class Dropout:
    """Dropout between half-blocks, on [tokens, hidden] of which this rank may hold a slice."""

    def __init__(self, model: ModelSpec, parallel: TensorParallel) -> None:
        self.probability, self.hidden, self.parallel = model.dropout, model.hidden, parallel

    def __call__(self, inputs: Tensor, batch: MicroBatch, layer: int, site: str) -> Tensor:
        """Drop at `site` of `layer`; in validation nothing."""
        if batch.validates:
            return inputs
        sequences, rows = held_places(batch, self.parallel)
        key = dropout.site_key(batch.seed, batch.step, layer, site)
        columns = torch.arange(self.hidden, device=inputs.device)
        keep = dropout.keep_mask(key, self.probability, sequences.unsqueeze(1), rows.unsqueeze(1), columns)
        return dropout.apply(inputs, keep, self.probability)


class Embedding:
    """Token embedding, and learned positions where the model has them. Its input is the micro-batch itself."""

    def __init__(self, buffer: FlatBuffer, model: ModelSpec, parallel: TensorParallel) -> None:
        self.buffer, self.parallel = buffer, parallel
        self.reads, self.reads_in_backward, self.backward_within_forward = (buffer,), (), False
        self.tokens, self.positions = buffer.weights["tokens"], buffer.weights.get("positions")
        self.first_row = parallel.comm.index * self.tokens.value.shape[0]
        self.dropout = Dropout(model, parallel) if model.dropout else None

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Look up the tokens of `batch`."""
        assert inputs is None, "the embedding stands first"
        self.buffer.check_parameters()
        anchor = torch.zeros((), device=batch.tokens.device, requires_grad=True)
        output = self.parallel.embed(batch.tokens.flatten(), self.tokens, self.first_row, anchor)
        if self.positions is not None:
            output = kernels.add_positions(output, self.positions, held_positions(batch, self.parallel))
        return self.dropout(output, batch, -1, "embedding") if self.dropout else output


def norm_of(buffer: FlatBuffer, name: str, model: ModelSpec, segments: Segments = EAGER) -> kernels.Norm:
    """The norm that the model asks for, over a buffer's leaves `name` and `name_bias`."""
    weight, bias = buffer.weights[name], buffer.weights.get(f"{name}_bias")
    if bias is None:
        return kernels.RMSNorm(weight, model.norm_eps, segments)
    return kernels.LayerNorm(weight, bias, model.norm_eps)


class Layer:
    """One transformer block: attention and feed-forward, each behind a norm and added to the residual stream.

    With `recomputes`, what is cheap to make again from tensors that are kept anyway is not kept for backward: outputs
    of norms and of the activation, and attention's output in its second shape, where that is a copy. (Turning queries
    and keys again would save nothing: only the turned ones are kept.)
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        index: int,
        model: ModelSpec,
        parallel: TensorParallel,
        rotation: tuple[Tensor, Tensor] | None,
        recomputes: bool,
        segments: Segments = EAGER,
    ) -> None:
        self.buffer, self.index = buffer, index
        self.reads = self.reads_in_backward = (buffer,)
        self.backward_within_forward = False
        weights = buffer.weights

        def column(names: Sequence[str], purpose: str, before: Repeatable) -> Column:
            biases = [weights[f"{name}_bias"] for name in names] if f"{names[0]}_bias" in weights else None
            return Column([weights[name] for name in names], biases, parallel, purpose, before if recomputes else None)

        def row(name: str, purpose: str, before: Repeatable) -> Row:
            bias = weights.get(f"{name}_bias")
            return Row(weights[name], bias, parallel, purpose, before if recomputes else None)

        q, k = _piece(buffer, "q_proj.weight"), _piece(buffer, "k_proj.weight")
        heads = range(*(row // model.head_dim for row in (q.rectangle.start[0], q.rectangle.stop[0])))
        num_kv_heads = k.shape[0] // model.head_dim
        norm1, norm2 = (norm_of(buffer, name, model, segments) for name in ("norm1", "norm2"))
        join, activation = kernels.JoinHeads(keeps_input=recomputes), _activation(model, segments)
        qkv = [name for name in ("qkv", "kv") if name in weights]
        self.opening: list[Link] = [norm1, column(qkv, "attention", norm1)]
        if model.qk_norm:
            norms = ((weights["q_norm"], len(heads)), (weights["k_norm"], num_kv_heads))
            self.opening.append(kernels.NormHeads(norms, model.head_dim, model.norm_eps))
        self.attention = Attention(model, heads, num_kv_heads, rotation, segments)
        self.closing: list[Link] = [join, row("out", "attention", join)]
        self.mlp = [norm2, column(["up"], "mlp", norm2), activation, row("down", "mlp", activation)]
        self.dropout = Dropout(model, parallel) if model.dropout else None

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Forward of one block."""
        assert inputs is not None
        self.buffer.check_parameters()
        q, k, v = chain([*self.opening, self.attention.split(batch)], inputs)
        attended = self.attention(q, k, v, batch, self.index)
        middle = self._half(self.closing, attended, inputs, batch, "attention")
        return self._half(self.mlp, middle, middle, batch, "mlp")

    def _half(self, links: Sequence[Link], inputs: Tensor, residual: Tensor, batch: MicroBatch, site: str) -> Tensor:
        """The end of a half-block, added to the residual stream."""
        if self.dropout is None:
            return chain(links, inputs, residual)
        return residual + self.dropout(chain(links, inputs), batch, self.index, site)


def _activation(model: ModelSpec, segments: Segments) -> Repeatable:
    if model.gated:
        return kernels.SwiGLU(segments)
    return kernels.GELU("tanh" if model.activation == "gelu_tanh" else "none")


class Head:
    """Final norm, output head and loss. Returns this micro-batch's share of the global mean loss, a scalar.

    `source` is the buffer that holds the head's weight, under `leaf`: its own, or the embedding's.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        source: FlatBuffer,
        leaf: Leaf,
        model: ModelSpec,
        parallel: TensorParallel,
        objective: Objective,
        segments: Segments = EAGER,
    ) -> None:
        self.buffer, self.weight, self.parallel = buffer, source.weights[leaf.name], parallel
        self.objective, self.segments = objective, segments
        self.reads = (buffer,) if source is buffer else (buffer, source)
        self.reads_in_backward: tuple[FlatBuffer, ...] = ()
        self.backward_within_forward = True
        rectangle = leaf.pieces[0].rectangle
        self.vocabulary = range(rectangle.start[0], rectangle.stop[0])
        self.norm = norm_of(buffer, "norm", model, segments)

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Loss of `batch`."""
        assert inputs is not None
        for buffer in self.reads:
            buffer.check_parameters()
        normed = chain([self.norm], inputs)
        if batch.validates:
            labels = batch.labels.flatten()
            return cross_entropy(normed, self.weight.value, labels, self.vocabulary, self.parallel)
        return head_loss(
            normed,
            self.weight,
            batch.labels.flatten(),
            self.vocabulary,
            batch.num_supervised,
            self.objective,
            self.parallel,
            self.segments,
            batch.loss_scale,
        )


class Stage:
    """Blocks in order; what one pipeline coordinate runs of a micro-batch at a time.

    Of the layers numbered in `checkpointed_layers` only the input is kept: they run again in backward.
    """

    def __init__(self, blocks: Sequence[Block], watcher: Watcher, checkpointed_layers: Container[int] = ()) -> None:
        self.blocks, self.watcher, self.checkpointed_layers = tuple(blocks), watcher, checkpointed_layers

    def forward(self, inputs: Tensor | None, batch: MicroBatch, *, last: bool) -> Tensor | None:
        """Run all blocks. A stage without blocks hands its input on.

        The watcher hears of each block, forward and, during `backward`, as soon as the gradient of the block's input is
        known, for then its weights' gradients are complete. `last`: they are complete for this step.
        """
        activations = inputs
        for index, block in enumerate(self.blocks):
            if activations is not None:
                activations.register_hook(self._backward_passed(index, last))
            self.watcher.before_forward(block, self._block(index + 1))
            if isinstance(block, Layer) and block.index in self.checkpointed_layers:
                assert activations is not None
                activations = checkpointed(functools.partial(block, batch=batch), activations)
            else:
                activations = block(activations, batch)
            self.watcher.after_forward(block)
        return activations

    @torch.no_grad()
    def validate(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor | None:
        """Run all blocks, and keep nothing for a backward."""
        activations = inputs
        for index, block in enumerate(self.blocks):
            self.watcher.before_validation(block, self._block(index + 1))
            activations = block(activations, batch)
            self.watcher.after_validation(block)
        return activations

    def backward(self, output: GradientEdge, output_grad: Tensor | None, *, last: bool) -> None:
        """Run backward from what `forward` returned."""
        self.watcher.before_backward(self.blocks[-1], self._block(len(self.blocks) - 2))
        torch.autograd.backward(output, output_grad)
        if isinstance(self.blocks[0], Embedding):  # its input has no gradient that could announce its end
            self.watcher.after_backward(self.blocks[0], last=last)

    def _block(self, index: int) -> Block | None:
        return self.blocks[index] if 0 <= index < len(self.blocks) else None

    def _backward_passed(self, index: int, last: bool) -> Callable[[Tensor], None]:
        """A hook for the gradient of the input of block `index`: that block is done, the one before it is next."""

        def passed(gradient: Tensor) -> None:
            self.watcher.after_backward(self.blocks[index], last=last)
            if index:
                self.watcher.before_backward(self.blocks[index - 1], self._block(index - 2))

        return passed


def _piece(buffer: FlatBuffer, ending: str) -> Piece:
    return next(piece for piece in buffer.layout.pieces if piece.parameter.name.endswith(ending))


def build(
    buffers: Sequence[FlatBuffer],
    model: ModelSpec,
    seq_len: int,
    parallel: TensorParallel,
    tied_embedding: FlatBuffer | None,
    watcher: Watcher,
    recompute: Recompute,
    recomputed_layers: Container[int],
    objective: Objective,
    segments: Segments = EAGER,
) -> Stage:
    """The stage whose blocks' parameters are `buffers`, in order. `tied_embedding`: the embedding's buffer where a tied
    head shares it on this rank. `recompute` holds for the layers with the numbers `recomputed_layers`. What lies
    between matrix products is computed as `segments` does."""
    blocks: list[Block] = []
    rotation: tuple[Tensor, Tensor] | None = None
    for buffer in buffers:
        if buffer.layout.name == "embedding":
            blocks.append(Embedding(buffer, model, parallel))
        elif buffer.layout.name == "head":
            source = buffer if "head" in buffer.weights else tied_embedding
            assert source is not None, "a tied head without its embedding"
            blocks.append(Head(buffer, source, _vocabulary_leaf(source), model, parallel, objective, segments))
        else:
            if rotation is None:
                rotation = rotation_table(model, seq_len, buffer.parameters.dtype, buffer.parameters.device)
            index = int(buffer.layout.name.split(".")[1])
            drops = recompute == "selective" and index in recomputed_layers
            blocks.append(Layer(buffer, index, model, parallel, rotation, drops, segments))
    return Stage(blocks, watcher, recomputed_layers if recompute == "full" else ())


def _vocabulary_leaf(buffer: FlatBuffer) -> Leaf:
    return next(leaf for leaf in buffer.layout.leaves if leaf.name in ("head", "tokens"))
