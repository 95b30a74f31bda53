"""Shards, layouts and groups: every element of every parameter has its place, and exactly one owner."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import STYLES, tiny_model

from phalanx.plan.groups import data_groups, groups, kv_copies
from phalanx.plan.layout import AXES, Coord, Layout
from phalanx.plan.shards import ALIGNMENT, Piece, padded_vocab, rank_buffers
from phalanx.spec.model import ModelSpec

SEQ_LEN = 32


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A small model and a legal layout of it."""
    tensor = draw(st.sampled_from([1, 2, 3, 4, 6]))
    num_kv_heads = draw(st.sampled_from([kv for kv in (1, 2, 3, 6, 12) if tensor % kv == 0 or kv % tensor == 0]))
    model = tiny_model(
        draw(st.sampled_from(sorted(STYLES))),
        num_layers=draw(st.integers(1, 6)),
        hidden=12,
        num_heads=12,
        num_kv_heads=num_kv_heads,
        head_dim=2,
        ffn=tensor * draw(st.integers(1, 9)),
        vocab=draw(st.integers(16 * tensor, 200)),
        max_seq_len=SEQ_LEN,
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    virtual_stages = draw(st.integers(1, 2))
    pipeline = draw(st.integers(1, 3))
    if pipeline * virtual_stages > model.num_layers:
        pipeline, virtual_stages = 1, 1
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=draw(st.integers(1, 4)),
        zero=draw(st.integers(0, 3)),
        virtual_stages=virtual_stages,
        schedule="interleaved-1f1b" if virtual_stages > 1 else "1f1b",
    )
    groups_of_two = layout.zero and layout.data == 4 and draw(st.booleans())
    return model, replace(layout, zero_group=2) if groups_of_two else layout


def cover(counts: dict[str, np.ndarray], piece: Piece, start: int, stop: int) -> int:
    """Count the elements that [start, stop) of a buffer holds of `piece`; returns how many."""
    total = 0
    for first, box in piece.rectangles(start, stop):
        assert start <= first and first + box.num_elements <= stop
        whole = counts.setdefault(piece.parameter.name, np.zeros(piece.parameter.shape, dtype=int))
        whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
        total += box.num_elements
    return total


@given(models_and_layouts())
def test_every_element_is_owned_once(case: tuple[ModelSpec, Layout]) -> None:
    """Over all ranks, with each part cut over the data axis, the counted shards tile the model exactly."""
    model, layout = case
    counts: dict[str, np.ndarray] = {}
    for coord in layout.coords():
        for buffer in rank_buffers(model, layout, coord, SEQ_LEN):
            for part in buffer.parts:
                start, stop = part.shard(coord.data, layout.data)
                assert (stop - start) % ALIGNMENT == 0
                for piece in buffer.pieces:
                    assert len(list(piece.rectangles(start, stop))) <= 3
                    if part.counted:
                        cover(counts, piece, start, stop)
    assert all((count == 1).all() for count in counts.values())
    assert sum(count.size for count in counts.values()) == model.num_parameters


@given(models_and_layouts())
def test_copies_hold_the_same_and_nothing_else_does(case: tuple[ModelSpec, Layout]) -> None:
    """Every element is held as often as its copies say: over all tensor ranks, by kv copies, on both tied stages."""
    model, layout = case
    held: dict[str, np.ndarray] = {}
    for coord in layout.coords():
        if coord.data == 0:
            for buffer in rank_buffers(model, layout, coord, SEQ_LEN):
                for piece in buffer.pieces:
                    cover(held, piece, 0, buffer.num_elements)
    for name, count in held.items():
        expected = 1
        if any(word in name for word in ("norm", "embed_positions", "o_proj.bias", "down_proj.bias")):
            expected = layout.tensor
        elif "k_proj" in name or "v_proj" in name:
            expected = kv_copies(model, layout.tensor)
        elif "embed_tokens" in name and model.tied and layout.pipeline > 1:
            expected = 2
        assert (count == expected).all(), name


