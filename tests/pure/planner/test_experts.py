"""Mixtures of experts: sizes, memory and messages of the planner."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.errors import LayoutError
from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.legality import problems
from phalanx.plan.operations import Kernels
from phalanx.plan.shards import rank_buffers
from phalanx.planner import memory
from phalanx.planner.advice import step_s
from phalanx.planner.candidates import of
from phalanx.planner.engine import engine
from phalanx.planner.estimate import estimate
from phalanx.planner.machinery import NEAR
from phalanx.planner.search import predict, search
from phalanx.spec import models
from phalanx.spec.cluster import ClusterSpec

EXPERTS = replace(LLAMA, num_experts=8, experts_per_token=2)
ENGINE = "megatron-core-2024"
MIXTRAL = replace(
    models.named("mistral-7b"), name="mixtral-8x7b", num_experts=8, experts_per_token=2, max_seq_len=32768
)


def test_parameters_of_mixtral() -> None:
    """46.7B in all, 12.9B for each token (arXiv 2401.04088, section 1)."""
    assert MIXTRAL.num_parameters / 1e9 == pytest.approx(46.7, rel=0.002)
    active = MIXTRAL.num_parameters - 32 * 3 * 4096 * 14336 * 6
    assert active / 1e9 == pytest.approx(12.9, rel=0.003)


def test_flops_count_the_experts_that_a_token_has() -> None:
    one, two = (replace(EXPERTS, experts_per_token=k).flops_per_token(96) for k in (1, 2))
    assert two - one == 3 * 7 * 2 * 3 * 96 * 240


@pytest.mark.parametrize(("data", "local", "copies"), [(1, 8, 1), (4, 2, 1), (8, 1, 1), (16, 1, 2), (6, 4, 3)])
def test_experts_spread_over_the_data_axis(data: int, local: int, copies: int) -> None:
    cut = cut_of(EXPERTS, 96, Layout(data=data), 2)
    assert (cut.experts, cut.expert_groups) == (local, copies)
    # Balanced routing: what comes to all experts here is what this rank sends out.
    assert cut.experts * cut.expert_tokens == cut.routed_tokens == 192


def test_products_of_experts_are_batched() -> None:
    cut = cut_of(EXPERTS, 96, Layout(data=4), 2)
    (up,) = [op for op in operations.layer(EXPERTS, cut, Kernels()).forward if op.name == "up"]
    assert (up.batch, up.m, up.n, up.k) == (2, 96, 480, 96)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_are_cut_over_their_copies_only(zero: int, context: int) -> None:
    """Eight experts on 16 data ranks have two copies, each also on every rank of the context axis."""
    layouts = of([Layout(data=16, context=context, zero=zero)])
    held = memory.held_elements(EXPERTS, layouts, np.array([[7]]), (0, 0))
    experts = 7 * 3 * 96 * 240
    assert held.experts[0, 0] == experts
    assert held.shard[0, 0] == pytest.approx(((held.elements[0, 0] - experts) / 16 + experts / 2) / context)


def test_experts_cost_messages_and_memory() -> None:
    layout = Layout(data=8)
    plain, mixed = (predict(m, JOB, CLUSTER, layout, engine_name=ENGINE).prediction for m in (LLAMA, EXPERTS))
    assert plain is not None and mixed is not None
    assert mixed.step_s_by_kind["tensor"] > plain.step_s_by_kind["tensor"] == 0
    assert mixed.memory_bytes[0]["activations"] > plain.memory_bytes[0]["activations"]


def test_search_ranks_mixtures_for_engines_that_run_them() -> None:
    found = search(EXPERTS, JOB, CLUSTER, engine_name=ENGINE)
    assert found.plans and found.num_fitting > 100


MACHINE = replace(CLUSTER, num_nodes=2, devices_per_node=4)


@pytest.mark.parametrize("per_node", [4, 3], ids=["eight devices", "six devices"])
def test_the_search_misses_no_way_to_lay_experts_out(per_node: int) -> None:
    """Against every layout of plain 1F1B, one at a time: the context axis, data outermost where pipelines lie within
    nodes, and experts over all ranks that divide or those of a node."""
    job, runner = replace(JOB, global_batch=2 * per_node), engine(ENGINE)
    machine = replace(MACHINE, devices_per_node=per_node)
    found = search(EXPERTS, job, machine, {"schedule": "1f1b"}, engine_name=ENGINE, top=3)
    sizes = [s for s in itertools.product((1, 2, 3, 4, 6, 8), repeat=4) if math.prod(s) == machine.num_devices]
    options = itertools.product(range(1, 9), runner.space.zero, (False, True), runner.space.recompute, (False, True))
    tried = []
    for (tensor, context, pipeline, data), (micro_batch, zero, cut, recompute, near) in itertools.product(
        sizes, options
    ):
        cell = tensor * context * pipeline
        inside = math.gcd(8, data, max(1, per_node // (tensor * context)))
        for group in {0, inside if inside < math.gcd(8, data) else 0}:
            layout = Layout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                micro_batch=micro_batch,
                zero=zero,
                sequence_parallel=cut,
                recompute=recompute,
                expert_group=group,
                outermost="data" if near else "pipeline",
            )
            twin = (tensor == 1 and cut) or (data * context == 1 and zero)
            if near and (min(pipeline, data) == 1 or per_node % cell or cell * data <= per_node):
                continue
            if not twin and not problems(EXPERTS, job, machine, layout):
                tried.append(predict(EXPERTS, job, machine, layout, engine_name=ENGINE))
    assert found.num_fitting == len(tried)
    assert {plan.layout.expert_group for plan in tried} == ({0, 1, 2, 4} if per_node == 4 else {0, 1})
    ways: dict[Layout, float] = {}
    for plan in tried:
        way = replace(plan.layout, outermost="pipeline")
        ways[way] = min(step_s(plan), ways.get(way, math.inf))
    best = sorted(ways.values())
    first, *others = map(step_s, found.plans)
    assert first <= best[0] * (1 + NEAR)
    assert others == pytest.approx([seconds for seconds in best if seconds != pytest.approx(first, rel=1e-9)][:2])


def test_fewer_ranks_for_experts_mean_shorter_ways_and_more_to_hold() -> None:
    wide, near = (Layout(data=8, expert_group=group) for group in (0, 4))
    slow = replace(MACHINE, inter_node=replace(MACHINE.inter_node, bytes_per_s=1e9))
    far, close = (predict(EXPERTS, JOB, slow, layout, engine_name=ENGINE).prediction for layout in (wide, near))
    assert far is not None and close is not None
    assert close.step_s_by_kind["tensor"] < far.step_s_by_kind["tensor"]
    assert close.step_s_by_kind["data"] > far.step_s_by_kind["data"]  # copies of experts add their gradients
    assert close.memory_bytes[0]["parameters"] > far.memory_bytes[0]["parameters"]


IDLE = replace(engine(ENGINE), host_layer_s=0.0)
"""With no host that anything could hide behind."""


def test_layouts_that_are_priced_together_cost_what_each_costs_alone() -> None:
    """Where experts lie depends on the data axis, their groups, and what lies inside of it."""
    slow = replace(MACHINE, inter_node=replace(MACHINE.inter_node, bytes_per_s=1e9))
    some: list[dict[str, Any]] = [{}, {"outermost": "data"}, {"expert_group": 2}, {"tensor": 2, "data": 2}]
    some += [{"pipeline": 1, "data": 8}, {"pipeline": 1, "data": 8, "expert_group": 4}, {"pipeline": 4, "data": 2}]
    many = [Layout(**{"pipeline": 2, "data": 4, **chosen}) for chosen in some]
    together = np.empty(len(many))
    for group in estimate(EXPERTS, JOB, slow, IDLE, of(many)):
        together[group.rows] = group.step_s
    alone = [predict_s(slow, layout) for layout in many]
    assert together == pytest.approx(alone, rel=1e-12) and len(set(alone)) == len(many)


def predict_s(cluster: ClusterSpec, layout: Layout) -> float:
    (group,) = estimate(EXPERTS, JOB, cluster, IDLE, of([layout]))
    return float(group.step_s[0])


def test_experts_are_part_of_the_reason() -> None:
    found = search(EXPERTS, JOB, MACHINE, {"tensor": 1, "pipeline": 2, "context": 1}, engine_name=ENGINE)
    kept = "[layout] keeps tensor = 1, pipeline = 2, context = 1"
    assert found.reasons[0] == f"deep but narrow: pipeline and data, experts over neighbours on it; {kept}"


def test_groups_that_do_not_divide_are_refused() -> None:
    (problem,) = problems(EXPERTS, JOB, CLUSTER, Layout(data=8, expert_group=3))
    assert problem.instead == "expert_group = 2 or 4"
    (problem,) = problems(LLAMA, JOB, CLUSTER, Layout(data=8, expert_group=2))
    assert "no experts" in problem.what


def test_the_trainer_refuses_what_it_does_not_have() -> None:
    with pytest.raises(LayoutError, match="has experts"):
        search(EXPERTS, JOB, CLUSTER)
    with pytest.raises(LayoutError, match="not yet trained"):
        rank_buffers(EXPERTS, Layout(), Coord(), 96)
