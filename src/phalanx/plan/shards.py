"""Shards: which rank holds which slice of which parameter, down to the element of a flat buffer.

A stage consists of blocks (embedding, one per layer, head), and each block's parameters lie in one flat Buffer:

    Buffer   = Parts one after another; a Part holds values that are treated alike: decayed by the optimizer or not, and
               held once or in copies. Each Part is padded to a multiple of (data × ALIGNMENT) elements, so that it can
               be cut evenly over the data axis; padding stays zero.
    Part     = Leaves one after another. A Leaf is what one matrix product uses.
    Leaf     = named Pieces side by side (q, k, v; gate, up), along dim 0.
    Piece    = this rank's rectangle of one global, unpadded parameter.

Names are those of Hugging Face's Llama, for both styles; exports translate them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import LayoutError
from phalanx.plan.groups import head_copies_embedding, kv_copies
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.schedule import placement
from phalanx.plan.stages import Stage, split
from phalanx.spec.model import ModelSpec

ALIGNMENT = 32
"""Elements. 64 bytes in bf16, 128 in fp32: a shard never begins inside a cache line."""

VOCAB_MULTIPLE = 16
"""Each tensor rank's rows of the vocabulary are a multiple of this, which keeps matrix products aligned."""

Copies = Literal["none", "tensor", "heads", "kv", "tied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One global tensor, unpadded. It starts as `constant + std × normal`."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    constant: float = 0.0

    @property
    def decayed(self) -> bool:
        """Weight decay acts on matrices only, never on biases or norms."""
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A box of a global tensor: `start[i]` up to, not including, `stop[i]` on dim i."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Rectangle:
        """All of a tensor."""
        return cls(start=(0,) * len(shape), stop=shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """What the box is of the whole tensor: `tensor[box.index]`."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def within(self, held: Rectangle) -> tuple[slice, ...]:
        """What the box is of a tensor that has the values of `held` alone."""
        spans = zip(held.start, self.start, self.stop, strict=True)
        return tuple(slice(start - origin, stop - origin) for origin, start, stop in spans)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent on each dim."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """The common box, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Rectangle(start=start, stop=stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """This rank's rectangle of one parameter, row-major in a buffer from element `offset` on.

    `shape` is what the buffer holds; where the vocabulary is padded it has more rows than `rectangle`, all zero.
    """

    parameter: Parameter
    rectangle: Rectangle
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements in the buffer, padding rows included."""
        return math.prod(self.shape)

    def rectangles(self, start: int, stop: int) -> Iterator[tuple[int, Rectangle]]:
        """What the elements [start, stop) of the buffer hold of this piece: up to three (first element, rectangle).

        A flat range of a matrix is the end of one row, whole rows, and the beginning of another.
        """
        width = math.prod(self.shape[1:])
        real = self.offset + self.rectangle.num_elements
        start, stop = max(start, self.offset), min(stop, real)
        while start < stop:
            row, column = divmod(start - self.offset, width)
            if column or stop - start < width:
                rows, end = 1, min(width, column + stop - start)
            else:
                rows, end = (stop - start) // width, width
            yield start, self._box(row, rows, column, end)
            start += rows * (end - column)

    def _box(self, row: int, num_rows: int, column: int, end: int) -> Rectangle:
        first = self.rectangle.start[0] + row
        if len(self.shape) == 1:
            return Rectangle(start=(first,), stop=(first + num_rows,))
        left = self.rectangle.start[1]
        return Rectangle(start=(first, left + column), stop=(first + num_rows, left + end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What one operation uses: pieces side by side along dim 0; `shape` is local."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def offset(self) -> int:
        """First element in the buffer."""
        return self.pieces[0].offset

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape: rows of all pieces, columns of one."""
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Values of a buffer that are treated alike, elements [start, stop) with padding.

    `copies` says who holds the same values: nobody ("none"), all of the tensor axis ("tensor"; "heads" where each uses
    them for its own heads only), the ranks of the "kv" group, or the first stage ("tied"). `counted`: whether this
    rank's copy is the one that counts towards norms.
    """

    decayed: bool
    copies: Copies
    counted: bool
    start: int
    stop: int

    def shard(self, index: int, num_shards: int) -> tuple[int, int]:
        """Elements [start, stop) that the `index`-th of `num_shards` data ranks owns under ZeRO."""
        size = (self.stop - self.start) // num_shards
        return self.start + index * size, self.start + (index + 1) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """The parameters of one block on one rank: "embedding", "layers.7" or "head"."""

    name: str
    leaves: tuple[Leaf, ...]
    parts: tuple[Part, ...]

    @property
    def num_elements(self) -> int:
        """Elements, padding included."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of all leaves."""
        return tuple(piece for leaf in self.leaves for piece in leaf.pieces)


def padded_vocab(model: ModelSpec, tensor: int) -> int:
    """Rows of the embedding over all tensor ranks; those beyond `model.vocab` are zero and never take part."""
    multiple = VOCAB_MULTIPLE * tensor
    return -(-model.vocab // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A piece before it has its place in a buffer; `copies` decides its part."""

    leaf: str
    parameter: Parameter
    rectangle: Rectangle
    shape: tuple[int, ...]
    copies: Copies = "none"


class _Cutter:
    """Cuts global parameters for one tensor index. All methods return drafts."""

    def __init__(self, model: ModelSpec, layout: Layout, coord: Coord) -> None:
        self.model, self.size, self.index = model, layout.tensor, coord.tensor
        self.kv_copies = kv_copies(model, layout.tensor)

    def whole(self, leaf: str, parameter: Parameter, copies: Copies = "tensor") -> Draft:
        box = Rectangle.of(parameter.shape)
        return Draft(leaf=leaf, parameter=parameter, rectangle=box, shape=parameter.shape, copies=copies)

    def cut(self, leaf: str, parameter: Parameter, dim: int, *, copies: int = 1) -> Draft:
        """Cut evenly along `dim` over the tensor axis, `copies` neighbours sharing one slice."""
        size = parameter.shape[dim] * copies // self.size
        first = self.index // copies * size
        start, stop = [0] * len(parameter.shape), list(parameter.shape)
        start[dim], stop[dim] = first, first + size
        box = Rectangle(start=tuple(start), stop=tuple(stop))
        kind: Copies = "kv" if copies > 1 else "none"
        return Draft(leaf=leaf, parameter=parameter, rectangle=box, shape=box.shape, copies=kind)

    def vocabulary(self, leaf: str, name: str, *, copies: Copies = "none") -> Draft:
        model = self.model
        rows = padded_vocab(model, self.size) // self.size
        first = min(self.index * rows, model.vocab)
        box = Rectangle(start=(first, 0), stop=(min(first + rows, model.vocab), model.hidden))
        parameter = Parameter(name=name, shape=(model.vocab, model.hidden), std=model.init_std)
        return Draft(leaf=leaf, parameter=parameter, rectangle=box, shape=(rows, model.hidden), copies=copies)

    def norm(self, leaf: str, name: str) -> list[Draft]:
        shape = (self.model.hidden,)
        drafts = [self.whole(leaf, Parameter(name=f"{name}.weight", shape=shape, constant=1.0))]
        if self.model.norm == "layernorm":
            drafts.append(self.whole(f"{leaf}_bias", Parameter(name=f"{name}.bias", shape=shape)))
        return drafts

    def column(self, leaf: str, name: str, rows: int, *, bias: bool, copies: int = 1) -> list[Draft]:
        """A linear layer whose output is cut over the tensor axis."""
        weight = Parameter(name=f"{name}.weight", shape=(rows, self.model.hidden), std=self.model.init_std)
        drafts = [self.cut(leaf, weight, 0, copies=copies)]
        if bias:
            drafts.append(self.cut(f"{leaf}_bias", Parameter(name=f"{name}.bias", shape=(rows,)), 0, copies=copies))
        return drafts

    def row(self, leaf: str, name: str, columns: int) -> list[Draft]:
        """A linear layer whose input is cut over the tensor axis and whose output is summed. Its std shrinks with
        depth, so that the residual stream keeps its scale (GPT-2 paper, 2.3)."""
        std = self.model.init_std / math.sqrt(2 * self.model.num_layers)
        weight = Parameter(name=f"{name}.weight", shape=(self.model.hidden, columns), std=std)
        drafts = [self.cut(leaf, weight, 1)]
        if self.model.bias:
            drafts.append(self.whole(f"{leaf}_bias", Parameter(name=f"{name}.bias", shape=(self.model.hidden,))))
        return drafts

    def layer(self, index: int) -> list[Draft]:
        model, at = self.model, f"model.layers.{index}"
        if model.num_experts:
            raise LayoutError(f"{model.name} has experts: such models can be planned, not yet trained")
        kv_leaf = "qkv" if self.kv_copies == 1 else "kv"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        drafts = self.column("qkv", f"{attention}.q_proj", model.q_rows, bias=model.qkv_bias)
        for which in ("k_proj", "v_proj"):
            name = f"{attention}.{which}"
            drafts += self.column(kv_leaf, name, model.kv_rows, bias=model.qkv_bias, copies=self.kv_copies)
        for which in ("q_norm", "k_norm") if model.qk_norm else ():
            scale = Parameter(name=f"{attention}.{which}.weight", shape=(model.head_dim,), constant=1.0)
            drafts.append(self.whole(which, scale, copies="heads"))
        drafts += self.row("out", f"{attention}.o_proj", model.q_rows)
        for which in ("gate_proj", "up_proj") if model.gated else ("up_proj",):
            drafts += self.column("up", f"{mlp}.{which}", model.ffn, bias=model.bias)
        drafts += self.row("down", f"{mlp}.down_proj", model.ffn)
        drafts += self.norm("norm1", f"{at}.input_layernorm")
        return drafts + self.norm("norm2", f"{at}.post_attention_layernorm")

    def embedding(self) -> list[Draft]:
        model = self.model
        drafts = [self.vocabulary("tokens", "model.embed_tokens.weight")]
        if model.positions == "learned":
            shape = (model.max_seq_len, model.hidden)
            positions = Parameter(name="model.embed_positions.weight", shape=shape, std=model.init_std)
            drafts.append(self.whole("positions", positions))
        return drafts

    def head(self, *, copy: bool) -> list[Draft]:
        drafts = self.norm("norm", "model.norm")
        if copy:
            drafts.append(self.vocabulary("head", "model.embed_tokens.weight", copies="tied"))
        elif not self.model.tied:
            drafts.append(self.vocabulary("head", "lm_head.weight"))
        return drafts


def place(
    name: str,
    drafts: Sequence[Draft],
    layout: Layout,
    coord: Coord,
    num_kv_copies: int = 1,
    *,
    counts_tied: bool = False,
) -> Buffer:
    """Lay drafts into one buffer: sorted into parts (decayed first, cut before copied), leaves kept together.

    `counts_tied`: whether the copies here of what is tied are those that count."""
    counted = {
        "none": True,
        "tensor": coord.tensor == 0,
        "heads": coord.tensor == 0,
        "kv": coord.tensor % num_kv_copies == 0,
        "tied": counts_tied,
    }
    order = list(counted)
    by_part: dict[tuple[bool, Copies], list[Draft]] = {}
    for draft in drafts:
        by_part.setdefault((draft.parameter.decayed, draft.copies), []).append(draft)
    leaves, parts, offset = [], [], 0
    for (decayed, copies), members in sorted(
        by_part.items(), key=lambda item: (not item[0][0], order.index(item[0][1]))
    ):
        start = offset
        by_leaf: dict[str, list[Piece]] = {}
        for leaf in dict.fromkeys(draft.leaf for draft in members):
            for draft in members:
                if draft.leaf == leaf:
                    piece = Piece(
                        parameter=draft.parameter, rectangle=draft.rectangle, shape=draft.shape, offset=offset
                    )
                    by_leaf.setdefault(leaf, []).append(piece)
                    offset += piece.num_elements
        leaves += [Leaf(name=leaf, pieces=tuple(pieces)) for leaf, pieces in by_leaf.items()]
        multiple = layout.data * ALIGNMENT
        offset = start + -(-(offset - start) // multiple) * multiple
        parts.append(Part(decayed=decayed, copies=copies, counted=counted[copies], start=start, stop=offset))
    return Buffer(name=name, leaves=tuple(leaves), parts=tuple(parts))


def stage_buffers(model: ModelSpec, layout: Layout, coord: Coord, stage: Stage) -> tuple[Buffer, ...]:
    """The buffers of one stage on the rank at `coord`, in the order in which forward uses them.

    A tied head that lives on the same pipeline rank as the embedding has no weight of its own in the head's buffer.
    """
    cutter = _Cutter(model, layout, coord)
    blocks: list[tuple[str, list[Draft]]] = []
    if stage.embedding:
        blocks.append(("embedding", cutter.embedding()))
    blocks += [(f"layers.{index}", cutter.layer(index)) for index in stage.layers]
    if stage.head:
        blocks.append(("head", cutter.head(copy=head_copies_embedding(model, layout))))
    return tuple(place(name, drafts, layout, coord, cutter.kv_copies) for name, drafts in blocks)


def rank_stages(model: ModelSpec, layout: Layout, coord: Coord, seq_len: int) -> tuple[Stage, ...]:
    """The stages that the rank at `coord` holds, in order of its chunks (virtual stages)."""
    stages = split(model, seq_len, layout.num_stages, layout.stage_layers, layout.tensor)
    places = placement(layout.schedule, layout.pipeline, layout.virtual_stages)
    mine = [
        (chunk, stage) for (pipeline, chunk), stage in zip(places, stages, strict=True) if pipeline == coord.pipeline
    ]
    return tuple(stage for _, stage in sorted(mine, key=lambda item: item[0]))


def rank_buffers(model: ModelSpec, layout: Layout, coord: Coord, seq_len: int) -> tuple[Buffer, ...]:
    """All buffers on the rank at `coord`, over all its chunks."""
    stages = rank_stages(model, layout, coord, seq_len)
    return tuple(buffer for stage in stages for buffer in stage_buffers(model, layout, coord, stage))
