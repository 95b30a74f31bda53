"""Seconds of single operations and of layers that a host issues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.operations import Kernels, Operation
from phalanx.planner.candidates import of
from phalanx.planner.compute import UNALIGNED, operation_s
from phalanx.planner.costs import costs
from phalanx.planner.engine import engine
from phalanx.spec import clusters, models

A100 = clusters.named("dgx-a100").device


def product_s(k: int, batch: int = 1) -> float:
    work = Operation(name="product", kind="matmul", m=4096, n=4096, k=k, batch=batch, bytes=0)
    return float(operation_s(work, A100, A100.flops_per_s["bf16"], engine()))


def test_odd_dimensions_cost_a_single_product_most_of_its_speed_and_batched_ones_all() -> None:
    assert product_s(4097) / product_s(4096) == pytest.approx(1 / UNALIGNED, rel=0.01)
    vector = A100.flops_per_s["bf16"] / A100.flops_per_s["fp32"]
    assert product_s(4097, batch=8) / product_s(4096, batch=8) == pytest.approx(vector, rel=0.01)


def test_a_vocabulary_may_stay_unpadded_where_nothing_cuts_it() -> None:
    model = replace(models.named("gpt2"), vocab=50257)
    for tensor, pads, width in ((1, True, 50272), (1, False, 50257), (2, False, 25136)):
        cut = cut_of(model, 1024, Layout(tensor=tensor), 2)
        head = operations.head(model, cut, Kernels(pads_alone=pads))
        (logits,) = (work for work in head.forward if work.name == "logits")
        assert logits.n == width


def test_ranks_of_a_tensor_group_wait_for_hosts_and_devices_both() -> None:
    for tensor in (1, 2):
        layouts = of([Layout(tensor=tensor)])
        idle = costs(LLAMA, JOB, CLUSTER, replace(engine(), host_layer_s=0.0), layouts).layer_forward
        work_s = float(np.asarray(idle.compute_s + idle.tensor_s)[0])
        assert float(idle.total_s[0]) == pytest.approx(work_s)
        busy = costs(LLAMA, JOB, CLUSTER, replace(engine(), host_layer_s=2 * work_s), layouts).layer_forward
        assert float(busy.total_s[0]) == pytest.approx((2.0 if tensor == 1 else 5**0.5) * work_s)


def test_a_job_that_compiles_fuses_kernels_and_the_loss() -> None:
    """Where an engine gains by it; others run as ever."""
    eager, compiled = (engine("phalanx", replace(JOB, compile=fuses)) for fuses in (False, True))
    assert (eager.elementwise_passes, eager.kernels.fused_loss) == (1.8, False)
    assert (compiled.elementwise_passes, compiled.kernels.fused_loss) == (1.5, True)
    assert engine("nanotron", replace(JOB, compile=True)) == engine("nanotron")
