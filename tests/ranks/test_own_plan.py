"""What a recorded module is said to do equals what the operations of its ModelSpec say; plans for it are ranked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from own_modules import cross_entropy, images, load_kernels_without_data, on_ranks, small, step_in
from tiny import toy_cluster
from torch import Tensor, nn

from phalanx.errors import InputError, LayoutError
from phalanx.own.blocks import Blocks
from phalanx.own.families import table_of
from phalanx.own.plan_for import plan_for
from phalanx.own.record import _Watch, record
from phalanx.own.stage import call
from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer.world import World

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "own"))
import llama

load_kernels_without_data()

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, LENGTH = 64, 32, 48, 4, 4, 2, 16


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


BATCH = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)}


def flops(found: tuple[operations.Operation, ...], kind: str) -> float:
    return sum(each.flops for each in found if each.kind == kind)


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_recorded_products_are_those_of_the_model_spec(tensor: int, sequence_parallel: bool) -> None:
    model = make_llama()
    parts = record(
        model,
        BATCH,
        llama.next_token,
        forward=call,
        blocks=llama.BLOCKS,
        cuts=table_of(model),
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        micro_batch=2,
    )
    spec = ModelSpec(
        name="tiny",
        num_layers=LAYERS,
        hidden=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        ffn=FFN,
        vocab=VOCAB,
        max_seq_len=LENGTH,
        head_dim=HIDDEN // HEADS,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        tied=False,
    )
    layout = Layout(tensor=tensor, micro_batch=2, sequence_parallel=sequence_parallel)
    cut, kernels = cut_of(spec, LENGTH, layout, 4), operations.Kernels()
    layer = operations.layer(spec, cut, kernels)
    said = (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
    assert len(parts) == LAYERS + 2
    for kind in ("matmul", "attention"):
        assert flops((*parts[1].forward, *parts[1].backward), kind) == flops(said, kind) > 0, kind
    head = operations.head(spec, cut, kernels)
    said = (*head.forward, *head.input_gradient, *head.weight_gradient)
    assert flops((*parts[-1].forward, *parts[-1].backward), "matmul") == flops(said, "matmul")
    num_trained = sum(part.num_trained for part in parts)
    assert num_trained == model.num_parameters() if tensor == 1 else num_trained > model.num_parameters() / tensor
    messages = {operation: count for operation, count, _ in parts[2].messages}
    expected = {"all_gather": 4, "reduce_scatter": 4} if sequence_parallel else {"all_reduce": 4}
    assert messages == (expected if tensor > 1 else {})


def test_a_frozen_block_is_not_taken_for_the_trained_one_before_it() -> None:
    model = make_llama()
    model.model.layers[2].requires_grad_(False)
    parts = record(model, BATCH, llama.next_token, forward=call, blocks=llama.BLOCKS, cuts=None)
    _, trained, frozen = (flops(part.backward, "matmul") for part in parts[1:4])
    assert frozen == trained / 2  # of the inputs alone
    assert [part.num_trained > 0 for part in parts[1:-1]] == [True, True, False, True]


class Window(nn.Module):
    """Of every second block, half of the rows are enough."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.enter, self.number, self.window = nn.Linear(8, 8), number, 8 if number % 2 else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.enter(x[:, : self.window]), x[:, 8:] if self.window else x[:, :0]), dim=1)


def test_blocks_that_differ_by_what_they_hold_are_told_apart_but_not_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    part = _Watch.part
    monkeypatch.setattr(_Watch, "part", lambda watch, name, *rest: (seen.append(name), part(watch, name, *rest))[1])
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*map(Window, range(6))), nn.Linear(8, 8))
    batch = torch.zeros(2, 16, 8)
    parts = record(model, batch, lambda output, _: output.sum(), forward=call, blocks=Blocks(path="1"), cuts=None)
    whole, *others = (flops(each.forward, "matmul") for each in parts[1:-1])
    assert others == [whole / 2, whole, whole / 2, whole, whole / 2]
    assert seen == ["before", "block 0", "block 1", "block 2", "block 5", "after"]  # the first and last have hooks


