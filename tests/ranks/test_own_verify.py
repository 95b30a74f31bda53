"""verify_module says yes where a module trains as it does alone, and names what differs where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from own_modules import (
    BLOCKS,
    cross_entropy,
    decoder,
    images,
    load_kernels_without_data,
    module_plan,
    on_ranks,
    small,
    step_in,
)
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.errors import CheckFailed
from phalanx.own import alone
from phalanx.own.stage import call
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.trainer.world import World

load_kernels_without_data()


def masked() -> tuple[Tensor, Tensor]:
    inputs, labels = images()
    labels[[1, 2]] = -100
    return inputs, labels


def mean_of_supervised(output: Tensor, batch: Any) -> Tensor:
    """A mean over what is supervised, passed off as one over samples."""
    return F.cross_entropy(output, batch[1], ignore_index=-100)


def skips_norm(module: Any, state: Any, batch: Any) -> Tensor:
    return module.head(state["hidden"].mean(1) + 0 * module.model.norm(state["hidden"]).mean(1))


def compared(world: World, plan: ModulePlan, make: Any, batch: Any, loss: Any, options: Any) -> alone.Compared:
    return alone.compare_step(step_in(world, make(), plan, **options), make, loss, batch, call)


@pytest.mark.parametrize(
    ("layout", "make", "batch", "loss", "options", "wrong"),
    [
        (Layout(data=2, micro_batch=2, zero=3), small, images(), cross_entropy, {}, ""),
        (Layout(pipeline=2, data=2, micro_batch=2), decoder, images(), cross_entropy, {"blocks": BLOCKS}, ""),
        (Layout(data=2, micro_batch=2), small, masked(), mean_of_supervised, {}, "loss step 1"),
        (
            Layout(pipeline=2, micro_batch=4),
            decoder,
            images(),
            cross_entropy,
            {"blocks": replace(BLOCKS, after=skips_norm)},
            "gradients model.norm.weight",
        ),
    ],
    ids=["zero 3", "pipeline", "mean of means", "forgotten norm"],
)
def test_verdicts(
    layout: Layout, make: Any, batch: Any, loss: Any, options: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = module_plan(layout)
    first, *others = on_ranks(layout, compared, plan, make, batch, loss, options)
    assert all(other == first for other in others)
    monkeypatch.setattr(alone, "compare_alone", lambda *args, **kwargs: first)
    verdict = phalanx.verify_module(make, loss, batch, plan, **options)
    assert verdict.ok == (not wrong)
    if wrong:
        with pytest.raises(CheckFailed, match=wrong):
            verdict.check()
    else:
        verdict.check()


def test_one_process_needs_no_starter() -> None:
    verdict = phalanx.verify_module(small, cross_entropy, images(), module_plan(Layout(micro_batch=2)))
    assert str(verdict).endswith(f"all {len(verdict.findings)} comparisons agree")
    assert verdict.ok and len(verdict.findings) == 2 + len(list(small().parameters()))
    assert torch.isfinite(torch.tensor(verdict.losses)).all()


class Attends(nn.Module):
    """Attention that draws dropout by a number of its own, not by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.squeeze(1)
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


def attends() -> nn.Module:
    torch.manual_seed(0)
    return Attends()


def test_dropout_that_is_no_layer_is_switched_off() -> None:
    verdict = phalanx.verify_module(attends, cross_entropy, images(), module_plan(Layout(micro_batch=2)))
    verdict.check()
    assert len(verdict.findings) == 2 + len(list(attends().parameters()))
