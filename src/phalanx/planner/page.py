"""Page: what a search found, drawn: bars of time and memory, the formation on its nodes, the pipeline's timeline, and
the front of time against memory. One HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from phalanx.plan.plan import Plan
from phalanx.plan.schedule import schedule
from phalanx.planner.advice import NAMES
from phalanx.planner.charts import bars, formation, front
from phalanx.planner.engine import engine
from phalanx.planner.estimate import pipeline_walk
from phalanx.planner.explain import explain
from phalanx.planner.search import Search
from phalanx.planner.summary import COLUMNS, beside, cells, heading, rejections, summaries, summary, whole_run
from phalanx.units import format_bytes, format_seconds
from phalanx.watch.drawing import Drawing, svg

MOST_STAGES = 16
"""Of a pipeline that is drawn."""

STYLE = (
    "body{font:14px sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}"
    "td,th{padding:.2em .6em;text-align:right;white-space:nowrap;vertical-align:top}"
    "td.words,th.words{text-align:left}"
    "td.words:last-child,table.ranked td.words{white-space:normal}"
    "table.ranked td.words{min-width:16em}"
    "tr:nth-child(even){background:#f4f4f4}"
    "svg{max-width:100%;height:auto}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:1em;font-size:12px}"
)


def page(found: Search) -> str:
    """The whole document."""
    best = found.plans[0]
    assert best.prediction is not None
    stages = {f"pipeline rank {i}": stage for i, stage in enumerate(best.prediction.memory_bytes)}
    reasons = "".join(f"<li>{escape(text)}</li>" for text in (*found.reasons, whole_run(best)))
    sections = {
        "Layouts": _ranked(found),
        "Why the first": f"<ul>{reasons}</ul>",
        **{f"Beside it, by {kind}": _table(rows) for kind, rows in beside(found).items()},
        "Time of a step": bars({str(plan.layout): _kinds(plan) for plan in found.plans}, format_seconds),
        "Memory": bars(stages, format_bytes, limit=best.cluster.device.memory_bytes),
        "Formation": formation(best),
        "Pipeline": _timeline(best, found.engine),
        "Time against memory": front(
            [summary(plan, found.engine) for plan in found.front],
            summary(best, found.engine),
            best.cluster.device.memory_bytes,
        ),
        f"{found.num_layouts:,} layouts, {found.num_fitting:,} fit": _table(rejections(found)),
        "The first in full": f"<pre>{escape(explain(best, found.engine))}</pre>",
    }
    body = "\n".join(f"<h2>{name}</h2>\n{content}" for name, content in sections.items())
    title = escape(f"{best.model.name} on {best.cluster.num_devices:,} × {best.cluster.device.name}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    start = f"<h1>{title}</h1><p>{escape(heading(best))}; engine {escape(found.engine)}</p>"
    return f"<!doctype html><html><head>{head}</head><body>{start}\n{body}\n</body></html>\n"


def _kinds(plan: Plan) -> Mapping[str, float]:
    """Seconds by kind, each kind in words."""
    assert plan.prediction is not None
    return {NAMES.get(kind, kind): seconds for kind, seconds in plan.prediction.step_s_by_kind.items()}


def _ranked(found: Search) -> str:
    head = "".join(f'<th class="{"words" if name == "layout" else ""}">{name}</th>' for name in COLUMNS)
    rows = ("".join(_cell(cell, words=not i) for i, cell in enumerate(cells(line))) for line in summaries(found))
    return f"<table class=ranked><tr>{head}</tr>{_rows(rows)}</table>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Short cells, and a text at the end; a first cell that is no number is one, too."""
    lines = (
        "".join(_cell(cell, words=i == len(row) - 1 or cell[:1].isalpha()) for i, cell in enumerate(row))
        for row in rows
    )
    return f"<table>{_rows(lines)}</table>"


def _rows(rows: Iterable[str]) -> str:
    return "".join(f"<tr>{row}</tr>" for row in rows)


def _cell(text: str, *, words: bool) -> str:
    return f"<td{' class=words' if words else ''}>{escape(text)}</td>"


def _timeline(plan: Plan, engine_name: str) -> str:
    """The schedule walked with the predicted times, for as many micro-batches as show its pattern."""
    layout, job = plan.layout, plan.job
    if layout.pipeline == 1:
        return "<p>one stage: nothing waits</p>"
    if layout.pipeline > MOST_STAGES:
        return f"<p>{layout.pipeline} pipeline ranks are too many to draw: phalanx schedule show --plan draws them</p>"
    there = layout.num_micro_batches(job.global_batch)
    count = min(there, 2 * layout.pipeline)
    name = f"the first {count} of {there} micro-batches" if count < there else f"all {there} micro-batches"
    drawing = Drawing(name=name, walk=pipeline_walk(plan, engine(engine_name, job), count))
    drawn = svg(schedule(layout.schedule, layout.pipeline, layout.virtual_stages, count), [drawing])
    note = "the bubble is that of these micro-batches, over all stages; the table has that of the stage with most work"
    return f"{drawn}<p>{note}</p>"
