"""Measure what one device reaches: matrix products by size, memory, attention, the cost of starting a kernel.

All ranks of a machine measure at the same time, as they will compute: cores share caches and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.trainer import kernels
from phalanx.trainer.chain import chain
from phalanx.trainer.flat import Weight, accumulation_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

_BUDGET_S = 0.25
"""Seconds given to one figure; the best of its rounds counts, as on a machine without other load."""


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one `call`, the best of the rounds that fit into _BUDGET_S."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    best, spent, count = float("inf"), 0.0, 1
    while spent < _BUDGET_S:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        took = time.perf_counter() - begin
        best, spent = min(best, took / count), spent + took
        if took < _BUDGET_S / 8:
            count *= 2
    return best


EAGER_PASSES = 1.8
"""How often our kernels pass over memory, which the planner's profile of this trainer multiplies by: a device has what
fused ones would reach."""


def device_figures(device: torch.device) -> dict[str, Any]:
    """Fields of `spec.cluster.Device` for `device`, measured; `memory_bytes` is what the caller knows better on CPU."""
    large = device.type == "cuda"
    compute = "bf16" if large else "fp32"
    peaks, half_depth = {}, 0.0
    for name, dtype in DTYPES.items():
        rate, half = products(dtype, device, side=4096 if large else 512)
        peaks[name] = rate
        half_depth = half if name == compute else half_depth
    stream = stream_bytes_per_s(device, num_bytes=2**30 if large else 2**26)
    elementwise = elementwise_bytes_per_s(DTYPES[compute], device, rows=16384 if large else 1024)
    # Activations may lie in a cache, where a kernel is faster than memory: the faster of both is the bandwidth.
    elementwise *= EAGER_PASSES
    bandwidth = max(stream, elementwise)
    forward, backward = attention_flops_per_s(DTYPES[compute], device, large=large)
    figures: dict[str, Any] = {
        "memory_bytes_per_s": bandwidth,
        "flops_per_s": peaks,
        "matmul_efficiency": 1.0,
        "matmul_half_depth": round(half_depth),
        "attention_efficiency": [min(1.0, forward / peaks[compute]), min(1.0, backward / peaks[compute])],
        "memory_efficiency": elementwise / bandwidth,
        "stream_efficiency": stream / bandwidth,
        "kernel_s": kernel_s(device),
    }
    if large:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        figures |= {
            "name": properties.name,
            "memory_bytes": total,
            "context_bytes": total - free - torch.cuda.memory_reserved(device),
            "num_cores": properties.multi_processor_count,
            "matmul_tile": [128, 256],
        }
    return figures


def products(dtype: torch.dtype, device: torch.device, side: int) -> tuple[float, float]:
    """FLOP/s that matrix products approach as they grow, and the inner dimension that halves it."""
    rates = {}
    for depth in (side // 8, side // 4, side // 2, side, 2 * side):
        left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((side, depth), (depth, side)))
        out = torch.empty(side, side, dtype=dtype, device=device)
        took = seconds(lambda: torch.mm(left, right, out=out), device)  # noqa: B023 (called at once)
        rates[depth] = 2.0 * side * side * depth / took
    return peak_and_half_depth(rates)


def peak_and_half_depth(rates: Mapping[int, float]) -> tuple[float, float]:
    """Of FLOP/s by inner dimension k, the line through 1 / rate over 1 / k: rate = peak × k / (k + half), as
    `planner.compute` has it."""
    points = [(1.0 / depth, 1.0 / rate) for depth, rate in rates.items()]
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    at_zero = mean_y - slope * mean_x
    if slope <= 0.0 or at_zero <= 0.0:  # no such fall: short products are as fast here
        return max(rates.values()), 0.0
    return 1.0 / at_zero, slope / at_zero


def stream_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bandwidth of adding one long buffer to another: two reads and a write."""
    total, term = (torch.zeros(num_bytes // 4, device=device) for _ in range(2))
    return 3.0 * num_bytes / seconds(lambda: total.add_(term), device)


def elementwise_bytes_per_s(dtype: torch.dtype, device: torch.device, rows: int) -> float:
    """Bandwidth of a norm and an activation, forward and backward, as `plan.operations` counts their bytes."""
    width, element = 1024, torch.empty((), dtype=dtype).element_size()
    inputs = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    gates = torch.randn(rows, 2 * width, device=device).to(dtype).requires_grad_()
    grad = torch.randn(rows, width, device=device).to(dtype)
    gain = torch.ones(width, dtype=dtype, device=device)
    weight = Weight(gain, torch.zeros(width, dtype=accumulation_dtype(dtype), device=device))

    def norm() -> None:
        chain([kernels.RMSNorm(weight, 1e-5)], inputs).backward(grad)
        inputs.grad = None

    def activation() -> None:
        chain([kernels.SwiGLU()], gates).backward(grad)
        gates.grad = None

    moved = rows * width * element * (6 + 8)
    return moved / (seconds(norm, device) + seconds(activation, device))


def attention_flops_per_s(dtype: torch.dtype, device: torch.device, *, large: bool) -> tuple[float, float]:
    """FLOP/s of causal attention forward and backward: 2 and 5 products over half of the scores."""
    sequences, heads, positions, width = (8, 16, 2048, 128) if large else (2, 8, 512, 64)
    q, k, v = (
        torch.randn(sequences, heads, positions, width, device=device).to(dtype).requires_grad_() for _ in range(3)
    )
    grad = torch.randn(sequences, heads, positions, width, device=device).to(dtype)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().backward(grad)
        q.grad = k.grad = v.grad = None

    product = 2.0 * sequences * heads * positions * positions / 2 * width
    forward_s, both_s = seconds(forward, device), seconds(both, device)
    return 2.0 * product / forward_s, 5.0 * product / max(both_s - forward_s, 1e-9)


def kernel_s(device: torch.device) -> float:
    """Seconds that a kernel takes at least as a block starts it: half of an activation's forward and backward on next
    to nothing."""
    gates = torch.randn(8, 32, device=device, requires_grad=True)
    grad = torch.randn(8, 16, device=device)

    def both() -> None:
        chain([kernels.SwiGLU()], gates).backward(grad)
        gates.grad = None

    return seconds(both, device) / 2
