"""StepRecord: one optimizer step as it was. Written as a line of JSON for programs and a line of text for people."""

from __future__ import annotations

import errno
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import InputError

AXES = ("tensor", "pipeline", "data", "world")
"""Whose communication is told apart: that of each axis and that of all ranks together, which is little but waiting for
the slowest at the end of a step. "compute" is the rest of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, the same on every rank. `step` counts from 1; `loss` is the mean over the supervised tokens of the
    global batch, before the update; `gradient_norm` before clipping. `skipped_steps` counts those since the run began
    or went on whose loss or norm was no finite number, so that they changed no weight. `loss_scale` is that of fp16,
    and 1 in other precisions. `updated`: whether this step changed weights; one without any supervised token does not
    either.

    `step_s`: wall seconds from one step's end to the next; `share`: the parts of it that the average rank computed, or
    was blocked in communication of one of AXES (waiting for a late peer included), adding up to 1. `tokens_per_s`
    counts each token of the global batch once, whatever the layout.

    After some steps, `validation_loss` is the mean cross-entropy over all that is validated on, after the update, and
    `validation_s` the wall seconds it took, which are no part of `step_s`.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    share: Mapping[str, float]
    skipped_steps: int = 0
    loss_scale: float = 1.0
    updated: bool = True
    validation_loss: float | None = None
    validation_s: float | None = None

    @classmethod
    def measured(cls, spent_s: Sequence[float], *, num_ranks: int, tokens_per_step: int, **facts: Any) -> StepRecord:
        """A record from the wall seconds of a step, and of those the seconds blocked on each of AXES, both summed over
        all ranks; `facts` are its other fields."""
        step_s, *blocked = (seconds / num_ranks for seconds in spent_s)
        share = {axis: seconds / step_s for axis, seconds in zip(AXES, blocked, strict=True)}
        return cls(
            step_s=step_s,
            tokens_per_s=tokens_per_step / step_s,
            tokens_per_s_per_device=tokens_per_step / step_s / num_ranks,
            share={"compute": 1.0 - math.fsum(share.values()), **share},
            **facts,
        )

    def line(self, num_steps: int) -> str:
        """For the terminal, in aligned columns. An axis with no time at all, as one of size 1, is left out."""
        width = len(str(num_steps))
        parts = [f"{kind} {part:3.0%}" for kind, part in self.share.items() if part]
        if not self.is_finite:
            overflow = self.loss_scale > 1.0 and math.isfinite(self.loss)
            why = f", gradients overflow at a loss scale of {self.loss_scale:,.0f}" if overflow else ""
            parts.append(f"skipped ({self.skipped_steps} so far){why}")
        elif not self.updated:
            parts.append("no supervised token, no update")
        if self.validation_loss is not None:
            parts.append(f"validation {self.validation_loss:.4f} in {self.validation_s:.1f} s")
        return (
            f"step {self.step:>{width}}/{num_steps}  loss {self.loss:7.4f}  norm {self.gradient_norm:6.3f}  "
            f"lr {self.learning_rate:.2e}  {self.tokens_per_s:>7,.0f} tokens/s  {self.step_s:6.3f} s  "
            + "  ".join(parts)
        )

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are numbers to go by."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def json(self) -> str:
        """One line of JSON; null stands for what is no finite number, since JSON has no word for it."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        losses = ("loss", "gradient_norm", "validation_loss")
        values |= {key: None for key in losses if not math.isfinite(values.get(key, 0.0))}
        return json.dumps(values)

    @classmethod
    def of_json(cls, line: str) -> StepRecord:
        """What `json` wrote."""
        values: dict[str, Any] = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
        return cls(**values)


class MetricsWriter:
    """Appends StepRecords to metrics.jsonl, each line whole and at once readable.

    A full disk must not end a run: a line that cannot be written is left out, and `say` hears of the first such line.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._failing = False

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        data = (record.json() + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(data) < len(data):
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._failing:
                self._say(f"metrics are not written from step {record.step} on: {self._path}: {error.strerror}")
            self._failing = True
        else:
            self._failing = False


def read(path: Path) -> list[StepRecord]:
    """All records of a metrics.jsonl; where a resumed run repeated a step, the later record. Raises InputError if it is
    missing or damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [StepRecord.of_json(line) for line in lines]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read metrics: {error}", where=str(path)) from error
    return [record for _, record in sorted({record.step: record for record in records}.items())]


def steady(records: Sequence[StepRecord]) -> float:
    """Median seconds of a step, without the first one, which warms up. Not a number if there are fewer than two."""
    return statistics.median(record.step_s for record in records[1:]) if len(records) > 1 else float("nan")
