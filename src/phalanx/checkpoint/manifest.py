"""Manifest: what a checkpoint holds, and the checksums by which it is known to be whole.

    step-000100/
      weight-00000.safetensors      what rank 0 wrote of the weights; one file per kind of state and writing rank
      exp_avg-00000.safetensors     …
      plan.json                     the plan that wrote it
      manifest.json                 written last: without it, or with a wrong one, this is no checkpoint

State is kept as rectangles of global tensors. A tensor that one file holds whole has its own name there; otherwise its
rectangles are named `name@first:last,first:last`, as slices on each dim. Each stored rectangle is checked in blocks of
whole rows, so that a reader of a part of it checks what it reads, and damage is found to the megabyte.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.checkpoint.checksum import checksum
from phalanx.checkpoint.disk import write_synced
from phalanx.errors import CheckpointError, DamagedCheckpointError
from phalanx.plan.shards import Rectangle

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
PLAN = "plan.json"

BLOCK_BYTES = 2**20
"""About so many bytes have one checksum: small enough to read a part of a tensor, large enough to list."""

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of an element, by the safetensors format's names of types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some rows of a stored rectangle: where they belong in the global tensor, where they lie in the file."""

    rectangle: Rectangle
    offset: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One rectangle of one global tensor of `shape`, as it lies in `file`: row-major from byte `offset` on.

    `checksums` has one for each block, in order.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    rectangle: Rectangle
    file: str
    offset: int
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.rectangle.num_elements * ITEM_BYTES[self.dtype]

    def blocks(self) -> Iterator[Block]:
        """The blocks, in file order."""
        shape, start, stop = self.rectangle.shape, self.rectangle.start, self.rectangle.stop
        row_bytes = self.num_bytes // shape[0]
        rows = block_rows(row_bytes)
        for index, first in enumerate(range(0, shape[0], rows)):
            count = min(rows, shape[0] - first)
            top = start[0] + first
            box = Rectangle(start=(top, *start[1:]), stop=(top + count, *stop[1:]))
            offset = self.offset + first * row_bytes
            yield Block(rectangle=box, offset=offset, num_bytes=count * row_bytes, checksum=self.checksums[index])


def block_rows(row_bytes: int) -> int:
    """Rows in one block."""
    return max(1, BLOCK_BYTES // row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint: its size, and the checksum of its first `head_bytes` (the header that comes before the
    tensors; a file without tensors is all head)."""

    num_bytes: int
    head_bytes: int
    head_crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is in one checkpoint taken after `step` steps. `extra` is what the training loop wanted kept."""

    step: int
    written_at: str
    extra: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: tuple[Stored, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.num_bytes for file in self.files.values())

    def write(self, path: Path) -> None:
        """Write as JSON under a checksum of its own, and force it to the disk. Raises OSError."""
        write_synced(path, _sealed(self._plain()))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read what `write` wrote. Raises DamagedCheckpointError for a file that is missing or damaged,
        CheckpointError for one of another version."""
        try:
            data = path.read_bytes()
            content = json.loads(data)["manifest"]
            whole = data == _sealed(content)
        except FileNotFoundError:
            raise DamagedCheckpointError("has no manifest: it was never finished", where=str(path.parent)) from None
        except OSError as error:
            raise DamagedCheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
        except (ValueError, KeyError, TypeError):  # ValueError: neither JSON nor UTF-8
            whole = False
        if not whole:
            raise DamagedCheckpointError("is damaged: it does not agree with its own checksum", where=str(path))
        version = content["format_version"]
        if version != FORMAT_VERSION:
            what = f"is of format version {version}; this program reads version {FORMAT_VERSION}"
            raise CheckpointError(what, where=str(path), instead="use the program that wrote it")
        return cls._from_plain(content)

    def _plain(self) -> dict[str, Any]:
        tensors: dict[str, dict[str, Any]] = {}
        for entry in self.tensors:
            tensor = tensors.setdefault(entry.kind, {}).setdefault(
                entry.name, {"shape": entry.shape, "dtype": entry.dtype, "rectangles": []}
            )
            box = entry.rectangle
            place = {"start": box.start, "stop": box.stop, "file": entry.file, "offset": entry.offset}
            tensor["rectangles"].append({**place, "checksums": entry.checksums})
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "written_at": self.written_at,
            "extra": self.extra,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": tensors,
        }

    @classmethod
    def _from_plain(cls, content: Mapping[str, Any]) -> Manifest:
        tensors = tuple(
            Stored(
                kind=kind,
                name=name,
                shape=tuple(tensor["shape"]),
                dtype=tensor["dtype"],
                rectangle=Rectangle(start=tuple(place["start"]), stop=tuple(place["stop"])),
                file=place["file"],
                offset=place["offset"],
                checksums=tuple(place["checksums"]),
            )
            for kind, by_name in content["tensors"].items()
            for name, tensor in by_name.items()
            for place in tensor["rectangles"]
        )
        return cls(
            step=content["step"],
            written_at=content["written_at"],
            extra=content["extra"],
            files={name: StoredFile(**file) for name, file in content["files"].items()},
            tensors=tensors,
        )


def _sealed(content: Mapping[str, Any]) -> bytes:
    """The manifest's file: its content, under a checksum."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "manifest": {text}}}\n'.encode()


def check_files(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint by their presence and sizes: all of it, nothing if all is well."""
    wrong = []
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            wrong.append(f"{folder / name}: {error.strerror}")
            continue
        if size != file.num_bytes:
            wrong.append(f"{folder / name}: has {size:,} bytes of {file.num_bytes:,}")
    return wrong


def check_contents(folder: Path, manifest: Manifest, on_bytes: Callable[[int], None]) -> list[str]:
    """Read everything and compare all checksums. Returns what is wrong, with file, bytes and tensor; `on_bytes` hears
    how much has been read."""
    wrong = []
    by_file: dict[str, list[Stored]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors:
        by_file[entry.file].append(entry)
    for name, entries in by_file.items():
        try:
            with (folder / name).open("rb") as file:
                for num_bytes, problem in _check_file(file, manifest.files[name], entries):
                    wrong += [f"{folder / name}: {problem}"] if problem else []
                    on_bytes(num_bytes)
        except OSError as error:
            wrong.append(f"{folder / name}: {error.strerror}")
    return wrong


def _check_file(file: BinaryIO, known: StoredFile, entries: Iterable[Stored]) -> Iterator[tuple[int, str]]:
    """Bytes read and what is wrong with them ("" if nothing), part after part."""
    head = file.read(known.head_bytes)
    yield len(head), head_mismatch(known, head)
    for entry in sorted(entries, key=lambda entry: entry.offset):
        for block in entry.blocks():
            file.seek(block.offset)
            yield block.num_bytes, mismatch(entry, block, file.read(block.num_bytes))


MISMATCH = "the checksum does not match: the file was changed or the disk is damaged"


def head_mismatch(known: StoredFile, head: bytes) -> str:
    """What is wrong with the first bytes of a file, "" if nothing."""
    return "" if zlib.crc32(head) == known.head_crc32 else f"bytes 0 to {known.head_bytes:,} (header): {MISMATCH}"


def mismatch(entry: Stored, block: Block, data: bytes | memoryview) -> str:
    """What is wrong with the bytes read of a block, "" if nothing."""
    if len(data) == block.num_bytes and checksum(data) == block.checksum:
        return ""
    span = f"bytes {block.offset:,} to {block.offset + block.num_bytes:,} ({entry.kind} of {entry.name})"
    if len(data) < block.num_bytes:
        return f"{span}: the file ends after {block.offset + len(data):,} bytes"
    return f"{span}: {MISMATCH}"
