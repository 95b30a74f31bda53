"""The search: exact, honest about what it rejects, and the same as pricing layouts one by one."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
from planner_cases import CLUSTER, DEVICE, GPT, JOB, LLAMA

from phalanx.errors import LayoutError, SpecError
from phalanx.plan.layout import Layout, Outermost, Recompute
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import SCHEDULES
from phalanx.planner import legal
from phalanx.planner.candidates import enumerate_all
from phalanx.planner.engine import engine, profiles
from phalanx.planner.explain import explain
from phalanx.planner.machinery import NEAR
from phalanx.planner.messages import of_step
from phalanx.planner.ranking import Alike
from phalanx.planner.search import glance, predict, search
from phalanx.planner.summary import as_json, summary
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.units import parse_bytes

SMALL = replace(CLUSTER, num_nodes=2, devices_per_node=4)


def brute_force(model: ModelSpec, job: JobSpec, cluster: ClusterSpec) -> list[Plan]:
    """Every Layout that uses all devices and that the trainer can run, tried one at a time."""
    axis = [size for size in range(1, cluster.num_devices + 1) if cluster.num_devices % size == 0]
    sizes = [s for s in itertools.product(axis, repeat=3) if math.prod(s) == cluster.num_devices]
    micro_batches = [b for b in range(1, job.global_batch + 1) if job.global_batch % b == 0]
    cuts = ((0, 0), (1, 0), (2, 0), (3, 0), (3, 2))
    repeats: tuple[tuple[Recompute, int], ...] = (("none", 1), ("selective", 1), ("full", 1), ("full", 2))
    flags = itertools.product(cuts, (False, True), repeats, get_args(Outermost))
    plans = []
    for (tensor, pipeline, data), micro_batch, name, chunks, (
        (zero, group),
        cut,
        (recompute, every),
        outermost,
    ) in itertools.product(sizes, micro_batches, SCHEDULES, range(1, model.num_layers + 1), flags):
        if group and group != cluster.devices_per_node // tensor:
            continue  # ZeRO within a node alone
        if outermost == "data" and (group or not stages_inside_nodes(tensor, pipeline, data, cluster)):
            continue
        layout = Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            micro_batch=micro_batch,
            schedule=name,
            virtual_stages=chunks,
            zero=zero,
            zero_group=group,
            sequence_parallel=cut,
            recompute=recompute,
            recompute_every=every,
            outermost=outermost,
        )
        if (pipeline == 1 and name != "1f1b") or (tensor == 1 and cut) or (data == 1 and zero) or group == data:
            continue  # twins of another layout
        if problems(model, job, cluster, layout) or engine_problems(layout):
            continue
        plan = predict(model, job, cluster, layout)
        assert plan.prediction is not None
        if max(sum(stage.values()) for stage in plan.prediction.memory_bytes) <= cluster.device.memory_bytes:
            plans.append(plan)
    return plans


def stages_inside_nodes(tensor: int, pipeline: int, data: int, cluster: ClusterSpec) -> bool:
    """Whether several nodes hold several whole pipelines of several stages."""
    spread = min(pipeline, data) > 1 and tensor * pipeline * data > cluster.devices_per_node
    return spread and cluster.devices_per_node % (tensor * pipeline) == 0


@pytest.mark.parametrize(
    ("model", "memory_bytes", "per_node"),
    [
        (replace(LLAMA, num_layers=5), 2**34, 2),
        (replace(GPT, num_layers=5), 6 * 2**20, 2),
        (replace(GPT, num_layers=3), 7 * 2**20, 3),
    ],
    ids=["roomy", "tight", "six devices"],
)
def test_search_misses_no_layout(
    model: ModelSpec, memory_bytes: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants aside, which are tried of the best alone (test_variants.py)."""
    monkeypatch.setattr("phalanx.planner.search.HANDFUL", 0)
    job = replace(JOB, global_batch=2 * per_node)
    device = replace(DEVICE, memory_bytes=memory_bytes)
    cluster = replace(CLUSTER, num_nodes=2, devices_per_node=per_node, device=device)
    found = search(model, job, cluster, top=5)
    tried = brute_force(model, job, cluster)
    assert found.num_fitting == len(tried)
    ways: dict[Layout, float] = {}
    for plan in tried:
        ways[way(plan)] = min(step_s(plan), ways.get(way(plan), math.inf))
    best = sorted(ways.values())
    near = [plan for plan in tried if step_s(plan) <= (1 + NEAR) * best[0]]
    least = min(num_mechanisms(plan.layout) for plan in near)
    first = min(step_s(plan) for plan in near if num_mechanisms(plan.layout) == least)
    assert step_s(found.plans[0]) == pytest.approx(first, rel=1e-9)
    assert num_mechanisms(found.plans[0].layout) == least
    if step_s(found.plans[0]) == pytest.approx(near_to := min(best, key=lambda s: abs(s - first)), rel=1e-9):
        best.remove(near_to)  # otherwise it is its way's best that comes further down
    assert [step_s(plan) for plan in found.plans[1:]] == pytest.approx(best[:4], rel=1e-9)
    for plan, fine in zip(found.plans, found.alike, strict=True):
        alike = [other.layout for other in tried if way(other) == way(plan) and other.layout != plan.layout]
        options = [field.name for field in fields(Alike)][:6]
        listed = [tuple(getattr(each, name) for name in options) for each in fine]
        assert sorted(listed) == sorted(tuple(getattr(layout, name) for name in options) for layout in alike)
        assert [each.least_s for each in fine] == sorted(each.least_s for each in fine)
    assert {tensor for tensor, entry in found.beside.scan.items() if entry.plan} == {p.layout.tensor for p in tried}
    for tensor, entry in found.beside.scan.items():
        if entry.plan is not None and tensor != found.plans[0].layout.tensor:
            fastest = min(step_s(plan) for plan in tried if plan.layout.tensor == tensor)
            assert step_s(entry.plan) == pytest.approx(fastest, rel=1e-9)
    for name, entry in found.beside.shapes.items():
        fastest = min((step_s(plan) for plan in tried if shape(plan.layout) == name), default=math.inf)
        assert math.isinf(fastest) if entry.plan is None else step_s(entry.plan) <= (1 + NEAR) * fastest
        if entry.plan is not None and entry.plan != found.plans[0]:
            assert step_s(entry.plan) == pytest.approx(fastest, rel=1e-9)


