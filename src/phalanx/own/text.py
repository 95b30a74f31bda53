"""TokenDataset: the samples of token files, for a module of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.samples import Samples
from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError, InputError

NOT_A_LABEL = -100
"""What torch.nn.functional.cross_entropy leaves out unless told otherwise."""


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """The samples of `prefix`, a pair of token files such as `phalanx data build` writes.

    A sample is (tokens, labels), both int64 [seq_len]: each label is the token that comes next, or -100 where
    `PREFIX.mask.bin` says that it is not to be learned. `vocab`: how many ids the module knows.

    Raises InputError for a `seq_len` below 1, DataError for files that are missing, damaged or too short, and for an id
    of `vocab` or more once it is read.
    """

    def __init__(self, prefix: Path | str, seq_len: int, *, vocab: int) -> None:
        if seq_len < 1:
            raise InputError(f"seq_len = {seq_len}", where="TokenDataset", instead="1 or more")
        self._samples = Samples(TokenFile(Path(prefix)), seq_len=seq_len, vocab=vocab)
        if not len(self):
            what = f"has {self._samples.file.num_tokens:,} tokens, a sample of {seq_len:,} needs one more than that"
            raise DataError(what, where=str(self._samples.file.bin_path), instead="more text, or a smaller seq_len")

    def __len__(self) -> int:
        """Whole samples; what is left at the end is not one."""
        return self._samples.num_samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Sample `number`."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        ids = np.array([number])
        (tokens,), (supervised,) = self._samples.tokens(ids), self._samples.supervised(ids)
        labels = np.where(supervised, tokens[1:], NOT_A_LABEL)
        return torch.from_numpy(tokens[:-1].copy()), torch.from_numpy(labels)
