"""Advice for the kinds of cases that people come with, on named machines: what is chosen, and that it is called so."""

from __future__ import annotations

from dataclasses import replace

import planner_cases
import pytest

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.advice import difference
from phalanx.planner.search import Search, predict, search
from phalanx.planner.summary import beside
from phalanx.spec import clusters, models
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

LLAMA = models.named("llama-3-8b")
DEEP = replace(LLAMA, num_layers=96, hidden=2048, num_heads=16, num_kv_heads=16, ffn=5632, vocab=32000)
WIDE = replace(LLAMA, num_layers=2, hidden=32768, num_heads=256, num_kv_heads=256, ffn=131072, vocab=32000)
PLAIN = {"schedule": "1f1b", "recompute_every": 1, "zero_group": 0}
"""Leaves most of the search out, but none of the axes."""


def found(model: ModelSpec, cluster: str, num_nodes: int, batch: int, seq_len: int) -> Search:
    job = JobSpec(global_batch=batch, seq_len=seq_len, num_steps=1)
    return search(model, job, clusters.named(cluster, num_nodes=num_nodes), PLAIN, top=1)


def axes(layout: Layout) -> tuple[bool, bool, bool]:
    return layout.tensor > 1, layout.pipeline > 1, layout.data > 1


CASES = {
    # 124M parameters: 2 GB of states on 80 GB.
    "small": (models.named("gpt2"), "dgx-a100", 1, 64, 1024),
    # 4.7B parameters in 96 thin layers over PCIe: too large for 24 GB, and messages inside layers cost most.
    "deep": (DEEP, "rtx4090-workstation", 2, 64, 2048),
    # 17B parameters a layer: 34 GB in 16 bits, and twice that of gradients.
    "wide": (WIDE, "dgx-h100", 4, 64, 2048),
    # 13B parameters on 40 GB: 26 GB of them leave too little for what is computed.
    "roomy": (models.named("llama-2-13b"), "dgx-a100-40", 4, 256, 4096),
    "huge": (models.named("llama-3-405b"), "dgx-h100", 128, 1024, 8192),
}


@pytest.mark.parametrize(
    ("name", "cut", "words"),
    [
        ("small", (False, False, True), "the model fits one device: data parallelism alone"),
        ("deep", (False, True, True), "deep but narrow: pipeline and data"),
        ("wide", (True, False, True), "one layer is too large for a device: cut over the tensor axis"),
        ("roomy", (False, False, True), "parameters fit one device whole; cut over the data axis as well, they leave"),
        ("huge", (True, True, True), "100B parameters and more: tensor inside the node, pipeline across nodes, data"),
    ],
)
def test_each_kind_of_case_is_called_by_its_name(name: str, cut: tuple[bool, ...], words: str) -> None:
    result = found(*CASES[name])
    assert axes(result.plans[0].layout) == cut and result.reasons[0].startswith(words), result.plans[0].layout
    shapes = result.beside.shapes
    if name == "wide":  # whatever leaves layers whole was tried, and none fits
        assert [name for name, entry in shapes.items() if entry.plan] == ["tensor and data", "all three"]


def test_a_model_that_fits_no_device_is_cut_over_data() -> None:
    """70B parameters on devices of 139 GiB: 131 GiB in 16 bits alone."""
    job = JobSpec(global_batch=256, seq_len=4096, num_steps=1)
    given = {**PLAIN, "tensor": 1, "pipeline": 1}
    result = search(models.named("llama-3-70b"), job, clusters.named("dgx-h200", num_nodes=8), given, top=1)
    assert result.reasons[0].startswith("a layer fits one device, the whole model does not: parameters cut")
    whole = result.beside.shapes["data alone"]
    assert whole.plan is None and "GiB of 139 GiB: 131 GiB parameters, " in whole.because


def test_the_first_is_among_those_beside_it_and_no_other_is_called_so() -> None:
    result = found(*CASES["deep"])
    for kind, rows in beside(result).items():
        assert [words for *_, words in rows].count("the first") == 1, kind
    sizes = [name for name, *_ in beside(result)["tensor size"]]
    assert sizes == ["tensor 1", "tensor 2", "tensor 4", "tensor 8"]
    for entry in (*result.beside.shapes.values(), *result.beside.scan.values()):
        assert entry.because and (entry.plan is None) == (entry.slower == float("inf"))


def test_most_of_a_loss_is_told_by_kind() -> None:
    job = JobSpec(global_batch=8, seq_len=1024, num_steps=1)
    plan = predict(models.named("gpt2"), job, clusters.named("dgx-a100"), Layout(data=8))
    assert plan.prediction is not None

    def spending(**seconds: float) -> Plan:
        assert plan.prediction is not None
        kinds = {"compute": 8.0, "tensor": 0.0, "pipeline": 0.0, "data": 1.0, **seconds}
        return replace(plan, prediction=replace(plan.prediction, step_s_by_kind=kinds))

    winner = spending()
    assert difference(spending(tensor=2.0, pipeline=0.5, data=0.0), winner) == "2 s more in messages inside layers"
    assert difference(spending(compute=9.0, tensor=2.0, pipeline=0.1), winner) == (
        "2 s more in messages inside layers, 1 s in compute"
    )
    assert difference(winner, winner) == difference(spending(data=0.5), winner) == "no slower in any part"


@pytest.mark.parametrize(
    ("per_node", "batch", "given", "words", "better"),
    [
        (5, 12, {"micro_batch": 3}, "a data axis: 15 would divide over all 5 devices", {"data": 5}),
        (8, 6, {"tensor": 2}, "more than 2 data ranks: 8 would divide over 4 data ranks", {"data": 4}),
        (8, 6, {"tensor": 2, "micro_batch": 3}, "more than 2 data ranks: 12 would divide over 4", {"data": 4}),
    ],
)
def test_the_batch_that_is_named_divides_beside_what_layout_keeps(
    per_node: int, batch: int, given: dict[str, int], words: str, better: dict[str, int]
) -> None:
    cluster = replace(planner_cases.CLUSTER, num_nodes=1, devices_per_node=per_node)
    job = replace(planner_cases.JOB, global_batch=batch)
    (said,) = (text for text in search(planner_cases.LLAMA, job, cluster, given).reasons if "a global batch of" in text)
    assert words in said
    named = int(said.split(": ")[1].split(" ")[0])
    assert search(planner_cases.LLAMA, replace(job, global_batch=named), cluster, given | better).plans
