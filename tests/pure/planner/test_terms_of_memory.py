"""Each term of a rank's memory, by itself and by hand: no total shows one that is half as large as it should be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from planner_cases import CLUSTER, GPT, JOB, LLAMA

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.operations import Block, Kernels
from phalanx.planner import memory
from phalanx.planner.candidates import of
from phalanx.planner.describe import memory_sum
from phalanx.planner.engine import Engine, States
from phalanx.planner.estimate import Footprint, footprints
from phalanx.spec.model import ModelSpec
from phalanx.units import parse_bytes

BARE = Engine(name="bare", source="", states={"bf16": States(parameter=2, gradient=4, optimizer=12)})
MICRO_BATCH, BUCKET = 2, 1000
BOUNDARY = MICRO_BATCH * 96 * 96 * 2
"""Bytes of an activation between stages: 2 sequences of 96 tokens, 96 wide, in bf16."""


def footprint(engine: Engine = BARE, model: ModelSpec = LLAMA, **chosen: Any) -> Footprint:
    layout = Layout(**{"micro_batch": MICRO_BATCH, "bucket_bytes": BUCKET, **chosen})
    (found,) = footprints(model, JOB, CLUSTER, engine, of([layout]))
    return found


def kind(name: str, engine: Engine = BARE, **chosen: Any) -> list[float]:
    """Bytes of one kind by pipeline rank."""
    found = footprint(engine, **chosen)
    values: list[float] = np.broadcast_to(found.memory[name], found.held.elements.shape)[0].tolist()
    return values


def layer(engine: Engine = BARE, **chosen: Any) -> Block:
    layout = Layout(micro_batch=MICRO_BATCH, **chosen)
    return operations.layer(LLAMA, cut_of(LLAMA, JOB.seq_len, layout, 2), engine.kernels)


def test_logits_and_their_gradient_and_the_heads_input_twice_on_the_last_rank() -> None:
    """1,000 ids are padded to 1,008, or to 512 on each of two ranks."""
    assert kind("logits", pipeline=2) == [0.0, 192 * 1008 * 8 + 2 * BOUNDARY]
    few = replace(BARE, sharded_loss_bytes=6.0, kernels=replace(BARE.kernels, head_rows=64))
    assert kind("logits", few) == [64 * 1008 * 8 + 2 * BOUNDARY]
    assert kind("logits", few, tensor=2) == [64 * 512 * 6 + 2 * BOUNDARY]


def test_buffers_of_messages() -> None:
    """Two activations and two gradients between stages, two buckets of the data axis, whole gradients on their way."""
    assert kind("buffers") == [0.0]
    assert kind("buffers", pipeline=2) == [4 * BOUNDARY] * 2
    assert kind("buffers", data=2, zero=1) == [2 * BUCKET]
    for engine, blocks in ((BARE, 0), (replace(BARE, whole_gradients=3), 3)):
        (held,) = footprint(data=2, zero=2).held.elements[0]
        assert kind("buffers", engine, data=2, zero=2) == [pytest.approx(2 * BUCKET + blocks * held / 7 * 4)]


def test_two_layers_are_whole_under_zero_3() -> None:
    (held,) = footprint(data=2, zero=3).held.elements[0]
    assert kind("gathered", data=2, zero=3) == [pytest.approx(2 * held / 7 * 2)]
    assert kind("gathered", data=2, zero=2) == [0.0]


@pytest.mark.parametrize(("reduce", "times"), [("fp32", 1), ("powersgd", 2), ("top-k", 2)])
def test_an_error_stands_beside_each_gradient(reduce: str, times: int) -> None:
    (held,) = footprint(data=2).held.elements[0]
    assert kind("gradients", data=2, reduce=reduce) == [4 * times * held]


def test_gradients_that_are_added_at_once_need_what_activations_and_logits_leave() -> None:
    """Backward ends with the gradients of a chunk; its activations and logits are gone by then."""
    many = 1000
    passing = replace(BARE, states={"bf16": States(parameter=2, gradient=4, optimizer=12, transient=many)})
    first, last = footprint(pipeline=2).held.elements[0]
    kept, logits = layer().kept_bytes, 192 * 1008 * 8 + 2 * BOUNDARY
    assert many * last > 3 * kept + logits
    expected = [4 * first + many * first - 4 * kept, 4 * last + many * last - 3 * kept - logits]
    assert kind("gradients", passing, pipeline=2) == expected
    few = replace(BARE, states={"bf16": States(parameter=2, gradient=4, optimizer=12, transient=2)})
    assert 2 * first < 4 * kept
    assert kind("gradients", few, pipeline=2) == [4 * first, 4 * last]


def test_gradients_that_pass_are_those_of_one_chunk() -> None:
    passing = replace(BARE, states={"bf16": States(parameter=2, gradient=4, optimizer=12, transient=1000)})
    chunks: dict[str, Any] = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b"}
    first = footprint(**chunks).held.elements[0, 0]
    assert kind("gradients", passing, **chunks)[0] == 4 * first + 500 * first - 2 * layer().kept_bytes


def test_buckets_beside_gradients_are_those_of_plain_data_parallelism() -> None:
    bucketed = replace(BARE, states={"bf16": States(parameter=2, gradient=4, optimizer=12, bucket=2)})
    (held,) = footprint(data=2).held.elements[0]
    assert kind("buffers", bucketed, data=2) == [2 * BUCKET + 2 * held]
    assert kind("buffers", bucketed, data=2, zero=1) == [2 * BUCKET]
    assert kind("buffers", bucketed) == [0.0]


def test_parameters_that_are_gathered_at_once_are_there_twice() -> None:
    gathers = replace(BARE, whole_gather=True)
    (held,) = footprint(data=2, zero=1).held.elements[0]
    assert kind("gathered", gathers, data=2, zero=1) == kind("gathered", gathers, data=2, zero=2) == [2 * held]
    assert kind("gathered", gathers, data=2) == kind("gathered", gathers, zero=1) == [0.0]
    assert kind("gathered", gathers, data=2, zero=3) == kind("gathered", data=2, zero=3)


def test_activations_of_the_whole_sequence_wait_for_their_collectives() -> None:
    """Two buffers that stay and five that wait, each as wide as hidden, where the tensor axis cuts the sequence."""
    ahead = replace(BARE, whole_buffers=2, run_ahead=5.0)
    assert kind("buffers", ahead, tensor=2, sequence_parallel=True) == [7 * BOUNDARY]
    assert kind("buffers", ahead, tensor=2) == kind("buffers", ahead) == [0.0]


def test_what_unfused_code_keeps_besides() -> None:
    """A copy of keys and values where queries are a view of one tensor with them, and a gated activation's output."""
    own = replace(LLAMA, num_kv_heads=LLAMA.num_heads)
    cut = cut_of(own, JOB.seq_len, Layout(micro_batch=MICRO_BATCH), 2)
    for model, viewed in ((own, 2 * own.kv_rows), (LLAMA, 0)):
        sizes = replace(cut, kv_heads=model.num_kv_heads)
        plain, unfused = (
            operations.layer(model, sizes, kernels).kept_bytes
            for kernels in (Kernels(), Kernels(whole_qkv=True, activation_output=True))
        )
        assert unfused - plain == 192 * (viewed + model.ffn) * 2


