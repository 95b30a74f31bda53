"""The copy of live state that a save in the background writes: complete when training goes on, on a GPU as well."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint.snapshot import Snapshot
from phalanx.plan.shards import Parameter, Rectangle


class OnGpu(Tensor):
    """A tensor in host memory that says it lies on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))


@dataclass
class Live:
    tensor: Tensor
    kind: str = "weight"
    owned: bool = True

    @property
    def parameter(self) -> Parameter:
        return Parameter(name="w", shape=tuple(self.tensor.shape), std=0.0)

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(start=(0,) * self.tensor.ndim, stop=tuple(self.tensor.shape))


def test_copies_keep_what_was_there() -> None:
    live = [Live(torch.arange(6.0).view(2, 3)), Live(torch.ones(4, dtype=torch.bfloat16))]
    copies = Snapshot(live).take()
    for each in live:
        each.tensor.zero_()
    assert torch.equal(copies[0].tensor, torch.arange(6.0).view(2, 3))
    assert torch.equal(copies[1].tensor, torch.ones(4, dtype=torch.bfloat16))


def test_from_a_gpu_copies_go_to_page_locked_memory_and_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    empty, copy = torch.empty, Tensor.copy_

    def recorded_empty(*shape: Any, pin_memory: bool, **options: Any) -> Tensor:
        said.append(("pinned", pin_memory))
        return empty(*shape, **options)

    def recorded_copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        said.append(("copied", non_blocking))
        return copy(self, source)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: said.append(("waited", device.index)))

    live = [Live(torch.ones(3).as_subclass(OnGpu)), Live(torch.ones(2).as_subclass(OnGpu)), Live(torch.ones(1))]
    monkeypatch.setattr(torch, "empty", recorded_empty)
    monkeypatch.setattr(Tensor, "copy_", recorded_copy)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    Snapshot(live).take()
    assert said == [("pinned", True), ("pinned", True), ("pinned", False), *[("copied", True)] * 3, ("waited", 0)]
