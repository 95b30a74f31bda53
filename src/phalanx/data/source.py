"""Source: token files → the batches of a step.

Documents are packed end to end without padding: sample i is the tokens [i × seq_len, i × seq_len + seq_len + 1), whose
first `seq_len` are the input and last `seq_len` the labels, so neighbours share one token and each token but the first
is a label once per epoch. Labels across a document's end are supervised like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.data.order import sample_ids
from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError

NOT_SUPERVISED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences of one global batch: `tokens` and `labels` are int64 [sequences, seq_len].

    A label of `NOT_SUPERVISED` (-100) counts for nothing. `num_supervised` counts the labels of the *whole* global
    batch that do: the one divisor of the loss, the same on every rank.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_supervised: int


class Source:
    """The batches of a run: any positions of any step, in any order, on any rank.

    Raises `DataError` for a file that is missing or damaged, has fewer samples than one global batch, or (when it is
    read) holds a token id that the model's vocabulary does not.
    """

    def __init__(self, prefix: Path, seq_len: int, seed: int, global_batch: int, vocab: int) -> None:
        self.file = TokenFile(prefix)
        self.seq_len = seq_len
        self.seed = seed
        self.global_batch = global_batch
        self.vocab = vocab
        self.num_samples = max(0, (self.file.num_tokens - 1) // seq_len)
        if self.num_samples < global_batch:
            have = f"{self.file.num_tokens:,} tokens are {self.num_samples:,} samples of {seq_len:,} and one label"
            need = f"needs {global_batch:,} samples, {global_batch * seq_len + 1:,} tokens"
            advice = "give more text, or lower job.global_batch or job.seq_len"
            raise DataError(f"{have}; one global batch {need}", where=str(self.file.bin_path), instead=advice)

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """The sequences at `positions` of the global batch of `step` (both from 0)."""
        ids = sample_ids(self.seed, step, self.global_batch, self.num_samples)[np.asarray(positions, dtype=np.int64)]
        samples = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, sample in zip(samples, ids.tolist(), strict=True):
            row[:] = self.file.read(sample * self.seq_len, self.seq_len + 1)
        self._check_ids(samples, ids)
        num_supervised = self.global_batch * self.seq_len
        return Batch(tokens=samples[:, :-1].copy(), labels=samples[:, 1:].copy(), num_supervised=num_supervised)

    def describe(self, num_steps: int) -> str:
        """One line: how much data there is, and how often a run of `num_steps` passes through it."""
        num_needed = num_steps * self.global_batch
        have = f"{self.file.num_tokens:,} tokens, {self.num_samples:,} samples of {self.seq_len:,}"
        epochs = num_needed / self.num_samples
        return f"{have}; {num_steps:,} steps take {num_needed:,} samples, {epochs:,.2f} epochs"

    def _check_ids(self, samples: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
        """A wrong id would be an index error deep in the model, or a row of zeros that trains in silence."""
        wrong = np.argwhere((samples < 0) | (samples >= self.vocab))
        if not len(wrong):
            return
        row, column = wrong[0].tolist()
        position = int(ids[row]) * self.seq_len + column
        what = f"token id {samples[row, column]} at position {position:,}; the model's vocabulary is {self.vocab:,} ids"
        advice = "tokenize with the model's tokenizer, or set model.vocab to cover every id of the tokenizer"
        raise DataError(what, where=str(self.file.bin_path), instead=advice)