def test_what_is_kept_is_that_of_the_fullest_chunk_for_each_micro_batch_in_flight() -> None:
    kept = layer().kept_bytes
    assert kind("activations") == [7 * kept]
    assert kind("activations", pipeline=2) == [2 * 4 * kept, 1 * 3 * kept]
    held = kind("activations", pipeline=2, virtual_stages=2, schedule="interleaved-1f1b")  # chunks of 2, 2, 2 and 1
    assert held == [5 * 2 * kept, 3 * 2 * kept]


def test_recompute_keeps_the_rest_and_makes_one_layer_again() -> None:
    block = layer()
    again = sum(each.bytes for each in block.kept if each.again)
    assert 0 < again < block.kept_bytes / 2
    assert kind("activations", recompute="selective") == [7 * (block.kept_bytes - again) + again]
    assert kind("activations", recompute="full") == [7 * BOUNDARY + block.kept_bytes]
    some = kind("activations", recompute="full", recompute_every=2)  # layers 0, 2, 4 and 6
    assert some == [4 * BOUNDARY + 3 * block.kept_bytes + block.kept_bytes]


def test_what_later_layers_leave_is_enough_to_make_one_again() -> None:
    """Where the last layer is not recomputed, it is gone when the one before is."""
    block = layer()
    assert kind("activations", recompute="full", recompute_layers=(3,)) == [3 * BOUNDARY + 4 * block.kept_bytes]
    found = footprint(model=replace(LLAMA, num_layers=6), recompute="full", recompute_every=2)
    assert found.memory["activations"].tolist() == [[3 * BOUNDARY + 3 * block.kept_bytes]]
    halves = kind("activations", recompute="full", recompute_every=2, pipeline=2)  # layers 0 to 3 and 4 to 6
    assert halves == [2 * (2 * BOUNDARY + 2 * block.kept_bytes), 2 * BOUNDARY + block.kept_bytes + block.kept_bytes]


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_scores_are_kept_without_flash_and_sequences_cut_everything(attention: Literal["flash", "math"]) -> None:
    """Softmax's output is kept, in compute precision, instead of one log-sum-exp per query and head; a context axis
    halves the queries, and with them all that is kept, of which keys and values of others are no part."""
    runner = replace(BARE, kernels=Kernels(attention=attention))
    (held,), (fused,) = kind("activations", runner), kind("activations")
    heads = MICRO_BATCH * LLAMA.num_heads * 96
    assert held - fused == (7 * heads * (2 * 96 - 4) if attention == "math" else 0)
    assert kind("activations", runner, context=2) == [held / 2]
    assert kind("logits", runner, context=2) == [kind("logits", runner)[0] / 2]


