"""ClusterSpec: the machine. Every number carries its source, so that a prediction can say what it rests on.

Figures are what a program meets, not what a data sheet hopes: next to each peak stands the fraction of it that good
kernels reach, so that a measurement replaces one field and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from phalanx.spec.schema import Count, Fraction, NotNegative, Positive, Range, Whole

Memory = Annotated[int, Range(at_least=2**20)]  # less, or slower than this, is a forgotten unit
Speed = Annotated[float, Range(at_least=1e6)]
Nodes = Annotated[int, Range(at_least=1, at_most=2**20)]  # more than there are: whoever means it would wait for days
PerNode = Annotated[int, Range(at_least=1, at_most=2**16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU process).

    `flops_per_s` gives the dense peak by precision ("bf16", "fp32", …); `memory_bytes` what a program can use,
    of which `context_bytes` go to driver and libraries in each process; `memory_bytes_per_s` the bandwidth of its main
    memory.

    What kernels reach of that: `matmul_efficiency` is the best large matrix product as a fraction of the peak, falling
    as k / (k + `matmul_half_depth`) for short inner dimensions; a product is cut into tiles of `matmul_tile` (rows,
    columns) that `num_cores` cores work on in waves, so a part-filled last wave costs a whole one (a tile of (1, 1)
    means no such steps). `attention_efficiency` is that of the best fused attention kernel, forward and backward, as a
    fraction of the peak, of which one that was not written for this device reaches the `portable_attention` part;
    `memory_efficiency` that of element-wise kernels as a fraction of the bandwidth,
    `stream_efficiency` that of plain copies and sums of long buffers; `kernel_s` the least time that a kernel takes.
    """

    name: str
    memory_bytes: Memory
    memory_bytes_per_s: Speed
    flops_per_s: Mapping[str, Speed]
    context_bytes: Whole = 0
    num_cores: Count = 1
    matmul_tile: tuple[Count, Count] = (1, 1)
    matmul_efficiency: Fraction = 0.8
    matmul_half_depth: Whole = 0
    attention_efficiency: tuple[Fraction, Fraction] = (0.5, 0.4)
    portable_attention: Fraction = 1.0
    memory_efficiency: Fraction = 0.8
    stream_efficiency: Fraction = 0.87
    kernel_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between devices: `latency_s` per message, `bytes_per_s` in one direction and per device.

    Collectives reach `efficiency` of it on large messages. `busbw` overrides that where it was measured: (bytes,
    bytes/s) pairs, the bus bandwidth (as nccl-tests defines it) of a ring all-reduce over all devices of one node.
    Where the switch itself can add (NVLink SHARP), `switch_busbw` is the same for an all-reduce over more than
    `switch_min_devices` devices; gathers and scatters stay with the ring. On a `mesh` without a switch, a group of n
    devices gets (n - 1) / (devices - 1) of the bandwidth.
    """

    name: str
    latency_s: NotNegative
    bytes_per_s: Speed
    efficiency: Fraction = 1.0
    busbw: tuple[tuple[Count, Positive], ...] = ()
    switch_busbw: tuple[tuple[Count, Positive], ...] = ()
    switch_min_devices: Count = 4
    mesh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`num_nodes` nodes of `devices_per_node` devices, one link inside a node and one between nodes.

    The node's `nics_per_node` network cards (0: one per device) carry `inter_node.bytes_per_s` × `devices_per_node`
    together; a group with one member per node uses one card. Beyond `nodes_per_switch` nodes (0: all hang on one
    fabric) the fabric is `oversubscription` times narrower. `sources` maps a field's dotted name to where its figure
    comes from.
    """

    name: str
    num_nodes: Nodes
    devices_per_node: PerNode
    device: Device
    intra_node: Link
    inter_node: Link
    nics_per_node: Whole = 0
    nodes_per_switch: Whole = 0
    oversubscription: Annotated[float, Range(at_least=1)] = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    @property
    def num_devices(self) -> int:
        """All devices of all nodes."""
        return self.num_nodes * self.devices_per_node
