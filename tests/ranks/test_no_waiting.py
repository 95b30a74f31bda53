"""Nothing in a step reads a value of a tensor, or makes one from Python's numbers: on a GPU each of these would make
the host wait until all work issued so far is done. What the host has to know, it asks for once, in `totals`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from single import masked_batch, solo_engine
from tiny import tiny_model, tiny_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.plan.layout import Layout
from phalanx.spec.job import OptimizerSpec
from phalanx.trainer.engine import Engine

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
WAITS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.lift_fresh,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
}


class NoWaiting(TorchDispatchMode):
    """Raises where a device would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def guarded_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step from its micro-batches to new weights, but for `totals`."""
    batches = engine.micro_batches(*masked_batch(engine.plan, 0), 0)

    def refuse(self: Tensor, *args: Any) -> Any:
        raise AssertionError("a tensor was read in the middle of a step")

    with monkeypatch.context() as patch, NoWaiting():
        for name in READS:
            patch.setattr(Tensor, name, refuse)
        loss = engine.forward_backward(batches)
        engine.synchronize()
    engine.totals(loss)
    with monkeypatch.context() as patch, NoWaiting():
        for name in READS:
            patch.setattr(Tensor, name, refuse)
        engine.update(1e-3, 0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("llama", Layout(micro_batch=2, recompute="full", recompute_every=2)),
        ("gpt2", Layout(schedule="zb-h1", recompute="selective")),
    ],
    ids=["llama", "gpt2"],
)
def test_a_step_does_not_wait_for_the_device(
    style: str, layout: Layout, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(style, num_layers=2, dropout=0.1, attention_dropout=0.1)
    plan = tiny_plan(layout, model, precision=precision, label_smoothing=0.1, z_loss=1e-4)
    plan = replace(plan, job=replace(plan.job, optimizer=OptimizerSpec(clip_norm=1.0)))
    guarded_step(solo_engine(plan), monkeypatch)


def test_a_value_that_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = solo_engine(tiny_plan(Layout(), tiny_model(num_layers=1)))
    finish = engine.data.finish
    engine.data.finish = lambda: (finish(), engine.data.slices[0].gradients.sum().item())[0]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="in the middle of a step"):
        guarded_step(engine, monkeypatch)
    engine.data.finish = lambda: (finish(), torch.tensor(1.0))[0]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="waits for the device"):
        guarded_step(engine, monkeypatch)
