"""Documents: where the documents of a token file begin, found by bisection in the mapped index: no table is made, so a
file of 10^12 tokens needs no more memory than a small one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.data.order import Integers
from phalanx.data.tokens import TokenFile


class Documents:
    """The documents of `file`, in order; a document may be empty."""

    def __init__(self, file: TokenFile) -> None:
        self.file = file

    def start(self, documents: Integers) -> Integers:
        """The first token of each of `documents` (by number, from 0); the end of the file for the one after the last.
        Same shape."""
        file = self.file
        if not file.num_sequences:
            return np.zeros_like(documents)
        sequences = file.documents[documents]
        starts = file.offsets[np.minimum(sequences, file.num_sequences - 1)] // file.dtype.itemsize
        return np.where(sequences < file.num_sequences, starts, file.num_tokens)

    def begun(self, tokens: Integers) -> Integers:
        """How many documents begin at or before each of `tokens` (by place in the file). Same shape."""
        low, high = np.zeros_like(tokens), np.full_like(tokens, self.file.num_documents)
        for _ in range(self.file.num_documents.bit_length()):
            middle = (low + high) // 2
            begins = (low < high) & (self.start(middle) <= tokens)
            low, high = np.where(begins, middle + 1, low), np.where(begins, high, middle)
        return low

    def begin_within(self, firsts: Integers, length: int) -> npt.NDArray[np.bool_]:
        """[len(firsts), length]: whether a document begins at token `firsts[i] + j`."""
        begins = np.zeros((len(firsts), length), dtype=np.bool_)
        rows, starts = self.starts_within(firsts, length)
        begins[rows, starts - firsts[rows]] = True
        return begins

    def starts_within(self, firsts: Integers, length: int) -> tuple[Integers, Integers]:
        """The documents that begin in [`firsts[i]`, `firsts[i] + length`): for each its i and its first token. Of
        documents that begin at one token, all but the last being empty, one is named."""
        before = self.begun(firsts - 1)
        counts = self.begun(firsts + (length - 1)) - before
        rows = np.repeat(np.arange(len(firsts)), counts)
        earlier = np.cumsum(counts) - counts
        starts = self.start(np.arange(len(rows)) + (before - earlier)[rows])
        new = np.ones(len(rows), dtype=np.bool_)
        new[1:] = (starts[1:] != starts[:-1]) | (rows[1:] != rows[:-1])
        return rows[new], starts[new]

    def around(self, token: int) -> tuple[int, int]:
        """The last document start at or before `token`, and the next one (the end of the file counts as one)."""
        after = self.begun(np.array([token], dtype=np.int64))
        before, following = self.start(np.array([max(0, after[0] - 1), after[0]], dtype=np.int64)).tolist()
        return before, following
