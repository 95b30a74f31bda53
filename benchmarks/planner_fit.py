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


class Losses:
    """Mean |log(predicted / measured)| of each source under given constants of its device, computed once.

    Sources are independent of one another, so a fit that leaves one out asks for little that another has not asked for.
    """

    def __init__(self, rows: list[Row], score: Callable[[list[Row]], list[Any]]) -> None:
        self.rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in rows:
            if device := device_of(row):
                self.rows[(row.source, device)].append(row)
        self.score = score
        self.known: dict[Any, float] = {}

    def of(self, source: str, device: str, constants: Constants) -> float:
        """That of the rows of `source` on `device`, thinned."""
        values = tuple(constants[(device, name)] for name in BOUNDS)
        key = (source, device, values)
        if key not in self.known:
            scored = self.score(with_constants(thin(self.rows[(source, device)]), constants))
            self.known[key] = float(np.mean([abs(float(np.log1p(entry.error))) for entry in scored]))
        return self.known[key]

    def mean(self, constants: Constants, without: str | None) -> float:
        """Mean over all sources but one: a large source weighs as much as a small one."""
        devices = {device for device, _ in constants}
        losses = [
            self.of(source, device, constants)
            for source, device in self.rows
            if source != without and device in devices
        ]
        return float(np.mean(losses)) if losses else 0.0  # nothing to fit to


def device_of(row: Row) -> str | None:
    """The device whose constants are fitted that the row ran on, if any."""
    return next((device for device in DEVICES if device in row.cluster.device.name), None)


def thin(rows: list[Row]) -> list[Row]:
    """At most ROWS_PER_SOURCE of them, evenly over their file."""
    return rows[:: -(-len(rows) // ROWS_PER_SOURCE)]


def fit(losses: Losses, start: Constants, without: str | None = None, rounds: int = 3) -> Constants:
    """Walk one constant at a time downhill, halving the steps where nothing helps."""
    values = dict(start)
    best = losses.mean(values, without)
    for number in range(rounds):
        for key in start:
            low, high = BOUNDS[key[1]]
            for sign in (1, -1):
                tried = dict(values)
                tried[key] = float(np.clip(values[key] + sign * STEPS[key[1]] / 2**number, low, high))
                found = losses.mean(tried, without)
                if found < best:
                    best, values = found, tried
                    break
    return values


def leave_one_out(rows: list[Row], losses: Losses) -> dict[str, Any]:
    """For each source: constants fitted on all others of its devices, and the errors that they leave on it. A source
    that is the only one of its device is left out of the table: nothing would be fitted."""
    start, result = current(rows), {}
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source and device_of(row)]
        devices = {device_of(row) for row in own}
        others = {device_of(row) for row in rows if row.source != source}
        if not own or not devices <= others:
            continue
        begin = {key: value for key, value in start.items() if key[0] in devices}
        constants = fit(losses, begin, without=source)
        held_out = losses.score(with_constants(own, constants))
        result[source] = {"constants": _words(constants), "errors": [entry.error for entry in held_out]}
    return result


def refit(rows: list[Row], losses: Losses) -> dict[str, float]:
    """Constants fitted on all rows."""
    return _words(fit(losses, current(rows)))


def _words(constants: Constants) -> dict[str, float]:
    return {f"{device}.{name}": round(value, 4) for (device, name), value in constants.items()}
