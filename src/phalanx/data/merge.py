"""Merge: the token files of all parts → one, in constant memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from phalanx.data.tokens import CODES, HEADER, MAGIC, VERSION, TokenFile, mask_path, paths

COPY_BYTES = 16 << 20


def merge(prefixes: Sequence[Path], ends: Sequence[bool], prefix: Path, *, with_mask: bool) -> None:
    """Write the token files `prefixes` end to end as `prefix`. Where `ends` is False, the last document of a file goes
    on in the next. All files are made durable; the caller gives them their final place."""
    bin_path, idx_path = paths(prefix)
    with bin_path.open("wb") as merged:
        for each in prefixes:
            _copy(paths(each)[0], merged)
        _durable(merged)
    if with_mask:
        with mask_path(prefix).open("wb") as merged:
            for each in prefixes:
                _copy(mask_path(each), merged)
            _durable(merged)
    with idx_path.open("wb") as index:
        _write_index(prefixes, ends, index)
        _durable(index)


def _write_index(prefixes: Sequence[Path], ends: Sequence[bool], index: IO[bytes]) -> None:
    """The arrays one after another, each from all files: opened again for each, as there may be very many."""
    files = [(file.num_sequences, file.num_documents, file.dtype) for file in map(TokenFile, prefixes)]
    num_sequences = sum(sequences for sequences, *_ in files)
    num_documents = sum(documents for _, documents, _ in files) - sum(not end for end in ends)
    index.write(HEADER.pack(MAGIC, VERSION, CODES[files[0][-1]], num_sequences, num_documents + 1))
    for file in map(TokenFile, prefixes):
        index.write(file.lengths.tobytes())
    num_bytes = 0
    for file in map(TokenFile, prefixes):
        index.write((file.offsets + num_bytes).astype("<i8").tobytes())
        num_bytes += file.num_tokens * file.dtype.itemsize
    index.write(np.zeros(1, "<i8").tobytes())
    num_sequences = 0
    for file, end in zip(map(TokenFile, prefixes), ends, strict=True):
        boundaries = file.documents[1:] + num_sequences
        index.write((boundaries if end else boundaries[:-1]).astype("<i8").tobytes())
        num_sequences += file.num_sequences


def _copy(path: Path, merged: IO[bytes]) -> None:
    with path.open("rb") as file:
        shutil.copyfileobj(file, merged, COPY_BYTES)


def _durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
