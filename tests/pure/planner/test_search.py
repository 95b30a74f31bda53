"""The search: exact, honest about what it rejects, and the same as pricing layouts one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, DEVICE, GPT, JOB, LLAMA

from phalanx.errors import LayoutError
from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner.search import predict, search
from phalanx.planner.summary import as_json, summary
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.model import ModelSpec

SMALL = replace(CLUSTER, num_nodes=2, devices_per_node=4)


def brute_force(model: ModelSpec, cluster: ClusterSpec) -> list[Plan]:
    """Every Layout that uses all devices, tried one at a time."""
    plans = []
    axis = range(1, cluster.num_devices + 1)
    for tensor, pipeline, data in itertools.product(axis, axis, axis):
        if tensor * pipeline * data != cluster.num_devices:
            continue
        for micro_batch, name, zero, cut in itertools.product(
            range(1, JOB.global_batch + 1), ("1f1b", "gpipe"), (0, 1), (False, True)
        ):
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                micro_batch=micro_batch,
                schedule=name,
                zero=zero,
                sequence_parallel=cut,
            )
            if problems(model, JOB, cluster, layout) or engine_problems(layout):
                continue
            plan = predict(model, JOB, cluster, layout)
            assert plan.prediction is not None
            if max(sum(stage.values()) for stage in plan.prediction.memory_bytes) <= cluster.device.memory_bytes:
                plans.append(plan)
    return plans


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_search_misses_no_layout(model: ModelSpec) -> None:
    found = search(model, JOB, SMALL, top=5)
    tried = sorted(step_s(plan) for plan in brute_force(model, SMALL))
    assert step_s(found.plans[0]) == pytest.approx(tried[0], rel=1e-9)
    distinct = sorted({round(t, 12) for t in tried})
    assert {round(step_s(plan), 12) for plan in found.plans} <= set(distinct)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_given_keys_are_kept() -> None:
    found = search(LLAMA, JOB, SMALL, {"tensor": 2, "micro_batch": 3, "zero": 1})
    assert {(p.layout.tensor, p.layout.micro_batch, p.layout.zero) for p in found.plans} == {(2, 3, 1)}


def test_stage_layers_are_kept() -> None:
    found = search(LLAMA, JOB, SMALL, {"pipeline": 2, "stage_layers": (4, 3)})
    assert {plan.layout.stage_layers for plan in found.plans} == {(4, 3)}


def test_prediction_adds_up() -> None:
    for plan in search(LLAMA, JOB, SMALL).plans:
        assert plan.prediction is not None
        assert sum(plan.prediction.step_s_by_kind.values()) == pytest.approx(plan.prediction.step_s)
        assert len(plan.prediction.memory_bytes) == plan.layout.pipeline
        assert 0 < summary(plan).mfu < 1


def test_nothing_fits_is_an_error_with_the_sum() -> None:
    cluster = replace(SMALL, device=replace(DEVICE, memory_bytes=2**20))
    with pytest.raises(LayoutError) as caught:
        search(LLAMA, JOB, cluster)
    (problem,) = caught.value.problems
    assert "of 1 MiB" in problem.what and "optimizer" in problem.what and problem.instead


def test_impossible_wishes_are_an_error() -> None:
    with pytest.raises(LayoutError, match="tensor 5 does not divide"):
        search(LLAMA, JOB, SMALL, {"tensor": 5, "data": 1, "pipeline": 1})


def test_rejected_layouts_are_counted_with_a_change_that_fits() -> None:
    cluster = replace(SMALL, device=replace(DEVICE, memory_bytes=6 * 2**20))
    found = search(LLAMA, JOB, cluster)
    assert sum(entry.count for entry in found.rejected) + found.num_fitting == found.num_layouts
    too_large = found.rejected[-1]
    assert too_large.reason == "does not fit into memory" and too_large.instead


def test_json_is_plain() -> None:
    value = as_json(search(GPT, JOB, SMALL, top=2))
    assert {"engine", "plans", "rejected", "num_layouts"} <= set(value)
    assert value["plans"][0]["step_s"] > 0
