"""Certainty: the range in which four of five measured step times lay for runs of one kind, from published runs.

Kinds differ in what a prediction rests on: one node, several nodes, a pipeline, parameters cut over the data axis. The
figures stand in certainty.toml; `benchmarks/planner_accuracy.py` prints them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.clusters import LOCAL

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """Measured step times lay between `low` and `high` times the predicted one, as `because` says."""

    low: float
    high: float
    because: str


def kind(layout: Layout, cluster: ClusterSpec) -> str:
    """What a prediction for `layout` rests on most."""
    if layout.zero == 3:
        return "ZeRO 3"
    if layout.pipeline > 1:
        return "pipeline"
    return "one node" if layout.num_ranks <= cluster.devices_per_node else "several nodes"


def likely(layout: Layout, cluster: ClusterSpec, engine_name: str) -> Likely:
    """The range for one layout: of runs of its kind by that engine, or by all where that has too few; wider for a
    device of which no runs are published."""
    table, name = _table(), kind(layout, cluster)
    own = table["engine"].get(engine_name, {}).get(name)
    found = own or table["all"][name]
    low, high = found["range"]
    because = f"as of {found['num_rows']} published runs of this kind ({name}, {engine_name if own else 'all engines'})"
    if cluster.device.name not in table["devices"]:
        other = table["other_device"]["range"]
        low, high = min(low, other[0]), max(high, other[1])
        because += f", and wider: no run on {cluster.device.name} is published"
    if cluster.name == LOCAL:
        because += "; speeds are a known laptop's, maybe far off, until phalanx measure takes this machine's"
    return Likely(low=low, high=high, because=because)


def words(layout: Layout, cluster: ClusterSpec, engine_name: str) -> str:
    """The range and where it comes from, as text."""
    found = likely(layout, cluster, engine_name)
    return f"80% of such steps should take {found.low:.2f} to {found.high:.2f} of the predicted time: {found.because}"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("phalanx.planner").joinpath("certainty.toml").read_text())