def shape(layout: Layout) -> str:
    axes = layout.tensor > 1, layout.pipeline > 1
    names = {(True, True): "all three", (True, False): "tensor and data", (False, True): "pipeline and data"}
    return names.get(axes, "data alone, ZeRO 3" if layout.zero == 3 else "data alone")


def way(plan: Plan) -> Layout:
    """The layout, but for fine options."""
    plain = {"schedule": "1f1b", "virtual_stages": 1, "outermost": "pipeline", "zero_group": 0, "recompute_every": 1}
    return replace(plan.layout, **plain)


def num_mechanisms(layout: Layout) -> int:
    """As `planner.machinery` counts them, one by one."""
    axes = [layout.tensor, layout.context, layout.pipeline]
    cuts = [layout.zero >= 2, layout.zero_group > 0, layout.recompute != "none", layout.recompute_every > 1]
    unusual = layout.pipeline > 1 and layout.schedule not in ("1f1b", "gpipe")
    return sum(size > 1 for size in axes) + sum(cuts) + unusual + (layout.outermost != "pipeline")


def test_among_near_ties_the_simplest_goes_first_and_is_said_to() -> None:
    two = replace(CLUSTER, num_nodes=1, devices_per_node=2)
    found = search(GPT, JOB, two, top=3)
    fastest = min(map(step_s, found.plans))
    assert step_s(found.plans[0]) <= (1 + NEAR) * fastest
    assert all(num_mechanisms(found.plans[0].layout) <= num_mechanisms(plan.layout) for plan in found.plans)
    alone = search(GPT, JOB, two, top=1)
    assert [plan.layout for plan in alone.plans] == [found.plans[0].layout]
    found = search(LLAMA, JOB, SMALL, top=5)  # zb-h1 is faster by a percent
    assert step_s(found.plans[0]) > min(map(step_s, found.plans)) and "least machinery" in " ".join(found.reasons)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_a_glance_finds_the_best_of_plain_1f1b() -> None:
    glanced = glance(GPT, JOB, SMALL, {})
    assert glanced is not None and glanced.prediction is not None
    plain = search(GPT, JOB, SMALL, {"schedule": "1f1b", "zero_group": 0}).plans
    best = min(step_s(plan) for plan in plain if plan.layout.recompute_every == 1)
    assert best <= step_s(glanced) * (1 + 1e-9) <= best * (1 + NEAR)
    assert glance(GPT, JOB, replace(SMALL, device=replace(DEVICE, memory_bytes=2**20)), {}) is None


