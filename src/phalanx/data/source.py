"""Source: token files → the batches of a step, and of validation.

`order` and `mixture` say by arithmetic alone which sample of which set stands where in which global batch; `samples`
reads it. Nothing here knows a layout or a rank, so all layouts see the same data, and a run resumes anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.data.mixture import choose, shares
from phalanx.data.order import Integers, in_order
from phalanx.data.samples import Samples, split
from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError
from phalanx.spec.job import DataSpec, JobSpec

NOT_SUPERVISED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences of one global batch: `tokens` and `labels` are int64 [sequences, seq_len].

    A label of `NOT_SUPERVISED` (-100) counts for nothing. `num_supervised` counts the labels of the *whole* global
    batch that do: the one divisor of the loss, the same on every rank. `positions`, like `tokens`, is how far each
    token stands from the beginning of its document, where documents are separate, else None.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_supervised: int
    positions: npt.NDArray[np.int64] | None = None


class Source:
    """The batches of a run: any positions of any step, in any order, on any rank.

    Raises `DataError` for a file that is missing or damaged, has fewer samples than its part of one global batch, holds
    nothing that is supervised, or cannot be split; and when it is read, for a token id that the model does not have.
    """

    def __init__(self, data: DataSpec, *, seq_len: int, seed: int, global_batch: int, vocab: int) -> None:
        self.seq_len, self.seed, self.global_batch, self.vocab = seq_len, seed, global_batch, vocab
        self.data = data
        if not data.mixed:
            raise DataError("no data", where="[data]", instead='path = "PREFIX", or sets')
        files = [TokenFile(Path(entry.path)) for entry in data.mixed]
        ends = [split(file, data.validation_fraction) if data.validation_fraction else None for file in files]
        self.sets = [self._samples(file, last=end) for file, end in zip(files, ends, strict=True)]
        self.held_out = [self._samples(file, first=end) for file, end in zip(files, ends, strict=True) if end]
        if data.validation_path is not None:
            self.held_out.append(self._samples(TokenFile(Path(data.validation_path))))
        self.shares = shares([entry.weight for entry in data.mixed])
        self._check()

    @classmethod
    def of(cls, job: JobSpec, vocab: int) -> Source:
        """The source of a job whose data is there, for a model with `vocab` token ids."""
        return cls(job.data, seq_len=job.seq_len, seed=job.seed, global_batch=job.global_batch, vocab=vocab)

    def _samples(self, file: TokenFile, first: int = 0, last: int | None = None) -> Samples:
        separate = self.data.documents == "separate"
        return Samples(file, seq_len=self.seq_len, vocab=self.vocab, separate=separate, first=first, last=last)

    def _check(self) -> None:
        for samples, share in zip(self.sets, self.shares, strict=True):
            needed = -(-self.global_batch * share // sum(self.shares))
            if samples.num_samples < needed:
                num_tokens = samples.last - samples.first
                have = f"{num_tokens:,} tokens are {samples.num_samples:,} samples of {self.seq_len:,} and one label"
                need = f"needs {needed:,} samples, {needed * self.seq_len + 1:,} tokens"
                advice = "give more text, or lower job.global_batch or job.seq_len"
                what = f"{have}; one global batch {need}"
                raise DataError(what, where=str(samples.file.bin_path), instead=advice)
        trained = [(samples, samples.num_samples) for samples in self.sets]
        validated = [(samples, samples.num_with_short) for samples in self.held_out]
        for part, name in ((trained, "train on"), (validated, "validate on")):
            if part and not any(samples.any_supervised(number) for samples, number in part):
                where = ", ".join(str(samples.file.bin_path) for samples, _ in part)
                instead = "another mask, longer documents, or more data"
                raise DataError(f"no supervised token to {name}", where=where, instead=instead)

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """The sequences at `positions` of the global batch of `step` (both from 0)."""
        sets, earlier = choose(step * self.global_batch, self.global_batch, self.shares)
        ids = np.empty_like(earlier)
        for index, samples in enumerate(self.sets):
            ids[sets == index] = in_order(earlier[sets == index], samples.num_samples, self.seed, index)
        # Every rank counts for the whole global batch: that spares a message.
        counts = (samples.num_supervised(ids[sets == index]) for index, samples in enumerate(self.sets))
        mine = np.asarray(positions, dtype=np.int64)
        return replace(self._read(self.sets, sets[mine], ids[mine]), num_supervised=sum(counts))

    @property
    def num_rounds(self) -> int:
        """How many global batches hold all that there is to validate on; the last one may be short."""
        return -(-sum(samples.num_with_short for samples in self.held_out) // self.global_batch)

    def validation(self, number: int, positions: Sequence[int]) -> Batch:
        """The sequences at `positions` of the `number`-th global batch of validation, in the order of the files. Beyond
        the end no label is supervised. `num_supervised` counts these sequences alone."""
        numbers = number * self.global_batch + np.asarray(positions, dtype=np.int64)
        firsts = np.cumsum([0, *(samples.num_with_short for samples in self.held_out[:-1])])
        sets = np.searchsorted(firsts, numbers, side="right") - 1
        return self._read(self.held_out, sets, numbers - firsts[sets])

    def _read(self, parts: Sequence[Samples], sets: Integers, ids: Integers) -> Batch:
        """Samples `ids` of `sets`; `num_supervised` counts them alone."""
        tokens = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        supervised = np.empty((len(ids), self.seq_len), dtype=np.bool_)
        positions = np.empty((len(ids), self.seq_len), dtype=np.int64) if self.data.documents == "separate" else None
        for index, samples in enumerate(parts):
            rows = sets == index
            tokens[rows], supervised[rows] = samples.tokens(ids[rows]), samples.supervised(ids[rows])
            if positions is not None:
                positions[rows] = samples.positions(ids[rows])
        labels = np.where(supervised, tokens[:, 1:], NOT_SUPERVISED)
        number = int(np.count_nonzero(supervised))
        return Batch(tokens=tokens[:, :-1].copy(), labels=labels, num_supervised=number, positions=positions)

    def describe(self, num_steps: int) -> list[str]:
        """Lines: how much data there is, how often a run of `num_steps` passes through it, and what is attended."""
        num_needed, total = num_steps * self.global_batch, sum(self.shares)
        lines = []
        for samples, share in zip(self.sets, self.shares, strict=True):
            taken = num_needed * share // total
            name = f"{samples.file.prefix}: " if len(self.sets) > 1 else ""
            have = f"{samples.last - samples.first:,} tokens, {samples.num_samples:,} samples of {self.seq_len:,}"
            epochs = taken / samples.num_samples
            lines.append(f"{name}{have}; {num_steps:,} steps take {taken:,} samples, {epochs:,.2f} epochs")
        if self.held_out:
            num_labels = sum(max(0, samples.last - samples.first - 1) for samples in self.held_out)
            every = self.data.validate_every_steps
            when = f"every {every:,} steps and at the end" if every else "at the end"
            lines.append(f"validation {when}, on {num_labels:,} tokens")
        joined = "attention crosses the ends of documents within a sequence (data.documents = joined)"
        lines.append(joined if self.data.documents == "joined" else "attention stays within each document")
        return lines
