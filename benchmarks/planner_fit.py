"""Refit the device constants of the planner to published runs, with each source left out in turn.

Three constants per device generation: what large matrix products sustain, the inner dimension that halves that, and
what memory-bound kernels reach of the bandwidth. Everything else is a fact of a machine or of an engine and stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from published import Row

Constants = Mapping[tuple[str, str], float]

DEVICES = ("A100", "H100")
BOUNDS = {"matmul_efficiency": (0.4, 0.95), "matmul_half_depth": (0.0, 400.0), "memory_efficiency": (0.3, 0.95)}
STEPS = {"matmul_efficiency": 0.03, "matmul_half_depth": 60.0, "memory_efficiency": 0.06}
ROWS_PER_SOURCE = 36


def current(rows: list[Row]) -> dict[tuple[str, str], float]:
    """The constants as they stand in clusters.toml."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        for device in DEVICES:
            if device in row.cluster.device.name:
                found |= {(device, name): float(getattr(row.cluster.device, name)) for name in BOUNDS}
    return found


def with_constants(rows: list[Row], constants: Constants) -> list[Row]:
    """The rows on devices with other constants."""
    changed = []
    for row in rows:
        device = row.cluster.device
        values = {name: value for (part, name), value in constants.items() if part in device.name}
        if "matmul_half_depth" in values:
            values["matmul_half_depth"] = int(values["matmul_half_depth"])
        changed.append(replace(row, cluster=replace(row.cluster, device=replace(device, **values))))
    return changed


def loss(rows: list[Row], constants: Constants, score: Callable[[list[Row]], list[Any]]) -> float:
    """Mean over sources of the mean |log(predicted / measured)|: a large source weighs as much as a small one."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for entry in score(with_constants(rows, constants)):
        by_source[entry.row.source].append(abs(float(np.log1p(entry.error))))
    return float(np.mean([np.mean(errors) for errors in by_source.values()]))


def thin(rows: list[Row]) -> list[Row]:
    """At most ROWS_PER_SOURCE rows of each source, evenly over its file."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    return [row for members in by_source.values() for row in members[:: -(-len(members) // ROWS_PER_SOURCE)]]


def fit(rows: list[Row], start: Constants, score: Callable[[list[Row]], list[Any]], rounds: int = 3) -> Constants:
    """Walk one constant at a time downhill, halving the steps where nothing helps."""
    best, values = loss(rows, start, score), dict(start)
    for number in range(rounds):
        for key in values:
            low, high = BOUNDS[key[1]]
            for sign in (1, -1):
                tried = dict(values)
                tried[key] = float(np.clip(values[key] + sign * STEPS[key[1]] / 2**number, low, high))
                found = loss(rows, tried, score)
                if found < best:
                    best, values = found, tried
                    break
    return values


def leave_one_out(rows: list[Row], score: Callable[[list[Row]], list[Any]]) -> dict[str, Any]:
    """For each source: constants fitted on all others of its device, and the errors that they leave on it."""
    start, result = current(rows), {}
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        devices = {device for device in DEVICES for row in own if device in row.cluster.device.name}
        others = [row for row in rows if row.source != source and any(d in row.cluster.device.name for d in devices)]
        begin = {key: value for key, value in start.items() if key[0] in devices}
        if others:
            constants = fit(thin(others), begin, score)
            held_out = score(with_constants(own, constants))
            result[source] = {"constants": _words(constants), "errors": [entry.error for entry in held_out]}
    return result


def refit(rows: list[Row], score: Callable[[list[Row]], list[Any]]) -> dict[str, float]:
    """Constants fitted on all rows."""
    return _words(fit(thin(rows), current(rows), score))


def _words(constants: Constants) -> dict[str, float]:
    return {f"{device}.{name}": round(value, 4) for (device, name), value in constants.items()}
