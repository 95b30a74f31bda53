"""Operations: what a block computes, moves and keeps, from sizes alone.

Claims, held against what a recorder sees the real blocks do. The planner prices them; the trainer never reads them.
Every size may be an int (one layout) or a numpy array with one entry per layout: the list of operations is the same for
all layouts, only their sizes differ, so one function serves one layout and a hundred thousand.

Symbols: T tokens per rank and micro-batch, h hidden, q and g rows of the query and of the key projection
on this rank, f feed-forward width on this rank, V padded vocabulary on this rank, s sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from phalanx.plan.cut import Cut, Size
from phalanx.spec.model import ModelSpec

Kind = Literal["matmul", "attention", "elementwise", "stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel: `batch` products of [m, k] by [k, n], `count` times; or an element-wise pass over `bytes`; or, under
    kind "stream", a plain sum or copy of long contiguous buffers, which no engine does in several passes.

    Under kind "attention" m and n are query and key positions, k the head width, `batch` sequences × heads, `products`
    how many m × n × k products the kernel makes (2 forward, 5 backward under recomputation of scores).
    `again` marks what selective recompute repeats. `bytes` counts everything read and written once.
    """

    name: str
    kind: Kind
    bytes: Size
    m: Size = 0
    n: Size = 0
    k: Size = 0
    batch: Size = 1
    count: Size = 1
    products: int = 1
    again: bool = False

    @property
    def flops(self) -> Size:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.count * self.batch * self.products * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that lives from a block's forward to its backward. `again`: dropped by selective recompute,
    and made again."""

    name: str
    bytes: Size
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one block does: forward, the gradient of its input, the gradients of its weights; and what it keeps."""

    forward: tuple[Operation, ...]
    input_gradient: tuple[Operation, ...]
    weight_gradient: tuple[Operation, ...]
    kept: tuple[Kept, ...]

    @property
    def kept_bytes(self) -> Size:
        """All that is kept for backward when nothing is recomputed."""
        return sum(kept.bytes for kept in self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How an engine does it.

    `attention`: "flash" never stores scores, "math" does; without `fused_dropout`, "flash" stores them as well where
    attention has dropout, and each query head has keys and values of its own. `selective`: what is made again: the
    attention "core" (Korthikanti et al., section 5), or what is "cheap": norms, activation, inputs of linear layers.
    `keep_gathered`: share of linear layers that keep their gathered input under sequence parallelism, instead of
    gathering it again.
    `masks`: what is kept of a dropout mask: nothing, a "byte" per element, or its "factor" in compute precision.
    `whole_qkv`: whether queries are a view of one tensor with keys and values, which so stays whole beside a copy of
    those two, where each query head has its own; `activation_output`: whether a gated activation keeps its output
    beside the product, both made by kernels of their own. `fused_sum`: whether matrix products add weight gradients to
    their sum (of `gradient_bytes`) themselves, or a pass of its own does. `head_rows`: tokens whose logits exist at a
    time, gradients computed there and then; 0: all at once, gradients in backward. `pads_alone`: whether the
    vocabulary is padded where no tensor axis cuts it. `softmax_passes`: how often softmax with its mask and dropout
    passes over stored scores, relative to one fused kernel. `fused_loss`: whether one kernel each way makes the loss of
    logits, or each of its steps passes over them.
    """

    attention: Literal["flash", "math"] = "flash"
    fused_dropout: bool = True
    selective: Literal["core", "cheap"] = "core"
    keep_gathered: float = 0.0
    masks: Literal["none", "byte", "factor"] = "none"
    whole_qkv: bool = False
    activation_output: bool = False
    gradient_bytes: int = 4
    fused_sum: Literal["always", "same precision", "never"] = "always"
    head_rows: int = 0
    pads_alone: bool = True
    softmax_passes: float = 1.0
    fused_loss: bool = True


def linear(
    name: str,
    tokens: Size,
    inputs: Size,
    outputs: Size,
    cut: Cut,
    kernels: Kernels,
    *,
    count: Size = 1,
    batch: Size = 1,
    pieces: tuple[Size, Size] = (1, 1),
) -> Block:
    """A linear layer's three products: Y = X Wᵀ, dX = dY W, dW += dYᵀ X; all `count` times, for `batch` weights. The
    first two are cut into `pieces` by tokens."""
    e, weights, into = cut.element, batch * inputs * outputs, max(cut.element, kernels.gradient_bytes)

    def product(suffix: str, m: Size, n: Size, k: Size, result: int, pieces: Size = 1) -> Operation:
        m = m // pieces
        moved, times = batch * (m * n * result + (n * k + m * k) * e), count * pieces
        return Operation(name=f"{name}{suffix}", kind="matmul", m=m, n=n, k=k, batch=batch, bytes=moved, count=times)

    def cast(suffix: str, size: Size) -> Operation:  # written in 8 bits by the pass before, as is and transposed
        moved = 2 * batch * tokens * size
        return Operation(name=f"{name}{suffix} cast", kind="elementwise", bytes=moved, count=count)

    fused = kernels.fused_sum == "always" or (kernels.fused_sum == "same precision" and into == e)
    weight_gradient = [product(" weight gradient", outputs, inputs, tokens, 2 * into if fused else e)]
    if not fused:
        moved = weights * (e + 2 * into)
        weight_gradient.append(Operation(name=f"{name} sum", kind="stream", bytes=moved, count=count))
    forward = [product("", tokens, outputs, inputs, e, pieces[0])]
    input_gradient = [product(" input gradient", tokens, inputs, outputs, e, pieces[1])]
    if cut.eight_bit:
        forward.insert(0, cast("", inputs))
        input_gradient.insert(0, cast(" gradient", outputs))
    products = (tuple(forward), tuple(input_gradient), tuple(weight_gradient))
    return Block(forward=products[0], input_gradient=products[1], weight_gradient=products[2], kept=())


def elementwise(name: str, forward: Size, backward: Size, kept: Iterable[Kept] = (), *, again: bool = False) -> Block:
    """A pass over memory: bytes read and written forward, and for the gradient."""
    first = Operation(name=name, kind="elementwise", bytes=forward, again=again)
    second = Operation(name=f"{name} gradient", kind="elementwise", bytes=backward)
    return Block(forward=(first,), input_gradient=(second,), weight_gradient=(), kept=tuple(kept))


def attention(cut: Cut, kernels: Kernels, dropout: bool) -> Block:
    """The attention core, causal. Flash: 2 products forward, 5 backward, over half of the scores, nothing of their size
    stored (FlashAttention-2, arXiv 2307.08691). Math: full score matrices, each stored in compute precision."""
    batch, e = cut.micro_batch * cut.heads, cut.element
    moved = (2 * cut.q + 2 * cut.kv) * cut.tokens * e
    if not _writes_scores(kernels, dropout):
        common = {"m": cut.queries, "n": cut.keys / 2, "k": cut.head_dim, "batch": batch}
        first = Operation(name="attention", kind="attention", bytes=moved, products=2, **common)
        second = Operation(name="attention gradient", kind="attention", bytes=2 * moved, products=5, **common)
        kept = [Kept(name="log-sum-exp", bytes=cut.statistic * cut.tokens * cut.heads)]
        return Block(forward=(first,), input_gradient=(second,), weight_gradient=(), kept=tuple(kept))
    scores = batch * cut.queries * cut.keys
    wide = {"none": 1, "byte": 1, "factor": e}[kernels.masks]
    dropped, mask = (2 * e, wide * scores) if dropout else (0, 0)
    kept = [Kept(name="softmax", bytes=e * scores)]
    if dropout:
        kept += [Kept(name="dropped softmax", bytes=e * scores), Kept(name="softmax mask", bytes=mask)]
    if kernels.attention == "flash":  # written out in plain passes: scaled, then what comes later hidden
        dropped = dropped + 4 * e
        kept.append(Kept(name="later positions", bytes=cut.queries * cut.keys))
    blocks = (
        _product("scores", batch, cut.queries, cut.keys, cut.head_dim, e),
        elementwise(
            "softmax",
            ((2 * e + dropped) * scores + mask) * kernels.softmax_passes,
            ((3 * e + dropped) * scores + mask) * kernels.softmax_passes,
            kept,
        ),
        _product("values", batch, cut.queries, cut.head_dim, cut.keys, e),
    )
    return join(blocks)


def _writes_scores(kernels: Kernels, dropout: bool) -> bool:
    return kernels.attention == "math" or (dropout and not kernels.fused_dropout)


def repeated(block: Block) -> Block:
    """`block`, all of which selective recompute makes again."""
    forward = tuple(replace(operation, again=True) for operation in block.forward)
    return replace(block, forward=forward, kept=tuple(replace(kept, again=True) for kept in block.kept))


def _product(name: str, batch: Size, m: Size, n: Size, k: Size, element: int) -> Block:
    """A batched product of two activations: both have gradients, none is a weight."""
    moved = batch * (m * n + n * k + m * k) * element
    forward = Operation(name=name, kind="matmul", m=m, n=n, k=k, batch=batch, bytes=moved)
    left = Operation(name=f"{name} left gradient", kind="matmul", m=m, n=k, k=n, batch=batch, bytes=moved)
    right = Operation(name=f"{name} right gradient", kind="matmul", m=n, n=k, k=m, batch=batch, bytes=moved)
    return Block(forward=(forward,), input_gradient=(left, right), weight_gradient=(), kept=())


def join(blocks: Iterable[Block]) -> Block:
    """Blocks one after another, as one."""
    blocks = tuple(blocks)
    return Block(
        forward=tuple(operation for block in blocks for operation in block.forward),
        input_gradient=tuple(operation for block in reversed(blocks) for operation in block.input_gradient),
        weight_gradient=tuple(operation for block in reversed(blocks) for operation in block.weight_gradient),
        kept=tuple(kept for block in blocks for kept in block.kept),
    )


def norm(name: str, model: ModelSpec, cut: Cut, *, again: bool = False) -> Block:
    """Reads and writes h per row; backward reads input and gradient, adds to the residual's gradient. Keeps its input
    and one statistic per row (two under LayerNorm)."""
    wide = cut.rows * cut.hidden * cut.element
    statistics = ("mean", "scale") if model.norm == "layernorm" else ("scale",)
    kept = [Kept(name=f"{name} input", bytes=wide)]
    kept += [Kept(name=f"{name} {statistic}", bytes=cut.rows * cut.statistic) for statistic in statistics]
    return elementwise(name, 2 * wide, 4 * wide, kept, again=again)


def head_norms(cut: Cut) -> Block:
    """Norms over the width of each query and key head: a pass over q, k and v each way. Keeps them as they were before,
    and one statistic per head that is normed."""
    wide = cut.tokens * (cut.q + 2 * cut.kv) * cut.element
    kept = [
        Kept(name="q, k, v before norms", bytes=wide),
        Kept(name="query scales", bytes=cut.tokens * cut.heads * cut.statistic),
        Kept(name="key scales", bytes=cut.tokens * cut.kv_heads * cut.statistic),
    ]
    return elementwise("head norms", 2 * wide, 3 * wide, kept)


def residual(name: str, model: ModelSpec, cut: Cut, kernels: Kernels) -> Block:
    """Bias, dropout and addition to the residual stream in one pass."""
    wide = cut.rows * cut.hidden * cut.element
    if model.dropout == 0.0:
        return elementwise(name, 3 * wide, 0 * wide)
    mask = {"none": 0, "byte": 1, "factor": cut.element}[kernels.masks] * cut.rows * cut.hidden
    kept = [Kept(name=f"{name} mask", bytes=mask)] if kernels.masks != "none" else []
    return elementwise(name, 3 * wide + mask, 2 * wide + mask, kept)


def layer(model: ModelSpec, cut: Cut, kernels: Kernels) -> Block:
    """One transformer layer: norm, attention, residual, norm, feed-forward, residual."""
    e, cheap = cut.element, kernels.selective == "cheap"
    core = attention(cut, kernels, model.attention_dropout > 0)
    apart = kernels.attention == "flash" and _writes_scores(kernels, model.attention_dropout > 0)
    heads = dict.fromkeys("qkv", cut.tokens * cut.q) if apart else {"q, k, v": cut.tokens * (cut.q + 2 * cut.kv)}
    viewed = kernels.whole_qkv and model.num_kv_heads == model.num_heads
    linear_input = (cut.rows + (cut.tokens - cut.rows) * kernels.keep_gathered) * cut.hidden * e
    copied = np.where(cut.kv_copied, 1, 0) if np.ndim(cut.kv_copied) else int(cut.kv_copied)
    own_kv = 2 * cut.kv * (1 - copied)
    opens, closes = (cut.opening, cut.closing), (cut.closing, cut.opening)
    rotary = cut.tokens * (cut.q + cut.kv) * e if model.positions == "rope" else 0 * cut.tokens
    return join(
        (
            norm("norm1", model, cut, again=cheap),
            _keeps("qkv input", linear_input, again=cheap),
            linear("qkv", cut.tokens, cut.hidden, cut.q + own_kv, cut, kernels, pieces=opens),
            linear("kv", cut.tokens, cut.hidden, 2 * cut.kv, cut, kernels, count=copied, pieces=opens),
            head_norms(cut) if model.qk_norm else join(()),
            elementwise("rotary", 2 * rotary, 2 * rotary),
            *(_keeps(name, size * e) for name, size in heads.items()),
            *([_keeps("copies of k, v", 2 * cut.tokens * cut.kv * e)] if viewed else []),
            core if cheap else repeated(core),
            _keeps("attention output", cut.tokens * cut.q * e),
            linear("out", cut.tokens, cut.q, cut.hidden, cut, kernels, pieces=closes),
            residual("residual1", model, cut, kernels),
            norm("norm2", model, cut, again=cheap),
            feed_forward(model, cut, kernels, linear_input),
            residual("residual2", model, cut, kernels),
        )
    )


def feed_forward(model: ModelSpec, cut: Cut, kernels: Kernels, linear_input: Size) -> Block:
    """Up, activation, down; under experts with a router before them, and tokens put in order for their experts and back
    (a pass over them each way)."""
    e, up, cheap = cut.element, (2 if model.gated else 1) * cut.ffn, kernels.selective == "cheap"
    tokens, batch = (cut.expert_tokens, cut.experts) if model.num_experts else (cut.tokens, 1)
    every = tokens * batch
    kept = [
        Kept(name="up output", bytes=every * up * e),
        Kept(name="down input", bytes=every * cut.ffn * e, again=cheap),
    ]
    if model.gated and kernels.activation_output:
        kept.append(Kept(name="activation output", bytes=every * cut.ffn * e, again=cheap))
    act = elementwise("activation", every * (up + cut.ffn) * e, every * (2 * up + cut.ffn) * e, kept, again=cheap)
    products = (
        linear("up", tokens, cut.hidden, up, cut, kernels, batch=batch, pieces=(cut.opening, cut.closing)),
        act,
        linear("down", tokens, cut.ffn, cut.hidden, cut, kernels, batch=batch, pieces=(cut.closing, cut.opening)),
    )
    if not model.num_experts:
        return join((_keeps("up input", linear_input, again=cheap), *products))
    routed = cut.routed_tokens * cut.hidden * e
    return join(
        (
            linear("router", cut.tokens, cut.hidden, model.num_experts, cut, kernels),
            _keeps("router input", linear_input),
            elementwise("to experts", 2 * routed, 2 * routed, [Kept(name="up input", bytes=every * cut.hidden * e)]),
            *products,
            elementwise("from experts", 2 * routed, 2 * routed, [Kept(name="expert output", bytes=routed)]),
        )
    )


def _keeps(name: str, num_bytes: Size, *, again: bool = False) -> Block:
    kept = Kept(name=name, bytes=num_bytes, again=again)
    return Block(forward=(), input_gradient=(), weight_gradient=(), kept=(kept,))


def embedding(model: ModelSpec, cut: Cut, kernels: Kernels) -> Block:
    """Rows of the table for each token (and its position), with dropout; backward adds rows into the gradient. The
    tokens are the micro-batch's own."""
    wide = cut.tokens * cut.hidden * cut.element
    mask = {"none": 0, "byte": 1, "factor": cut.element}[kernels.masks] * cut.rows * cut.hidden
    kept = [Kept(name="embedding mask", bytes=mask)] if model.dropout and kernels.masks != "none" else []
    return elementwise("embedding", 2 * wide, 3 * wide, kept)


def cross_entropy(logits: Size, cut: Cut, kernels: Kernels) -> Block:
    """The loss of so many logits. One kernel reads them for maximum, exponential sum and gradient, in `statistic`
    precision, and writes the gradient back. Step by step (Megatron-LM's tensor_parallel/cross_entropy.py, nanotron's
    after it) logits are widened, then read for their maximum, less it, their exponentials, the sum of those and its
    quotients; the gradient is scaled and narrowed."""
    w = cut.statistic
    if kernels.fused_loss:
        return elementwise("loss", 2 * logits * w, 2 * logits * w)
    cast = cut.element + w
    first = Operation(name="loss", kind="stream", bytes=logits * (cast + 8 * w))
    second = Operation(name="loss gradient", kind="stream", bytes=logits * (cast + 2 * w))
    return Block(forward=(first,), input_gradient=(second,), weight_gradient=(), kept=())


def head(model: ModelSpec, cut: Cut, kernels: Kernels) -> Block:
    """Final norm, logits and loss. Chunked, forward computes all gradients but the norm's."""
    vocab = cut.vocab if kernels.pads_alone else np.where(cut.vocab >= model.vocab, model.vocab, cut.vocab)
    loss, wide = cross_entropy(cut.tokens * vocab, cut, kernels), replace(cut, eight_bit=False)
    first = norm("final norm", model, cut)
    if not kernels.head_rows:
        return join((first, linear("logits", cut.tokens, cut.hidden, vocab, wide, kernels), loss))
    full, rest = cut.tokens // kernels.head_rows, cut.tokens % kernels.head_rows
    short = np.maximum(1, rest) if np.ndim(rest) else max(1, rest)
    some = np.minimum(1, rest) if np.ndim(rest) else min(1, rest)
    chunks = join(
        (
            linear("logits", kernels.head_rows, cut.hidden, vocab, wide, kernels, count=full),
            linear("logits", short, cut.hidden, vocab, wide, kernels, count=some),
            loss,
        )
    )
    inside = Block(
        forward=chunks.forward + chunks.input_gradient + chunks.weight_gradient,
        input_gradient=(),
        weight_gradient=(),
        kept=(Kept(name="gradient of the head's input", bytes=cut.rows * cut.hidden * cut.element),),
    )
    return join((first, inside))
