"""The messages that the planner prices are those that Traffic lists, for every layout of up to 8 ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, GPT, JOB, LLAMA

from phalanx.plan.groups import data_groups
from phalanx.plan.layout import AXES, Coord, Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.plan.states import state_bytes
from phalanx.plan.traffic import traffic
from phalanx.planner import messages, network
from phalanx.planner.candidates import of
from phalanx.planner.engine import engine
from phalanx.planner.estimate import estimate
from phalanx.spec.model import ModelSpec

SMALL = replace(JOB, global_batch=16)


def layouts(model: ModelSpec) -> list[Layout]:
    """Legal ones of up to 8 ranks, with every ZeRO stage and kind of recompute."""
    sizes = [s for s in itertools.product((1, 2, 4, 8), repeat=3) if s[0] * s[1] * s[2] <= 8]
    made = [
        Layout(tensor=t, pipeline=p, data=d, zero=zero, zero_group=group, sequence_parallel=cut, recompute=recompute)
        for (t, p, d), (zero, group), cut, recompute in itertools.product(
            sizes, ((0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (3, 2)), (False, True), ("none", "selective", "full")
        )
    ]
    return [x for x in made if not problems(model, SMALL, CLUSTER, x) and not engine_problems(x)]


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bytes_of_model_states_are_those_of_shards(model: ModelSpec) -> None:
    for layout in layouts(model)[::3]:
        plan = Plan(model=model, cluster=CLUSTER, job=SMALL, layout=layout)
        (group,) = estimate(model, SMALL, CLUSTER, engine(), of([layout]))
        for pipeline in range(layout.pipeline):
            held = state_bytes(plan, Coord(pipeline=pipeline))
            for kind in ("parameters", "gradients", "optimizer"):
                assert group.footprint.memory[kind][0, pipeline] == getattr(held, kind), f"{kind} of {layout}"


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_priced_messages_are_those_of_traffic(model: ModelSpec) -> None:
    checked = 0
    for layout in layouts(model)[::2]:
        plan = Plan(model=model, cluster=CLUSTER, job=SMALL, layout=layout)
        listed: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for message in traffic(plan, Coord()):
            purpose = message.purpose.split()[0] if message.group == "tensor" else message.purpose
            listed[message.group, purpose] += message.payload_bytes
            counts[message.group, purpose] += message.count
        (group,) = estimate(model, SMALL, CLUSTER, engine(), of([layout]))
        footprint, micro_batches = group.footprint, layout.num_micro_batches(SMALL.global_batch)
        layers = int(footprint.layers[:, 0].sum())
        cut = layout.sequence_parallel and layout.tensor > 1
        if layout.tensor > 1:
            # Forward closes (and opens) two half-blocks, backward likewise; recompute opens or runs them again.
            each = 4 + 4 * cut + {"none": 0, "selective": 2 * cut, "full": 2 + 2 * cut}[layout.recompute]
            assert counts["tensor", "attention"] + counts["tensor", "mlp"] == each * layers * micro_batches
        if layout.pipeline > 1:
            sent = float(footprint.costs.boundary_bytes[0]) * micro_batches
            assert listed["pipeline", "activations"] == sent
        if ("tied", "tied gradients") in listed:
            shared = float(footprint.tied[0, 0]) / layout.num_shards
            assert shared <= listed["tied", "tied gradients"] / engine().reduce_bytes < shared + 2 * 64
        if layout.data > 1:
            held = int(footprint.held.elements[0, 0])
            repeats = micro_batches if layout.zero >= 2 else 1
            shards, replicas = data_groups(layout)
            if layout.num_shards > 1:
                assert listed[shards, "gradients"] == held * repeats * engine().reduce_bytes
            if layout.num_shards < layout.data:
                assert listed[replicas, "gradients"] == held // layout.num_shards * engine().reduce_bytes
            if layout.zero in (1, 2):
                assert listed[shards, "parameters"] == held * 2
        checked += 1
    assert checked > 100


NOT_PRICED = {"loss", "replicated gradients", "head norm gradients", "kv copy gradients", "gradients", "parameters"}
"""Claimed in another way: losses in chunks, copies not at all, the data axis as the test above compares."""


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_messages_made_for_other_engines_are_those_of_traffic_for_this_one(model: ModelSpec) -> None:
    for layout in layouts(model)[::3]:
        plan = Plan(model=model, cluster=CLUSTER, job=SMALL, layout=layout)
        listed, claimed = (
            {
                (message.group, message.purpose, message.operation): (message.count, message.payload_bytes)
                for message in found
                if message.purpose not in NOT_PRICED
            }
            for found in (traffic(plan, Coord()), messages.Claimed(plan, engine()).step())
        )
        if ("tied", "tied gradients", "all_reduce") in listed:
            del listed["tied", "tied gradients", "all_reduce"], claimed["tied", "tied gradients", "all_reduce"]
        assert claimed == listed, str(layout)


def test_experts_and_context_have_their_messages() -> None:
    """Each token goes to two experts and back, forward and backward; keys and values go round the context axis, and
    their gradients as well."""
    model = replace(LLAMA, num_experts=4, experts_per_token=2)
    layout = Layout(data=4, context=2, micro_batch=2, zero=1)
    plan = Plan(model=model, cluster=CLUSTER, job=SMALL, layout=layout)
    found = {row.message.purpose: row for row in messages.of_step(plan, "megatron-core-2024")}
    micro_batches, tokens = 2, 2 * SMALL.seq_len // 2
    times = model.num_layers * micro_batches
    out = found["tokens of experts"].message
    assert (out.operation, out.count) == ("all_to_all", 2 * times)
    assert out.payload_bytes == 2 * times * 2 * tokens * model.hidden * 2
    assert found["token gradients of experts"].message.payload_bytes == out.payload_bytes
    there = found["keys and values"].message
    assert there.payload_bytes == times * 2 * tokens * model.kv_rows * 2
    assert found["keys and values, gradients"].message.payload_bytes == 2 * there.payload_bytes
    assert all(row.seconds > 0 and row.link for row in found.values())
    layer = {row.message.purpose: row for row in messages.of_layer(plan, "megatron-core-2024")}
    assert layer["tokens of experts"].message.count == 2
    assert layer["tokens of experts"].seconds == pytest.approx(found["tokens of experts"].seconds / times)


def test_messages_of_a_layer_are_its_part_of_the_step() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True, recompute="full")
    plan = Plan(model=LLAMA, cluster=CLUSTER, job=SMALL, layout=layout)
    (group,) = estimate(LLAMA, SMALL, CLUSTER, engine(), of([layout]))
    each = int(group.footprint.layers[:, 0].sum()) * layout.num_micro_batches(SMALL.global_batch)
    step = {row.message.purpose: row.message for row in messages.of_step(plan)}
    for row in messages.of_layer(plan):
        assert row.message.count * each == step[row.message.purpose].count
        assert row.message.payload_bytes * each == step[row.message.purpose].payload_bytes


@pytest.mark.parametrize("context", [1, 2])
def test_groups_sit_where_the_planner_prices_them(context: int) -> None:
    for layout in layouts(LLAMA)[::5]:
        if context > 1 and layout.pipeline > 2:
            continue
        layout = replace(layout, context=context)
        plan = Plan(model=LLAMA, cluster=CLUSTER, job=SMALL, layout=layout)
        places = network.placements(CLUSTER, layout)
        shards, replicas = data_groups(layout)
        groups = {"tensor": "tensor", "context": "context", "pipeline": "pipeline", "data": "shards"}
        if layout.zero and layout.num_shards < layout.data:
            groups = {shards: "shards", replicas: "replicas"}
        for group, name in groups.items():
            place = messages.placed(plan, group, AXES)
            assert (int(place.size), int(place.per_node)) == (int(places[name].size), int(places[name].per_node)), group


def test_other_orders_of_axes_cross_other_links() -> None:
    """On two nodes, tensor inside each and data across; the other way round each message of a layer crosses."""
    slow = replace(CLUSTER, num_nodes=2, inter_node=replace(CLUSTER.inter_node, bytes_per_s=1e9))
    plan = Plan(model=LLAMA, cluster=slow, job=SMALL, layout=Layout(tensor=4, data=4))
    seconds = messages.by_order(plan)
    assert list(seconds) == [("data", "tensor"), ("tensor", "data")]
    rows = messages.of_step(plan)
    assert seconds["data", "tensor"] == pytest.approx(sum(row.seconds for row in rows))
    message = next(row.message for row in rows if row.message.group == "tensor")
    links = [messages.priced(plan, message, order).link for order in seconds]
    assert links == ["link", "net"]
    assert messages.by_order(replace(plan, layout=Layout(tensor=2, data=4))) == {}


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_boundary_in_parts_is_gathered_by_those_who_receive_it(cut: bool) -> None:
    """The first of two stages sends activations and gets back gradients, a quarter each, and gathers the latter."""
    layout = Layout(pipeline=2, tensor=4, micro_batch=2, sequence_parallel=cut)
    plan = Plan(model=LLAMA, cluster=CLUSTER, job=SMALL, layout=layout)
    claimed = list(messages.Claimed(plan, engine("megatron-2021")).step())
    times, wide = layout.num_micro_batches(SMALL.global_batch), 2 * SMALL.seq_len * LLAMA.hidden * 2
    (sent,) = (message for message in claimed if message.operation == "send")
    assert (sent.count, sent.payload_bytes) == (times, times * wide // 4)
    gathered = [
        (m.operation, m.count, m.payload_bytes) for m in claimed if m.group == "tensor" and "gradients" in m.purpose
    ]
    assert gathered == ([] if cut else [("all_gather", times, times * wide)])
