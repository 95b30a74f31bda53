"""How far the planner's predictions are from published runs: `python benchmarks/planner_accuracy.py PATH…`.

Reads files of the published format and prints, per source and overall, the error of step time and of memory, how many
layouts that did not fit are predicted not to, and how well layouts of one model are ranked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from planner_fit import Losses, leave_one_out, refit
from published import CRASHED_WITHOUT_LAYERS, WITHOUT_LAYERS, Row, read
from published_machines import runner

from phalanx.errors import PhalanxError
from phalanx.plan.layout import Layout
from phalanx.planner import timeline
from phalanx.planner.candidates import of
from phalanx.planner.certainty import kind
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import Group, estimate

OK = ("ok", "ok_recompute_untold")
RESERVED_BY_FIRST = ("playbook",)
"""Sources whose memory is what the allocator of rank 0, a rank of the first stage, had reserved: nanotron's benchmark
mode forgets the peak of what is allocated before each update, and lets rank 0 write its table (nanotron/helpers.py)."""

UNKNOWABLE = {
    "sc21_t2, ZeRO 3 of 2021": "DeepSpeed's first ZeRO 3 ran 1.6 to 5 times slower than its messages and products need",
    "nemo_launcher_2305": "the layout is a guess: the printed throughput is paired with a config of the same commit",
}
"""Sources with effects that no model can know: scored, but never fitted to."""

TARGETS = {
    "seqsel_t5": 0.02,
    "megatron_readme_apr2021_sc21_t1": 0.05,
    "sc21_t2": 0.07,
    "megatron_readme_h100": 0.08,
    "vtrain_single": 0.06,
    "llm_foundry": 0.05,
    "bigscience_tr11_176b": 0.08,
    "vtrain_multi": 0.08,
    "dgxc_24.11": 0.08,
    "playbook": 0.07,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row and what the planner says of it: the fastest that fits of the layouts that it may have been."""

    row: Row
    step_s: float
    memory_bytes: float
    reserved_bytes: float

    @property
    def error(self) -> float:
        """Signed relative error of step time."""
        assert self.row.step_s
        return self.step_s / self.row.step_s - 1.0

    @property
    def memory_error(self) -> float:
        """Signed relative error of memory: of what the first stage reserved where that was printed, else of the fullest
        process."""
        assert self.row.memory_bytes
        ours = self.reserved_bytes if self.row.source in RESERVED_BY_FIRST else self.memory_bytes
        return ours / self.row.memory_bytes - 1.0


def score(
    rows: list[Row],
    engines: dict[str, Engine] | None = None,
    skipped: dict[str, int] | None = None,
    *,
    walked: bool = True,
) -> list[Scored]:
    """Predict all rows; rows of one model, job and machine in one call. What cannot be priced is counted in `skipped`,
    by reason. Without `walked`, pipelines take what their bound says: five times as fast."""
    batches: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        batches[(repr(row.model), repr(row.job), repr(row.cluster), row.engine)].append(row)
    scored = []
    for members in batches.values():
        first = members[0]
        used = (engines or {}).get(first.engine) or runner(first.engine, first.job.precision)
        try:
            scored += _score(members, used, walked)
        except PhalanxError as error:
            if skipped is None:
                raise
            skipped[str(error)] = skipped.get(str(error), 0) + len(members)
    return scored


