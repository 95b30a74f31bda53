"""The most that a step holds at a time: what recomputation saves of it is what the planner claims, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from single import batch, solo_engine
from tiny import tiny_model, tiny_plan
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.plan.layout import Layout
from phalanx.planner.search import predict

WIDE = tiny_model(
    "llama", num_layers=4, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=192, vocab=96, max_seq_len=128
)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "every other": {"recompute": "full", "recompute_every": 2},
    "first three": {"recompute": "full", "recompute_layers": (3,)},
}


class Peak(TorchDispatchMode):
    """The most bytes that were ever alive of the storages which operations under it return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))


@cache
def step(**recompute: Any) -> tuple[int, int]:
    """Bytes at the peak of a second step, and activations and logits as the planner claims them."""
    layout = Layout(micro_batch=2, **recompute)
    plan = tiny_plan(layout, WIDE, global_batch=2, seq_len=128, precision="fp32")
    engine = solo_engine(plan)
    tokens, labels = batch(plan)
    batches = engine.micro_batches(tokens, labels, labels.numel(), 0)
    engine.forward_backward(batches)
    with Peak() as peak:
        engine.forward_backward(batches)
    prediction = predict(plan.model, plan.job, plan.cluster, plan.layout).prediction
    assert prediction is not None
    (stage,) = prediction.memory_bytes
    return peak.bytes, stage["activations"] + stage["logits"]


@pytest.mark.parametrize("kind", ["full", "every other", "first three"])
def test_recomputing_layers_saves_what_is_claimed(kind: str) -> None:
    (everything, claimed), (peak, less) = step(), step(**RECOMPUTE[kind])
    assert everything - peak == claimed - less > 0


def test_recomputing_the_cheap_saves_at_least_what_is_claimed() -> None:
    """It is made again half-block by half-block, where the claim has a layer's at once."""
    (everything, claimed), (peak, less) = step(), step(**RECOMPUTE["selective"])
    boundary = 2 * 128 * WIDE.hidden * 4
    assert 0 < claimed - less <= everything - peak <= claimed - less + 2 * boundary
