"""Draws a walked Schedule to scale: one row per pipeline coordinate, time from left to right."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from phalanx.plan.actions import Action, ActionKind
from phalanx.plan.schedule import Schedule
from phalanx.plan.walk import Walk

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

ROW, GAP, LEFT, UNIT = 22, 4, 96, 22
"""Pixels of the SVG: a row's height, the gap below it, the space for its name, the shortest action's width."""


def colour(action: Action) -> str:
    """The fill of `action`, as #rrggbb."""
    return COLOURS[action.kind][action.chunk % 2]


def row_name(schedule: Schedule, coordinate: int) -> str:
    """As "stage 2", or "stages 2, 6" where there are several."""
    stages = schedule.stages[coordinate]
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


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


def lines(schedule: Schedule, walk: Walk, width: int) -> list[Text]:
    """One line of `width` columns per coordinate. Actions are lettered, so that the drawing reads without colours."""
    from rich.text import Text

    names = [row_name(schedule, coordinate) for coordinate in range(schedule.pipeline)]
    left = max(map(len, names)) + 1
    columns_per_s = (width - left) / walk.step_s
    if columns_per_s > 1 / _shortest_s(walk):
        columns_per_s = int(columns_per_s * _shortest_s(walk)) / _shortest_s(walk)
    drawn = []
    for coordinate, actions in enumerate(schedule.actions):
        line = Text(names[coordinate].ljust(left), no_wrap=True)
        for action, start_s, end_s in zip(actions, walk.starts_s[coordinate], walk.ends_s[coordinate], strict=True):
            start, end = (left + round(time_s * columns_per_s) for time_s in (start_s, end_s))
            line.append(" " * (start - len(line)))
            line.append(_label(action, end - len(line)), style=f"black on {colour(action)}")
        drawn.append(line)
    return drawn


def _shortest_s(walk: Walk) -> float:
    rows = zip(walk.starts_s, walk.ends_s, strict=True)
    return min(end - start for starts, ends in rows for start, end in zip(starts, ends, strict=True))


def _label(action: Action, width: int) -> str:
    letter = LETTERS[action.kind].lower() if action.chunk % 2 else LETTERS[action.kind]
    label = f"{letter}{action.micro_batch}"
    return (label if len(label) <= width else letter)[: max(width, 0)].ljust(width)


def svg(schedule: Schedule, walk: Walk) -> str:
    """The drawing as an SVG document; each action says in words what it is when pointed at."""
    scale = UNIT / _shortest_s(walk)
    width = LEFT + round(walk.step_s * scale) + GAP
    bottom = schedule.pipeline * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 2 * ROW}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for coordinate, actions in enumerate(schedule.actions):
        top = coordinate * (ROW + GAP)
        parts.append(f'<text x="0" y="{top + 15}" fill="gray">{row_name(schedule, coordinate)}</text>')
        for action, start_s, end_s in zip(actions, walk.starts_s[coordinate], walk.ends_s[coordinate], strict=True):
            parts.append(_svg_action(action, LEFT + start_s * scale, (end_s - start_s) * scale, top))
    for index, text in enumerate((facts(schedule, walk), legend(schedule))):
        parts.append(f'<text x="{LEFT}" y="{bottom + 15 * (index + 1)}" fill="gray">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _svg_action(action: Action, left: float, width: float, top: int) -> str:
    return (
        f'<g><title>{action}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
        f'fill="{colour(action)}" stroke="white"/><text x="{left + width / 2:.1f}" y="{top + 15}" '
        f'text-anchor="middle">{action.micro_batch}</text></g>'
    )
