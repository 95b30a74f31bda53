"""What overlap hides, and what chunks of the tensor axis and `overlap = false` change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LLAMA

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.operations import Operation
from phalanx.plan.plan import Prediction
from phalanx.planner import compute, network
from phalanx.planner.candidates import of
from phalanx.planner.costs import costs
from phalanx.planner.engine import engine
from phalanx.planner.search import predict
from phalanx.spec.cluster import ClusterSpec

TILED = replace(DEVICE, matmul_tile=(128, 128))
GPUS = replace(CLUSTER, num_nodes=2, devices_per_node=4, device=TILED)
WIDE = replace(LLAMA, hidden=1024, head_dim=128, ffn=4096)


def predicted(cluster: ClusterSpec = GPUS, **chosen: Any) -> Prediction:
    prediction = predict(WIDE, replace(JOB, seq_len=512), cluster, Layout(**chosen)).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize("kind", ["matmul", "elementwise"])
def test_several_calls_cost_as_much_as_one_after_another(kind: Any) -> None:
    once = Operation(name="logits", kind=kind, m=1024, n=512, k=256, bytes=2**20)
    one, five = (
        compute.operation_s(replace(once, count=count), TILED, 1e14, engine()) for count in (1, np.array([0, 5]))
    )
    assert five == pytest.approx(np.array([0.0, 5.0]) * one)


@pytest.mark.parametrize("cut", [False, True], ids=["sums", "sequence parallel"])
def test_chunks_hide_what_a_layer_sends_up_to_what_the_machine_pays_for_it(cut: bool) -> None:
    waiting = [
        predicted(tensor=4, data=2, micro_batch=24, sequence_parallel=cut, tensor_overlap_chunks=chunks).step_s_by_kind[
            "tensor"
        ]
        for chunks in (1, 2, 4)
    ]
    assert waiting[0] > waiting[1] > waiting[2]
    blocked = predicted(tensor=4, data=2, micro_batch=24, sequence_parallel=cut, overlap=False).step_s_by_kind["tensor"]
    assert blocked > waiting[0] and waiting[2] >= compute.OVERLAP_TAX * blocked


FREE = replace(GPUS.intra_node, latency_s=0.0)


@pytest.mark.parametrize("rate", [1e10, 1e12], ids=["slow", "fast"])
def test_of_chunks_and_products_one_is_alone_and_the_longer_rules(rate: float) -> None:
    """Of four chunks, a quarter of the shorter is beside nothing; below what messages cost kernels nothing goes."""
    cluster, job = replace(GPUS, intra_node=replace(FREE, bytes_per_s=rate)), replace(JOB, seq_len=512)
    layout = Layout(tensor=4, data=2, micro_batch=24, tensor_overlap_chunks=4)
    found = costs(WIDE, job, cluster, engine(), of([layout])).layer_forward
    place = network.placement(cluster, 4, 1)
    message = float(network.collective_s(cluster, "all_reduce", 24 * 512 * 1024 * 2, place))
    block = operations.layer(WIDE, cut_of(WIDE, 512, layout, 2), engine().kernels)
    waiting = 0.0
    for name in ("out", "down"):
        product = float(compute.total_s([work for work in block.forward if work.name == name], TILED, "bf16", engine()))
        both = max(message, product) + min(message, product) / 4
        waiting += max(compute.OVERLAP_TAX * message, both - product)
    assert float(np.ravel(found.tensor_s)[0]) == pytest.approx(waiting)


@pytest.mark.parametrize("rate", [1e9, 1e12], ids=["slow", "fast"])
def test_inputs_gathered_again_travel_beside_the_input_gradients(rate: float) -> None:
    cluster, job = replace(GPUS, intra_node=replace(FREE, bytes_per_s=rate)), replace(JOB, seq_len=512)
    layout = Layout(tensor=4, data=2, micro_batch=2, sequence_parallel=True)
    waits = []
    for keep in (0.0, 1.0):
        kernels = replace(engine().kernels, keep_gathered=keep)
        found = costs(WIDE, job, cluster, replace(engine(), kernels=kernels), of([layout])).layer_backward
        waits.append(float(np.ravel(found.tensor_s)[0]))
    place = network.placement(cluster, 4, 1)
    message = float(network.collective_s(cluster, "all_gather", 2 * 512 * 1024 * 2, place))
    block = operations.layer(WIDE, cut_of(WIDE, 512, layout, 2), engine().kernels)
    beside = {work.name: float(compute.total_s([work], TILED, "bf16", engine())) for work in block.input_gradient}
    products = [beside[f"{name} input gradient"] for name in ("qkv", "up")]
    again = sum(max(compute.OVERLAP_TAX * message, message - product) for product in products)
    assert waits[0] - waits[1] == pytest.approx(again)


def test_chunks_of_small_messages_cost_their_latency() -> None:
    few, many = (
        predicted(tensor=4, data=2, tensor_overlap_chunks=chunks).step_s_by_kind["tensor"] for chunks in (1, 8)
    )
    assert many > few


def test_a_processor_that_moves_its_own_bytes_gains_nothing_by_chunks() -> None:
    cpu = replace(GPUS, device=replace(DEVICE, matmul_tile=(1, 1)))
    plain, chunked = (
        predicted(cpu, tensor=4, data=2, tensor_overlap_chunks=chunks).step_s_by_kind["tensor"] for chunks in (1, 4)
    )
    assert chunked >= plain


@pytest.mark.parametrize(
    "layout", [{"pipeline": 4, "data": 2}, {"data": 8, "zero": 3}, {"data": 8, "zero": 1}], ids=str
)
def test_without_overlap_messages_are_waited_for(layout: dict[str, int]) -> None:
    assert predicted(**layout, overlap=False).step_s > predicted(**layout).step_s


def test_without_overlap_parameters_are_gathered_before_each_layer() -> None:
    """Each message of ZeRO 3 adds its whole time to the step."""
    slow = replace(GPUS, inter_node=replace(GPUS.inter_node, bytes_per_s=1e8))
    with_overlap, without = (predicted(slow, data=8, zero=3, overlap=overlap).step_s for overlap in (True, False))
    compute_s = predicted(slow, data=8, zero=3).step_s_by_kind["compute"]
    assert without - with_overlap == pytest.approx(compute_s, rel=0.05)  # what messages outlast is hidden under them