def _score(members: list[Row], used: Engine, walked: bool) -> list[Scored]:
    """Rows that share model, job, machine and engine."""
    first = members[0]
    layouts = of([layout for row in members for layout in row.layouts])
    step_s, peak, reserved = (np.empty(len(layouts)) for _ in range(3))
    places: dict[int, tuple[Group, int]] = {}
    for group in estimate(first.model, first.job, first.cluster, used, layouts):
        step_s[group.rows] = group.step_s
        places |= {int(at): (group, index) for index, at in enumerate(group.rows)}
        peak[group.rows] = group.memory_bytes.max(1)
        there = np.minimum(group.memory_bytes[:, 0], first.cluster.device.memory_bytes)  # no allocator has more
        reserved[group.rows] = there - used.on(first.cluster.device).context_bytes
    scored, start = [], 0
    for row in members:
        part = slice(start, start := start + len(row.layouts))
        fitting = peak[part] <= row.cluster.device.memory_bytes
        times = np.where(fitting, step_s[part], np.inf) if fitting.any() else step_s[part]
        best = int(np.argmin(times))
        seconds = float(step_s[part][best])
        if walked and row.layouts[best].pipeline > 1:
            seconds = _replayed_s(row, used, *places[part.start + best], row.layouts[best])
        memory = {"memory_bytes": float(peak[part][best]), "reserved_bytes": float(reserved[part][best])}
        scored.append(Scored(row=row, step_s=seconds, **memory))
    return scored


def _replayed_s(row: Row, used: Engine, group: Group, index: int, layout: Layout) -> float:
    """Seconds of a step as a search reports them: with the schedule walked."""
    shape = (layout.pipeline, layout.virtual_stages, layout.num_micro_batches(row.job.global_batch))
    pipeline_s = timeline.replay_s(layout.schedule, group.times, index, *shape)
    return used.factor * (pipeline_s + float(group.tail_s[index]))


def spread(errors: list[float]) -> dict[str, float]:
    """Number, median and 90th percentile of |error|, mean of |error|, mean error."""
    size = np.abs(errors)
    return {
        "num_rows": len(errors),
        "median_abs_error": float(np.median(size)),
        "p90_abs_error": float(np.percentile(size, 90)),
        "mean_abs_error": float(size.mean()),
        "bias": float(np.mean(errors)),
    }


def ranks(values: Any) -> Any:
    """Ranks with ties averaged."""
    values = np.asarray(values)
    order = np.argsort(values)
    result = np.empty(len(values))
    result[order] = np.arange(len(values))
    for value in np.unique(values):
        result[values == value] = result[values == value].mean()
    return result


def correlation(left: Any, right: Any) -> float:
    """Pearson's; 0 where one side does not vary."""
    return float(np.corrcoef(left, right)[0, 1]) if np.ptp(left) and np.ptp(right) else 0.0


def ranking(scored: list[Scored]) -> dict[str, Any]:
    """Per source: over groups of at least five layouts of one model, job and machine, the mean Spearman and Kendall
    correlation of predicted and measured time, and the regret of the first choice."""
    cells: dict[Any, list[Scored]] = defaultdict(list)
    for entry in scored:
        cells[entry.row.cell].append(entry)
    by_source: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for cell, members in cells.items():
        if len(members) < 5:
            continue
        predicted = np.array([entry.step_s for entry in members])
        measured = np.array([entry.row.step_s for entry in members])
        spearman = correlation(ranks(predicted), ranks(measured))
        pairs = np.sign(np.subtract.outer(predicted, predicted)) * np.sign(np.subtract.outer(measured, measured))
        kendall = float(pairs.sum() / (len(members) * (len(members) - 1)))
        regret = float(measured[np.argmin(predicted)] / measured.min() - 1.0)
        by_source[cell[0]].append((spearman, kendall, regret))
    return {
        source: {
            "num_groups": len(values),
            "spearman": float(np.mean([v[0] for v in values])),
            "kendall": float(np.mean([v[1] for v in values])),
            "regret": float(np.mean([v[2] for v in values])),
            "max_regret": float(np.max([v[2] for v in values])),
        }
        for source, values in by_source.items()
    }


