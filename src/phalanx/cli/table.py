"""Tables that stay readable on any terminal: short cells in columns, and one long text beside them or beneath."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def entries(rows: Sequence[Sequence[str]], texts: Sequence[str], width: int) -> list[str]:
    """One entry per row, the heading first: its cells aligned to the right, then its text; where `width` is too small
    for the longest text, texts are on lines of their own and that of the heading is left out."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    if len(lines[0]) + 2 + max(map(len, texts)) <= width:
        return [f"{line}  {text}" for line, text in zip(lines, texts, strict=True)]
    indent = " " * (widths[0] + 2)
    beneath = [f"{line}\n{wrapped(indent + text, width)}" for line, text in zip(lines[1:], texts[1:], strict=True)]
    return [lines[0], *beneath]


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width`, further ones two columns deeper than its own indentation."""
    words = text.lstrip()
    indent = text[: len(text) - len(words)]
    return textwrap.fill(
        words,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