def test_given_keys_are_kept() -> None:
    found = search(LLAMA, JOB, SMALL, {"tensor": 2, "micro_batch": 3, "zero": 1})
    assert {(p.layout.tensor, p.layout.micro_batch, p.layout.zero) for p in found.plans} == {(2, 3, 1)}


def test_devices_that_stay_idle_are_counted() -> None:
    found = search(LLAMA, JOB, SMALL, {"data": 3})
    idle = 8 - found.plans[0].layout.num_ranks
    assert idle and any(text.startswith(f"{idle} of 8 devices stay idle") for text in found.reasons)


def test_stage_layers_are_kept() -> None:
    found = search(LLAMA, JOB, SMALL, {"pipeline": 2, "stage_layers": (4, 3)})
    assert {plan.layout.stage_layers for plan in found.plans} == {(4, 3)}


def test_prediction_adds_up() -> None:
    for plan in search(LLAMA, JOB, SMALL).plans:
        assert plan.prediction is not None
        assert sum(plan.prediction.step_s_by_kind.values()) == pytest.approx(plan.prediction.step_s)
        assert len(plan.prediction.memory_bytes) == plan.layout.pipeline
        assert 0 < summary(plan).mfu < 1


def test_nothing_fits_is_an_error_with_the_sum() -> None:
    cluster = replace(SMALL, device=replace(DEVICE, memory_bytes=2**20))
    with pytest.raises(LayoutError) as caught:
        search(LLAMA, JOB, cluster)
    (problem,) = caught.value.problems
    assert problem.what.startswith("no layout fits into memory") and "too much" not in problem.what
    assert "of 1 MiB" in problem.what and "optimizer" in problem.what and "devices with " in problem.instead


def test_what_lies_just_beyond_the_memory_says_by_how_much() -> None:
    given = {"tensor": 1, "pipeline": 1, "micro_batch": 1, "zero": 1, "zero_group": 0}
    given |= {"recompute": "none", "sequence_parallel": False}
    (plan,) = search(LLAMA, JOB, SMALL, given).plans
    assert plan.prediction is not None
    needed = max(sum(stage.values()) for stage in plan.prediction.memory_bytes)
    with pytest.raises(LayoutError) as caught:
        search(LLAMA, JOB, replace(SMALL, device=replace(DEVICE, memory_bytes=int(needed) - 8)), given)
    assert re.search(r"needs ([\d.]+ .iB) of \1, [89] B too much: ", caught.value.problems[0].what)


def test_what_helps_is_tried_first() -> None:
    """Advice names the keys that are in the way, and a memory that is enough."""
    cluster = replace(SMALL, device=replace(DEVICE, memory_bytes=8 * 2**20))
    with pytest.raises(LayoutError) as caught:
        search(LLAMA, JOB, cluster, {"pipeline": 1, "tensor": 1, "zero": 0, "bucket_bytes": 2**20})
    instead = caught.value.problems[0].instead
    assert "[layout] without " in instead and "without zero" in instead and "bucket_bytes" not in instead
    enough = parse_bytes(re.search(r"devices with ([\d.]+ .iB)", instead).group(1))  # type: ignore[union-attr]
    roomy = replace(SMALL, device=replace(DEVICE, memory_bytes=enough))
    assert search(LLAMA, JOB, roomy, {"pipeline": 1, "tensor": 1, "zero": 0, "bucket_bytes": 2**20}).num_fitting


def test_no_more_nodes_are_asked_for_than_are_enough() -> None:
    """Six would do, and so do five; four do not."""
    tight = replace(CLUSTER, num_nodes=3, devices_per_node=2, device=replace(DEVICE, memory_bytes=2600 * 2**10))
    with pytest.raises(LayoutError) as caught:
        search(LLAMA, JOB, tight)
    assert caught.value.problems[0].instead.startswith("cluster.num_nodes = 5, or ")
    assert search(LLAMA, JOB, replace(tight, num_nodes=5), top=1).plans
    with pytest.raises(LayoutError):
        search(LLAMA, JOB, replace(tight, num_nodes=4), top=1)


