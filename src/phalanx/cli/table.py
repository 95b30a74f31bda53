"""Tables that stay readable on any terminal: short cells in columns, and one long text beside them or beneath."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def entries(rows: Sequence[Sequence[str]], texts: Sequence[str], width: int) -> list[str]:
    """One entry per row, the heading first: its cells aligned to the right, then its text; where `width` is too small
    for the longest text, texts are on lines of their own and that of the heading is left out. Columns are two blanks
    apart, or one where `width` is too small for that."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= width else " "
    lines = [gap.join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    if len(lines[0]) + 2 + max(map(len, texts)) <= width:
        return [f"{line}  {text}" for line, text in zip(lines, texts, strict=True)]
    indent = " " * (widths[0] + 2)
    beneath = [f"{line}\n{wrapped(indent + text, width)}" for line, text in zip(lines[1:], texts[1:], strict=True)]
    return [lines[0], *beneath]


def columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """One entry per row: short cells in columns, numbers to the right, and the row's last cell, a long text that goes
    on beneath its own beginning."""
    starts = ["  "] * len(rows)
    for column in list(zip(*rows, strict=True))[:-1]:
        size, words = max(map(len, column)), any(cell[:1].isalpha() for cell in column)
        cells = [cell.ljust(size) if words else cell.rjust(size) for cell in column]
        starts = [f"{start}{cell}  " for start, cell in zip(starts, cells, strict=True)]
    return [_filled(row[-1], width, start, " " * len(start)) for start, row in zip(starts, rows, strict=True)]


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width`, further ones two columns deeper than its own indentation."""
    words = text.lstrip()
    indent = text[: len(text) - len(words)]
    return _filled(words, width, indent, indent + "  ")


def _filled(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
