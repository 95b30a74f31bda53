"""Prefetch: the next batch is read while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from phalanx.data.source import Batch


class Batches(Protocol):
    """What training and validation read from: see `data.source.Source`."""

    @property
    def num_rounds(self) -> int:
        """Global batches of validation."""

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Sequences of the global batch of `step`."""

    def validation(self, number: int, positions: Sequence[int]) -> Batch:
        """Sequences of the `number`-th global batch of validation."""


class Prefetch:
    """`source`, for a rank that asks for the same positions of one step after the other: a thread has the next one
    ready. What is wrong with a batch is raised where it is asked for. Use as a context: the thread ends with it."""

    def __init__(self, source: Batches, num_steps: int) -> None:
        self._source, self._num_steps = source, num_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._coming: dict[tuple[str, int], Future[Batch]] = {}

    @property
    def num_rounds(self) -> int:
        """Global batches of validation."""
        return self._source.num_rounds

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Sequences of the global batch of `step`."""
        return self._take("step", self._source.batch, step, self._num_steps, positions)

    def validation(self, number: int, positions: Sequence[int]) -> Batch:
        """Sequences of the `number`-th global batch of validation."""
        return self._take("round", self._source.validation, number, self.num_rounds, positions)

    def _take(
        self,
        kind: str,
        read: Callable[[int, Sequence[int]], Batch],
        number: int,
        end: int,
        positions: Sequence[int],
    ) -> Batch:
        coming = self._coming.pop((kind, number), None)
        batch = coming.result() if coming else read(number, positions)
        if number + 1 < end:
            self._coming[kind, number + 1] = self._thread.submit(read, number + 1, positions)
        return batch

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)
