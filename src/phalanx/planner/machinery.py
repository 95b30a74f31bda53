"""Machinery: how much a layout needs beyond data parallelism. Where predicted times cannot tell layouts apart, the one
that needs least goes first: it is easier to understand, to debug and to change."""

from __future__ import annotations

import numpy as np

from phalanx.planner.candidates import RECOMPUTES, Array, Candidates

NEAR = 0.02
"""Layouts that take at most this share longer than the fastest are as good as it: predictions err by several times as
much between layouts of one model."""

PLAIN = ("1f1b", "gpipe")
"""Schedules in which each pipeline rank holds one stage and works off whole backwards."""


def machinery(layouts: Candidates) -> Array:
    """How many of these each layout has: a tensor, context or pipeline axis; a schedule that is not plain; gradients or
    parameters that are cut (ZeRO 2 and 3), and that within groups; recompute, and that of some layers only; experts
    within groups; an unusual axis outermost; products cut into chunks. ZeRO 1, sequence parallelism and the size of
    micro-batches count nothing."""
    plain = [number for number, name in enumerate(layouts.schedules) if name in PLAIN]
    parts = (
        layouts.tensor > 1,
        layouts.context > 1,
        layouts.pipeline > 1,
        (layouts.pipeline > 1) & ~(layouts.schedule[:, None] == plain).any(1),
        layouts.zero >= 2,
        layouts.zero_group > 0,
        layouts.recompute != RECOMPUTES.index("none"),
        layouts.recompute_every > 1,
        layouts.expert_group > 0,
        layouts.outermost > 0,
        layouts.tensor_overlap_chunks > 1,
    )
    return np.asarray(np.sum(parts, axis=0))
