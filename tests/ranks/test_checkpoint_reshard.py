"""Any layout loads what any other wrote, bit for bit, over random layouts of up to 8 ranks."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_equal, engines, gather, pieces_of, read, scramble, write
from tiny import tiny_job, tiny_model, tiny_plan, toy_cluster

from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems

MODELS = {
    "llama": tiny_model("llama", num_layers=5, hidden=32, ffn=48, head_dim=8, vocab=50, qk_norm=True),
    "tied llama": tiny_model("llama", num_layers=5, hidden=32, ffn=48, head_dim=8, vocab=50, tied=True),
    "gpt2": tiny_model("gpt2", num_layers=5, hidden=32, ffn=64, head_dim=8, vocab=53),
}


def legal_layouts(model) -> list[Layout]:
    """Every layout of up to 8 ranks that this model allows, with chunks in several placements."""
    axes = itertools.product([1, 2, 4], [1, 2, 3], [1, 2, 3, 4, 8], [0, 1, 3], [False, True])
    found = [
        Layout(tensor=tensor, pipeline=pipeline, data=data, zero=zero, sequence_parallel=sequence)
        for tensor, pipeline, data, zero, sequence in axes
        if tensor * pipeline * data <= 8
    ]
    found += [replace(layout, zero_group=2) for layout in found if layout.zero and layout.data == 4]
    for schedule in ("interleaved-1f1b", "zb-v"):
        found += [
            replace(layout, schedule=schedule, virtual_stages=2)
            for layout in found
            if layout.pipeline == 2 and layout.schedule == "1f1b"
        ]
    found += [replace(layout, outermost="data") for layout in found if min(layout.pipeline, layout.data) > 1]
    job, cluster = tiny_job(global_batch=24), toy_cluster(8)
    return [layout for layout in found if not problems(model, job, cluster, layout)]


LAYOUTS = {name: legal_layouts(model) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_identity(name):
    model = MODELS[name]

    @settings(max_examples=8)
    @given(
        st.sampled_from(LAYOUTS[name]),
        st.sampled_from(LAYOUTS[name]),
        st.sampled_from(["fp32", "bf16", "fp64"]),
        st.integers(0, 100),
    )
    def check(a, b, precision, seed):
        plans = [tiny_plan(layout, model, global_batch=24, precision=precision) for layout in (a, b)]
        first, second, third = (pieces_of(engines(plan)) for plan in (*plans, plans[0]))
        scramble(first, seed)
        truth = gather(first)
        with tempfile.TemporaryDirectory() as folder:
            read(write(Path(folder) / "a", plans[0], first), second)
            assert_equal(gather(second), truth)
            assert_equal(gather(second, owned=False), truth, partly=True)
            read(write(Path(folder) / "b", plans[1], second), third)
        assert_equal(gather(third), truth)

    check()


def num_owned(layout: Layout) -> list[int]:
    """Elements of the state that each rank writes."""
    plan = tiny_plan(layout, MODELS["llama"], global_batch=24)
    return [sum(piece.tensor.numel() for piece in pieces if piece.owned) for pieces in pieces_of(engines(plan))]


def test_what_tensor_ranks_hold_copies_of_is_written_once():
    """Norms, those of heads, and two kv heads on four ranks."""
    assert sum(num_owned(Layout(tensor=4, data=2, zero=1))) == 3 * MODELS["llama"].num_parameters


@pytest.mark.parametrize(
    "layout", [Layout(data=4), Layout(data=8, zero=1, zero_group=2), Layout(data=4, zero=3)], ids=str
)
def test_ranks_that_hold_the_same_share_the_writing(layout):
    """Each rank writes its share of every element, once, up to the padding of parts."""
    owned = num_owned(layout)
    assert sum(owned) == 3 * MODELS["llama"].num_parameters
    assert max(owned) <= 1.1 * sum(owned) / layout.num_ranks
