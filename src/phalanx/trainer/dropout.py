"""Dropout masks without state: each element's fate is a hash of where it stands in the whole job.

The key is (seed, step, layer, site); the element is addressed by global sequence, global row, and column (or head and
column). So a slice of an activation gets its slice of the mask, copies of an activation get the same mask, and resume
repeats it, without any generator whose state could go astray.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

_LOW = 0xFFFFFFFF


def site_key(seed: int, step: int, layer: int, site: str) -> int:
    """A 32-bit key for one use of dropout in one optimizer step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{layer}/{site}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _mix(values: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64, each output bit depending on each input bit (a multiply-xorshift
    hash with the constants of Ettinger's 'hash-prospector' search)."""
    values = values ^ (values >> 16)
    values = (values * 0x7FEB352D) & _LOW
    values = values ^ (values >> 15)
    values = (values * 0x846CA68B) & _LOW
    return values ^ (values >> 16)


def keep_mask(key: int, probability: float, *coordinates: Tensor) -> Tensor:
    """Whether each element is kept, as a boolean tensor of the broadcast shape of `coordinates` (int64 each).

    An element is dropped with `probability`, independently for every distinct tuple of coordinates.
    """
    hashed = _mix(coordinates[0] ^ key)
    for coordinate in coordinates[1:]:
        hashed = _mix(hashed ^ _mix(coordinate + 0x9E3779B9))
    return hashed >= int(probability * 2**32)


def apply(inputs: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Zero what is not kept, and scale the rest so that the expectation stays."""
    return inputs * (keep.to(inputs.dtype) / (1.0 - probability))
