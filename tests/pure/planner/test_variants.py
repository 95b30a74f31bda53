"""Options that are tried on the best layouts alone, and one that is advice and never chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.planner.advice import step_s
from phalanx.planner.candidates import enumerate_all, of
from phalanx.planner.engine import engine
from phalanx.planner.machinery import NEAR
from phalanx.planner.ranking import Task
from phalanx.planner.search import predict, search
from phalanx.planner.variants import around

WIDE = replace(LLAMA, hidden=1024, head_dim=128, ffn=4096)
LONG = replace(JOB, seq_len=512)
SLOW = replace(
    CLUSTER,
    num_nodes=2,
    devices_per_node=4,
    device=replace(DEVICE, matmul_tile=(128, 128)),
    inter_node=replace(CLUSTER.inter_node, bytes_per_s=2e9),
)


NARROW = replace(SLOW, num_nodes=8, devices_per_node=2)
FAST = replace(SLOW, inter_node=CLUSTER.inter_node)


GIVEN: dict[str, dict[str, Any]] = {
    "tensor_overlap_chunks": {"tensor": 4, "pipeline": 1, "micro_batch": 24},
    "recompute_every": {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "full"},
    "zero_group": {"tensor": 1, "pipeline": 1, "zero": 3, "recompute": "none", "micro_batch": 1},
}


@pytest.mark.parametrize("key", GIVEN)
def test_variants_of_the_best_are_tried_and_chosen(key: str) -> None:
    """No other value of any of the three makes the first faster, and the one that it has was worth its machinery."""
    job, given = replace(LONG, precision="bf16"), GIVEN[key]
    cluster = {"tensor_overlap_chunks": SLOW, "recompute_every": FAST, "zero_group": NARROW}[key]
    if key == "zero_group":  # parameters cut within a node do not fit, within two nodes they do
        sizes = [predict(WIDE, job, cluster, Layout(data=16, zero=3, zero_group=size)).prediction for size in (2, 4)]
        most, enough = (max(sum(kinds.values()) for kinds in size.memory_bytes) for size in sizes if size is not None)
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=(most + enough) // 2))
    found = search(WIDE, job, cluster, given)
    first = found.plans[0]
    assert getattr(first.layout, key) == {"tensor_overlap_chunks": 8, "recompute_every": 4, "zero_group": 4}[key]
    for other in {"zero_group": (0, 2, 4, 8), "recompute_every": (1, 2, 3, 4), "tensor_overlap_chunks": (1, 2, 4, 8)}[
        key
    ]:
        plan = predict(WIDE, job, cluster, replace(first.layout, **{key: other}))
        assert plan.prediction is not None
        if max(sum(kinds.values()) for kinds in plan.prediction.memory_bytes) <= cluster.device.memory_bytes:
            assert step_s(plan) >= step_s(first) * (1 - 1e-9)
    kept = search(WIDE, job, cluster, given | {key: {"zero_group": 0}.get(key, 1)}).plans[0]
    assert getattr(kept.layout, key) == {"zero_group": 0}.get(key, 1)
    assert step_s(kept) > (1 + NEAR) * step_s(first)


def test_variants_are_counted_and_legal_and_none_twice() -> None:
    task = Task(model=WIDE, job=LONG, cluster=SLOW, runner=engine(), given={})
    found = search(WIDE, LONG, SLOW)
    cut = Layout(tensor=2, data=4, micro_batch=3, zero=3, sequence_parallel=True, recompute="full")
    more = around(task, of([cut, Layout(data=8, zero=1, recompute="selective")]))
    every, _ = enumerate_all(WIDE, LONG, SLOW, engine().space, {})
    tried = {every.layout(row) for row in range(len(every))}
    varied = [more.layout(row) for row in range(len(more))]
    assert len(varied) > 20 and len(set(varied)) == len(varied) and not tried & set(varied)
    for layout in varied:
        assert not problems(WIDE, LONG, SLOW, layout) and not engine_problems(layout)
    assert found.num_layouts > len(every)
    assert sum(entry.count for entry in found.rejected) + found.num_fitting == found.num_layouts


def test_rounding_gradients_is_said_and_left() -> None:
    """The gain is that of the first layout with them rounded."""
    job = replace(LONG, precision="bf16")
    found = search(WIDE, job, SLOW, {"tensor": 1, "pipeline": 1, "zero": 0})
    first, said = found.plans[0], [text for text in found.reasons if " reduce = " in text]
    match = re.search(r'reduce = "bf16" would save .* \(([\d.]+)%\), which rounds gradients', said[0])
    assert match and first.layout.reduce == "fp32"
    changed = predict(WIDE, job, SLOW, replace(first.layout, reduce="bf16"))
    assert 100 * (1 - step_s(changed) / step_s(first)) == pytest.approx(float(match[1]), abs=0.06)


def test_what_layout_gives_is_not_argued_with() -> None:
    given = {"tensor": 4, "pipeline": 1, "micro_batch": 24, "tensor_overlap_chunks": 1, "reduce": "fp32"}
    kept, *others = search(WIDE, LONG, SLOW, given).reasons
    assert kept.endswith("[layout] keeps " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items()))
    assert "tensor_overlap_chunks" not in " ".join(others) and "reduce" not in " ".join(others)
