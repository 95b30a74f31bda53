"""The copy of live state that a save in the background writes: complete when training goes on, on a GPU as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint.snapshot import Snapshot
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.plan.shards import Parameter


class OnGpu(Tensor):
    """A tensor in host memory that says it lies on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))


def live_piece(tensor: Tensor) -> StatePiece:
    return StatePiece.whole(Parameter(name="w", shape=tuple(tensor.shape)), tensor)


def test_copies_keep_what_was_there() -> None:
    live = [live_piece(torch.arange(6.0).view(2, 3)), live_piece(torch.ones(4, dtype=torch.bfloat16))]
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

    live = [
        live_piece(torch.ones(3).as_subclass(OnGpu)),
        live_piece(torch.ones(2).as_subclass(OnGpu)),
        live_piece(torch.ones(1)),
    ]
    monkeypatch.setattr(torch, "empty", recorded_empty)
    monkeypatch.setattr(Tensor, "copy_", recorded_copy)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    Snapshot(live).take()
    assert said == [("pinned", True), ("pinned", True), ("pinned", False), *[("copied", True)] * 3, ("waited", 0)]
