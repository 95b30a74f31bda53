"""Prefetch: the same batches, read ahead in a thread that ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from phalanx.data.prefetch import Prefetch
from phalanx.data.source import Batch
from phalanx.errors import DataError


class Numbered:
    """Batches of their number. `read` says which were read, in which threads."""

    num_rounds = 2

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong
        self.read: list[tuple[str, int, str]] = []
        self.done = threading.Semaphore(0)

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        return self._read("step", step, positions)

    def validation(self, number: int, positions: Sequence[int]) -> Batch:
        return self._read("round", number, positions)

    def _read(self, kind: str, number: int, positions: Sequence[int]) -> Batch:
        self.read.append((kind, number, threading.current_thread().name.partition("_")[0]))
        self.done.release()
        if number == self.wrong:
            raise DataError(f"number {number} is wrong", where="here")
        tokens = np.full((len(positions), 1), number)
        return Batch(tokens=tokens, labels=tokens, num_supervised=1)


def test_the_next_batch_is_read_meanwhile_and_none_beyond_the_end():
    source = Numbered()
    with Prefetch(source, num_steps=5) as ahead:
        assert ahead.batch(2, [0, 1]).tokens.tolist() == [[2], [2]]
        assert all(source.done.acquire(timeout=10) for _ in range(2))  # step 2 and, without being asked for, step 3
        assert [ahead.validation(number, [0]).tokens[0, 0] for number in range(2)] == [0, 1]
        assert [ahead.batch(step, [0, 1]).tokens[0, 0] for step in (3, 4)] == [3, 4]
    main = threading.current_thread().name.partition("_")[0]
    assert sorted(source.read) == sorted(
        [
            ("step", 2, main),
            ("step", 3, "prefetch"),
            ("step", 4, "prefetch"),
            ("round", 0, main),
            ("round", 1, "prefetch"),
        ]
    )
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_what_is_wrong_with_a_batch_is_raised_when_it_is_asked_for():
    with Prefetch(Numbered(wrong=1), num_steps=3) as ahead:
        ahead.batch(0, [0])
        with pytest.raises(DataError, match="number 1 is wrong"):
            ahead.batch(1, [0])
