"""Seconds of a step by kind: each kind holds what only its cause can change, and together they are the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import CLUSTER, JOB, LINK, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner.engine import profiles
from phalanx.planner.search import predict, search
from phalanx.planner.summary import summary
from phalanx.spec.cluster import ClusterSpec

FAST = replace(LINK, name="fast", latency_s=1e-12, bytes_per_s=1e18)
SLOW = replace(LINK, name="slow", bytes_per_s=1e9)


def kinds(layout: Layout, engine_name: str = "phalanx", **links: object) -> dict[str, float]:
    cluster: ClusterSpec = replace(CLUSTER, num_nodes=2, devices_per_node=4, **links)  # type: ignore[arg-type]
    prediction = predict(LLAMA, JOB, cluster, layout, engine_name=engine_name).prediction
    assert prediction is not None
    assert sum(prediction.step_s_by_kind.values()) == pytest.approx(prediction.step_s, rel=1e-9)
    return dict(prediction.step_s_by_kind)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_messages_between_stages_are_no_bubble(schedule: str) -> None:
    """A slow network adds to the messages alone; what is waited for of other stages is as over a perfect one."""
    layout = Layout(pipeline=7, micro_batch=4, schedule=schedule)
    free = kinds(layout, intra_node=FAST, inter_node=FAST)
    slow = kinds(layout, inter_node=SLOW)
    assert slow["transfer"] > 10 * free["transfer"] and slow["pipeline"] == pytest.approx(free["pipeline"], rel=1e-6)
    assert slow["compute"] == pytest.approx(free["compute"])
    alone = kinds(Layout(data=8))
    assert alone["transfer"] == alone["pipeline"] == 0


def test_what_blocks_compute_is_a_message_too() -> None:
    """Megatron's sender and receiver wait for a transfer: at both ends of each stage but the first and the last."""
    blocking = next(name for name, engine in profiles().items() if engine.blocking_transfers == 1)
    slow, slower = (
        kinds(Layout(pipeline=7, micro_batch=2), blocking, inter_node=link, intra_node=link)
        for link in (SLOW, replace(SLOW, bytes_per_s=0.5e9))
    )
    assert slower["transfer"] == pytest.approx(2 * slow["transfer"], rel=0.05) and slow["transfer"] > 0
    assert slower["host"] == pytest.approx(slow["host"], abs=1e-12)


def test_gathered_parameters_are_exposed_communication() -> None:
    """ZeRO 3 over a slow network waits for parameters, not for the host; the table counts it as communication."""
    slow, whole = (kinds(Layout(data=8, zero=zero), inter_node=SLOW) for zero in (3, 2))
    assert slow["gathers"] > slow["compute"] and slow["host"] == pytest.approx(whole["host"]) and whole["gathers"] == 0
    cluster = replace(CLUSTER, num_nodes=2, devices_per_node=4, inter_node=SLOW)
    line = summary(predict(LLAMA, JOB, cluster, Layout(data=8, zero=3)))
    messages = sum(slow[kind] for kind in ("tensor", "gathers", "transfer", "data"))
    assert line.communication == pytest.approx(messages / line.step_s) and line.communication > 0.2


def test_what_the_host_cannot_issue_in_time_is_its_own_kind() -> None:
    slow = next(name for name, engine in profiles().items() if engine.host_layer_s > 0 and "bf16" in engine.states)
    found = kinds(Layout(data=8, micro_batch=1), slow)
    assert found["host"] > found["compute"] and found["gathers"] == found["transfer"] == 0


def test_kinds_of_every_plan_of_a_search_add_up() -> None:
    found = search(LLAMA, JOB, replace(CLUSTER, num_nodes=2, devices_per_node=4, inter_node=SLOW))
    for plan in (*found.plans, *found.front):
        assert plan.prediction is not None
        parts = plan.prediction.step_s_by_kind
        assert min(parts.values()) >= 0 and sum(parts.values()) == pytest.approx(plan.prediction.step_s, rel=1e-9)