@given(models_and_layouts())
def test_parts_tell_decayed_from_undecayed(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    for buffer in rank_buffers(model, layout, Coord(), SEQ_LEN):
        end = 0
        for part in buffer.parts:
            assert part.start == end
            end = part.stop
            inside = [piece for piece in buffer.pieces if part.start <= piece.offset < part.stop]
            assert inside
            assert {piece.parameter.decayed for piece in inside} == {part.decayed}
            assert sum(piece.num_elements for piece in inside) <= part.stop - part.start


@given(st.data())
def test_a_flat_range_is_at_most_three_rectangles(data: st.DataObject) -> None:
    model = tiny_model(hidden=12, num_heads=2, head_dim=6)
    buffer = rank_buffers(model, Layout(), Coord(), SEQ_LEN)[1]
    start = data.draw(st.integers(0, buffer.num_elements))
    stop = data.draw(st.integers(start, buffer.num_elements))
    for piece in buffer.pieces:
        boxes = list(piece.rectangles(start, stop))
        inside = max(0, min(stop, piece.offset + piece.num_elements) - max(start, piece.offset))
        assert sum(box.num_elements for _, box in boxes) == inside
        assert len(boxes) <= 3


@pytest.mark.parametrize(
    ("vocab", "tensor", "rows"), [(250, 1, 256), (250, 4, 256), (50257, 8, 50304), (32000, 8, 32000)]
)
def test_vocabulary_is_padded_to_divide(vocab: int, tensor: int, rows: int) -> None:
    assert padded_vocab(tiny_model(vocab=vocab), tensor) == rows


@given(st.tuples(*[st.integers(1, 4)] * 4))
def test_ranks_and_coordinates_are_inverse(sizes: tuple[int, ...]) -> None:
    layout = Layout(**dict(zip(AXES, sizes, strict=True)))
    assert [layout.rank(coord) for coord in layout.coords()] == list(range(math.prod(sizes)))
    assert list(layout.coords()) == [layout.coord(rank) for rank in range(layout.num_ranks)]


def test_neighbouring_ranks_share_the_tensor_axis() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    named = {
        name: [group.ranks for group in groups(tiny_model(tied=True), layout) if group.name == name]
        for name in ("world", "tensor", "data", "pipeline", "tied")
    }
    assert named == {
        "world": [(0, 1, 2, 3, 4, 5, 6, 7)],
        "tensor": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "data": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "pipeline": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "tied": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }


def test_shards_lie_among_neighbours_and_replicas_across() -> None:
    layout = Layout(tensor=2, data=4, zero=1, zero_group=2)
    named = {
        name: [group.ranks for group in groups(tiny_model(), layout) if group.name == name]
        for name in ("shards", "replicas")
    }
    assert named == {"shards": [(0, 2), (4, 6), (1, 3), (5, 7)], "replicas": [(0, 4), (2, 6), (1, 5), (3, 7)]}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(data=4), ("shards", "data")),
        (Layout(data=4, zero=2), ("data", "replicas")),
        (Layout(data=4, zero=2, zero_group=4), ("data", "replicas")),
        (Layout(data=4, zero=2, zero_group=2), ("shards", "replicas")),
    ],
)
def test_only_a_part_of_the_data_axis_needs_groups_of_its_own(layout: Layout, names: tuple[str, str]) -> None:
    assert data_groups(layout) == names
    made = {group.name: group.size for group in groups(tiny_model(), layout)}
    sizes = [made.get(name, 1) for name in names]
    assert sizes == [layout.num_shards, layout.data // layout.num_shards]


@given(models_and_layouts())
def test_a_rank_is_in_one_group_per_name_at_most(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    seen = set()
    for group in groups(model, layout):
        assert group.size > 1
        for rank in group.ranks:
            assert (group.name, rank) not in seen
            seen.add((group.name, rank))
