"""Quantities as people write them: "80 GiB", "25 GB/s", "312 TFLOP/s", "5 us".

A binary prefix (KiB, MiB, GiB, TiB) is a power of 1024, a decimal one (kB, MB, GB, TB) a power of 1000; they are never
taken for each other. Network cards are sold in bits: 400 Gb/s are 50 GB/s. Values are held in bytes, seconds, FLOP/s
and bytes/s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

BYTES: Mapping[str, float] = {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()}
SECONDS: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
FLOPS_PER_S: Mapping[str, float] = {f"{prefix}FLOP/s": size for prefix, size in (_PREFIXES | {"E": 10**18}).items()}
BYTES_PER_S: Mapping[str, float] = {
    **{f"{unit}/s": size for unit, size in BYTES.items()},
    **{f"{prefix}b/s": size / 8 for prefix, size in _PREFIXES.items()},
}

_QUANTITY = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*")


def parse(text: str, units: Mapping[str, float]) -> float:
    """The value of `text`, a number and one of `units`. Raises ValueError, which names the units that there are."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not a number with a unit ({", ".join(units)})')
    number, unit = match.groups()
    if unit not in units:
        wrong = f'has the unknown unit "{unit}"' if unit else "has no unit"
        raise ValueError(f'"{text}" {wrong}; known: {", ".join(units)}')
    size = units[unit]
    value = float(number) / round(1 / size) if size < 1 else float(number) * size  # "5 us" is then exactly 5e-6
    if not math.isfinite(value):
        raise ValueError(f'"{text}" is too large')
    return value


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "80 GiB". Raises ValueError when the unit is missing or unknown."""
    return round(parse(text, BYTES))


def parse_seconds(text: str) -> float:
    """Seconds of a time such as "5 us" or "10 min". Raises ValueError when the unit is missing or unknown."""
    return parse(text, SECONDS)


def parse_flops_per_s(text: str) -> float:
    """FLOP/s of a speed such as "312 TFLOP/s". Raises ValueError when the unit is missing or unknown."""
    return parse(text, FLOPS_PER_S)


def parse_bytes_per_s(text: str) -> float:
    """Bytes/s of a bandwidth such as "25 GB/s" or "200 Gb/s" (bits). Raises ValueError without a known unit."""
    return parse(text, BYTES_PER_S)


def format_bytes(num_bytes: float) -> str:
    """A size with a binary prefix: 84933279744 → "79.1 GiB"."""
    return _format(num_bytes, {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50})


def format_seconds(seconds: float) -> str:
    """A time: 0.0123 → "12.3 ms", 5400 → "1.5 h"."""
    return _format(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400})


def format_flops_per_s(flops_per_s: float) -> str:
    """A speed with a decimal prefix: 3.12e14 → "312 TFLOP/s"."""
    return _format(flops_per_s, FLOPS_PER_S)


def _format(value: float, units: Mapping[str, float]) -> str:
    """`value` in the largest unit that leaves at least 1 of it, to three digits (more before the point are kept)."""
    base = min(units, key=lambda unit: abs(units[unit] - 1))
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {base}"
    fitting = [unit for unit, size in units.items() if abs(value) >= 0.9995 * size]  # 0.9995 prints as 1
    unit = fitting[-1] if fitting else next(iter(units))
    scaled = value / units[unit]
    return f"{scaled:.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:.0f} {unit}"
