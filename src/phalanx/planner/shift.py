"""Shift: layers moved between stages where stages of equal work do not fit into memory, as when the first one holds a
large embedding and, under 1F1B, the activations of the most micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import placement
from phalanx.plan.stages import split


def fitting(plan: Plan, limit: int, predict: Callable[[Layout], Plan]) -> Plan | None:
    """`plan` with as few layers moved as make every rank need at most `limit` bytes: one after another, from the
    fullest pipeline rank to the emptiest. None if that does not help. `predict` prices a layout."""
    layout = plan.layout
    stages = split(plan.model, plan.job.seq_len, layout.num_stages, layout.stage_layers, layout.tensor)
    layers = [len(stage.layers) for stage in stages]
    places = [place for place, _ in placement(layout.schedule, layout.pipeline, layout.virtual_stages)]
    for _ in range(plan.model.num_layers):
        assert plan.prediction is not None
        needed = [sum(kinds.values()) for kinds in plan.prediction.memory_bytes]
        if max(needed) <= limit:
            return plan
        fullest, emptiest = needed.index(max(needed)), needed.index(min(needed))
        source = max((stage for stage, place in enumerate(places) if place == fullest), key=layers.__getitem__)
        target = min((stage for stage, place in enumerate(places) if place == emptiest), key=layers.__getitem__)
        if not layers[source]:
            return None
        layers[source] -= 1
        layers[target] += 1
        moved = predict(replace(layout, stage_layers=tuple(layers)))
        assert moved.prediction is not None
        if max(sum(kinds.values()) for kinds in moved.prediction.memory_bytes) >= max(needed):
            return None
        plan = moved
    return None
