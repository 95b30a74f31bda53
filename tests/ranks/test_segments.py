"""What lies between matrix products and messages, compiled: the same numbers as by hand, in whole steps too.

A backend that traces and runs without generating code stands for inductor, whose compiler takes a minute on first use.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_worlds
from single import masked_batch, solo_engine
from tiny import tiny_model, tiny_plan, write_run_file
from torch import Tensor

from phalanx.cli.main import main
from phalanx.errors import InputError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.trainer import engine, segments
from phalanx.trainer.segments import EAGER, compiled


def traced() -> Any:
    return compiled("aot_eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_segment_computes_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    inputs, weight, grad, gates = random(40, 24), random(24), random(40, 24), random(40, 48)
    tolerance = 4 * torch.finfo(dtype).eps
    _, scale = EAGER.rms_norm(inputs, weight, 1e-5)
    scores, factor = random(40, 50).float(), random(40).float().exp()
    label, here = torch.randint(0, 50, (40,), generator=generator), torch.arange(40) % 3 > 0
    for name, arguments in {
        "rms_norm": (inputs, weight, 1e-5),
        "rms_norm_backward": (inputs, scale, grad, weight),
        "swiglu": (gates,),
        "swiglu_backward": (gates, grad),
        "exponentials": (scores,),
        "loss_gradient": (scores, factor, label, here, 0.9, 0.1 / 50),
    }.items():
        copies = [[each.clone() if isinstance(each, Tensor) else each for each in arguments] for _ in range(2)]
        results = [getattr(way, name)(*given) for way, given in zip((EAGER, traced()), copies, strict=True)]
        pairs = zip(*results, strict=True) if isinstance(results[0], tuple) else [results]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype, name
            assert (ours - theirs).norm() <= tolerance * ours.norm(), name


@pytest.mark.parametrize("sign", [1, -1])
def test_turning_in_place_is_the_same(sign: int) -> None:
    """Of a view: what lies behind the heads that are turned stays."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(2, 6, 5, 8, generator=generator, dtype=torch.float64)
    theirs, before = ours.clone(), ours.clone()
    angles = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    for way, heads in ((EAGER, ours), (traced(), theirs)):
        way.rotate(heads[:, :, :3], angles.cos(), angles.sin(), sign)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours[:, :, 3:].equal(before[:, :, 3:]) and theirs[:, :, 3:].equal(before[:, :, 3:])
    assert not torch.allclose(ours[:, :, :3], before[:, :, :3])


def losses(**changes: Any) -> tuple[list[float], list[float]]:
    """Losses and norms of three steps, with recompute, so that segments run in backward too."""
    plan = tiny_plan(Layout(micro_batch=2, recompute="selective"), tiny_model(num_layers=2), **changes)
    return trained(solo_engine(plan), plan, 3)


def trained(made: engine.Engine, plan: Plan, num_steps: int) -> tuple[list[float], list[float]]:
    mine, found, norms = list(made.positions), [], []
    for step in range(num_steps):
        tokens, labels, num_supervised = masked_batch(plan, step)
        loss = made.forward_backward(made.micro_batches(tokens[mine], labels[mine], num_supervised, step))
        made.synchronize()
        total, norm, _ = made.totals(loss)
        made.update(1e-2, 1.0)
        found.append(total)
        norms.append(norm)
    return found, norms


def test_a_run_with_compiled_segments_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted() -> Any:
        calls.append(1)
        return traced()

    monkeypatch.setattr(engine, "compiled", counted)
    smoothed = {"label_smoothing": 0.1, "z_loss": 1e-2}
    (plain, plain_norms), (ours, norms) = losses(**smoothed), losses(compile=True, **smoothed)
    assert len(calls) == 1
    assert ours == pytest.approx(plain, rel=1e-10)
    assert norms == pytest.approx(plain_norms, rel=1e-10)
    assert not math.isclose(plain[0], plain[-1], rel_tol=1e-3)


COMPOSED = [
    (Layout(tensor=2, data=2, zero=3, sequence_parallel=True, recompute="selective"), "bf16", 2e-2),
    (Layout(pipeline=2, tensor=2, schedule="zb-h1", recompute="full", recompute_every=2), "fp64", 1e-10),
]


@pytest.mark.parametrize(("layout", "precision", "tolerance"), COMPOSED, ids=str)
def test_compiled_segments_compose(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, precision: str, tolerance: float
) -> None:
    """With every axis, ZeRO 3, a split backward and recompute; held against one process that compiles nothing."""
    monkeypatch.setattr(engine, "compiled", traced)
    alone = tiny_plan(Layout(), tiny_model(num_layers=2), precision=precision)
    plan = tiny_plan(layout, alone.model, precision=precision, compile=True)

    def run(world: Any) -> tuple[list[float], list[float]]:
        return trained(engine.Engine(plan, world.coord, world.comm, world.device), plan, 2)

    wanted = trained(solo_engine(alone), alone, 2)
    for found in run_worlds(layout, run, model=plan.model, timeout=100.0, timeout_s=90.0):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU no C++ compiler is asked for")
def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "c++-of-nobody")
    segments.compiled.cache_clear()
    with pytest.raises(InputError, match="there is no c\\+\\+-of-nobody") as caught:
        losses(compile=True)
    assert "compile = false" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU no C++ compiler is asked for")
def test_without_a_compiler_no_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "c++-of-nobody")
    monkeypatch.chdir(tmp_path)
    write_run_file(tmp_path, Layout(), num_steps=1)
    given = ["train", "run.toml", "--run-dir", "run", "--set", "job.compile=true"]
    assert main(given) == 2
    assert "phalanx: --set job.compile=true: torch.compile makes code" in capsys.readouterr().err
    assert not Path("run").exists()
