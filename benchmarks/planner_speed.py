"""How fast the planner searches: CPU seconds and layouts per second, of GPT 20B on 256 A100 and GPT 1T on 3,072.

    python benchmarks/planner_speed.py

One process; the best of three searches each, without imports. CPU seconds depend less than wall seconds on what else
runs, but not little: neighbours on a core share its caches and units.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from phalanx.planner.search import glance, search
from phalanx.spec.load import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt-20b-256-a100.toml"
ROUNDS = 3


def main() -> None:
    """Print one line per case."""
    small = load(EXAMPLE, [])
    wide = replace(small.model, name="gpt-1t", num_layers=128, hidden=25600, num_heads=160, head_dim=160, ffn=102400)
    many, batch = replace(small.cluster, num_nodes=384), replace(small.job, global_batch=3072)
    large = replace(small, model=replace(wide, num_kv_heads=160), cluster=many, job=batch, layout={})
    for run in (small, large):
        seconds, first = [], []
        for _ in range(ROUNDS):
            start_s = time.process_time()
            glance(run.model, run.job, run.cluster, run.layout)
            first.append(time.process_time() - start_s)
            found = search(run.model, run.job, run.cluster, run.layout)
            seconds.append(time.process_time() - start_s - first[-1])
        rate = found.num_layouts / min(seconds)
        print(
            f"{run.model.name} on {run.cluster.num_devices:,} devices: {found.num_layouts:,} layouts, "
            f"{found.num_fitting:,} fit, {found.num_replayed} walked, in {min(seconds):.2f} CPU seconds: "
            f"{rate:,.0f} layouts/s; a first answer after {min(first):.2f}"
        )


if __name__ == "__main__":
    main()
