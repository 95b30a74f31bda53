"""How messages are cut into fragments, and in which order terms are added."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.trainer.shared_memory import reduce_in_order
from phalanx.trainer.streams import fragments


@given(
    lengths=st.lists(st.integers(0, 300), max_size=6).map(tuple),
    capacity=st.integers(1, 12).map(lambda lines: 16 * lines),
    align=st.sampled_from([1, 8, 16]),
)
def test_fragments_hold_every_element_once_and_nothing_overlaps(
    lengths: tuple[int, ...], capacity: int, align: int
) -> None:
    seen: list[list[int]] = [[] for _ in lengths]
    cut = fragments(lengths, capacity, align)
    for used, pieces in cut:
        assert used <= capacity
        end = 0
        for number, start, stop, at in pieces:
            assert at % align == 0
            assert end <= at < at + stop - start <= used
            end = at + stop - start
            seen[number] += range(start, stop)
    assert seen == [list(range(length)) for length in lengths]
    assert len(cut) == 1 or all(pieces for _, pieces in cut)


def test_small_tensors_share_a_fragment() -> None:
    assert len(fragments((10,) * 20, 1024, 16)) == 1
    assert fragments((), 1024, 16) == ((0, ()),)


def test_sums_run_in_rank_order() -> None:
    terms = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    out = torch.empty(1)
    reduce_in_order(terms, "sum", out)
    assert out.item() == 1.0  # (1e8 + 1) loses the 1, then 0 + 1; another order gives 0 or 2
    reduce_in_order(terms, "max", out)
    assert out.item() == 1e8


@pytest.mark.parametrize("own", range(3))
def test_a_sum_may_replace_any_of_its_terms(own: int) -> None:
    terms = [torch.tensor([1.0, 10.0]) * 3**member for member in range(3)]
    reduce_in_order(terms, "sum", terms[own])
    assert terms[own].tolist() == [13, 130]


def test_short_floats_are_rounded_once() -> None:
    terms = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_in_order(terms, "sum", out)
    assert out.item() == 258  # added in bfloat16, both ones would be lost
