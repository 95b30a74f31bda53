"""Reduction: what crosses the data axis in place of gradients, so that less does.

    fp32       the gradients as they were accumulated (float64 in an fp64 run)
    bf16       rounded to bf16 for the way
    fp16       rounded to fp16, scaled by the power of two under which no sum can overflow
    powersgd   two thin factors of each matrix (Vogels et al. 2019); vectors as they are
    top-k      of each buffer, the elements of largest magnitude

The last two send a part only. What was not sent stays on the rank as its error and is added to the next gradients, so
that nothing is lost (error feedback; Karimireddy et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.plan.layout import Layout
from phalanx.plan.shards import Buffer, Leaf

NARROW = ("bf16", "fp16")
WITH_ERRORS = ("powersgd", "top-k")


def matrices(buffer: Buffer, rank: int) -> Iterator[Leaf]:
    """The leaves that PowerSGD sends as factors [rows, rank] and [columns, rank]: where these are smaller."""
    for leaf in buffer.leaves:
        if len(leaf.shape) == 2 and rank * sum(leaf.shape) < math.prod(leaf.shape):
            yield leaf


def factor_elements(buffer: Buffer, rank: int) -> tuple[int, int]:
    """What PowerSGD sends of a buffer: elements of all left factors and of what is not a matrix; of the right ones."""
    chosen = list(matrices(buffer, rank))
    plain = sum(math.prod(leaf.shape) for leaf in buffer.leaves) - sum(math.prod(leaf.shape) for leaf in chosen)
    return plain + rank * sum(leaf.shape[0] for leaf in chosen), rank * sum(leaf.shape[1] for leaf in chosen)


def num_largest(buffer: Buffer, fraction: float) -> int:
    """Elements of a buffer that top-k sends: `fraction` of all, rounded up."""
    return min(buffer.num_elements, math.ceil(fraction * buffer.num_elements))


def kept_elements(layout: Layout, buffer: Buffer) -> int:
    """Elements that a rank keeps of a buffer from one reduction to the next: errors, and PowerSGD's right factors."""
    if layout.reduce == "powersgd":
        return (
            sum(math.prod(leaf.shape) for leaf in matrices(buffer, layout.reduce_rank))
            + (factor_elements(buffer, layout.reduce_rank)[1])
        )
    return buffer.num_elements if layout.reduce == "top-k" else 0
