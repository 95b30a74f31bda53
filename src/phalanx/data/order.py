"""Which sample stands where: a pure function of (seed, step, position in the global batch).

Nothing here knows a layout or a rank, so every layout sees the same samples in the same order, and a run resumes
anywhere by arithmetic alone, as fast at step 10,000,000 as at step 10.

Positions are counted through the run: position p of step k is number `k × global_batch + p`. Every `num_samples` of
them are one epoch, and each epoch is a permutation of its own, so that every sample comes exactly once per epoch; a
global batch may hold the end of one epoch and the beginning of the next. The permutation needs no table: a Feistel
network (Luby and Rackoff, 1988) is a bijection on [0, 2^bits) whatever its round function, and walking on along its
cycles until a value lies below `num_samples` makes it one on [0, num_samples) (Black and Rogaway, 2002). As 2^bits is
below 2 × num_samples, that takes fewer than two steps on average.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Unsigned: TypeAlias = npt.NDArray[np.uint64]


def sample_ids(seed: int, step: int, global_batch: int, num_samples: int) -> Integers:
    """The samples of one optimizer step, in the order of their positions in the global batch: int64 [global_batch]."""
    numbers = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    return in_order(numbers, num_samples, seed)


def in_order(numbers: Integers, num_samples: int, seed: int, stream: int = 0) -> Integers:
    """The samples that come as the `numbers`-th (not decreasing) of a run, epoch after epoch: same shape. Each `stream`
    has an order of its own."""
    epochs, within = np.divmod(numbers, num_samples)
    ids = np.empty_like(numbers)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if len(epochs) else ():
        chosen = epochs == epoch
        ids[chosen] = permute(within[chosen], num_samples, seed, epoch, stream)
    return ids


def permute(indices: Integers, num_samples: int, seed: int, epoch: int, stream: int = 0) -> Integers:
    """Where the permutation of (seed, epoch, stream) sends `indices` of [0, num_samples): same shape, a bijection."""
    name = f"order {seed} {epoch}" + (f" {stream}" if stream else "")
    keys = np.frombuffer(hashlib.blake2b(name.encode()).digest(), "<u8")  # 8 of them, one for each round
    num_bits = max(2, (num_samples - 1).bit_length())
    values = _feistel(indices.astype(np.uint64), num_bits, keys)
    outside = np.flatnonzero(values >= num_samples)
    while len(outside):
        values[outside] = _feistel(values[outside], num_bits, keys)
        outside = outside[values[outside] >= num_samples]
    return values.astype(np.int64)


def _feistel(values: Unsigned, num_bits: int, keys: Unsigned) -> Unsigned:
    """A keyed bijection on [0, 2^num_bits). The halves differ by one bit where num_bits is odd; rounds swap them, and
    as the number of rounds is even they end as they began."""
    low_bits, high_bits = num_bits // 2, num_bits - num_bits // 2
    low, high = values & _mask(low_bits), values >> np.uint64(low_bits)
    for key in keys:
        low, high = high ^ (_mix(low ^ key) & _mask(high_bits)), low
        low_bits, high_bits = high_bits, low_bits
    return (high << np.uint64(low_bits)) | low


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)


def _mix(values: Unsigned) -> Unsigned:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves all of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