def test_a_cut_sequence_divides_what_the_tensor_axis_leaves_whole() -> None:
    """Inputs of both norms and of both opening products, and the norms' scales: four tensors as wide as hidden."""
    whole, cut = kind("activations", tensor=2), kind("activations", tensor=2, sequence_parallel=True)
    assert whole[0] - cut[0] == 7 * (4 * BOUNDARY / 2 + 2 * 192 * 4 / 2)
    gathers = replace(BARE, kernels=Kernels(keep_gathered=1.0))
    assert kind("activations", gathers, tensor=2, sequence_parallel=True)[0] - cut[0] == 7 * 2 * BOUNDARY / 2


def test_a_refusal_shows_its_sum() -> None:
    loose = replace(BARE, fragmentation=1.25, context_bytes=10**9, whole_gradients=2)
    for chosen in ({"pipeline": 2, "data": 2, "zero": 2}, {"data": 2, "zero": 3, "recompute": "full"}):
        found = footprint(loose, **chosen)
        words = memory_sum(found, 0, 2**20)
        stage, parts = re.fullmatch(r"stage (\d) needs [\d.]+ .iB of 1 MiB: (.*)", words).groups()  # type: ignore[union-attr]
        sizes = {kind: parse_bytes(size) for size, kind in re.findall(r"([\d.]+ [KMG]?i?B) (\w+)", parts)}
        held = {name: np.broadcast_to(v, found.held.elements.shape)[0] for name, v in found.memory.items()}
        assert sizes.keys() == {name for name, size in held.items() if size[int(stage)]}
        assert all(sizes[name] == pytest.approx(held[name][int(stage)], rel=0.06) for name in sizes)
        assert found.memory_bytes[0, int(stage)] == found.memory_bytes.max()


def test_what_the_allocator_and_libraries_take() -> None:
    loose = replace(BARE, fragmentation=1.25, context_bytes=7)
    (total,) = footprint().memory_bytes[0]
    assert kind("overhead") == [0.0]
    assert kind("overhead", loose) == [pytest.approx(0.25 * total + 7)]


def test_shards_are_cut_over_data_and_context() -> None:
    (held,) = footprint(data=2, context=2).held.elements[0]
    assert kind("optimizer", data=2, context=2, zero=1) == [12 * held / 4]
    assert kind("optimizer", data=4, zero=1, zero_group=2) == [
        pytest.approx(12 * footprint(data=4).held.shard[0, 0] * 2)
    ]


def test_the_head_is_on_the_last_rank_and_a_tied_embedding_on_both() -> None:
    table = 1008 * 96
    for model, tied in ((LLAMA, 0), (GPT, table)):
        assert footprint(model=model, pipeline=2).tied.tolist() == [[tied, tied]]
        assert footprint(model=model).tied.tolist() == [[0]]
    layers = footprint(pipeline=2, stage_layers=(7, 0)).held.elements[0]
    more = footprint(pipeline=2, stage_layers=(0, 7)).held.elements[0]
    assert layers[1] == more[0] + 96  # the head has its norm
    assert layers[0] + layers[1] == more.sum()


def test_every_process_has_the_context_of_its_device_or_more_if_its_engine_says_so() -> None:
    device = replace(CLUSTER.device, context_bytes=900)
    layouts = of([Layout(micro_batch=MICRO_BATCH, pipeline=2)])
    for said, context in ((0, 900), (7, 900), (901, 901)):
        engine = replace(BARE, context_bytes=said)
        (found,) = footprints(LLAMA, JOB, replace(CLUSTER, device=device), engine, layouts)
        assert np.broadcast_to(found.memory["overhead"], (1, 2)).tolist() == [[context, context]]


@pytest.mark.parametrize(("zero", "shards"), [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_the_least_is_model_states_alone(zero: int, shards: tuple[int, int, int]) -> None:
    """Of the mean rank of two: bytes of parameters, gradients and optimizer, each over as many ranks as ZeRO cuts."""
    layout = Layout(pipeline=2, data=8, zero=zero)
    total = footprint(pipeline=2, data=8, zero=zero).held.elements[0].sum()
    states = sum(size / cut for size, cut in zip((2, 4, 12), shards, strict=True))
    loose = replace(BARE, context_bytes=7)
    assert memory.least(LLAMA, loose, "bf16", of([layout]))[0] == pytest.approx(states * total / 2 + 7)
