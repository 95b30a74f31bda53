"""Stages: every layer exactly once, and the slowest stage as fast as any split makes it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from phalanx.plan.layout import Layout
from phalanx.plan.stages import head_cost, layer_cost, recomputed_layers, split, stage_costs

TINY = tiny_model()


def counts(num_layers, num_stages, vocab=250, **sizes):
    model = replace(TINY, num_layers=num_layers, vocab=vocab, **sizes)
    return tuple(len(stage.layers) for stage in split(model, 64, num_stages))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(10, 3, (3, 4, 3)), (30, 4, (7, 8, 8, 7)), (5, 4, (1, 1, 2, 1)), (4, 4, (1, 1, 1, 1)), (7, 1, (7,))],
)
def test_layers_that_do_not_divide(num_layers, num_stages, expected):
    """Case 31: where others train 28 of 30 layers."""
    assert counts(num_layers, num_stages) == expected


def test_a_large_vocabulary_moves_layers_off_the_last_stage():
    assert counts(12, 4, vocab=1_000) == (3, 3, 4, 2)
    assert counts(12, 4, vocab=20_000)[-1] == 0


def test_an_empty_last_stage_only_where_the_head_outweighs_a_layer():
    equal = replace(TINY, vocab=1, hidden=2, num_heads=1, num_kv_heads=1, head_dim=1, ffn=1, num_layers=4)
    assert head_cost(equal) <= layer_cost(equal, 64)
    assert len(split(equal, 64, 4)[-1].layers) == 1


def test_an_embedding_costs_its_copies():
    """A row is copied per token, and a position added where it is learned; the head multiplies each row and reads its
    logit five times."""
    for positions, copies in (("rope", 1), ("learned", 2)):
        model = replace(TINY, positions=positions, num_layers=2)
        stages = split(model, 64, 2, stage_layers=(0, 2))
        layers = 2 * layer_cost(model, 64)
        assert stage_costs(model, 64, stages) == (copies * 64, layers + (2 * 64 + 5) * model.vocab)


def test_the_users_split_is_kept_even_with_empty_stages():
    """Case 28: a stage with only the embedding or only the head."""
    stages = split(TINY, 64, 4, stage_layers=(0, 3, 1, 0))
    assert [(stage.embedding, list(stage.layers), stage.head) for stage in stages] == [
        (True, [], False),
        (False, [0, 1, 2], False),
        (False, [3], False),
        (False, [], True),
    ]
    assert [str(stage) for stage in stages] == [
        "stage 0: embedding",
        "stage 1: layers 0-2",
        "stage 2: layers 3-3",
        "stage 3: head",
    ]


SPLITS = st.integers(1, 4).flatmap(lambda num_stages: st.tuples(st.just(num_stages), st.integers(num_stages, 9)))


@given(
    sizes=SPLITS,
    vocab=st.integers(1, 20_000),
    seq_len=st.integers(1, 4096),
    positions=st.sampled_from(["learned", "rope"]),
)
def test_no_other_split_has_a_faster_slowest_stage(sizes, vocab, seq_len, positions):
    num_stages, num_layers = sizes
    model = replace(TINY, num_layers=num_layers, vocab=vocab, positions=positions)
    stages = split(model, seq_len, num_stages)
    every = itertools.product(range(num_layers + 1), repeat=num_stages)
    slowest = [
        max(stage_costs(model, seq_len, split(model, seq_len, num_stages, counts)))
        for counts in every
        if sum(counts) == num_layers
    ]
    assert max(stage_costs(model, seq_len, stages)) == min(slowest)


@given(num_stages=st.integers(1, 64), extra=st.integers(0, 100), vocab=st.integers(1, 300_000))
def test_every_layer_exactly_once_in_order(num_stages, extra, vocab):
    model = replace(TINY, num_layers=num_stages + extra, vocab=vocab)
    stages = split(model, 64, num_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(range(model.num_layers))
    assert [stage.index for stage in stages if stage.embedding] == [0]
    assert [stage.index for stage in stages if stage.head] == [num_stages - 1]
    assert all(stage.layers for stage in stages[:-1])
    assert stages[-1].layers or head_cost(model) > layer_cost(model, 64)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [[], [], []]),
        ({"recompute": "full"}, [[0, 1], [2, 3, 4], [5, 6]]),
        ({"recompute": "selective", "recompute_every": 2}, [[0], [2, 4], [6]]),
        ({"recompute": "full", "recompute_every": 5}, [[0], [], [5]]),
        ({"recompute": "full", "recompute_layers": (1, 9, 0)}, [[0], [2, 3, 4], []]),
    ],
)
def test_which_layers_are_recomputed(chosen, expected):
    layout = Layout(pipeline=3, stage_layers=(2, 3, 2), **chosen)
    stages = split(replace(TINY, num_layers=7), 64, 3, layout.stage_layers)
    assert [list(recomputed_layers(layout, stage)) for stage in stages] == expected
