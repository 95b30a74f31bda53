"""The messages that the planner prices are those that Traffic lists, for every layout of up to 8 ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, GPT, JOB, LLAMA

from phalanx.plan.groups import data_groups
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.plan.states import state_bytes
from phalanx.plan.traffic import traffic
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
    for layout in layouts(model):
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
