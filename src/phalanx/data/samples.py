"""Samples: a stretch of a token file, cut into samples of equal length.

Documents are packed end to end without padding: sample i is the tokens [i × seq_len, i × seq_len + seq_len + 1) of the
stretch, whose first `seq_len` are the input and last `seq_len` the labels, so neighbours share one token and each token
but the first is a label once. What is left at the end is a short sample: training leaves it out, validation fills it up
with labels that count for nothing.

Which labels are supervised: those of the stretch whose byte in `PREFIX.mask.bin` is 1, or all where there is no such
file; and where documents are separate, none that is the first token of a document, for the document before cannot know.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.data.documents import Documents
from phalanx.data.order import Integers
from phalanx.data.tokens import TokenFile, check_mask, read_mask
from phalanx.errors import DataError

Flags: TypeAlias = npt.NDArray[np.bool_]

_CHUNK_TOKENS = 1 << 20


class Samples:
    """The samples of tokens [first, last) of `file`. `separate`: whether each document stands alone.

    Raises `DataError` for a damaged mask and, when it is read, for a token id that the model's vocabulary does not
    have.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        seq_len: int,
        vocab: int,
        separate: bool = False,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self.file, self.seq_len, self.vocab = file, seq_len, vocab
        self.documents = Documents(file) if separate else None
        self.first, self.last = first, file.num_tokens if last is None else last
        self.mask = read_mask(file)

    @property
    def num_samples(self) -> int:
        """Whole samples."""
        return max(0, (self.last - self.first - 1) // self.seq_len)

    @property
    def num_with_short(self) -> int:
        """Samples with at least one label."""
        return max(0, -(-(self.last - self.first - 1) // self.seq_len))

    def tokens(self, ids: Integers) -> Integers:
        """The tokens of samples `ids`: int64 [samples, seq_len + 1], zeros beyond the end."""
        samples = np.zeros((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, start in zip(samples, self._starts(ids).tolist(), strict=True):
            count = min(self.seq_len + 1, max(0, self.last - start))
            row[:count] = self.file.read(min(start, self.last), count)
        self._check(samples, ids)
        return samples

    def supervised(self, ids: Integers) -> Flags:
        """Which labels of samples `ids` count: [samples, seq_len]."""
        starts = self._starts(ids) + 1  # the first label is the second token
        flags = starts[:, None] + np.arange(self.seq_len) < self.last
        if self.mask is not None:
            for row, start in zip(flags, starts.tolist(), strict=True):
                values = self.mask[start : min(start + self.seq_len, self.last)]
                check_mask(self.file, values, start)
                row[: len(values)] &= values.view(np.bool_)
        if self.documents is not None:
            flags &= ~self.documents.begin_within(starts, self.seq_len)
        return flags

    def num_supervised(self, ids: Integers) -> int:
        """How many labels of whole samples `ids` count; much faster than to ask which."""
        starts = self._starts(ids) + 1
        number = len(ids) * self.seq_len
        if self.mask is not None:
            rows = (self.mask[start : start + self.seq_len] for start in starts.tolist())
            number = sum(int(np.count_nonzero(row)) for row in rows)
        if self.documents is not None:
            _, begins = self.documents.starts_within(starts, self.seq_len)
            number -= len(begins) if self.mask is None else int(np.count_nonzero(self.mask[begins]))
        return number

    def positions(self, ids: Integers) -> Integers:
        """How far each token of samples `ids` stands from the beginning of its document, or of the sample if that is
        nearer: int64 [samples, seq_len]. Only where documents are separate."""
        assert self.documents is not None
        places = np.arange(self.seq_len)
        begins = self.documents.begin_within(self._starts(ids), self.seq_len)
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

    def any_supervised(self, num_samples: int) -> bool:
        """Whether any label of the first `num_samples` samples counts; most often the first few tell."""
        at_once = max(1, _CHUNK_TOKENS // self.seq_len)
        chunks = (np.arange(start, min(start + at_once, num_samples)) for start in range(0, num_samples, at_once))
        return any(self.supervised(ids).any() for ids in chunks)

    def _starts(self, ids: Integers) -> Integers:
        return self.first + ids * self.seq_len

    def _check(self, samples: Integers, ids: Integers) -> None:
        """A wrong id would be an index error deep in the model, or a row of zeros that trains in silence."""
        if not samples.size or (samples.min() >= 0 and samples.max() < self.vocab):
            return
        row, column = np.argwhere((samples < 0) | (samples >= self.vocab))[0].tolist()
        position = int(self._starts(ids)[row]) + column
        what = f"token id {samples[row, column]} at position {position:,}; the model's vocabulary is {self.vocab:,} ids"
        advice = "tokenize with the model's tokenizer, or set model.vocab to cover every id of the tokenizer"
        raise DataError(what, where=str(self.file.bin_path), instead=advice)


def split(file: TokenFile, fraction: float) -> int:
    """Where the last `fraction` of a file's tokens begins, moved to the nearest beginning of a document, so that no
    document is on both sides. Raises `DataError` if no document begins there."""
    wanted = round(file.num_tokens * (1.0 - fraction))
    inside = [start for start in Documents(file).around(wanted) if 0 < start < file.num_tokens]
    if not inside:
        what = f"{file.num_documents:,} documents cannot be split at {1.0 - fraction:.6g} of their tokens"
        instead = "another data.validation_fraction, or data.validation_path"
        raise DataError(what, where=str(file.idx_path), instead=instead)
    return min(inside, key=lambda start: abs(start - wanted))
