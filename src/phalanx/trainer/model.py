"""A plain transformer stage: embedding, layers, head. It knows local sizes and the layers it was given, not ranks.

Activations are matrices [tokens, hidden]; tokens run over (sequence, position) of one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from phalanx.plan.layout import Recompute
from phalanx.plan.shards import Leaf, Piece
from phalanx.spec.model import ModelSpec
from phalanx.trainer import dropout, kernels
from phalanx.trainer.attention import Attention, rotation_table
from phalanx.trainer.flat import FlatBuffer, Weight
from phalanx.trainer.loss import Objective, cross_entropy, head_loss
from phalanx.trainer.micro_batch import MicroBatch, held_places, held_positions
from phalanx.trainer.recompute import checkpointed
from phalanx.trainer.segments import EAGER, Segments
from phalanx.trainer.tensor_parallel import Again, TensorParallel


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


class Norm:
    """The norm that the model asks for, over a buffer's leaves `name` and `name_bias`."""

    def __init__(self, buffer: FlatBuffer, name: str, model: ModelSpec) -> None:
        self.weight, self.bias = buffer.weights[name], buffer.weights.get(f"{name}_bias")
        self.eps, self.segments = model.norm_eps, EAGER

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalize [tokens, hidden]."""
        if self.bias is None:
            return kernels.rms_norm(inputs, self.weight, self.eps, self.segments)
        return kernels.layer_norm(inputs, self.weight, self.bias, self.eps)


def _join_heads(attended: Tensor) -> Tensor:
    """[sequences, heads, positions, width] → [tokens, heads × width]."""
    return attended.transpose(1, 2).reshape(-1, attended.shape[1] * attended.shape[3])


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
    ) -> None:
        self.buffer, self.index, self.model, self.parallel = buffer, index, model, parallel
        self.recomputes, self.segments = recomputes, EAGER
        self.reads = self.reads_in_backward = (buffer,)
        self.backward_within_forward = False
        weights = buffer.weights
        qkv = [name for name in ("qkv", "kv") if name in weights]
        self.qkv, self.qkv_bias = _leaves(weights, qkv)
        self.up, self.up_bias = _leaves(weights, ["up"])
        self.out, self.out_bias = weights["out"], weights.get("out_bias")
        self.down, self.down_bias = weights["down"], weights.get("down_bias")
        self.norm1, self.norm2 = Norm(buffer, "norm1", model), Norm(buffer, "norm2", model)
        q, k = _piece(buffer, "q_proj.weight"), _piece(buffer, "k_proj.weight")
        heads = range(*(row // model.head_dim for row in (q.rectangle.start[0], q.rectangle.stop[0])))
        num_kv_heads = k.shape[0] // model.head_dim
        self.attention = Attention(model, heads, num_kv_heads, rotation)
        self.head_norms = ((weights["q_norm"], len(heads)), (weights["k_norm"], num_kv_heads)) if model.qk_norm else ()
        self.dropout = Dropout(model, parallel) if model.dropout else None

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Forward of one block."""
        assert inputs is not None
        self.buffer.check_parameters()
        normed = self.norm1(inputs)
        again = self._again(self.norm1, inputs)
        qkv = self.parallel.column(normed, self.qkv, self.qkv_bias, "attention", again)
        if self.head_norms:
            qkv = kernels.norm_heads(qkv, self.head_norms, self.model.head_dim, self.model.norm_eps)
        attended = self.attention(qkv, batch, self.index)
        joined, again = _join_heads(attended), self._again(_join_heads, attended)
        middle = self._close(joined, self.out, self.out_bias, inputs, batch, "attention", again)
        normed = self.norm2(middle)
        up = self.parallel.column(normed, self.up, self.up_bias, "mlp", self._again(self.norm2, middle))
        activated, again = self._activate(up), self._again(self._activate, up)
        return self._close(activated, self.down, self.down_bias, middle, batch, "mlp", again)

    def _again(self, make: Callable[[Tensor], Tensor], inputs: Tensor) -> Again | None:
        """How to make `make(inputs)` once more in backward, if that is asked for; `inputs` is kept anyway."""
        return functools.partial(make, inputs) if self.recomputes else None

    def use(self, segments: Segments) -> None:
        """From now on, compute what lies between matrix products as `segments` does."""
        self.segments = self.norm1.segments = self.norm2.segments = self.attention.segments = segments

    def _activate(self, up: Tensor) -> Tensor:
        if self.model.gated:
            return kernels.swiglu(up, self.segments)
        return F.gelu(up, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")

    def _close(
        self,
        inputs: Tensor,
        weight: Weight,
        bias: Weight | None,
        residual: Tensor,
        batch: MicroBatch,
        purpose: str,
        again: Again | None,
    ) -> Tensor:
        if self.dropout is None:
            return self.parallel.row(inputs, weight, bias, residual, purpose, again)
        output = self.parallel.row(inputs, weight, bias, None, purpose, again)
        return residual + self.dropout(output, batch, self.index, purpose)


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
    ) -> None:
        self.buffer, self.weight, self.parallel = buffer, source.weights[leaf.name], parallel
        self.objective, self.segments = objective, EAGER
        self.reads = (buffer,) if source is buffer else (buffer, source)
        self.reads_in_backward: tuple[FlatBuffer, ...] = ()
        self.backward_within_forward = True
        rectangle = leaf.pieces[0].rectangle
        self.vocabulary = range(rectangle.start[0], rectangle.stop[0])
        self.norm = Norm(buffer, "norm", model)

    def use(self, segments: Segments) -> None:
        """As `Layer.use`."""
        self.segments = self.norm.segments = segments

    def __call__(self, inputs: Tensor | None, batch: MicroBatch) -> Tensor:
        """Loss of `batch`."""
        assert inputs is not None
        for buffer in self.reads:
            buffer.check_parameters()
        if batch.validates:
            labels = batch.labels.flatten()
            return cross_entropy(self.norm(inputs), self.weight.value, labels, self.vocabulary, self.parallel)
        return head_loss(
            self.norm(inputs),
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

    def use(self, segments: Segments) -> None:
        """From now on, compute what lies between matrix products as `segments` does."""
        for block in self.blocks:
            if isinstance(block, (Layer, Head)):
                block.use(segments)


def _leaves(weights: dict[str, Weight], names: Sequence[str]) -> tuple[list[Weight], list[Weight] | None]:
    values = [weights[name] for name in names]
    return values, [weights[f"{name}_bias"] for name in names] if f"{names[0]}_bias" in weights else None


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
) -> Stage:
    """The stage whose blocks' parameters are `buffers`, in order. `tied_embedding`: the embedding's buffer where a tied
    head shares it on this rank. `recompute` holds for the layers with the numbers `recomputed_layers`."""
    blocks: list[Block] = []
    rotation: tuple[Tensor, Tensor] | None = None
    for buffer in buffers:
        if buffer.layout.name == "embedding":
            blocks.append(Embedding(buffer, model, parallel))
        elif buffer.layout.name == "head":
            source = buffer if "head" in buffer.weights else tied_embedding
            assert source is not None, "a tied head without its embedding"
            blocks.append(Head(buffer, source, _vocabulary_leaf(source), model, parallel, objective))
        else:
            if rotation is None:
                rotation = rotation_table(model, seq_len, buffer.parameters.dtype, buffer.parameters.device)
            index = int(buffer.layout.name.split(".")[1])
            drops = recompute == "selective" and index in recomputed_layers
            blocks.append(Layer(buffer, index, model, parallel, rotation, drops))
    return Stage(blocks, watcher, recomputed_layers if recompute == "full" else ())


def _vocabulary_leaf(buffer: FlatBuffer) -> Leaf:
    return next(leaf for leaf in buffer.layout.leaves if leaf.name in ("head", "tokens"))
