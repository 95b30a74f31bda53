"""Seconds of messages: latency and bandwidth of the link a group crosses, for ring and tree, alone or with others.

Bus bandwidth, steps and payload conventions are those of nccl-tests (PERFORMANCE.md): an all-reduce of M bytes over n
moves 2 (n - 1) / n × M per member in 2 (n - 1) steps, a gather or scatter half of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from phalanx.plan.layout import AXES
from phalanx.spec.cluster import ClusterSpec, Link

Seconds: TypeAlias = Any
Size: TypeAlias = Any

TREE_BANDWIDTH = 0.92
"""A tree's share of the ring's bandwidth between nodes (NCCL tuning.cc: LL128 factor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a group sits: `size` members, at most `per_node` of them in one node. Arrays or ints."""

    size: Size
    per_node: Size

    @property
    def nodes(self) -> Size:
        """Nodes that the group spans."""
        return -(-self.size // np.maximum(1, self.per_node))


def placement(cluster: ClusterSpec, size: Size, stride: Size) -> Placement:
    """A group of `size` ranks, `stride` apart, on nodes filled in rank order: the one that lies worst, since all groups
    of an axis wait for it. Groups that would fit a node, but do not divide it, come to lie across two. A group
    over nodes that `stride` does not divide may lie on a node fewer or more than that."""
    devices, span = cluster.devices_per_node, size * stride
    across = (cluster.num_nodes > 1) & (span <= devices) & (devices % np.minimum(span, devices) > 0)
    per_node = np.where(across, -(-size // 2), np.clip(devices // stride, 1, size))
    return Placement(size=size, per_node=per_node)


def placements(cluster: ClusterSpec, layout: Any) -> dict[str, Placement]:
    """The groups of each axis. "shards" sum or cut what they hold together, over the context axis too; "replicas" are
    those who then hold the same shard."""
    axes = {name: placement(cluster, getattr(layout, name), layout.stride(name)) for name in AXES}
    shards, stride = np.where(layout.zero, layout.num_shards, layout.data), layout.stride("data")
    return {
        **axes,
        "shards": with_context(cluster, placement(cluster, shards, stride), axes["context"], layout.tensor),
        "replicas": placement(cluster, layout.data // shards, stride * shards),
    }


def with_context(cluster: ClusterSpec, data: Placement, context: Placement, tensor: Size) -> Placement:
    """The group that is made up of all `context` groups of the members of a `data` group."""
    nearest = np.maximum(1, cluster.devices_per_node // tensor)  # so many of a node have one place on the tensor axis
    per_node = np.minimum(data.per_node * context.per_node, nearest)
    return Placement(size=data.size * context.size, per_node=per_node)


def _curve(points: tuple[tuple[int, float], ...], size: Size) -> Size:
    """Measured bandwidth at `size` bytes, on a line between logarithms; flat outside."""
    sizes, rates = np.array(points, dtype=float).T
    return np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(sizes), np.log(rates)))


def ring_step_s(link: Link, chunk: Size, members: Size, devices: int) -> Seconds:
    """One step of a ring inside a node: every member hands `chunk` bytes on.

    Where bus bandwidth was measured (over all devices of a node), a step costs what it cost there for the same chunk.
    """
    if link.busbw:
        # The measured all-reduce of n × chunk took 2 (n - 1) steps, each moving one chunk.
        return chunk / _curve(link.busbw, chunk * devices)
    share = (members - 1) / max(1, devices - 1) if link.mesh else 1.0
    return link.latency_s + chunk / (link.bytes_per_s * link.efficiency * np.maximum(share, 1e-9))


def inter_node_bytes_per_s(cluster: ClusterSpec, place: Placement) -> Size:
    """What one group gets of the node's cards while all groups of its axis talk at once."""
    link = cluster.inter_node
    cards = cluster.nics_per_node or cluster.devices_per_node
    node = link.bytes_per_s * cluster.devices_per_node
    alone = node / cards * np.minimum(place.per_node, cards)
    shared = node * place.per_node / cluster.devices_per_node
    narrow: Size = 1.0
    if cluster.nodes_per_switch:
        narrow = np.where(place.nodes > cluster.nodes_per_switch, cluster.oversubscription, 1.0)
    return np.minimum(alone, shared) * link.efficiency / narrow


def collective_s(cluster: ClusterSpec, operation: str, payload: Size, place: Placement) -> Seconds:
    """Seconds of one collective of `payload` bytes (the convention of plan.comm); 0 for a group of one."""
    size, several = np.maximum(place.size, 1), np.asarray(place.nodes > 1)
    rounds = 2.0 if operation == "all_reduce" else 1.0
    across: Seconds = _across_s(cluster, rounds, payload, place) if several.any() else 0.0
    inside: Seconds = 0.0
    if not several.all():
        inside = rounds * (size - 1) * ring_step_s(cluster.intra_node, payload / size, size, cluster.devices_per_node)
        if operation == "all_reduce":
            inside = _with_switch(cluster, payload, size, inside)
    return np.where(size == 1, 0.0, np.where(several, across, inside))


def _with_switch(cluster: ClusterSpec, payload: Size, size: Size, ring: Seconds) -> Seconds:
    """An all-reduce may be summed by the switch, for groups large enough; the library takes the faster way."""
    link = cluster.intra_node
    if not link.switch_busbw:
        return ring
    summed = 2.0 * (size - 1) / size * payload / _curve(link.switch_busbw, payload)
    return np.where(size > link.switch_min_devices, np.minimum(ring, summed), ring)


def _across_s(cluster: ClusterSpec, rounds: float, payload: Size, place: Placement) -> Seconds:
    """Ring or tree over several nodes, whichever is faster: the narrower of both links carries the bytes; a ring has a
    latency per step, a tree (all-reduce only) one per level between nodes and one per member inside."""
    inter, intra = cluster.inter_node, cluster.intra_node
    rate = inter_node_bytes_per_s(cluster, place)
    inside = np.where(place.per_node > 1, intra.bytes_per_s * intra.efficiency, np.inf)
    wire_s = rounds * (place.size - 1) / place.size * payload / np.minimum(rate, inside)
    steps = rounds * (place.size - 1)
    crossings = rounds * np.minimum(place.nodes, place.size)
    ring_latency = crossings * inter.latency_s + np.maximum(0, steps - crossings) * intra.latency_s
    if rounds < 2:
        return ring_latency + wire_s
    levels = 2.0 * (np.ceil(np.log2(np.maximum(place.nodes, 2))) * inter.latency_s)
    tree_latency = levels + 2.0 * (place.per_node - 1) * intra.latency_s
    return np.minimum(ring_latency + wire_s, tree_latency + wire_s / TREE_BANDWIDTH)


def all_to_all_s(cluster: ClusterSpec, payload: Size, place: Placement) -> Seconds:
    """Every member sends payload / size to each other; what leaves the node is bound by the cards."""
    intra, size = cluster.intra_node, np.maximum(place.size, 1)
    outside = (size - np.minimum(place.per_node, size)) / size
    inside = (size - 1) / size - outside
    rate = inter_node_bytes_per_s(cluster, place) / np.maximum(1, place.per_node)
    across_s = np.where(outside > 0, outside * payload / rate + cluster.inter_node.latency_s, 0.0)
    inside_s = inside * payload / (intra.bytes_per_s * intra.efficiency) + intra.latency_s
    return np.where(size == 1, 0.0, across_s + inside_s)


def point_to_point_s(cluster: ClusterSpec, payload: Size, place: Placement) -> Seconds:
    """One neighbour to the next; all ranks of a node send at the same time, so each has its share of the cards."""
    intra, inter = cluster.intra_node, cluster.inter_node
    inside = intra.latency_s + payload / (intra.bytes_per_s * intra.efficiency)
    across = inter.latency_s + payload / (inter.bytes_per_s * inter.efficiency)
    return np.where(place.size == 1, 0.0, np.where(place.nodes > 1, across, inside))
