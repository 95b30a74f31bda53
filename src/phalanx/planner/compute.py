"""Seconds of operations on one device: matrix products by shape, attention kernels, memory-bound passes, the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from phalanx.errors import SpecError
from phalanx.plan.operations import Operation
from phalanx.planner.engine import Engine
from phalanx.spec.cluster import Device

Seconds: TypeAlias = Any

# Smaller tiles fill the last wave better but read more per FLOP: (share of the tile's rows, of its columns, speed).
# Speeds after CUTLASS's own profiler tables; a library picks the best of them per shape.
SMALLER_TILES = ((1.0, 1.0, 1.0), (1.0, 0.5, 0.95), (0.5, 0.5, 0.8))

OVERLAP_TAX = 0.13

EIGHT_BIT = 0.95
"""Matrix products in 8 bits reach this share of what 16-bit ones reach of their peak, in training. Their best shapes on
H100 reach 0.88 (0.709 and 0.803 of peak: stas00/ml-engineering accelerator tables, 744d01e), but power holds 16-bit
products further below their best."""

ALIGNMENT = 8
"""Elements: 16 bytes of 16-bit numbers (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core
Requirements")."""

UNALIGNED = 0.38
"""What a single product keeps of its speed on other dimensions. Seen where a vocabulary of 50,257 was not padded:
vTrain's runs with one tensor rank (arXiv 2312.12391), whose heads take more than twice as long as padded ones would.
Batched products run on vector units: BLOOM's first trials, with heads of 150, lost a quarter of a step to them."""

# fp16 runs at bf16's rate on every device that has both.
ALIASES = {"fp16": "bf16"}


def peak_flops(device: Device, precision: str) -> float:
    """Dense peak of `device` at `precision`; raises SpecError where it is not stated."""
    for name in (precision, ALIASES.get(precision, precision)):
        if name in device.flops_per_s:
            return device.flops_per_s[name]
    raise SpecError(
        f"device {device.name} states no FLOP/s for precision {precision}",
        instead=f"one of {', '.join(device.flops_per_s)}, or add flops_per_s.{precision} to the cluster",
    )


def wave_quantisation(operation: Operation, device: Device) -> Any:
    """FLOPs really spent / FLOPs asked for, at least 1: tiles that overhang, and the last wave that is not full.

    A product's tiles run on `num_cores` cores in waves (NVIDIA, Matrix Multiplication Background User's Guide, "Wave
    Quantization"). Best over tile sizes, each by its speed.
    """
    rows, columns = device.matmul_tile
    if rows * columns == 1:
        return 1.0
    best: Any = np.inf
    for row_share, column_share, speed in SMALLER_TILES:
        tile_m, tile_n = int(rows * row_share), int(columns * column_share)
        for a, b in {(tile_m, tile_n), (tile_n, tile_m)}:
            tiles = -(-operation.m // a) * -(-operation.n // b) * operation.batch
            per_core = -(-tiles // device.num_cores) * device.num_cores * (a * b)
            best = np.minimum(best, per_core / (operation.batch * operation.m * operation.n * speed))
    return best


def _aligned(operation: Operation) -> Any:
    """Whether the inner dimensions are multiples of ALIGNMENT, as matrix units need for their full speed."""
    return (operation.n % ALIGNMENT == 0) & (operation.k % ALIGNMENT == 0)


def operation_s(
    operation: Operation, device: Device, peak: float, engine: Engine, *, backward: bool = False
) -> Seconds:
    """Seconds of one operation: the slower of arithmetic and memory, and at least a kernel's start (roofline)."""
    memory_s = operation.bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    if operation.kind == "stream":
        stream_s = operation.bytes / (device.memory_bytes_per_s * device.stream_efficiency)
        return operation.count * np.maximum(stream_s, device.kernel_s)
    if operation.kind == "elementwise":
        return operation.count * np.maximum(memory_s * engine.elementwise_passes, device.kernel_s)
    if operation.kind == "attention":
        kernel = engine.attention_factor * (device.portable_attention if engine.portable_attention else 1.0)
        rate = peak * device.attention_efficiency[backward] * kernel * engine.matmul_factor
        return np.maximum(operation.flops / rate, memory_s) + device.kernel_s
    depth = operation.k / (operation.k + device.matmul_half_depth)
    vector = min(peak, device.flops_per_s.get("fp32", peak))
    odd = np.where(np.asarray(operation.batch) == 1, peak * UNALIGNED, vector)
    usable = np.where(_aligned(operation), peak, odd)
    rate = usable * device.matmul_efficiency * engine.matmul_factor * depth
    arithmetic_s = operation.flops * wave_quantisation(operation, device) / rate  # of all calls
    return np.maximum(arithmetic_s, operation.count * memory_s) + operation.count * device.kernel_s


def total_s(
    operations: Iterable[Operation], device: Device, precision: str, engine: Engine, *, backward: bool = False
) -> Seconds:
    """Seconds of operations one after another."""
    peak = peak_flops(device, precision) * (EIGHT_BIT if precision == "fp8" else 1.0)
    core = peak_flops(device, "bf16") if precision == "fp8" else peak
    seconds: Seconds = 0.0
    for operation in operations:
        rate = core if operation.kind == "attention" else peak
        seconds = seconds + operation_s(operation, device, rate, engine, backward=backward)
    return seconds


def overlap_tax(device: Device) -> float:
    """What a message costs the compute that it runs beside, as a share of its own time: it takes cores and bandwidth
    (1.13 × in Galvatron's sample profile; docs/equations.md, 25). A CPU moves its bytes itself, so hides nothing."""
    return 1.0 if device.matmul_tile == (1, 1) else OVERLAP_TAX


def optimizer_s(num_parameters: Any, engine: Engine, device: Device) -> Seconds:
    """The optimizer over `num_parameters` elements: bytes over bandwidth."""
    return num_parameters * engine.optimizer_bytes / (device.memory_bytes_per_s * device.stream_efficiency)
