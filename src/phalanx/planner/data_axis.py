"""The data axis and what ends a step: gradients reduced, parameters gathered, the optimizer.

Arrays, one entry per layout and pipeline coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.plan.reduction import NARROW
from phalanx.planner import compute, network
from phalanx.planner.candidates import Array, Candidates
from phalanx.planner.engine import Engine
from phalanx.spec.cluster import ClusterSpec

if TYPE_CHECKING:
    from phalanx.planner.estimate import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Seconds per step besides the pipeline: messages of the data axis, what of them nothing hides, the optimizer."""

    data_s: Array
    exposed_s: Array
    optimizer_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """ZeRO 3, per layer and micro-batch: seconds of gathering before forward, and of gathering and scattering around
    backward; zero below stage 3. `tax` as in compute.overlap_tax."""

    forward_s: Array
    backward_s: Array
    tax: float


def gathers(
    cluster: ClusterSpec, engine: Engine, precision: str, layouts: Candidates, place: network.Placement, layer: Any
) -> Gathers:
    """`layer`: elements of one layer on this rank. Layers are gathered whole, one ahead (ZeRO, arXiv 1910.02054)."""
    parameter = min(2.0, engine.states_for(precision).parameter)
    forward = network.collective_s(cluster, "all_gather", layer * parameter, place)
    scatter = network.collective_s(cluster, "reduce_scatter", layer * engine.reduce_bytes, place)
    third = layouts.zero >= 3
    return Gathers(
        forward_s=np.where(third, forward, 0.0),
        backward_s=np.where(third, forward + scatter, 0.0),
        tax=compute.overlap_tax(cluster.device) if layouts.overlap else 1.0,
    )


def tail(
    cluster: ClusterSpec,
    engine: Engine,
    precision: str,
    footprint: Footprint,
    places: dict[str, network.Placement],
    num_micro_batches: Array,
    last_backward_s: Array,
    first_forward_s: Array,
) -> Tail:
    """`places` as network.placements has them; `last_backward_s`, `first_forward_s` [layouts, coordinates]: what the
    reduction, and the gather of new parameters, may hide behind."""
    layouts, held, num_layers = footprint.layouts, footprint.held, footprint.layers.sum(0)
    states, zero = engine.states_for(precision), layouts.zero[:, None]
    own = held.elements - held.experts
    reduced = own * engine.reduce_bytes * _part_sent(layouts, engine)

    def split(rows: Array, operation: str, payload: Array, pieces: Any, group: str = "shards") -> Array:
        """Seconds of `pieces` messages that make up `payload`, under the layouts at `rows`; 0 under others."""
        seconds = np.zeros(own.shape)
        if rows.any():
            size, per_node = (each[rows, None].astype(float) for each in (places[group].size, places[group].per_node))
            place = network.Placement(size=size, per_node=per_node)
            count = np.broadcast_to(pieces, own.shape)[rows]
            seconds[rows] = count * network.collective_s(cluster, operation, payload[rows] / count, place)
        return seconds

    buckets = np.maximum(1, np.ceil(reduced / layouts.bucket_bytes))
    sharded_pieces = np.maximum(1, num_layers) * engine.shard_messages if engine.shard_messages else buckets
    cut, copied = (layouts.zero == 1) | (layouts.zero == 2), (layouts.zero > 0) & (layouts.num_shards < layouts.data)
    rounds = np.where(zero == 2, num_micro_batches[:, None], 1.0)
    reduce_s = split(layouts.zero == 0, "all_reduce", reduced, buckets)
    reduce_s = reduce_s + rounds * split(cut, "reduce_scatter", reduced, sharded_pieces)
    reduce_s = reduce_s + split(
        copied, "all_reduce", reduced / layouts.num_shards[:, None].astype(float), buckets, "replicas"
    )
    gather_s = split(cut, "all_gather", own * min(states.parameter, 4.0), sharded_pieces)
    if held.experts.any():
        reduce_s = reduce_s + _experts_s(cluster, engine, footprint, rounds)
    overlap = np.where(zero == 0, engine.data_overlap, engine.scatter_overlap)
    window = layouts.overlap * overlap * last_backward_s * rounds
    tax = compute.overlap_tax(cluster.device)
    exposed = np.maximum(tax * reduce_s, reduce_s - window)
    exposed = exposed + np.maximum(tax * gather_s, gather_s - layouts.overlap * engine.gather_overlap * first_forward_s)
    exposed = exposed + _tied_s(cluster, engine, footprint, places["pipeline"])
    optimizer = compute.optimizer_s(np.where(zero >= 1, held.shard, held.elements), engine, cluster.device)
    return Tail(data_s=reduce_s + gather_s, exposed_s=exposed, optimizer_s=optimizer)


def _part_sent(layouts: Candidates, engine: Engine) -> Array:
    """Bytes that cross the data axis per byte of gradients, priced as a sum of that size. Top-k gathers two numbers per
    element and rank; of PowerSGD, whose factors' sizes are Traffic's matter, no saving is claimed."""
    part = np.ones((len(layouts), 1))
    if layouts.reduce in NARROW:
        return part * min(1.0, 2.0 / engine.reduce_bytes)
    return part * layouts.reduce_fraction * layouts.data[:, None] if layouts.reduce == "top-k" else part


def _experts_s(cluster: ClusterSpec, engine: Engine, footprint: Footprint, rounds: Array) -> Array:
    """Seconds in which the copies of each expert add their gradients; under ZeRO 1 and 2 each keeps its part and gives
    out its parameters, as many messages as one sum."""
    layouts, held = footprint.layouts, footprint.held
    copies = layouts.data // held.spread * layouts.context
    place = network.placement(cluster, copies, layouts.stride("data") // layouts.context * held.spread)
    place = network.Placement(size=place.size[:, None], per_node=place.per_node[:, None])
    seconds = network.collective_s(cluster, "all_reduce", held.experts * engine.reduce_bytes, place)
    return np.asarray(seconds * np.where(layouts.zero[:, None] == 2, (rounds + 1) / 2, 1))


def tied_parts(layouts: Candidates, engine: Engine) -> Array:
    """Into how many parts a tied embedding's gradient is cut before both its holders add it up."""
    return layouts.num_shards * layouts.context if engine.tied_shards else np.ones(len(layouts), dtype=int)


def _tied_s(cluster: ClusterSpec, engine: Engine, footprint: Footprint, spread: network.Placement) -> Array:
    """Seconds in which both holders of a tied embedding add their gradients, on the coordinates that hold a copy: of
    the whole table, or of the shards that they update. Nothing hides it: it follows the reduction."""
    layouts, tied = footprint.layouts, footprint.tied
    if not tied.any():
        return np.zeros(tied.shape)
    size = tied * engine.reduce_bytes / tied_parts(layouts, engine)[:, None]
    pair = network.Placement(size=2, per_node=np.where(spread.nodes > 1, 1, 2)[:, None])
    return np.where(tied > 0, network.collective_s(cluster, "all_reduce", size, pair), 0.0)
