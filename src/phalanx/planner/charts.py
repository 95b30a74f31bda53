"""Charts of a page, as SVG: bars, the formation of ranks on their nodes, and time against memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.planner.summary import Summary
from phalanx.units import format_bytes, format_seconds

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#ffaabb", "#eebb99")
WIDTH, ROW = 1000, 22
"""Pixels: of the widest drawing, and the height of one bar or device."""

MOST_NODES, MOST_ROWS = 4096, 40
"""Nodes that are looked at, and rows of alike nodes that are drawn."""


def bars(rows: Mapping[str, Mapping[str, float]], show: Callable[[float], str], *, limit: float = 0.0) -> str:
    """One bar per row, its parts side by side to one scale; `limit` is drawn as a line. Kinds of which there is nothing
    are left out."""
    most = max([limit, *(sum(row.values()) for row in rows.values())])
    kinds = [k for k in dict.fromkeys(kind for row in rows.values() for kind in row) if _any(rows, k, most)]
    parts, top = list(_legend(kinds)), 20.0 * (1 + (len(kinds) - 1) // 4) + 8
    for name, row in rows.items():
        x = 0.0
        for i, kind in enumerate(kinds):
            size = row.get(kind, 0.0)
            width = (WIDTH - 20) * size / most
            parts.append(_box(x, top + 14, width, ROW - 6, COLOURS[i % len(COLOURS)], f"{kind}: {show(size)}"))
            x += width
        parts.append(_text(0, top + 11, f"{name}: {show(sum(row.values()))}"))
        top += ROW + 16
    if limit:
        x = (WIDTH - 20) * limit / most
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{top}" stroke="red"/>')
        parts.append(_text(x - 4, 34, f"{show(limit)} there are", anchor="end"))
    return drawing(WIDTH, top, parts)


def _any(rows: Mapping[str, Mapping[str, float]], kind: str, most: float) -> bool:
    return any(row.get(kind, 0.0) > 1e-9 * most for row in rows.values())


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    for i, kind in enumerate(kinds):
        x, y = 245 * (i % 4), 20 * (i // 4)
        yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        yield _text(x + 14, y + 10, kind)


def formation(plan: Plan) -> str:
    """Nodes as rows of devices; nodes that differ in nothing but the data axis share a row."""
    layout, per_node = plan.layout, plan.cluster.devices_per_node
    nodes = -(-layout.num_ranks // per_node)
    alike = itertools.groupby(range(min(nodes, MOST_NODES)), key=lambda node: _pattern(plan, node))
    groups = [list(members) for _, members in alike]
    parts, drawn = list[str](), groups[:MOST_ROWS]
    for row, members in enumerate(drawn):
        y, coords = ROW * row + 2 * row, [c for node in (members[0], members[-1]) for c in _coords(plan, node)]
        parts.append(_text(0, y + 15, _span("node", members)))
        for place, coord in enumerate(_coords(plan, members[0])):
            fill, title = COLOURS[coord.pipeline % len(COLOURS)], f"rank {members[0] * per_node + place}: {coord}"
            x = 110 + 26 * place
            parts.append(_box(x, y, 24, ROW, fill, title) + _text(x + 12, y + 15, str(coord.tensor), anchor="middle"))
        axes = [_span(axis, sorted({getattr(coord, axis) for coord in coords})) for axis in ("pipeline", "data")]
        parts.append(_text(120 + 26 * min(per_node, layout.num_ranks), y + 15, ", ".join(axes)))
    left = nodes - (drawn[-1][-1] + 1)
    note = "colour: pipeline rank; number: tensor rank" + (f"; and {left:,} more nodes" if left else "")
    return drawing(420 + 26 * per_node, (ROW + 2) * len(drawn), parts) + f"<p>{note}</p>"


def _coords(plan: Plan, node: int) -> list[Coord]:
    per_node = plan.cluster.devices_per_node
    ranks = range(node * per_node, min((node + 1) * per_node, plan.layout.num_ranks))
    return [plan.layout.coord(rank) for rank in ranks]


def _pattern(plan: Plan, node: int) -> tuple[tuple[int, ...], ...]:
    """What a node's devices hold, whichever data rank they are."""
    return tuple((coord.pipeline, coord.context, coord.tensor) for coord in _coords(plan, node))


def _span(name: str, numbers: Sequence[int]) -> str:
    """As `node 3` or `nodes 0 to 124`."""
    if len(numbers) == 1:
        return f"{name} {numbers[0]:,}"
    return f"{name}{'s' if name == 'node' else ''} {numbers[0]:,} to {numbers[-1]:,}"


def front(points: Sequence[Summary], first: Summary, limit: int) -> str:
    """Layouts that no other beats in both time and memory, the `first`, and the memory that there is."""
    times = [line.step_s for line in (*points, first)]
    sizes = [float(line.memory_bytes) for line in (*points, first)]
    x_of, x_ticks = _axis(min(times), max(times), (1e-9, 1e-6, 1e-3, 1.0, 60.0, 3600.0), 90, WIDTH - 60)
    y_of, y_ticks = _axis(0.0, max(sizes), tuple(2.0 ** (10 * i) for i in range(6)), 270, 20)
    parts = [_line(90, 270, WIDTH - 60, 270, "black"), _line(90, 20, 90, 270, "black")]
    for seconds in x_ticks:
        parts += [_line(x_of(seconds), 20, x_of(seconds), 270, "#dddddd")]
        parts += [_text(x_of(seconds), 286, format_seconds(seconds), anchor="middle")]
    for size in y_ticks:
        parts += [_line(90, y_of(size), WIDTH - 60, y_of(size), "#dddddd")]
        parts += [_text(84, y_of(size) + 4, format_bytes(size), anchor="end")]
    if y_of(limit) >= 20:
        parts += [_line(90, y_of(limit), WIDTH - 60, y_of(limit), "red")]
    for line, fill in [*((line, "#4477aa") for line in points), (first, "#ee6677")]:
        title = f"{line.layout}: {format_seconds(line.step_s)}, {format_bytes(line.memory_bytes)}"
        place = f'cx="{x_of(line.step_s):.1f}" cy="{y_of(line.memory_bytes):.1f}"'
        parts.append(f'<circle {place} r="5" fill="{fill}"><title>{escape(title)}</title></circle>')
    parts.append(_text(WIDTH - 60, 304, "time of a step", anchor="end"))
    parts.append(_text(0, 10, "memory of the fullest stage"))
    note = "red: the first of the table; blue: what no other layout beats in both; red line: the memory that there is"
    return drawing(WIDTH, 310, parts) + f"<p>{note}</p>"


def _axis(
    low: float, high: float, units: Sequence[float], start: float, end: float
) -> tuple[Callable[[float], float], list[float]]:
    """Pixels of a value between `low` and `high`, with some room, and round values in the largest of `units` in it."""
    room = 0.05 * (high - low) or 0.05 * high
    low, high = max(0.0, low - room), high + room
    unit = max((unit for unit in units if unit <= high), default=units[0])
    least = (high - low) / unit / 6
    step = next(s for s in _round_steps(least) if s >= least) * unit
    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda value: start + (end - start) * (value - low) / (high - low), ticks


def _round_steps(least: float) -> Iterator[float]:
    power = 10.0 ** math.floor(math.log10(least))
    return (digit * power for digit in (1, 2, 5, 10))


def drawing(width: float, height: float, parts: Iterable[str]) -> str:
    """`parts` as one picture, which shrinks with the page."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="white"/>'
    return f"<g><title>{escape(title)}</title>{shape}</g>"


def _line(x: float, y: float, to_x: float, to_y: float, stroke: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