def likely(scored: list[Scored]) -> dict[str, Any]:
    """Per engine and kind of layout, and per kind over all engines: measured / predicted step time, 10th, 50th and 90th
    percentile, of what a model can know. Where planner/certainty.toml takes its ranges from."""
    by_engine: dict[str, list[float]] = defaultdict(list)
    for entry in scored:
        if entry.row.source not in UNKNOWABLE:
            name = kind(entry.row.layouts[0], entry.row.cluster)
            assert entry.row.step_s
            for whose in (entry.row.engine, "all engines"):
                by_engine[f"{whose}, {name}"].append(entry.row.step_s / entry.step_s)
    return {
        name: {"num_rows": len(values), "percentiles": [float(p) for p in np.percentile(values, (10, 50, 90))]}
        for name, values in by_engine.items()
    }


def too_few_micro_batches(row: Row) -> bool:
    """Whether nanotron's 1F1B refuses to start: it asserts at least as many micro-batches as stages, less one
    (nanotron/parallel/pipeline_parallel/engine.py)."""
    layout = row.layouts[0]
    return row.engine == "nanotron" and layout.num_micro_batches(row.job.global_batch) < layout.pipeline - 1


def fit_or_not(scored: list[Scored], skipped: dict[str, int]) -> dict[str, Any]:
    """Rows that did not fit: how many are predicted over; rows that ran: how many are predicted under; and the curve of
    both over a scale of the limit. A refusal for another reason is no prediction of memory, so it is counted apart:
    `refused` crashed rows by the rule that they break, `caught_or_refused` of those and all rows that did not fit."""
    failed = np.array([s.memory_bytes / s.row.cluster.device.memory_bytes for s in scored if not s.row.fits])
    ran = np.array([s.memory_bytes / s.row.cluster.device.memory_bytes for s in scored if s.row.fits])
    if not len(failed):
        return {"num_failed": 0, "num_ran": len(ran)}
    broken = np.array([too_few_micro_batches(s.row) for s in scored if not s.row.fits])
    without_layers = skipped.get(CRASHED_WITHOUT_LAYERS, 0)
    curve = [
        {"limit": scale, "caught": float((failed > scale).mean()), "false_alarms": float((ran > scale).mean())}
        for scale in (0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5)
    ]
    return {
        "num_failed": len(failed),
        "num_ran": len(ran),
        "caught": float((failed > 1).mean()),
        "false_alarms": float((ran > 1).mean()),
        "curve": curve,
        "refused": {"more stages than layers": without_layers, "too few micro-batches": int(broken.sum())},
        "refused_that_ran": skipped.get(WITHOUT_LAYERS, 0)
        + sum(too_few_micro_batches(s.row) for s in scored if s.row.fits),
        "caught_or_refused": float((((failed > 1) | broken).sum() + without_layers) / (len(failed) + without_layers)),
    }


def report(scored: list[Scored], skipped: dict[str, int]) -> dict[str, Any]:
    """Everything that is printed, as one value."""
    timed = [s for s in scored if s.row.step_s and s.row.fits]
    good = [s for s in timed if s.row.quality in OK]
    by_source: dict[str, list[float]] = defaultdict(list)
    other: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for entry in timed:
        target = by_source if entry.row.quality in OK else other
        name = entry.row.source if entry.row.quality in OK else f"{entry.row.source}:{entry.row.quality}"
        target[name].append(entry.error)
    for entry in scored:
        if entry.row.memory_bytes and entry.row.fits:
            memory[entry.row.source].append(entry.memory_error)
            if entry.row.source == "playbook" and entry.row.layouts[0].tensor <= 8:
                memory["playbook, tensor <= 8"].append(entry.memory_error)
    return {
        "overall": spread([s.error for s in good]) if good else {"num_rows": 0},
        "sources": {name: spread(errors) for name, errors in by_source.items()},
        "not_scored": {name: spread(errors) for name, errors in other.items()},
        "ranking": ranking(good),
        "likely": likely(good),
        "memory": {name: spread(errors) for name, errors in memory.items()},
        "did_not_fit": fit_or_not([s for s in scored if s.row.quality in (*OK, "slow_outlier")], skipped),
        "skipped": skipped,
        "filled": dict(Counter(what for entry in scored for what in entry.row.filled)),
        "num_without_time": len(scored) - len(timed),
    }


