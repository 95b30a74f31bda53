"""Quantities with units: what is read, what is refused, what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "80 GB", 80 * 10**9),
        (units.parse_bytes, "16MiB", 16 * 2**20),
        (units.parse_bytes, "1.5 kB", 1500),
        (units.parse_bytes, "1_000 B", 1000),
        (units.parse_seconds, "5 us", 5e-6),
        (units.parse_seconds, "5 µs", 5e-6),
        (units.parse_seconds, "10 min", 600.0),
        (units.parse_flops_per_s, "312 TFLOP/s", 312e12),
        (units.parse_flops_per_s, "1.2 EFLOP/s", 1.2e18),
        (units.parse_bytes_per_s, "25 GB/s", 25e9),
        (units.parse_bytes_per_s, "25 GiB/s", 25 * 2**30),
        (units.parse_bytes_per_s, "400 Gb/s", 50e9),
    ],
)
def test_values(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "why"),
    [
        (units.parse_bytes, "80", '"80" has no unit; known: B, kB'),
        (units.parse_bytes, "80 gb", 'unknown unit "gb"'),
        (units.parse_bytes, "80 GB/s", 'unknown unit "GB/s"'),
        (units.parse_bytes, "eighty GB", "is not a number with a unit"),
        (units.parse_bytes, "", "is not a number with a unit"),
        (units.parse_bytes, "1e999 GB", "is too large"),
        (units.parse_bytes, "nan GB", "is not a number with a unit"),
        (units.parse_seconds, "5 minutes", 'unknown unit "minutes"'),
        (units.parse_flops_per_s, "312 TFLOP", 'unknown unit "TFLOP"'),
    ],
)
def test_refused(parse, text, why):
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("format_value", "value", "text"),
    [
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 1023, "1023 B"),
        (units.format_bytes, 1024, "1 KiB"),
        (units.format_bytes, 84_933_279_744, "79.1 GiB"),
        (units.format_bytes, -5 * 2**30, "-5 GiB"),
        (units.format_bytes, 1023.9 * 2**20, "1 GiB"),
        (units.format_seconds, 0.0123, "12.3 ms"),
        (units.format_seconds, 59.99, "1 min"),
        (units.format_seconds, 5400, "1.5 h"),
        (units.format_seconds, 1e-12, "0.001 ns"),
        (units.format_seconds, float("inf"), "inf s"),
        (units.format_flops_per_s, 3.12e14, "312 TFLOP/s"),
    ],
)
def test_printed(format_value, value, text):
    assert format_value(value) == text


PAIRS = [
    (units.parse_bytes, units.format_bytes, 1.0),
    (units.parse_seconds, units.format_seconds, 1e-9),
    (units.parse_flops_per_s, units.format_flops_per_s, 1.0),
]


@pytest.mark.parametrize(("parse", "format_value", "smallest"), PAIRS)
@given(scale=st.floats(1.0, 1e16))
def test_print_then_parse_keeps_three_digits(parse, format_value, smallest, scale):
    value = smallest * scale
    assert parse(format_value(value)) == pytest.approx(value, rel=5.1e-3, abs=0.5 * (smallest == 1.0))
