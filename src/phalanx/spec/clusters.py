"""Clusters and devices by name, and this machine.

A cluster is written as a table of ClusterSpec's fields (clusters.toml, [cluster] of a run file, or a file of its own),
with `device` either a table of Device's fields or the name of a known device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from phalanx.errors import SpecError
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.document import Document, Key, Place, parse, read
from phalanx.spec.schema import Checker, checked, suggest
from phalanx.units import parse_flops_per_s

LOCAL = "local"
"""The cluster that this machine is."""

MOST_LOCAL = 4096
"""Processes that one machine can be thought to hold."""

PARTS = ("devices_per_node", "device", "intra_node")
"""What a cluster that is described by its own numbers must give."""


@functools.cache
def _known() -> dict[str, dict[str, Any]]:
    return parse((resources.files("phalanx.spec") / "clusters.toml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Names of all clusters that are known by name, this machine among them."""
    return (*_known()["clusters"], LOCAL)


def device_names() -> tuple[str, ...]:
    """Names of all devices that are known by name."""
    return tuple(_known()["devices"])


def named(name: str, *, num_nodes: int = 1) -> ClusterSpec:
    """`num_nodes` nodes of the cluster called `name`. Raises SpecError, with the nearest known name, for another."""
    if name not in names():
        raise SpecError(f'unknown cluster "{name}"', instead=suggest(name, names()))
    place = Place(text=f"clusters.toml: {name}", folder=Path())
    return checked(Document(table={**table(name), "num_nodes": num_nodes}, places={(): place}), build)


def table(name: str, num_devices: int | None = None) -> dict[str, Any]:
    """The keys of the known cluster `name`; its device is spelt out. `num_devices` is for this machine alone."""
    if name == LOCAL:
        return _local(num_devices or num_cores())
    return with_device({"name": name, "num_nodes": 1, **_known()["clusters"][name]})


def with_device(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with a device that is given by name replaced by its figures and their sources."""
    device = table.get("device")
    if not isinstance(device, str) or device not in _known()["devices"]:
        return dict(table)
    figures = {"name": device, **_known()["devices"][device]}
    sources = {f"device.{name}": source for name, source in figures.pop("sources").items()}
    return {**table, "device": figures, "sources": {**sources, **table.get("sources", {})}}


def with_base(run: Document, num_devices: int, asked_at: Key) -> Document:
    """`run` with what its [cluster] names (a known cluster or a file; else this machine with `num_devices` devices,
    unless it describes another) laid under the keys given there. Raises SpecError for one that is not found, and for
    more devices than this machine can be thought to have, which the key `asked_at` wants."""
    given = run.table.get("cluster", {})
    name, file = given.get("name", LOCAL if _is_local(given) else None), given.get("file")
    known = name in names()
    if file:
        if known:
            what = f'cluster.name = "{name}" and cluster.file = "{file}" both say which cluster'
            raise SpecError(what, where=run.where(("cluster", "file")), instead="leave one of them out")
        base = read(run.path(("cluster", "file"), file), asked_at=run.where(("cluster", "file")))
    elif name == LOCAL and num_devices > MOST_LOCAL:
        what = f"{num_devices:,} processes, which this machine cannot hold"
        raise SpecError(what, where=run.where(asked_at), instead="smaller axes, or a [cluster] of that size")
    elif known:
        base = Document(table=table(name, num_devices), places={})
    elif name and not all(part in given for part in PARTS):
        instead = f"{suggest(name, names())}; or give {', '.join(PARTS)}, or file"
        raise SpecError(f'unknown cluster "{name}"', where=run.where(("cluster", "name")), instead=instead)
    else:
        base = Document(table={}, places={})
    below = with_device(base.table)
    if isinstance(given.get("device"), str):
        below.pop("device", None)  # another device: nothing of the base's stays
    upper = {**run.table, "cluster": with_device(given)}
    return Document(table=upper, places=run.places).over(Document(table=below, places=base.places).below("cluster"))


def _is_local(given: Mapping[str, Any]) -> bool:
    """Whether a [cluster] without a name means this machine: it gives at most the number of devices, and single figures
    of one."""
    device = given.get("device", {})
    return set(given) <= {"devices_per_node", "device"} and isinstance(device, Mapping) and "flops_per_s" not in device


def build(check: Checker, table: Mapping[str, Any], key: Key) -> ClusterSpec | None:
    """The ClusterSpec that `table`, which stands at `key`, describes; None if something in it is wrong."""
    device = table.get("device")
    if isinstance(device, str):
        check.problem((*key, "device"), f'unknown device "{device}"', suggest(device, device_names()))
        return None
    completed = _complete(table)
    alone = completed["num_nodes"] == 1 and "inter_node" not in completed
    if alone:
        completed["inter_node"] = {"name": "none", "latency_s": 0, "bytes_per_s": "1 GB/s"}
    cluster = check.build(ClusterSpec, completed, key)
    return replace(cluster, inter_node=cluster.intra_node) if cluster and alone else cluster


def _complete(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with names for what has none, and one node unless it says more."""
    completed: dict[str, Any] = {"name": "custom", "num_nodes": 1, **table}
    completed.pop("file", None)
    for part, name in (("device", "device"), ("intra_node", "inside a node"), ("inter_node", "between nodes")):
        if isinstance(completed.get(part), Mapping):
            completed[part] = {"name": name, **completed[part]}
    return completed


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Main memory of this machine, or what its control group leaves of it."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory  # no control groups here
    return min(memory, int(limit)) if limit.isdigit() else memory


def _local(num_devices: int) -> dict[str, Any]:
    """This machine as a node of `num_devices` equal CPU processes, which share its memory and cores; speeds as of the
    known laptop, until they are measured."""
    base = table("laptop")
    flops = {precision: parse_flops_per_s(text) for precision, text in base["device"]["flops_per_s"].items()}
    share = min(1.0, num_cores() / num_devices)
    device = base["device"] | {
        "memory_bytes": memory_bytes() // num_devices,
        "flops_per_s": {precision: speed * share for precision, speed in flops.items()},
    }
    sources = base["sources"] | {"device.memory_bytes": f"this machine's memory, shared by {num_devices} processes"}
    return base | {"name": LOCAL, "devices_per_node": num_devices, "device": device, "sources": sources}
