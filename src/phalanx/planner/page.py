"""Page: what a search found, drawn: bars of time and memory, the formation on its nodes, the pipeline's timeline, and
the front of time against memory. One HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from phalanx.plan.plan import Plan
from phalanx.plan.schedule import schedule
from phalanx.planner.engine import engine
from phalanx.planner.estimate import pipeline_walk
from phalanx.planner.explain import explain
from phalanx.planner.search import Search
from phalanx.planner.summary import COLUMNS, cells, summaries, summary, whole_run
from phalanx.units import format_bytes, format_seconds
from phalanx.watch.drawing import Drawing, svg

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#000000", "#eebb99")
WIDTH, ROW = 720, 22
MOST_NODES, MOST_STAGES = 32, 16
"""What is drawn at most; the rest repeats."""

STYLE = (
    "body{font:14px sans-serif;max-width:1000px;margin:2em auto}"
    "td,th{padding:.2em .7em;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left;white-space:normal}"
    "pre{overflow:auto;background:#f4f4f4;padding:1em}"
)


def page(found: Search) -> str:
    """The whole document."""
    best = found.plans[0]
    assert best.prediction is not None
    title = f"{best.model.name} on {best.cluster.num_devices} × {best.cluster.device.name}"
    stages = {f"rank {i}": stage for i, stage in enumerate(best.prediction.memory_bytes)}
    sections = (
        ("Layouts", _table(found)),
        ("Why the first", "".join(f"<p>{escape(text)}</p>" for text in (*found.reasons, whole_run(best)))),
        ("Time of a step", _bars({str(plan.layout): _kinds(plan) for plan in found.plans}, format_seconds)),
        ("Memory by pipeline rank", _bars(stages, format_bytes, limit=best.cluster.device.memory_bytes)),
        ("Formation", _formation(best)),
        ("Pipeline", _timeline(best, found.engine)),
        ("Time against memory", _front(found.front)),
        ("In full", f"<pre>{escape(explain(best, found.engine))}</pre>"),
    )
    body = "\n".join(f"<h2>{name}</h2>\n{content}" for name, content in sections)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"


def _kinds(plan: Plan) -> Mapping[str, float]:
    assert plan.prediction is not None
    return plan.prediction.step_s_by_kind


def _table(found: Search) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in cells(line)) for line in summaries(found)]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _drawing(width: float, height: float, parts: Iterable[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="white"/>'
    return f"<g><title>{escape(title)}</title>{shape}</g>"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _bars(rows: Mapping[str, Mapping[str, float]], show: Callable[[float], str], *, limit: float = 0.0) -> str:
    """One bar per row, its parts side by side to one scale; `limit` is drawn as a line."""
    most = max([limit, *(sum(v for v in row.values() if v > 0) for row in rows.values())])
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    parts = [
        f'<rect x="{130 * (i % 5)}" y="{18 * (i // 5)}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        + _text(130 * (i % 5) + 14, 18 * (i // 5) + 10, kind)
        for i, kind in enumerate(kinds)
    ]
    top = 18.0 * (1 + len(kinds) // 5) + 10
    for name, row in rows.items():
        x = 0.0
        for i, kind in enumerate(kinds):
            size = max(0.0, row.get(kind, 0.0))
            width = WIDTH * size / most
            parts.append(_box(x, top + 14, width, ROW - 6, COLOURS[i % len(COLOURS)], f"{kind}: {show(size)}"))
            x += width
        parts.append(_text(0, top + 11, f"{name}: {show(sum(row.values()))}"))
        top += ROW + 16
    if limit:
        x = WIDTH * limit / most
        parts.append(f'<line x1="{x}" x2="{x}" y1="30" y2="{top}" stroke="red"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="40" text-anchor="end">{show(limit)} there are</text>')
    return _drawing(WIDTH + 10, top, parts)


def _formation(plan: Plan) -> str:
    """Nodes as rows of devices; colour is the pipeline rank, the number the tensor rank."""
    layout, per_node = plan.layout, plan.cluster.devices_per_node
    nodes = min(MOST_NODES, -(-layout.num_ranks // per_node))
    parts = []
    for rank in range(min(layout.num_ranks, nodes * per_node)):
        coord, (node, place) = layout.coord(rank), divmod(rank, per_node)
        x, y = 70 + 26 * place, 24 * node
        fill = COLOURS[coord.pipeline % len(COLOURS)]
        parts.append(_box(x, y, 24, 22, fill, f"rank {rank}: {coord}") + _text(x + 7, y + 15, str(coord.tensor)))
        if place == 0:
            parts.append(_text(0, y + 15, f"node {node}"))
    left_out = -(-layout.num_ranks // per_node) - nodes
    note = "<p>colour: pipeline rank; number: tensor rank</p>" + (
        f"<p>and {left_out} more nodes</p>" if left_out else ""
    )
    return _drawing(80 + 26 * per_node, 24 * nodes, parts) + note


def _timeline(plan: Plan, engine_name: str) -> str:
    """The schedule walked with the predicted times, for as many micro-batches as show its pattern."""
    layout, job = plan.layout, plan.job
    if layout.pipeline == 1:
        return "<p>one stage: nothing waits</p>"
    if layout.pipeline > MOST_STAGES:
        return f"<p>{layout.pipeline} stages: phalanx schedule show draws them</p>"
    count = min(layout.num_micro_batches(job.global_batch), 2 * layout.pipeline)
    shape = (layout.pipeline, layout.virtual_stages, count)
    drawing = Drawing(name="predicted", walk=pipeline_walk(plan, engine(engine_name, job), count))
    return f'<div style="overflow:auto">{svg(schedule(layout.schedule, *shape), [drawing])}</div>'


def _front(plans: Sequence[Plan]) -> str:
    """Every layout that no other beats in both."""
    points = [(line.step_s, line.memory_bytes, line.layout) for line in map(summary, plans)]
    slowest, largest = max(p[0] for p in points), max(p[1] for p in points)
    ends = f"to {format_seconds(slowest)}", f"to {format_bytes(largest)}"
    parts = [_text(0, 256, f"time → {ends[0]}"), _text(0, 12, f"memory ↑ {ends[1]}")]
    for seconds, size, name in points:
        x, y = 60 + (WIDTH - 80) * seconds / slowest, 240 - 220 * size / largest
        title = f"{name}: {format_seconds(seconds)}, {format_bytes(size)}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4477aa"><title>{escape(title)}</title></circle>')
    return _drawing(WIDTH, 260, parts)
