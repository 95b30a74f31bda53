"""Options that the search does not vary, tried on the layout that goes first: advice, never chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner.advice import step_s
from phalanx.planner.search import predict, search
from phalanx.spec.cluster import ClusterSpec

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


@pytest.mark.parametrize(
    ("cluster", "given", "key", "note"),
    [
        (SLOW, {"tensor": 4, "pipeline": 1, "micro_batch": 24}, "tensor_overlap_chunks", ""),
        (SLOW, {"tensor": 1, "pipeline": 1, "zero": 0}, "reduce", "rounds gradients"),
        (FAST, {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "full"}, "recompute_every", ""),
        (NARROW, {"tensor": 1, "pipeline": 1, "zero": 3, "recompute": "none", "micro_batch": 1}, "zero_group", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_save_time_is_said_and_left(
    cluster: ClusterSpec, given: dict[str, Any], key: str, note: str
) -> None:
    """The gain is that of the layout with the value said; the first layout itself keeps its own."""
    job = replace(LONG, precision="bf16")
    if key == "zero_group":  # parameters cut within a node do not fit, within two nodes they do
        sizes = [predict(WIDE, job, cluster, Layout(data=16, zero=3, zero_group=size)).prediction for size in (2, 4)]
        most, enough = (max(sum(kinds.values()) for kinds in size.memory_bytes) for size in sizes if size is not None)
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=(most + enough) // 2))
    found = search(WIDE, job, cluster, given)
    first, said = found.plans[0], [text for text in found.reasons if f" {key} = " in text]
    assert said, found.reasons
    match = re.search(rf'{key} = "?(\w+)"? would save .* \(([\d.]+)%\)', said[0])
    assert match and note in said[0]
    value = match[1] if key == "reduce" else int(match[1])
    assert getattr(first.layout, key) != value
    changed = predict(WIDE, job, cluster, replace(first.layout, **{key: value}))
    assert 100 * (1 - step_s(changed) / step_s(first)) == pytest.approx(float(match[2]), abs=0.06)


def test_what_layout_gives_is_not_argued_with() -> None:
    given = {"tensor": 4, "pipeline": 1, "micro_batch": 24, "tensor_overlap_chunks": 1, "reduce": "fp32"}
    kept, *others = search(WIDE, LONG, SLOW, given).reasons
    assert kept.endswith("[layout] keeps " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items()))
    assert "tensor_overlap_chunks" not in " ".join(others) and "reduce" not in " ".join(others)
