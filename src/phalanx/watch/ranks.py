"""Lists of ranks as short texts, however many ranks they hold."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_in_words(ranks: Sequence[int]) -> str:
    """As `2, 3`; long lists as ranges: `0-63`, `0-62 by 2`."""
    text = ",".join(map(str, ranks)) if len(ranks) <= 8 else as_ranges(ranks)
    return text.replace(":", " by ").replace(",", ", ")


def as_ranges(ranks: Sequence[int]) -> str:
    """`0-6:2,9` for 0, 2, 4, 6, 9: groups of thousands of ranks stay short."""
    parts, start = [], 0
    while start < len(ranks):
        stop = start + 1
        step = ranks[stop] - ranks[start] if stop < len(ranks) else 0
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        if stop - start <= 2:
            stop = start + 1
            parts.append(str(ranks[start]))
        else:
            parts.append(f"{ranks[start]}-{ranks[stop - 1]}" + (f":{step}" if step != 1 else ""))
        start = stop
    return ",".join(parts)


def from_ranges(text: str) -> tuple[int, ...]:
    """The ranks that `as_ranges` wrote."""
    members: list[int] = []
    for part in filter(None, text.replace("?", "").split(",")):
        first, dash, rest = part.partition("-")
        last, _, step = rest.partition(":")
        members += range(int(first), int(last) + 1, int(step or 1)) if dash else [int(first)]
    return tuple(members)
