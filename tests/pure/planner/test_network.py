"""Messages: what crosses which link, shared cards, narrow fabrics, nodes of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner import network
from phalanx.planner.search import search

SIX = replace(CLUSTER, num_nodes=3, devices_per_node=6)


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "nodes"),
    [(8, 1, 8, 1), (4, 8, 1, 4), (4, 4, 2, 2), (32, 1, 8, 4), (1, 1, 1, 1), (16, 2, 4, 4)],
)
def test_strides_decide_the_link(size: int, stride: int, per_node: int, nodes: int) -> None:
    place = network.placement(CLUSTER, size, stride)
    assert (int(place.per_node), int(place.nodes)) == (per_node, nodes)


@pytest.mark.parametrize(("size", "stride", "per_node"), [(3, 1, 2), (6, 1, 3), (3, 2, 2), (4, 2, 4)])
def test_groups_that_do_not_divide_a_node_come_to_lie_across_two(size: int, stride: int, per_node: int) -> None:
    """Of eight devices: the worst of three neighbours has two on one node and one on the next. A lone node has all."""
    place = network.placement(CLUSTER, size, stride)
    assert (int(place.per_node), int(place.nodes)) == (per_node, -(-size // per_node))
    assert int(network.placement(replace(CLUSTER, num_nodes=1), size, stride).nodes) == 1


def test_the_tensor_axis_stays_inside_a_node() -> None:
    places = network.placements(CLUSTER, Layout(tensor=8, data=2, pipeline=2))
    assert [int(places[axis].nodes) for axis in ("tensor", "data", "pipeline")] == [1, 2, 2]
    wide = network.placements(CLUSTER, Layout(tensor=4, data=4, zero=1))["shards"]  # two of them in a node of eight
    assert (int(wide.per_node), int(wide.nodes)) == (2, 2)


def test_a_group_of_one_costs_nothing() -> None:
    place = network.placement(CLUSTER, 1, 1)
    assert float(network.collective_s(CLUSTER, "all_reduce", 1e9, place)) == 0.0
    assert float(network.all_to_all_s(CLUSTER, 1e9, place)) == 0.0


def test_a_narrow_fabric_slows_what_leaves_the_switch() -> None:
    narrow = replace(CLUSTER, num_nodes=8, nodes_per_switch=4, oversubscription=2.0)
    inside, beyond = (network.placement(narrow, n, 8) for n in (4, 8))
    assert float(network.inter_node_bytes_per_s(narrow, inside)) == 100e9
    assert float(network.inter_node_bytes_per_s(narrow, beyond)) == 50e9


def test_a_mesh_gives_a_pair_a_share() -> None:
    mesh = replace(CLUSTER, intra_node=replace(CLUSTER.intra_node, mesh=True, latency_s=0.0))
    two, eight = (float(network.ring_step_s(mesh.intra_node, 1e9, n, 8)) for n in (2, 8))
    assert two == pytest.approx(7 * eight)


def test_latency_rules_small_messages_and_bandwidth_large_ones() -> None:
    place = network.placement(CLUSTER, 32, 1)
    sizes = 2.0 ** np.arange(4, 34)
    took = network.collective_s(CLUSTER, "all_reduce", sizes, place)
    assert (np.diff(took) > 0).all()
    assert took[0] == pytest.approx(took[1], rel=0.01) and took[-1] == pytest.approx(2 * took[-2], rel=0.01)


def test_any_number_of_devices() -> None:
    found = search(LLAMA, replace(JOB, global_batch=36), SIX)
    assert all(plan.layout.num_ranks == 18 for plan in found.plans)
    assert {plan.layout.tensor for plan in found.front} <= {1, 2, 3, 6}


def test_one_device() -> None:
    found = search(LLAMA, JOB, replace(CLUSTER, num_nodes=1, devices_per_node=1))
    assert found.plans[0].layout.num_ranks == 1 and "one device" in found.reasons[0]
