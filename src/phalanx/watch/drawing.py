"""Draws walked Schedules to scale: one row per pipeline coordinate, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from phalanx.plan.actions import Action, ActionKind
from phalanx.plan.schedule import Schedule
from phalanx.plan.walk import Walk
from phalanx.units import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

LETTERS: dict[ActionKind, str] = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}
COLOURS: dict[ActionKind, tuple[str, str]] = {
    "forward": ("#5b8dd6", "#9fc0f0"),
    "backward": ("#4fa36b", "#98d4ab"),
    "input_gradient": ("#3aa6a0", "#93d6d2"),
    "weight_gradient": ("#c9964a", "#ecca96"),
}
"""By kind, the colour of even and of odd chunks."""

ROW, GAP, LEFT = 22, 4, 110
"""Pixels of the SVG: a row's height, the gap below it, the space for its name."""

UNIT, WIDTH, DIGIT = 22, 1100, 7
"""Pixels of the shortest unit of work; of the longest drawing whose times are seconds; of a digit of a number."""


def colour(action: Action) -> str:
    """The fill of `action`, as #rrggbb."""
    return COLOURS[action.kind][action.chunk % 2]


def row_name(schedule: Schedule, coordinate: int) -> str:
    """As "stage 2", "stages 2, 6" where there are several, or "stages 2, 6 … 26" where there are many."""
    first, *others = schedule.stages[coordinate]
    if len(others) > 2:
        return f"stages {first}, {others[0]} … {others[-1]}"
    return f"stage{'s' if others else ''} {', '.join(map(str, (first, *others)))}"


def facts(schedule: Schedule, walk: Walk) -> str:
    """Bubble, and the most activations that each coordinate holds at once, in words."""
    peaks = ", ".join(str(schedule.peak_live(coordinate)) for coordinate in range(schedule.pipeline))
    per_chunk = f" (of one of {schedule.virtual_stages} chunks)" if schedule.virtual_stages > 1 else ""
    return f"bubble {walk.bubble:.1%}; most micro-batches whose activations are held{per_chunk}: {peaks}"


def legend(schedule: Schedule) -> str:
    """What the letters mean that this schedule uses."""
    kinds = {action.kind for actions in schedule.actions for action in actions}
    words = [f"{letter} {kind.replace('_', ' ')}" for kind, letter in LETTERS.items() if kind in kinds]
    if schedule.virtual_stages > 1:
        words.append("small letters: odd chunks")
    return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One way in which a schedule goes through time: `walk`, and its `name` where it stands beside others. Without a
    name the times are units of work."""

    walk: Walk
    name: str = ""


def title(drawing: Drawing) -> str:
    """As "predicted: 1.21 s, bubble 12.4%"."""
    return f"{drawing.name}: {format_seconds(drawing.walk.step_s)}, bubble {drawing.walk.bubble:.1%}"


def lines(schedule: Schedule, drawings: Sequence[Drawing], width: int) -> list[Text]:
    """One line of `width` columns per coordinate, of all drawings one below the other and to the same scale. Actions
    are lettered, so that they can be read without colours."""
    from rich.text import Text

    left = max(len(row_name(schedule, coordinate)) for coordinate in range(schedule.pipeline)) + 1
    columns_per_s = (width - left) / max(drawing.walk.step_s for drawing in drawings)
    shortest_s = min(_shortest_s(drawing.walk) for drawing in drawings)
    if columns_per_s > 1 / shortest_s and not drawings[0].name:
        columns_per_s = int(columns_per_s * shortest_s) / shortest_s  # equal units of work have equal widths
    drawn, rows = list[Text](), range(schedule.pipeline)
    for drawing in drawings:
        drawn += [Text(title(drawing))] if drawing.name else []
        drawn += [_line(schedule, drawing.walk, coordinate, left, columns_per_s) for coordinate in rows]
    return drawn


def _line(schedule: Schedule, walk: Walk, coordinate: int, left: int, columns_per_s: float) -> Text:
    from rich.text import Text

    line = Text(row_name(schedule, coordinate).ljust(left), no_wrap=True)
    times = zip(walk.starts_s[coordinate], walk.ends_s[coordinate], strict=True)
    for action, (start_s, end_s) in zip(schedule.actions[coordinate], times, strict=True):
        start, end = (left + round(time_s * columns_per_s) for time_s in (start_s, end_s))
        line.append(" " * (start - len(line)))
        line.append(_label(action, end - len(line)), style=f"black on {colour(action)}")
    return line


def _shortest_s(walk: Walk) -> float:
    rows = zip(walk.starts_s, walk.ends_s, strict=True)
    return min(end - start for starts, ends in rows for start, end in zip(starts, ends, strict=True))


def _label(action: Action, width: int) -> str:
    letter = LETTERS[action.kind].lower() if action.chunk % 2 else LETTERS[action.kind]
    label = f"{letter}{action.micro_batch}"
    return (label if len(label) <= width else letter)[: max(width, 0)].ljust(width)


def svg(schedule: Schedule, drawings: Sequence[Drawing]) -> str:
    """The drawings as one SVG document, one below the other and to the same scale; each action says in words what it
    is, and how long it took, when pointed at."""
    longest_s = max(drawing.walk.step_s for drawing in drawings)
    scale = WIDTH / longest_s if drawings[0].name else UNIT / min(_shortest_s(drawing.walk) for drawing in drawings)
    parts, top = list[str](), 0
    for drawing in drawings:
        if drawing.name:
            parts.append(f'<text x="{LEFT}" y="{top + 15}" fill="gray">{escape(title(drawing))}</text>')
            top += ROW
        for coordinate in range(schedule.pipeline):
            parts += _svg_row(schedule, drawing, coordinate, top, scale)
            top += ROW + GAP
    if not drawings[0].name:
        parts.append(f'<text x="{LEFT}" y="{top + 15}" fill="gray">{escape(facts(schedule, drawings[0].walk))}</text>')
        top += 15
    parts += _svg_legend(schedule, top + 6)
    width, height = LEFT + round(longest_s * scale) + GAP, top + ROW
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, *parts, "</svg>", ""])


def _svg_legend(schedule: Schedule, top: int) -> Iterator[str]:
    used = {action.kind for actions in schedule.actions for action in actions}
    for place, kind in enumerate(kind for kind in LETTERS if kind in used):
        x = LEFT + 120 * place
        yield f'<rect x="{x}" y="{top}" width="11" height="11" fill="{COLOURS[kind][0]}"/>'
        yield f'<text x="{x + 15}" y="{top + 10}" fill="gray">{kind.replace("_", " ")}</text>'


def _svg_row(schedule: Schedule, drawing: Drawing, coordinate: int, top: int, scale: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + 15}" fill="gray">{row_name(schedule, coordinate)}</text>'
    times = zip(drawing.walk.starts_s[coordinate], drawing.walk.ends_s[coordinate], strict=True)
    for action, (start_s, end_s) in zip(schedule.actions[coordinate], times, strict=True):
        left, width = LEFT + start_s * scale, (end_s - start_s) * scale
        took = f", {format_seconds(end_s - start_s)}" if drawing.name else ""
        number = f'<text x="{left + width / 2:.1f}" y="{top + 15}" text-anchor="middle">{action.micro_batch}</text>'
        fits = width >= DIGIT * len(str(action.micro_batch)) + DIGIT
        yield (
            f'<g><title>{action}{took}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
            f'fill="{colour(action)}" stroke="white"/>{number if fits else ""}</g>'
        )