def test_impossible_wishes_are_an_error() -> None:
    with pytest.raises(LayoutError, match="tensor 5 does not divide"):
        search(LLAMA, JOB, SMALL, {"tensor": 5, "data": 1, "pipeline": 1})


def test_rejected_layouts_are_counted_with_a_change_that_fits() -> None:
    cluster = replace(SMALL, device=replace(DEVICE, memory_bytes=8 * 2**20))
    found = search(LLAMA, JOB, cluster)
    assert sum(entry.count for entry in found.rejected) + found.num_fitting == found.num_layouts
    too_large = found.rejected[-1]
    assert too_large.reason == "does not fit into memory" and too_large.instead


def test_what_no_option_can_save_is_counted_without_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layout stands for all that share hopeless axis sizes; the counts are those of all of them."""
    monkeypatch.setattr("phalanx.planner.search.HANDFUL", 0)
    specs = LLAMA, JOB, replace(CLUSTER, num_nodes=3, devices_per_node=6)
    every, ones = enumerate_all(*specs, engine().space, {})
    assert (ones == 1).all()
    broken, counts = np.zeros(len(every), dtype=bool), {}
    for reason, mask in legal.illegal(*specs, every).items():
        if (mask & ~broken).any():
            counts[reason] = int((mask & ~broken).sum())
        broken |= mask
    found = search(*specs)
    assert found.num_layouts == len(every)
    assert {entry.reason: entry.count for entry in found.rejected if entry.reason in counts} == counts
    few, times = enumerate_all(*specs, engine().space, {}, lambda tensor, num_ranks: tensor == 9)
    assert len(few) < len(every) == times.sum()


def test_json_is_plain() -> None:
    value = as_json(search(GPT, JOB, SMALL, top=2))
    assert {"engine", "plans", "rejected", "num_layouts"} <= set(value)
    assert value["plans"][0]["step_s"] > 0


def test_explain_holds_every_message_and_number() -> None:
    plan = predict(LLAMA, JOB, SMALL, Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True))
    text = explain(plan)
    for word in ("Memory by pipeline rank", "attention input", "activations", "gradients", "loss and norm", "bubble"):
        assert word in text
    assert sum(row.seconds for row in of_step(plan)) > 0
    wide = replace(SMALL, device=replace(DEVICE, flops_per_s={"fp32": 1e12}))
    single = explain(predict(LLAMA, replace(JOB, precision="fp32"), wide, Layout(tensor=2, data=4)))
    assert "b s h × 4 bytes" in single and "bubble of" not in single


def test_formulas_come_out_at_what_stands_beside_them() -> None:
    plan = predict(LLAMA, replace(JOB, precision="bf16"), SMALL, Layout(data=8, zero=3))
    text = explain(plan)
    states = re.search(r"does = ([\d,]+) × \((.*)\) bytes = ([\d.]+ .iB)", text)
    assert states and states[2] == "2 / 8 + 4 / 8 + 12 / 8"
    assert int(states[1].replace(",", "")) * 18 / 8 == pytest.approx(parse_bytes(states[3]), rel=0.005)
    moved = re.search(r"= 1 × \(8 - 1\) / 8 × ([\d.]+ .iB) / ([\d.]+) GB/s = ([\d.]+) us", text)
    assert moved, text
    assert 7 / 8 * parse_bytes(moved[1]) / (float(moved[2]) * 1e9) == pytest.approx(float(moved[3]) / 1e6, rel=0.01)


def test_scan_and_front() -> None:
    found = search(LLAMA, JOB, SMALL)
    scan = found.beside.scan
    assert set(scan) >= {1, 2, 4}
    assert -NEAR <= min(entry.slower for entry in scan.values()) <= 0.0
    assert step_s(found.front[0]) == min(map(step_s, found.plans))
    times = [step_s(plan) for plan in found.front]
    sizes = [summary(plan).memory_bytes for plan in found.front]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor": 1, "pipeline": 1, "zero": 1}, "data parallelism alone"),
        ({"tensor": 1, "pipeline": 2}, "deep but narrow"),
        ({"tensor": 2, "pipeline": 1}, "wide layers: cut over the tensor axis"),
        ({"tensor": 2, "pipeline": 2}, "stages across nodes"),
        ({"tensor": 2, "pipeline": 2, "data": 2}, "[layout] gives the axes"),
        ({"tensor": 4, "pipeline": 2}, "[layout] gives the axes"),
    ],
)
def test_reasons_name_the_case(given: dict[str, int], words: str) -> None:
    assert words in search(LLAMA, JOB, SMALL, given).reasons[0]


def test_a_layer_too_large_for_a_device_is_called_so() -> None:
    """Where nothing fits without a tensor axis."""
    given = {"pipeline": 1, "micro_batch": 1, "recompute": "full", "zero": 3, "bucket_bytes": 2**16}
    wide, job = replace(LLAMA, hidden=6144, head_dim=512, ffn=24000), replace(JOB, precision="bf16")
    peaks = []
    for tensor in (1, 2):
        found = search(wide, job, SMALL, given | {"tensor": tensor, "sequence_parallel": tensor > 1})
        peaks.append(summary(found.plans[0]).memory_bytes)
    tight = replace(SMALL, device=replace(DEVICE, memory_bytes=sum(peaks) // 2))
    reasons = search(wide, job, tight, given).reasons
    assert reasons[0].startswith("one layer is too large for a device") and "predictions of it err by" not in reasons[1]
    snug = replace(SMALL, device=replace(DEVICE, memory_bytes=int(1.01 * peaks[1])))
    assert "less than the 6% that predictions of it err by" in search(wide, job, snug, given | {"tensor": 2}).reasons[1]


def test_layouts_that_predictions_cannot_tell_apart_are_called_so() -> None:
    found = search(LLAMA, JOB, SMALL, top=5)
    assert step_s(found.plans[1]) < step_s(found.plans[0]) * 1.05
    assert "cannot be told apart" in " ".join(found.reasons)


def test_an_unknown_engine_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match="megatron"):
        search(LLAMA, JOB, SMALL, engine_name="megatron-99")


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_engine_ranks_layouts(name: str) -> None:
    precision = next(iter(profiles()[name].states))
    device = replace(DEVICE, flops_per_s={precision: 1e14, "bf16": 1e14, "fp32": 1e13})
    job = replace(JOB, precision=precision)
    assert search(LLAMA, job, replace(SMALL, device=device), engine_name=name).plans


KEPT = {"pipeline": 2, "tensor": 1, "data": 1, "micro_batch": 1, "schedule": "1f1b", "recompute": "none"}


def test_layers_move_where_stages_of_equal_work_do_not_fit() -> None:
    """The first stage holds the embedding and two micro-batches; only as many layers leave it as must."""
    model, two = replace(LLAMA, num_layers=12, vocab=4000), replace(CLUSTER, num_nodes=1, devices_per_node=2)
    balanced = predict(model, JOB, two, Layout(pipeline=2)).prediction
    assert balanced is not None
    peak = max(sum(kinds.values()) for kinds in balanced.memory_bytes)
    splits = []
    for share in (1.0, 0.98, 0.9):
        limit = int(share * peak)
        small = replace(two, device=replace(two.device, memory_bytes=limit))
        found = search(model, JOB, small, KEPT)
        plan = found.plans[0]
        assert plan.prediction is not None
        assert max(sum(kinds.values()) for kinds in plan.prediction.memory_bytes) <= limit
        splits.append(plan.layout.stage_layers)
    assert splits == [None, (7, 5), (6, 6)]
    assert found.reasons[-1] == "stages of equal work do not fit: 6, 6 layers do"
    with pytest.raises(LayoutError):
        search(model, JOB, replace(two, device=replace(two.device, memory_bytes=peak // 2)), KEPT)
    with pytest.raises(LayoutError):  # what was asked for stays
        search(model, JOB, small, KEPT | {"stage_layers": (8, 4)})


def test_a_precision_that_an_engine_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(SpecError, match="llm-foundry has no recipe for precision fp64") as refused:
        search(LLAMA, replace(JOB, precision="fp64"), SMALL, engine_name="llm-foundry")
    assert refused.value.problems[0].instead == "job.precision, one of fp32, bf16, fp16"  # fp8 no run file can name
