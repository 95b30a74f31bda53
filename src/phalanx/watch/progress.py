"""Progress: which steps of a run the terminal shows, and how long the rest will take. metrics.jsonl has every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx.units import format_seconds
from phalanx.watch.metrics import StepRecord

NUM_FIRST = 10
"""Steps after each start that are shown whatever `every` says: a long run should soon be seen to live."""
LEAST_LEFT_S = 60.0
"""A run that ends sooner need not say when."""


class Progress:
    """Turns the records of a run, each step's in turn, into the lines of its terminal.

    Shown are the first steps after a start, every `every`-th, the last, and those after which something is to be told:
    a validation, or a step that changed no weight. Loss, norm and learning rate are those of the step shown; time,
    speed and shares are means over all steps since the last line. Where more than a minute is left, the line says how
    much, from the mean of all steps since the start but the first, which warms up.
    """

    def __init__(self, num_steps: int, every: int) -> None:
        self.num_steps, self.every = num_steps, every
        self._unshown: list[StepRecord] = []
        self._num_seen, self._seen_s = 0, 0.0
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None

    def line(self, record: StepRecord) -> str | None:
        """The line for `record`, or None if it is not shown."""
        self._unshown.append(record)
        self._first, self._last = self._first or record, record
        self._num_seen += 1
        if self._num_seen > 1:
            self._seen_s += record.step_s
        if not self._shows(record):
            return None
        line = _mean(self._unshown).line(self.num_steps)
        self._unshown.clear()
        return line + self._left(record)

    def summary(self) -> str:
        """What a run that has ended came to since its start; "" if it did no step."""
        first, last = self._first, self._last
        if first is None or last is None:
            return ""
        parts = [f"steps {first.step} to {last.step}: loss {first.loss:.4f} → {last.loss:.4f}"]
        if last.validation_loss is not None:
            parts.append(f"validation {last.validation_loss:.4f}")
        if self._seen_s:
            tokens = first.tokens_per_s * first.step_s  # of every step
            parts.append(f"{tokens * (self._num_seen - 1) / self._seen_s:,.0f} tokens/s")
        return "done: " + ", ".join(parts)

    def _shows(self, record: StepRecord) -> bool:
        regular = self._num_seen <= NUM_FIRST or record.step % self.every == 0 or record.step == self.num_steps
        return regular or not record.updated or record.validation_loss is not None

    def _left(self, record: StepRecord) -> str:
        """Validations and checkpoints are not counted."""
        if self._num_seen < 2:
            return ""
        left_s = (self.num_steps - record.step) * self._seen_s / (self._num_seen - 1)
        return f"  {format_seconds(left_s)} left" if left_s > LEAST_LEFT_S else ""


def _mean(records: Sequence[StepRecord]) -> StepRecord:
    """The last of `records`, with the mean time, speed and shares of all."""
    total_s = math.fsum(record.step_s for record in records)
    last = records[-1]
    if len(records) == 1 or not total_s:
        return last
    tokens = math.fsum(record.tokens_per_s * record.step_s for record in records)
    share = {kind: math.fsum(each.share[kind] * each.step_s for each in records) / total_s for kind in last.share}
    return replace(last, step_s=total_s / len(records), tokens_per_s=tokens / total_s, share=share)
