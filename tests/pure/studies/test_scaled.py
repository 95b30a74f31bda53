"""Plans of any size become small ones that run, and go on cutting what they cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import tiny_model, tiny_plan, toy_cluster

from phalanx.plan.groups import kv_copies
from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.plan.plan import Plan
from phalanx.spec import clusters, models
from phalanx.spec.model import ModelSpec
from phalanx.studies.scaled import MAX_PARAMETERS, MAX_RANKS, MAX_TOKENS, scaled


def test_what_is_small_stays_as_it_is() -> None:
    plan = tiny_plan(Layout(tensor=2, pipeline=2, data=2, zero=1))
    assert scaled(plan) == (plan, ())


def test_one_micro_batch_becomes_two() -> None:
    small, changes = scaled(tiny_plan(Layout(pipeline=2, micro_batch=8)))
    assert changes == ("layout.micro_batch 8 → 4",)
    assert small.layout.num_micro_batches(small.job.global_batch) == 2
    small, changes = scaled(tiny_plan(Layout(data=8, micro_batch=1)))
    assert changes == ("job.global_batch 8 → 16",)


def test_a_large_run_says_all_that_changes() -> None:
    model = tiny_model(hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab=128256, num_layers=33)
    layout = Layout(tensor=8, pipeline=4, data=8, micro_batch=2, sequence_parallel=True, zero=1)
    plan = tiny_plan(layout, model, global_batch=512, seq_len=4096)
    small, changes = scaled(plan)
    assert small.layout == replace(layout, tensor=2, pipeline=2, data=2)
    assert small.model.num_parameters < MAX_PARAMETERS
    assert {change.split(" ")[0] for change in changes} == {
        *(f"model.{key}" for key in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab")),
        *("job.global_batch", "job.seq_len", "layout.tensor", "layout.pipeline", "layout.data"),
    }
    assert "job.seq_len 4,096 → 128" in changes
    assert small.model.num_layers % small.layout.num_stages == 1  # as 33 layers on 4 stages


def test_copies_of_kv_heads_stay_copies() -> None:
    model = tiny_model(hidden=2048, num_heads=32, num_kv_heads=2, ffn=8192)
    for layout in (Layout(tensor=8), Layout(tensor=4, data=8)):
        small, _ = scaled(tiny_plan(layout, model, global_batch=64))
        assert kv_copies(small.model, small.layout.tensor) > 1


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    num_layers = draw(st.integers(1, 70))
    model: ModelSpec = tiny_model(
        draw(st.sampled_from(["llama", "gpt2"])),
        num_layers=num_layers,
        hidden=draw(st.sampled_from([64, 512, 4096])),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(st.sampled_from([10, 16, 128])),
        ffn=draw(st.sampled_from([96, 1536, 11520])),
        vocab=draw(st.sampled_from([250, 50257])),
        max_seq_len=4096,
    )
    virtual_stages, schedule = draw(st.sampled_from([(1, "1f1b"), (1, "gpipe"), (2, "interleaved-1f1b"), (2, "zb-v")]))
    layout = Layout(
        tensor=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])),
        pipeline=draw(st.integers(1, 16)),
        data=draw(st.sampled_from([1, 2, 5, 64])),
        micro_batch=draw(st.integers(1, 4)),
        virtual_stages=virtual_stages,
        schedule=schedule,
        sequence_parallel=draw(st.booleans()),
    )
    global_batch = layout.micro_batch * layout.data * draw(st.integers(1, 9))
    return replace(
        tiny_plan(layout, model, global_batch=global_batch, seq_len=draw(st.sampled_from([48, 96, 4096]))),
        cluster=replace(toy_cluster(16), num_nodes=layout.num_ranks),
    )


@given(plans())
def test_every_legal_plan_becomes_a_small_legal_one(plan: Plan) -> None:
    assume(not problems(plan.model, plan.job, plan.cluster, plan.layout))
    small, changes = scaled(plan)
    assert not problems(small.model, small.job, small.cluster, small.layout), changes
    assert small.layout.num_ranks <= MAX_RANKS
    assert small.layout.num_micro_batches(small.job.global_batch) >= 2
    least = 2 * small.layout.data * small.job.seq_len
    assert small.job.tokens_per_step <= max(MAX_TOKENS, least)
    for axis in ("tensor", "pipeline", "data"):
        assert (getattr(small.layout, axis) > 1) == (getattr(plan.layout, axis) > 1)
    assert scaled(small)[0] == small


@pytest.mark.parametrize("name", ["gpt-3-175b", "llama-3-70b", "qwen2.5-0.5b", "mistral-7b"])
def test_named_models(name: str) -> None:
    model = models.named(name)
    layout = Layout(tensor=8 if model.num_heads % 8 == 0 else 2, pipeline=4, data=16, sequence_parallel=True)
    plan = replace(
        tiny_plan(layout, model, global_batch=256, seq_len=2048), cluster=clusters.named("dgx-h100", num_nodes=64)
    )
    small, changes = scaled(plan)
    assert changes
    assert not problems(small.model, small.job, small.cluster, small.layout)
