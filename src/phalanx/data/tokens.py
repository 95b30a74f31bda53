"""Token files: `prefix.bin` holds token ids back to back, `prefix.idx` where sequences and documents end.

The layout is that of Megatron-LM's indexed data sets, so that files made for it are read as they are, and ours by it.
All numbers are little-endian. `.idx`: magic `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 N sequences,
uint64 D; then int32 tokens per sequence [N], int64 byte offset of each sequence in `.bin` [N], int64 document
boundaries in units of sequences [D, first 0, last N], and perhaps an int8 mode per sequence [N]: no flag tells of it,
the file's size does. The int64 arrays lie unaligned.

Ours alone is `prefix.mask.bin`, which may lie beside them: a uint8 per token, 1 where a model is to learn it.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError

Integers: TypeAlias = npt.NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
INT32_MAX = 2**31 - 1
PROBES, PROBE_BYTES = 16, 4096
"""Stretches of a mask that are looked at when it is opened: one that is wrong is mostly wrong throughout."""


def paths(prefix: Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a prefix; a dot in the prefix's name is no suffix."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def mask_path(prefix: Path) -> Path:
    """The mask of a prefix, whether there is one or not."""
    return prefix.with_name(prefix.name + ".mask.bin")


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The narrowest dtype that readers of this format expect: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab < 65_500 else "<i4")


class TokenFile:
    """One `.bin`/`.idx` pair, memory-mapped: opening reads a header, whatever the size.

    `lengths` [N] are tokens per sequence, `offsets` [N] its first byte in `.bin`, `documents` [D] boundaries in units
    of sequences, `modes` [N] or None. Raises `DataError` for a file that is missing, damaged or short.
    """

    def __init__(self, prefix: Path) -> None:
        if not prefix.name:
            raise DataError("is a folder", where=str(prefix), instead="the prefix of a .bin and an .idx file in it")
        self.prefix = prefix
        self.bin_path, self.idx_path = paths(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                advice = "data.path is the prefix of a .bin and an .idx file; data.text builds them from text files"
                found = prefix.glob("*.idx") if prefix.is_dir() else ()
                inside = sorted(str(index.with_suffix("")) for index in found)
                raise DataError("no such file", where=str(path), instead=" or ".join(inside[:3]) or advice)
        self._read_index()
        bin_bytes = self.bin_path.stat().st_size
        expected = self._end_bytes()
        if bin_bytes != expected:
            raise self._damaged(self.bin_path, f"has {bin_bytes:,} bytes, its .idx describes {expected:,}")
        self._tokens: Integers = (
            # As a plain array: a memmap makes each slice an object of its own, at several times the cost.
            np.asarray(np.memmap(self.bin_path, dtype=self.dtype, mode="r")) if bin_bytes else np.empty(0, self.dtype)
        )

    def _read_index(self) -> None:
        """Check the header and the file's size, and map the arrays."""
        size = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            header = file.read(HEADER.size)
        if not header.startswith(MAGIC):
            raise self._damaged(self.idx_path, f"begins with {header[:9]!r}, a token index with {MAGIC!r}")
        if len(header) < HEADER.size:
            raise self._damaged(self.idx_path, f"ends after {size} bytes, within its header of {HEADER.size}")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        if version != VERSION:
            raise self._damaged(self.idx_path, f"has format version {version}, known is {VERSION}")
        if np.dtype(DTYPES.get(code, "<f4")).kind == "f":
            raise self._damaged(self.idx_path, f"has dtype code {code}; token ids have 1 to 5 (u8 to i64) or 8 (u16)")
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if size not in (expected, expected + num_sequences) or not num_boundaries:
            numbers = f"{num_sequences:,} sequences and {num_boundaries:,} document boundaries need {expected:,} bytes"
            raise self._damaged(self.idx_path, f"has {size:,} bytes, but {numbers} ({num_sequences:,} more with modes)")
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = HEADER.size
        self.lengths: Integers = np.frombuffer(index, "<i4", num_sequences, at)
        self.offsets: Integers = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
        self.documents: Integers = np.frombuffer(index, "<i8", num_boundaries, at + 12 * num_sequences)
        with_modes = num_sequences > 0 and size > expected
        self.modes: Integers | None = np.frombuffer(index, "<i1", num_sequences, expected) if with_modes else None
        if self.documents[0] != 0 or self.documents[-1] != num_sequences:
            ends = f"{self.documents[0]} to {self.documents[-1]}"
            raise self._damaged(self.idx_path, f"has documents from sequence {ends}, not 0 to {num_sequences:,}")

    def _end_bytes(self) -> int:
        """Where the last sequence ends in `.bin`: sequences lie back to back, so it is the size of the file."""
        if not len(self.lengths):
            return 0
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    @staticmethod
    def _damaged(path: Path, what: str) -> DataError:
        return DataError(
            what, where=str(path), instead="the file is damaged or of another kind: build or copy it again"
        )

    def check(self) -> None:
        """Read the whole index and raise `DataError` unless sequences lie back to back and documents in order."""
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        wrong = np.flatnonzero((self.lengths < 0) | (self.offsets != ends - self.lengths * self.dtype.itemsize))
        if len(wrong):
            at = int(wrong[0])
            numbers = f"begins at byte {self.offsets[at]:,} and has {self.lengths[at]:,} tokens"
            raise self._damaged(self.idx_path, f"sequence {at:,} {numbers}; sequences do not lie back to back")
        if (np.diff(self.documents) < 0).any():
            raise self._damaged(self.idx_path, "has document boundaries that go backwards")

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self._tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences; a document has one or more."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def read(self, offset: int, length: int) -> Integers:
        """Tokens [offset, offset + length) of the whole file, documents end to end: a view, shape [length]."""
        assert offset >= 0 and length >= 0 and offset + length <= self.num_tokens
        return self._tokens[offset : offset + length]

    def sequence(self, index: int) -> Integers:
        """The tokens of one sequence."""
        return self.read(int(self.offsets[index]) // self.dtype.itemsize, int(self.lengths[index]))

    def document(self, index: int) -> Integers:
        """The tokens of one document, its sequences end to end."""
        first, last = int(self.documents[index]), int(self.documents[index + 1])
        if first == last:
            return self.read(0, 0)
        return self.read(int(self.offsets[first]) // self.dtype.itemsize, int(self.lengths[first:last].sum()))


def read_mask(file: TokenFile) -> npt.NDArray[np.uint8] | None:
    """The mask beside `file`, memory-mapped, if there is one. Raises `DataError` for one of another length, or
    with other bytes than 0 and 1 in one of PROBES stretches; the rest is checked when it is read."""
    path = mask_path(file.prefix)
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size != file.num_tokens:
        what = f"has {size:,} bytes for {file.num_tokens:,} tokens"
        raise DataError(what, where=str(path), instead="one byte per token: build the data again, or delete the mask")
    mask = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if size else np.empty(0, np.uint8)
    for start in range(0, size, max(PROBE_BYTES, size // PROBES)):
        check_mask(file, mask[start : start + PROBE_BYTES], start)
    return mask


def check_mask(file: TokenFile, values: npt.NDArray[np.uint8], first: int) -> None:
    """Raises `DataError` unless all of `values`, those of the mask of `file` from token `first` on, are 0 or 1."""
    if values.size and values.max() > 1:
        at = int(values.argmax())
        what = f"byte {values[at]} at position {first + at:,}"
        raise DataError(what, where=str(mask_path(file.prefix)), instead="1 for a supervised token, 0 for others")


class TokenWriter:
    """Writes a `.bin`/`.idx` pair, and a mask if `with_mask`. Use as a context: the files appear when it ends without
    an error, or not at all.

    They are written aside and renamed, `.idx` last, so that an `.idx` never stands beside a `.bin` that it does not
    describe for longer than the renames take.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike, *, with_mask: bool = False) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES and self.dtype.kind in "ui"
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        bin_path, idx_path = paths(prefix)
        self._final = (*([mask_path(prefix)] if with_mask else []), bin_path, idx_path)
        self._partial = tuple(path.with_name(f".{path.name}.{os.getpid()}.partial") for path in self._final)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._mask = self._partial[0].open("wb") if with_mask else None
        self._bin = self._partial[-2].open("wb")

    @property
    def num_documents(self) -> int:
        """Documents that have ended."""
        return len(self._documents) - 1

    def add(self, tokens: Iterable[int] | Integers) -> None:
        """Append one sequence to the document under way. An id that the dtype cannot hold raises `DataError`."""
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=np.int64)
        self.write(ids)
        self._end_sequence(len(ids))

    def end_document(self) -> None:
        """The sequences added since the last call are one document."""
        self._documents.append(len(self._lengths))

    def write(self, ids: npt.NDArray[np.int64], mask: Integers | None = None) -> None:
        """Append tokens [any number] and their mask, which `end_documents` divides. An id that the dtype cannot hold
        raises `DataError`."""
        limits = np.iinfo(self.dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            wrong = int(ids.min() if ids.min() < limits.min else ids.max())
            raise DataError(f"token id {wrong} does not fit {self.dtype.name}", where=str(self._final[-2]))
        self._bin.write(ids.astype(self.dtype).tobytes())
        if self._mask is not None:
            assert mask is not None and len(mask) == len(ids)
            self._mask.write(mask.astype(np.uint8).tobytes())
        self.num_tokens += len(ids)

    def end_documents(self, lengths: Iterable[int]) -> None:
        """The tokens written since the last document ended are documents of `lengths`, each of one sequence."""
        for length in lengths:
            self._end_sequence(length)
            self.end_document()

    def _end_sequence(self, length: int) -> None:
        if length > INT32_MAX:
            what = f"a sequence of {length:,} tokens; the format holds {INT32_MAX:,}"
            raise DataError(what, where=str(self._final[-2]))
        self._lengths.append(length)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for path in self._partial:
                path.unlink(missing_ok=True)
            for file in self._open_files():  # what is still to be written may not fit on the disk: the names are gone
                file.close()

    def _open_files(self) -> list[IO[bytes]]:
        return [self._bin] if self._mask is None else [self._mask, self._bin]

    def _finish(self) -> None:
        """Write the index, make all files durable, give them their names."""
        assert self._documents[-1] == len(self._lengths), "end_document was not called for the last sequences"
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with self._partial[-1].open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            index.write(lengths.astype("<i4").tobytes())
            index.write(offsets.astype("<i8").tobytes())
            index.write(np.array(self._documents, "<i8").tobytes())
            for file in (*self._open_files(), index):
                file.flush()
                os.fsync(file.fileno())
        for partial, final in zip(self._partial, self._final, strict=True):
            partial.rename(final)