def show(result: dict[str, Any]) -> None:
    """The report as tables."""
    print(f"{'source':44} {'rows':>5} {'median':>7} {'p90':>7} {'mean':>7} {'bias':>7}  aim")
    for name, line in [*result["sources"].items(), ("all rows of quality ok", result["overall"])]:
        if line["num_rows"]:
            aim = f"{TARGETS[name]:.0%}" if name in TARGETS else ""
            print(_line(name, line) + f"  {aim}")
    for title, key in (("scored apart", "not_scored"), ("memory", "memory")):
        print(f"\n{title}")
        for name, line in result[key].items():
            print(_line(name, line))
    print("\nranking of layouts of one model")
    for name, line in result["ranking"].items():
        words = " ".join(f"{key} {line[key]:.3f}" for key in ("spearman", "kendall", "regret", "max_regret"))
        print(f"{name:44} {line['num_groups']:5} groups  {words}")
    print("\nmeasured / predicted by engine and kind: 10th, 50th, 90th percentile")
    for name, line in result["likely"].items():
        print(f"{name:44} {line['num_rows']:5}  " + "  ".join(f"{value:.2f}" for value in line["percentiles"]))
    fit = result["did_not_fit"]
    if fit.get("num_failed"):
        print(f"\ndid not fit: {fit['caught']:.1%} of {fit['num_failed']} caught, ", end="")
        print(f"{fit['false_alarms']:.1%} of {fit['num_ran']} that ran called too large")
        for point in fit["curve"]:
            print(
                f"    limit × {point['limit']:.2f}: {point['caught']:6.1%} caught, {point['false_alarms']:6.1%} false"
            )
        rules = ", ".join(f"{count} {rule}" for rule, count in fit["refused"].items())
        print(f"    crashed, and refused before memory is asked: {rules} ({fit['refused_that_ran']} such ran);")
        print(f"    {fit['caught_or_refused']:.1%} of all that crashed, these included, are caught or refused")
    for name, reason in UNKNOWABLE.items():
        if name in result["sources"]:
            print(f"\nno model can know: {name}: {reason}")
    if "fit" in result:
        print("\nleave one source out (device constants fitted on the others)")
        for name, line in [*result["leave_one_out"].items(), ("all", result["leave_one_out_overall"])]:
            print(_line(name, line))
        print("constants fitted on all:", result["fit"])
    print(f"\nfilled in where rows do not say: {result['filled'] or 'nothing'}")
    print(f"\nskipped: {result['skipped'] or 'none'}; rows without a time: {result['num_without_time']}")


def _line(name: str, line: dict[str, float]) -> str:
    values = " ".join(f"{line[key]:7.1%}" for key in ("median_abs_error", "p90_abs_error", "mean_abs_error", "bias"))
    return f"{name:44} {line['num_rows']:5} {values}"


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--fit", action="store_true", help="refit device constants, leaving out each source in turn")
    options = parser.parse_args(arguments)
    try:
        rows, skipped = read(options.paths)
    except PhalanxError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    scored = score(rows, skipped=skipped)
    result = report(scored, skipped)
    if options.fit:
        priced = {id(entry.row) for entry in scored}
        told = [row for row in rows if id(row) in priced and row.step_s and row.fits]
        usable = [row for row in told if row.quality in OK and row.source not in UNKNOWABLE]
        losses = Losses(usable, score)
        left_out = leave_one_out(usable, losses)
        result["fit"] = refit(usable, losses)
        result["leave_one_out"] = {
            name: {**spread(entry["errors"]), "constants": entry["constants"]} for name, entry in left_out.items()
        }
        every = [error for entry in left_out.values() for error in entry["errors"]]
        result["leave_one_out_overall"] = spread(every) if every else {"num_rows": 0}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
