"""Tensor files: rectangles of tensors in the safetensors format, written with checksums on the way.

The format: 8 bytes header size (little-endian), a JSON header {key: dtype, shape, data_offsets}, then the bytes of all
tensors without gaps. Written here rather than by the safetensors library, which copies every tensor and knows no
checksums.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.checksum import checksum
from phalanx.checkpoint.disk import start_writing
from phalanx.checkpoint.manifest import ITEM_BYTES, Stored, StoredFile, block_rows
from phalanx.plan.shards import Parameter, Rectangle

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = FLOATS | {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_HEADER_ALIGNMENT = 64
_WRITE_BUFFER_BYTES = 2**16

_START_BYTES = 2**23
"""After so many bytes the disk begins its work, while the next ones are still being copied."""

NUM_THREADS = 4
"""Files that one rank writes or reads at once: checksums of one overlap with the disk's work on another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """A part of a run's state: `tensor` holds `rectangle` of the global tensor of `kind` for `parameter`.

    Kinds: "weight" (master weights where compute is narrower), "exp_avg" and "exp_avg_sq" (AdamW's moments), "frozen"
    and "buffer" (of modules), and `match.REDUCTION`, which is no part of a global tensor but a rank's own. `owned`: of
    all ranks that hold the same values, exactly one writes them, and this is it.
    """

    parameter: Parameter
    rectangle: Rectangle
    tensor: Tensor
    kind: str = "weight"
    owned: bool = True

    @classmethod
    def whole(cls, parameter: Parameter, tensor: Tensor, *, kind: str = "weight") -> StatePiece:
        """All of a global tensor."""
        return cls(parameter=parameter, rectangle=Rectangle.of(parameter.shape), tensor=tensor, kind=kind)


def write_tensors(path: Path, pieces: Sequence[StatePiece]) -> tuple[StoredFile, list[Stored]]:
    """Write the pieces, all of one kind, into a new file and force it to the disk. Raises OSError."""
    head = header(_listed(piece) for piece in pieces)
    offset = len(head)
    stored = []
    with path.open("xb", buffering=_WRITE_BUFFER_BYTES) as file:
        started = file.write(head)
        for piece in pieces:
            data = bytes_of(piece.tensor)
            size = block_rows(len(data) // piece.rectangle.shape[0]) * (len(data) // piece.rectangle.shape[0])
            checksums = []
            for first in range(0, len(data), size):
                block = data[first : first + size]
                checksums.append(checksum(block))
                file.write(block)
                if file.tell() - started >= _START_BYTES:
                    started = start_writing(file, started)
            stored.append(_entry(piece, path.name, offset, checksums))
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(num_bytes=offset, head_bytes=len(head), head_crc32=zlib.crc32(head)), stored


def key(name: str, shape: tuple[int, ...], rectangle: Rectangle) -> str:
    """The name under which a rectangle of a tensor stands in a file."""
    if rectangle.shape == shape:
        return name
    return f"{name}@" + ",".join(f"{a}:{b}" for a, b in zip(rectangle.start, rectangle.stop, strict=True))


def _listed(piece: StatePiece) -> tuple[str, str, tuple[int, ...]]:
    name = key(piece.parameter.name, piece.parameter.shape, piece.rectangle)
    return name, DTYPE_NAMES[piece.tensor.dtype], piece.rectangle.shape


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file that holds the tensors (name, type, shape), in this order and without gaps."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry(piece: StatePiece, file: str, offset: int, checksums: list[int]) -> Stored:
    dtype = DTYPE_NAMES[piece.tensor.dtype]
    assert piece.tensor.nbytes == piece.rectangle.num_elements * ITEM_BYTES[dtype]
    return Stored(
        kind=piece.kind,
        name=piece.parameter.name,
        shape=piece.parameter.shape,
        dtype=dtype,
        rectangle=piece.rectangle,
        file=file,
        offset=offset,
        checksums=tuple(checksums),
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major, without a copy where it lies so in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())
