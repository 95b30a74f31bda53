"""Cases from the field that a planner meets, each under its number."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, DEVICE, LLAMA

from phalanx.errors import LayoutError
from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.planner.explain import explain
from phalanx.planner.search import predict, search
from phalanx.planner.summary import as_json, summary
from phalanx.spec import models
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.units import parse_bytes

TINY = models.named("tiny")
OTHER = replace(TINY, num_layers=10, num_heads=6, num_kv_heads=6, hidden=96, ffn=192)
JOB = JobSpec(global_batch=16, seq_len=64, num_steps=1, precision="fp32")


def machine(num_devices: int, memory_bytes: int = 2**30) -> ClusterSpec:
    device = replace(DEVICE, memory_bytes=memory_bytes, flops_per_s={"fp32": 1e11, "bf16": 1e11})
    return replace(CLUSTER, num_nodes=1, devices_per_node=num_devices, device=device)


def needed(model: ModelSpec, layout: Layout) -> int:
    return summary(predict(model, JOB, machine(8), layout)).memory_bytes


@pytest.mark.parametrize(
    ("model", "refused", "words"),
    [
        (replace(LLAMA, num_heads=6, num_kv_heads=2, ffn=256), {4}, "does not divide 6 query heads"),
        (
            replace(LLAMA, num_heads=40, num_kv_heads=10, head_dim=8, ffn=640, vocab=640),
            {4, 8},
            "neither divides 10 kv heads nor is a multiple of them",
        ),
        (replace(LLAMA, num_heads=4, num_kv_heads=2, ffn=256), set(), "of 4 ranks two hold the same kv head"),
    ],
    ids=["6 of 2", "40 of 10", "4 of 2"],
)
def test_case_16_no_impossible_tensor_size_is_offered(model: ModelSpec, refused: set[int], words: str) -> None:
    found = search(model, replace(JOB, seq_len=96), machine(8))
    out = {size: entry.because for size, entry in found.beside.scan.items() if entry.plan is None}
    assert set(out) == refused and all(words in because for because in out.values())
    assert all(plan.layout.tensor <= model.num_heads for plan in found.plans)
    for plan in (*found.plans, *found.front):
        assert not problems(plan.model, plan.job, plan.cluster, plan.layout) and not engine_problems(plan.layout)


@pytest.mark.parametrize(("num_layers", "stages"), [(10, 3), (30, 4), (5, 4)])
def test_case_31_every_layer_is_on_one_stage(num_layers: int, stages: int) -> None:
    model = replace(TINY, num_layers=num_layers)
    plan = predict(model, replace(JOB, global_batch=12), machine(stages), Layout(pipeline=stages))
    counts = [int(count) for count in re.findall(r"\((\d+) layers\)", explain(plan))]
    assert sum(counts) == num_layers and max(counts) - min(counts) <= 2 and len(counts) == stages
    with pytest.raises(LayoutError, match="pipeline 4 for 3 layers"):
        predict(replace(TINY, num_layers=3), JOB, machine(4), Layout(pipeline=4))


def test_case_95_what_stages_hold_and_what_the_logits_take() -> None:
    """1F1B on four stages: 4, 3, 2 and 1 micro-batches. 4 × 512 tokens × 32,000 logits in fp32 are 262,144,000 bytes,
    and as much for their gradient, of which the trainer holds half the rows at a time."""
    model = replace(TINY, num_layers=8)
    plan = predict(model, JOB, machine(4), Layout(pipeline=4, micro_batch=2, stage_layers=(2, 2, 2, 2)))
    assert plan.prediction is not None
    held = [stage["activations"] for stage in plan.prediction.memory_bytes]
    assert [size * 4 / held[0] for size in held] == pytest.approx([4, 3, 2, 1])
    wide, job = replace(TINY, vocab=32000, max_seq_len=512), replace(JOB, seq_len=512)
    sizes = []
    for tensor in (1, 2):
        cut = predict(wide, job, machine(4, 2**34), Layout(tensor=tensor, data=4 // tensor, micro_batch=4))
        assert cut.prediction is not None
        sizes.append(cut.prediction.memory_bytes[0])
    assert (
        0.5 * 2 * 262_144_000 <= sizes[0]["logits"] < 1.05 * 262_144_000
        and sizes[1]["logits"] < 0.6 * sizes[0]["logits"]
    )
    assert sizes[1]["activations"] < sizes[0]["activations"] < 2 * sizes[1]["activations"]  # norms' inputs stay whole
    whole, again = (needed(TINY, Layout(data=8, micro_batch=2, recompute=how)) for how in ("none", "full"))
    assert again < whole


@pytest.mark.parametrize("model", [TINY, OTHER], ids=["tiny", "10 layers, 6 heads"])
def test_case_96_the_choice_under_a_limit_and_its_explanation(model: ModelSpec) -> None:
    """What data parallelism alone would need is not there: the first fits, others are dropped with the bytes. Then
    nothing fits: by how much, and what helps."""
    alone = search(model, JOB, machine(8), {"tensor": 1, "pipeline": 1}, top=1)
    least = summary(alone.front[-1]).memory_bytes
    found = search(model, JOB, machine(8, least - 1), top=5)
    assert found.plans[0].layout.tensor * found.plans[0].layout.pipeline > 1
    for name in ("data alone", "data alone, ZeRO 3"):
        entry = found.beside.shapes[name]
        assert entry.plan is None and re.match(r"stage 0 needs [\d.]+ .iB of [\d.]+ .iB", entry.because)
    assert found.rejected[-1].reason == "does not fit into memory" and found.rejected[-1].instead
    for row in json.loads(json.dumps(as_json(found)))["plans"]:
        assert row["memory_bytes"] < least and row["step_s"] > 0 and row["sent_bytes"] > 0
    with pytest.raises(LayoutError) as caught:
        search(model, JOB, machine(8, summary(found.front[-1]).memory_bytes // 2))
    (problem,) = caught.value.problems
    assert re.match(
        r"no layout fits into memory; of the smallest, stage \d needs [\d.]+ .iB of [\d.]+ .iB: ", problem.what
    )
    enough = re.search(r"devices with ([\d.]+ .iB), for tensor", problem.instead)
    assert enough and search(model, JOB, machine(8, round(1.01 * parse_bytes(enough[1]))), top=1).plans