class Attends(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.enter, self.attend = nn.Linear(8, 8), attend

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.attend(x, x, x)


def test_attention_is_recorded_however_it_is_called() -> None:
    attend = F.scaled_dot_product_attention
    ways = [
        lambda q, k, v: attend(q, k, v, None, 0.0, True),
        lambda q, k, v: attend(q, k, value=v, is_causal=True),
        lambda q, k, v: attend(query=q, key=k, value=v, is_causal=True),
    ]
    batch, loss = torch.zeros(2, 4, 8), lambda output, batch: output.mean()
    first, *others = (record(Attends(way), batch, loss, forward=call, blocks=None, cuts=None) for way in ways)
    assert flops(first[0].forward, "attention") == 2 * 2 * 4 * (4 / 2) * 8
    assert all(other == first for other in others)


def sent(world: World, plan: ModulePlan, options: Any) -> dict[tuple[str, str], list[int]]:
    """What the second step sends over the tensor axis."""
    step = step_in(world, make_llama(), plan, **options)
    batch = {"input_ids": torch.zeros(plan.job.global_batch, LENGTH, dtype=torch.int64)}
    for _ in range(2):
        world.recorder.messages.clear()
        step.forward_backward(step.share(batch), llama.next_token)
        found = {key[1:]: value for key, value in world.recorder.messages.items() if key[0] == "tensor"}
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recorded_messages_are_those_that_are_sent(sequence_parallel: bool) -> None:
    options = {"blocks": llama.BLOCKS, "cuts": table_of(make_llama())}
    layout = Layout(tensor=2, micro_batch=2, sequence_parallel=sequence_parallel)
    said: dict[str, list[int]] = {}
    for part in record(
        make_llama(),
        BATCH,
        llama.next_token,
        forward=call,
        tensor=2,
        micro_batch=2,
        sequence_parallel=sequence_parallel,
        **options,
    ):
        for operation, count, size in part.messages:
            known = said.setdefault(operation, [0, 0])
            said[operation] = [known[0] + count, known[1] + size]
    found = on_ranks(layout, sent, ModulePlan(job=job(global_batch=4), layout=layout), options)[0]
    shared = found.pop(("shared gradients", "all_reduce"), None)
    assert (shared is not None) == sequence_parallel
    counted: dict[str, list[int]] = {}
    for (_, operation), (count, size) in found.items():
        known = counted.setdefault(operation, [0, 0])
        counted[operation] = [known[0] + count, known[1] + size]
    assert counted == {operation: [2 * count, 2 * size] for operation, (count, size) in said.items()}


def job(**changes: Any) -> JobSpec:
    return JobSpec(**{"global_batch": 16, "seq_len": LENGTH, "num_steps": 1, "precision": "fp32", **changes})


def test_layouts_for_a_module_are_ranked() -> None:
    with torch.device("meta"):
        model = make_llama()
    found = plan_for(model, job(), toy_cluster(8), BATCH, llama.next_token, blocks=llama.BLOCKS, cuts="auto", top=500)
    steps = [each.step_s for each in found.plans]
    assert steps == sorted(steps) and found.num_fitting == found.num_layouts == len(steps) > 100
    layouts = {(each.layout.tensor, each.layout.pipeline, each.layout.data) for each in found.plans}
    assert {(1, 1, 8), (2, 1, 4), (1, 2, 4)} <= layouts
    assert all(each.layout.tensor <= KV_HEADS for each in found.plans)  # more ranks would have to copy heads
    assert "recorded" in str(found).splitlines()[0] and str(found.plans[0].layout) in str(found).splitlines()[1]
    kept = plan_for(
        model, job(), toy_cluster(8), BATCH, llama.next_token, blocks=llama.BLOCKS, cuts="auto", given={"pipeline": 4}
    )
    assert {each.layout.pipeline for each in kept.plans} == {4}


def test_recompute_and_zero_take_less_memory() -> None:
    def needed(**given: Any) -> int:
        keys = {"data": 8, "micro_batch": 2, "zero": 0, "recompute": "none", **given}
        found = plan_for(make_llama(), job(), toy_cluster(8), BATCH, llama.next_token, blocks=llama.BLOCKS, given=keys)
        return sum(found.plans[0].memory_bytes.values())

    assert needed() > needed(recompute="full")
    assert needed() > needed(zero=1) > needed(zero=2) > needed(zero=3)


def test_a_module_without_blocks_has_data_parallel_layouts() -> None:
    found = plan_for(small(), job(), toy_cluster(4), images(), cross_entropy)
    assert {each.layout.data for each in found.plans} == {4}
    assert [part.name for part in found.recorded] == ["module"]
    assert any(each.name.startswith("aten.convolution") for each in found.recorded[0].forward)


def test_what_cannot_be_planned_is_refused_in_words() -> None:
    small_devices = replace(toy_cluster(2), device=replace(toy_cluster(2).device, memory_bytes=10_000))
    with pytest.raises(LayoutError, match=r"needs .* of 9.77 KiB, and others more"):
        plan_for(small(), job(), small_devices, images(), cross_entropy)
    with pytest.raises(InputError, match="recorded modules are priced under 1F1B"):
        plan_for(small(), job(), small_devices, images(), cross_entropy, given={"schedule": "zb-h1"})
    with pytest.raises(InputError, match=r"unknown key layout.tensro(.|\n)*did you mean tensor"):
        plan_for(small(), job(), small_devices, images(), cross_entropy, given={"tensro": 2})
    with pytest.raises(InputError, match="cannot be run on tensors without data"):
        plan_for(small(), job(), toy_cluster(2), images(), lambda output, batch: output.mean() * output.sum().item())
