"""Machines and engines of published runs: names as printed, into a cluster with its links and an engine profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from phalanx.planner.engine import Engine, engine
from phalanx.spec import clusters
from phalanx.spec.cluster import ClusterSpec, Link

GIB = 2**30

# Sites whose network differs from the vendor's: bytes/s per device, cards per node, share reached, seconds per message.
SITES = {
    "bigscience": (6.25e9, 4, 0.9, 4e-6),  # Jean Zay: four 100 Gb/s Omni-Path links for 8 devices (BLOOM model card)
    "mt_nlg": (25e9, 8, 0.96, 4e-6),  # Selene: one HDR card per device (arXiv 2201.11990)
    "dgxc": (50e9, 8, 0.94, 4e-6),
    "playbook": (50e9, 8, 0.74, 14e-6),  # EFA (hardware.json: 0.74 of the wire; NCCL Simple hop)
}

# The first whose key is part of the printed name, written as "h100-80gb-hbm3".
GPUS = (
    ("h200", "dgx-h200"),
    ("gh200", "dgx-h100"),
    ("gb200", "gb200-nvl72"),
    ("gb300", "gb200-nvl72"),
    ("b300", "dgx-b200"),
    ("b200", "dgx-b200"),
    ("h100-pcie", "h100-pcie"),
    ("h100", "dgx-h100"),
    ("h800", "dgx-h100"),
    ("a100-pcie", "a100-pcie"),
    ("a100-40", "dgx-a100-40"),
    ("a100-sxm4-40", "dgx-a100-40"),
    ("a100-sxm-40", "dgx-a100-40"),
    ("a100", "dgx-a100"),
    ("a800", "dgx-a100"),
    ("v100", "dgx-1-v100"),
    ("mi300x", "mi300x"),
    ("l40s", "l40s-pcie"),
    ("(?:rtx-?)?4090", "rtx4090-workstation"),
    ("(?:rtx-?)?3090", "rtx3090-workstation"),
    ("t4", "t4-pcie"),
    ("910b", "ascend-910b"),
)

# Versions for export: NVLink of so many bytes/s, all else the same (NVIDIA product sheets, from memory).
NARROW = {"h800": 200e9, "a800": 200e9}

NOMINAL = 0.989
"""Usable part of nominal memory where nobody printed it, as in clusters.toml."""

ENGINES = (
    ("bigscience", "bigscience"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("nemo launcher 2023", "nemo-2023"),
    ("nemo", "nemo-2024"),
    ("megatron-core", "megatron-core-2024"),
    ("llm-foundry", "llm-foundry"),
    ("nanotron", "nanotron"),
    ("torchtitan", "torchtitan"),
    ("deepspeed", "deepspeed"),
    ("fsdp", "fsdp"),
    ("megatron", "megatron-2021"),
)

BY_SOURCE = {
    "seqsel_t5": "megatron-2022",
    "mt_nlg_530b": "deepspeed-pipeline",
    "vtrain_single": "vtrain-node",
    "sc21_t2, ZeRO 3 of 2021": "deepspeed-2021",
}

FALLBACK = "generic"


AFTER_AMPERE = re.compile(r"(?<![a-z0-9])(h[128]00|g?b[23]00|gh200|mi3)")


def engine_of(framework: str, source: str, precision: str, raw: Mapping[str, Any]) -> str:
    """Name of the engine profile for a printed framework and what the row says besides; FALLBACK where none is known.
    What a row names dates a Megatron-LM: devices, 8 bits or a context axis that came with Megatron-Core, a cut sequence
    or selective recompute of 2022."""
    low, overlap = framework.lower(), str(raw.get("overlap"))
    name = BY_SOURCE.get(source) or next((name for key, name in ENGINES if key in low), FALLBACK)
    if name == "megatron-2021":
        context = str(raw.get("cp") or 1) not in ("1", "1.0")
        newest = AFTER_AMPERE.search(str(raw.get("gpu")).lower()) or precision == "fp8" or context
        newer = str(raw.get("sequence_parallel")).lower() == "true" or "selective" in str(raw.get("recompute")).lower()
        name = "megatron-core-2024" if newest else "megatron-2022" if newer else name
    if name == "llm-foundry" and "mixed_precision=default" in low:
        return "llm-foundry-amp"
    if name == "megatron-core-2024" and "tp-comm-overlap" in overlap:
        return "megatron-core-tuned"
    return "bigscience-bf16" if name == "bigscience" and precision == "bf16" else name


@cache
def runner(name: str, precision: str) -> Engine:
    """The profile `name`; a precision that its runs never had is kept as FALLBACK keeps it."""
    found = engine(name)
    if precision in found.states:
        return found
    return replace(found, states={**engine(FALLBACK).states, **found.states})


def cluster_of(gpu: str, per_node: int | None, num_devices: int, source: str, inter: str) -> ClusterSpec | None:
    """The machine that a row names: so many devices per node (None: as its maker builds it), the network of a known
    site or as printed ("800 Gbps per node"); None where no figures for the device are known."""
    key = re.sub(r"[\s_]+", "-", gpu.lower())
    name = next((name for part, name in GPUS if re.search(rf"(?<![a-z0-9]){part}", key)), None)
    if name is None:
        return None
    cluster = _named(name)
    if per_node is None or cluster.devices_per_node > 16:  # one NVLink domain: what a rank reaches without a card
        per_node = cluster.devices_per_node
    cluster = _with_memory(_of_nodes(cluster, per_node), key)
    cluster = replace(cluster, num_nodes=-(-num_devices // per_node))
    narrow = next((rate for part, rate in NARROW.items() if part in key), None)
    if narrow:
        link = replace(cluster.intra_node, bytes_per_s=narrow, busbw=(), switch_busbw=())
        cluster = replace(cluster, intra_node=link)
    site = next((value for part, value in SITES.items() if source.startswith(part)), None)
    printed = re.search(r"([\d.]+) *Gbps per node", inter)
    if site:
        rate, cards, efficiency, latency_s = site
        link = replace(cluster.inter_node, bytes_per_s=rate, efficiency=efficiency, latency_s=latency_s)
        return replace(cluster, inter_node=link, nics_per_node=cards)
    if printed and float(printed.group(1)) > 0:
        rate = float(printed.group(1)) * 1e9 / 8 / per_node
        return replace(cluster, inter_node=replace(cluster.inter_node, bytes_per_s=rate))
    return cluster


def _of_nodes(cluster: ClusterSpec, per_node: int) -> ClusterSpec:
    """With nodes of another size: a step of the ring, measured over all devices of a node, costs what it cost."""
    scale = per_node / cluster.devices_per_node
    busbw = tuple((max(1, round(size * scale)), rate) for size, rate in cluster.intra_node.busbw)
    link: Link = replace(cluster.intra_node, busbw=busbw)
    cards = min(cluster.nics_per_node, per_node)
    return replace(cluster, devices_per_node=per_node, intra_node=link, nics_per_node=cards)


def _with_memory(cluster: ClusterSpec, key: str) -> ClusterSpec:
    """With the memory that the device's name tells, as in "v100-16g". 96 GB of H100 are HBM2e on 500 W
    (pytorch/torchtitan, llama3_h100_202412)."""
    printed = re.search(r"(?<![0-9])(\d{2,3})-?gi?b?(?![a-z0-9])", key)
    usable = int(printed.group(1)) * NOMINAL * GIB if printed else cluster.device.memory_bytes
    if abs(usable / cluster.device.memory_bytes - 1) < 0.05:
        return cluster
    rate = 2.4e12 if printed and "h100-96" in key else cluster.device.memory_bytes_per_s
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(usable), memory_bytes_per_s=rate))


@cache
def _named(name: str) -> ClusterSpec:
    return clusters.named(name)
