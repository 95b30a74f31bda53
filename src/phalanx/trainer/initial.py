"""Initial weights that do not depend on the layout: any slice of any parameter can be drawn alone.

A matrix is drawn in fp32 in blocks of 64 rows of the unpadded tensor, each block from a generator of its own, seeded by
(seed, name, block). A rank draws the blocks that its rectangle touches, one at a time, and keeps its slice.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from phalanx.plan.shards import Parameter, Rectangle
from phalanx.trainer.flat import FlatBuffer

BLOCK_ROWS = 64


def draw(parameter: Parameter, rectangle: Rectangle, seed: int) -> Tensor:
    """The fp32 values of `rectangle` of `parameter`, the same whoever asks."""
    values = torch.full(rectangle.shape, parameter.constant)
    if not parameter.std:
        return values
    first, last = rectangle.start[0], rectangle.stop[0]
    columns = slice(rectangle.start[1], rectangle.stop[1])
    for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
        top = block * BLOCK_ROWS
        bottom = min(top + BLOCK_ROWS, parameter.shape[0])
        rows = torch.empty(bottom - top, *parameter.shape[1:])
        rows.normal_(0.0, parameter.std, generator=_generator(seed, parameter.name, block))
        begin, end = max(first, top), min(last, bottom)
        values[begin - first : end - first] += rows[begin - top : end - top, columns]
    return values


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def fill(buffer: FlatBuffer, seed: int) -> None:
    """Draw all of a buffer's parameters into it, cast to its dtype."""
    for piece in buffer.layout.pieces:
        buffer.values(piece).copy_(draw(piece.parameter, piece.rectangle, seed))
