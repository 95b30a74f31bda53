"""The checksum of a block of tensor bytes: a CRC32 at the speed of memory.

A block is laid out in rows of COLUMNS words of 64 bits, its columns are added up modulo 2^64, and the sums have a
CRC32. Reading memory is most of its cost; a CRC32 of every byte costs more than reading them from a fast disk. A
changed bit is always found, and any change within one row as surely as a CRC32 finds it; COLUMNS is a prime, so that
sectors or pages of a disk that changed places stand under other columns.
"""

from __future__ import annotations

import zlib

import numpy as np

COLUMNS = 1021
_WORD = np.dtype("<u8")


def checksum(data: memoryview | bytes) -> int:
    """The folded CRC32 of `data`; of no more than a row (8,168 bytes), it is the CRC32 itself."""
    num_words = len(data) // _WORD.itemsize
    num_rows, rest = divmod(num_words, COLUMNS)
    if num_rows == 0 or (num_rows == 1 and rest == 0):
        return zlib.crc32(data)
    words = np.frombuffer(data, dtype=_WORD, count=num_words)
    sums = np.add.reduce(words[: num_rows * COLUMNS].reshape(num_rows, COLUMNS), axis=0)
    sums[:rest] += words[num_rows * COLUMNS :]
    return zlib.crc32(data[num_words * _WORD.itemsize :], zlib.crc32(sums))
