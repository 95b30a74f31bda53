"""Any layout reads what any other wrote: stored rectangles ∩ wanted rectangles → copies, read in file order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import Block, Manifest, Stored, StoredFile, head_mismatch, mismatch
from phalanx.checkpoint.tensor_file import DTYPES, NUM_THREADS, StatePiece
from phalanx.errors import DamagedCheckpointError
from phalanx.plan.shards import Rectangle

Wanted = Sequence[tuple[StatePiece, Rectangle]]
"""Pieces, each with the part of it that a stored rectangle or block has."""


def read_pieces(folder: Path, manifest: Manifest, pieces: Iterable[StatePiece], *, check: bool = True) -> None:
    """Fill the pieces' tensors, casting to their types. Only blocks that hold something wanted are read, each once,
    with its checksum compared unless `check` is off.

    Raises DamagedCheckpointError, which names file, bytes and tensor, also where a piece is not covered.
    """
    wanted: dict[tuple[str, str], list[StatePiece]] = {}
    missing: dict[int, int] = {}
    for piece in pieces:
        wanted.setdefault((piece.kind, piece.parameter.name), []).append(piece)
        missing[id(piece)] = piece.rectangle.num_elements
    files: dict[str, list[tuple[Stored, Wanted]]] = {}
    for entry in manifest.tensors:
        parts = _overlaps(wanted.get((entry.kind, entry.name), ()), entry.rectangle)
        if parts:
            files.setdefault(entry.file, []).append((entry, parts))
        for piece, box in parts:
            missing[id(piece)] -= box.num_elements
    for piece in (piece for group in wanted.values() for piece in group):
        if missing[id(piece)]:
            what = f"{piece.kind} of {piece.parameter.name}: {_span(piece.rectangle)} is not stored exactly once"
            raise DamagedCheckpointError(what, where=str(folder))
    # Reading and comparing let go of the interpreter: files overlap.
    with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        list(
            pool.map(lambda item: _read_file(folder / item[0], manifest.files[item[0]], item[1], check), files.items())
        )


def _overlaps(pieces: Iterable[StatePiece], rectangle: Rectangle) -> Wanted:
    return [(piece, box) for piece in pieces if (box := piece.rectangle.intersect(rectangle))]


def _read_file(path: Path, known: StoredFile, entries: Iterable[tuple[Stored, Wanted]], check: bool) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            problem = head_mismatch(known, os.pread(descriptor, known.head_bytes, 0)) if check else ""
            if problem:
                raise DamagedCheckpointError(problem, where=str(path))
            scratch = torch.empty(0, dtype=torch.uint8)
            for entry, parts in sorted(entries, key=lambda item: item[0].offset):
                for block in entry.blocks():
                    overlaps = _overlaps([piece for piece, _ in parts], block.rectangle)
                    if overlaps:
                        if scratch.numel() < block.num_bytes:
                            scratch = torch.empty(block.num_bytes, dtype=torch.uint8)
                        _read_block(descriptor, path, entry, block, overlaps, scratch, check)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedCheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _read_block(
    descriptor: int, path: Path, entry: Stored, block: Block, overlaps: Wanted, scratch: Tensor, check: bool
) -> None:
    piece, box = overlaps[0]
    direct = piece.tensor[box.within(piece.rectangle)]
    same = direct.dtype == DTYPES[entry.dtype] and direct.device.type == "cpu"
    fits = same and box == block.rectangle and direct.is_contiguous()
    flat = direct.view(-1).view(torch.uint8) if fits else scratch[: block.num_bytes]
    data = memoryview(flat.numpy())
    length = _read_fully(descriptor, data, block.offset)
    problem = mismatch(entry, block, data[:length]) if check or length < block.num_bytes else ""
    if problem:
        raise DamagedCheckpointError(problem, where=str(path))
    values = flat.view(DTYPES[entry.dtype]).view(block.rectangle.shape)
    for piece, box in overlaps[1:] if fits else overlaps:
        piece.tensor[box.within(piece.rectangle)].copy_(values[box.within(block.rectangle)])


def _read_fully(descriptor: int, data: memoryview, offset: int) -> int:
    """Read until `data` is full or the file ends; returns the number of bytes."""
    length = 0
    while length < len(data):
        got = os.preadv(descriptor, [data[length:]], offset + length)
        if not got:
            break
        length += got
    return length


def _span(rectangle: Rectangle) -> str:
    spans = (f"{start}:{stop}" for start, stop in zip(rectangle.start, rectangle.stop, strict=True))
    return f"[{', '.join(spans)}]"
