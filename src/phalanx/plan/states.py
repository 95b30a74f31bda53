"""States: the bytes of parameters, gradients and optimizer state that lie on one rank between steps."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.plan.reduction import kept_elements
from phalanx.plan.shards import rank_buffers
from phalanx.plan.stage_traffic import ACCUMULATION_BYTES, COMPUTE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on one rank, padding included. `gradients`: also what a reduction keeps until the next one. `optimizer`:
    both moments, and master weights where compute is narrower."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(plan: Plan, coord: Coord) -> StateBytes:
    """What the rank at `coord` holds. What ZeRO cuts is the shard of each part, the rest is whole (ZeRO, arXiv
    1910.02054, section 5): 1 cuts the optimizer's, 2 gradients as well, 3 parameters as well."""
    layout, narrow, wide = plan.layout, COMPUTE_BYTES[plan.job.precision], ACCUMULATION_BYTES[plan.job.precision]
    buffers = rank_buffers(plan.model, layout, coord, plan.job.seq_len)
    whole = sum(buffer.num_elements for buffer in buffers)
    shard = whole // layout.num_shards
    kept = sum(kept_elements(layout, buffer) for buffer in buffers) if layout.data > 1 else 0
    return StateBytes(
        parameters=(shard if layout.zero >= 3 else whole) * narrow,
        gradients=((shard if layout.zero >= 2 else whole) + kept) * wide,
        optimizer=(shard if layout.zero >= 1 else whole) * (2 * wide + (wide if narrow < wide else 0)),
    )
