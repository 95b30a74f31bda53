"""Published step times that rest on structure alone: engines without a factor, the device constants of all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import megatron_gpt

from phalanx.plan.layout import Layout
from phalanx.planner.search import predict
from phalanx.spec import clusters
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec


def step_s(model: ModelSpec, batch: int, layout: Layout, engine_name: str) -> float:
    """Seconds of a step on as many nodes of eight A100 as the layout needs."""
    machine = replace(clusters.named("dgx-a100"), num_nodes=layout.num_ranks // 8)
    job = JobSpec(global_batch=batch, seq_len=2048, num_steps=1, precision="fp16")
    prediction = predict(model, job, machine, layout, engine_name=engine_name).prediction
    assert prediction is not None
    return prediction.step_s


TABLE_5 = {
    "22B": (megatron_gpt(6144, 48, 64), 4, Layout(tensor=8, micro_batch=4), 1.42, 1.10),
    "175B": (megatron_gpt(12288, 96, 96), 64, Layout(tensor=8, pipeline=8, virtual_stages=3), 18.13, 13.75),
    "530B": (megatron_gpt(20480, 105, 128), 280, Layout(tensor=8, pipeline=35, virtual_stages=3), 49.05, 37.83),
    "1T": (megatron_gpt(25600, 128, 160), 512, Layout(tensor=8, pipeline=64), 94.42, 71.49),
}
"""Reducing Activation Recomputation (arXiv 2205.05198), table 5: model, sequences per step, layout; seconds with full
recompute, and with selective recompute and the sequence cut."""


def test_steps_with_full_and_with_selective_recompute_take_what_the_paper_measured() -> None:
    errors = []
    for model, batch, layout, full_s, selective_s in TABLE_5.values():
        layout = replace(layout, schedule="interleaved-1f1b" if layout.virtual_stages > 1 else "1f1b")
        full = replace(layout, recompute="full")
        selective = replace(layout, recompute="selective", sequence_parallel=True)
        for case, measured in ((full, full_s), (selective, selective_s)):
            errors.append(step_s(model, batch, case, "megatron-2022") / measured - 1.0)
    assert max(map(abs, errors)) < 0.05
    assert sum(map(abs, errors)) / len(errors) < 0.02


def test_a_trillion_parameters_on_3072_devices_take_what_the_paper_measured() -> None:
    """Megatron-LM of 2021 (arXiv 2104.04473, table 1): 3,072 sequences in 102.6 s, 163 TFLOP/s of each A100."""
    layout = Layout(tensor=8, pipeline=64, data=6, recompute="full")
    assert step_s(megatron_gpt(25600, 128, 160), 3072, layout, "megatron-2021") == pytest.approx(102.63, rel=0.03)
