"""The checksum finds what disks and memory do to data."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.checksum import COLUMNS, checksum

ROW = COLUMNS * 8
RANDOM = np.random.default_rng(0).bytes(2**20)
SIZES = st.integers(1, 5 * ROW)


def by_hand(data: bytes) -> int:
    """The definition, word by word."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    sums = [sum(words[column::COLUMNS]) % 2**64 for column in range(min(COLUMNS, len(words)))]
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums) + data[len(words) * 8 :])


@pytest.mark.parametrize("size", [0, 3, 8, ROW - 1, ROW, ROW + 1, ROW + 8, 3 * ROW + 21])
def test_it_is_what_its_description_says(size):
    data = RANDOM[:size]
    assert checksum(data) == checksum(memoryview(data)) == by_hand(data)


@given(st.data(), SIZES)
def test_a_changed_bit_is_found(data, size):
    changed = bytearray(RANDOM[:size])
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(bytes(changed)) != checksum(RANDOM[:size])


@given(st.data(), SIZES)
def test_a_stretch_of_zeros_is_found(data, size):
    first = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(first + 1, size))
    changed = bytearray(RANDOM[:size])
    changed[first:stop] = bytes(stop - first)
    assert bytes(changed) == RANDOM[:size] or checksum(bytes(changed)) != checksum(RANDOM[:size])


@pytest.mark.parametrize("unit", [512, 4096])
def test_sectors_and_pages_that_changed_places_are_found(unit):
    before = checksum(RANDOM)
    for distance in (1, 2, 7, 100):
        changed = bytearray(RANDOM)
        changed[:unit] = RANDOM[distance * unit : (distance + 1) * unit]
        changed[distance * unit : (distance + 1) * unit] = RANDOM[:unit]
        assert checksum(bytes(changed)) != before
