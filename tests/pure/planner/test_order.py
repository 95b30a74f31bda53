"""The outermost axis decides which link the stages of a pipeline and the copies of a stage talk over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LLAMA

from phalanx.plan.groups import axis_groups
from phalanx.plan.layout import Coord, Layout, Outermost
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner import network
from phalanx.planner.messages import of_step
from phalanx.planner.search import predict, search
from phalanx.spec.cluster import ClusterSpec

SIX = replace(CLUSTER, num_nodes=3, devices_per_node=6)
LAYOUTS = [
    Layout(pipeline=4, data=8),
    Layout(pipeline=2, data=4, tensor=4),
    Layout(pipeline=16, data=2),
    Layout(pipeline=2, data=8, tensor=2, zero=1, zero_group=4),
    Layout(pipeline=2, data=9),
    Layout(pipeline=3, data=2, tensor=3),
    Layout(pipeline=9, data=2),
]


@pytest.mark.parametrize("outermost", ["pipeline", "data"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_lie_where_they_are_priced(layout: Layout, outermost: Outermost) -> None:
    """The group that lies worst spans as many nodes as the planner believes, and within a node only if all do."""
    cluster = CLUSTER if layout.num_ranks == 32 else SIX
    layout = replace(layout, outermost=outermost)
    places = network.placements(cluster, layout)
    groups = axis_groups(layout)
    data = "shards" if layout.zero_group else "data"
    for name, priced in {"tensor": "tensor", "pipeline": "pipeline", data: "shards", "replicas": "replicas"}.items():
        ranks = [group.ranks for group in groups if group.name == name]
        nodes = [Counter(rank // cluster.devices_per_node for rank in each) for each in ranks]
        if nodes:
            most = max(map(len, nodes))
            assert (int(places[priced].nodes) > 1) == (most > 1), name
            if cluster is CLUSTER:
                assert int(places[priced].nodes) == most, name
                assert int(places[priced].per_node) == max(nodes[0].values()), name


@pytest.mark.parametrize("outermost", ["pipeline", "data"])
def test_coordinates_and_ranks_are_each_others_inverse(outermost: Outermost) -> None:
    layout = Layout(pipeline=2, data=3, context=2, tensor=2, outermost=outermost)
    assert [layout.rank(coord) for coord in layout.coords()] == list(range(24))
    assert [layout.coord(rank) for rank in range(24)] == list(layout.coords())
    for axis in ("pipeline", "data", "context", "tensor"):
        assert layout.rank(Coord(**{axis: 1})) == layout.stride(axis)


def slow(cluster: ClusterSpec) -> ClusterSpec:
    """Nodes that talk a hundred times as slowly as their devices among themselves."""
    return replace(cluster, inter_node=replace(cluster.inter_node, bytes_per_s=1e9, latency_s=20e-6))


LONG = replace(JOB, global_batch=1152, seq_len=1024)
GIVEN = {"tensor": 1, "pipeline": 2, "zero": 0, "micro_batch": 4, "recompute": "none", "schedule": "1f1b"}


@pytest.mark.parametrize("cluster", [replace(CLUSTER, num_nodes=2), SIX], ids=["eight", "six"])
def test_pipelines_lie_within_nodes_where_activations_outweigh_gradients(cluster: ClusterSpec) -> None:
    """A large batch of a small model: what stages send is more than the gradients, and should not leave a node."""
    model = replace(LLAMA, max_seq_len=1024)
    cluster = slow(replace(cluster, device=replace(DEVICE, memory_bytes=2**40)))
    found = search(model, LONG, cluster, GIVEN)
    first = found.plans[0]
    assert first.layout.outermost == "data" and "data outermost" in str(first.layout)
    assert not problems(model, LONG, cluster, first.layout) and not engine_problems(first.layout)
    links = {row.message.group: row.link for row in of_step(first)}
    assert (links["pipeline"], links["data"]) == (cluster.intra_node.name, cluster.inter_node.name)
    other = predict(model, LONG, cluster, replace(first.layout, outermost="pipeline"))
    assert step_s(other) > 1.02 * step_s(first)
    kept = search(model, LONG, cluster, GIVEN | {"outermost": "pipeline"})
    assert {plan.layout.outermost for plan in kept.plans} == {"pipeline"}


def test_the_usual_order_stays_where_links_are_equal() -> None:
    found = search(LLAMA, JOB, replace(CLUSTER, num_nodes=2), GIVEN | {"micro_batch": 1})
    assert found.plans[0].layout.outermost == "pipeline"
    alone = search(LLAMA, JOB, replace(CLUSTER, num_nodes=1), GIVEN | {"micro_batch": 1})
    assert {plan.layout.outermost for plan in alone.plans} == {"pipeline"}


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
