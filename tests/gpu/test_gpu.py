"""What the CUDA paths must do; skipped where there is no GPU. `benchmarks/gpu_check.py` runs these and more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single import masked_batch
from tiny import tiny_model, tiny_plan

from phalanx.plan.comm import Group
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.segments import EAGER, compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
LAYOUT = Layout(micro_batch=2, recompute="selective")


def engine_on(device: str, plan: Plan) -> Engine:
    return Engine(plan, Coord(), lambda name: SoloComm(Group(name=name, ranks=(0,))), torch.device(device))


def batches_of(engine: Engine, step: int) -> Any:
    tokens, labels, num_supervised = masked_batch(engine.plan, step)
    return engine.micro_batches(tokens.to(engine.device), labels.to(engine.device), num_supervised, step)


def losses(device: str, **job: Any) -> list[float]:
    engine, found = engine_on(device, tiny_plan(LAYOUT, tiny_model(dropout=0.1), **job)), []
    for step in range(3):
        loss = engine.forward_backward(batches_of(engine, step))
        engine.synchronize()
        total, norm, _ = engine.totals(loss)
        engine.update(1e-2, 1.0)
        found += [total, norm]
    return found


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 0.03)])
def test_a_gpu_computes_what_a_cpu_does(precision: str, tolerance: float) -> None:
    assert losses("cuda", precision=precision) == pytest.approx(losses("cpu", precision=precision), rel=tolerance)


def test_a_step_does_not_wait_for_the_gpu() -> None:
    engine = engine_on("cuda", tiny_plan(LAYOUT, tiny_model(dropout=0.1), precision="bf16"))
    batches = batches_of(engine, 0)
    for _ in range(2):  # the first one makes handles and plans, which may wait
        torch.cuda.synchronize()
        engine.totals(engine.forward_backward(batches))
        engine.update(1e-3, 0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.forward_backward(batches)
        engine.synchronize()
        engine.update(1e-3, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_segments_compute_the_same(dtype: torch.dtype) -> None:
    inputs, grad = (torch.randn(64, 256, dtype=dtype, device="cuda") for _ in range(2))
    weight, gates = torch.randn(256, dtype=dtype, device="cuda"), torch.randn(64, 512, dtype=dtype, device="cuda")
    heads, angles = torch.randn(2, 64, 6, 32, dtype=dtype, device="cuda"), torch.randn(64, 1, 16, device="cuda")
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    factor, label = torch.rand(64, device="cuda"), torch.randint(512, (64,), device="cuda")
    _, scale = EAGER.rms_norm(inputs, weight, 1e-5)
    for name, arguments in [
        ("rms_norm", (inputs, weight, 1e-5)),
        ("rms_norm_backward", (inputs, scale, grad, weight)),
        ("swiglu", (gates,)),
        ("swiglu_backward", (gates, grad)),
        ("rotate", (heads, cosines, sines, 1)),
        ("rotate", (heads, cosines, sines, -1)),
        ("exponentials", (gates.float(),)),
        ("loss_gradient", (gates.float(), factor, label, label % 3 > 0, 0.9, 0.1 / 512)),
    ]:
        copies = [[each.clone() if isinstance(each, torch.Tensor) else each for each in arguments] for _ in range(2)]
        results = [getattr(way, name)(*given) for way, given in zip((EAGER, compiled()), copies, strict=True)]
        if name == "rotate":  # in place
            results = [given[0] for given in copies]
            assert not torch.allclose(results[0], heads)
        for ours, theirs in zip(*results, strict=True) if isinstance(results[0], tuple) else [results]:
            assert (ours - theirs).norm() <= 8 * torch.finfo(dtype).eps * ours.norm(), name
