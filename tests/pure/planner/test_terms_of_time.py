"""Each term of a step's time, by itself and by hand: no total shows one that is half as large as it should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LINK, LLAMA
from planner_terms import BARE, FAR, GPUS, TILED, TOKENS, WIDE, collective, group

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.operations import Kernels, Operation
from phalanx.planner import compute, network, timeline
from phalanx.planner.candidates import of
from phalanx.planner.costs import costs
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import stage_layers
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.model import ModelSpec

# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_ring_over_nodes_hands_on_all_but_its_own_part_and_crosses_once_per_node() -> None:
    """32 ranks on 4 nodes: 31 steps, of which 4 cross; 8 cards of 10 GB/s carry the bytes."""
    assert collective("all_gather", 1e9, 32, cluster=FAR) == pytest.approx(31 / 32 * 1e9 / 80e9 + 4 * 10e-6 + 27 * 2e-6)
    ring = 2 * (31 / 32 * 1e9 / 80e9 + 4 * 10e-6 + 27 * 2e-6)
    assert collective("all_reduce", 1e9, 32, cluster=FAR) == pytest.approx(ring)


def test_a_tree_has_a_latency_per_level_and_twice_one_per_member_inside() -> None:
    tree = 2 * 2 * 10e-6 + 2 * 7 * 2e-6 + 2 * 31 / 32 * 1e5 / 80e9 / 0.92
    assert collective("all_reduce", 1e5, 32, cluster=FAR) == pytest.approx(tree)


def test_neighbours_of_the_pipeline_send_over_the_link_between_them() -> None:
    near, far = (network.placement(FAR, 2, stride) for stride in (1, 8))
    assert float(network.point_to_point_s(FAR, 1e6, near)) == pytest.approx(2e-6 + 1e6 / 100e9)
    assert float(network.point_to_point_s(FAR, 1e6, far)) == pytest.approx(10e-6 + 1e6 / 10e9)


def test_tokens_to_other_nodes_share_the_cards_and_others_stay_inside() -> None:
    """16 ranks on 2 nodes: half goes to the other node, 7/16 to neighbours."""
    took = float(network.all_to_all_s(FAR, 1e9, network.placement(FAR, 16, 1)))
    assert took == pytest.approx(0.5 * 1e9 / 10e9 + 10e-6 + 7 / 16 * 1e9 / 100e9 + 2e-6)


def test_strides_follow_the_order_of_axes() -> None:
    places = network.placements(CLUSTER, Layout(pipeline=2, data=2, context=2, tensor=2, zero=1))
    seen = {axis: (int(place.size), int(place.per_node)) for axis, place in places.items()}
    assert seen == {
        "tensor": (2, 2),
        "context": (2, 2),
        "data": (2, 2),
        "shards": (4, 4),
        "replicas": (1, 1),
        "pipeline": (2, 1),
    }
    wide = network.placements(CLUSTER, Layout(data=16, tensor=2, zero=3, zero_group=4))
    assert [int(wide[axis].nodes) for axis in ("shards", "replicas")] == [1, 4]


# ---- kernels ---------------------------------------------------------------------------------------------------------

KERNEL = replace(DEVICE, kernel_s=1e-6, matmul_half_depth=64, num_cores=4, stream_efficiency=0.5)


def seconds(operation: Operation, device: Any = KERNEL, **how: Any) -> float:
    return float(compute.operation_s(operation, device, 100e12, BARE, **how))


def test_attention_has_an_efficiency_each_way() -> None:
    core = Operation(name="attention", kind="attention", m=4096, n=2048, k=64, batch=8, products=2, bytes=0)
    flops = 2 * 2 * 8 * 4096 * 2048 * 64
    assert seconds(core) == pytest.approx(flops / (0.5 * 100e12) + 1e-6)
    assert seconds(core, backward=True) == pytest.approx(flops / (0.4 * 100e12) + 1e-6)


def test_a_kernel_for_all_devices_reaches_a_part_of_what_one_for_this_device_does() -> None:
    core = Operation(name="attention", kind="attention", m=4096, n=2048, k=64, batch=8, products=2, bytes=0)
    device = replace(KERNEL, portable_attention=0.7, kernel_s=0.0)
    own, portable = (
        float(compute.operation_s(core, device, 100e12, replace(BARE, portable_attention=portable)))
        for portable in (False, True)
    )
    assert portable == pytest.approx(own / 0.7)


def test_short_inner_dimensions_slow_a_product_and_each_call_has_a_start() -> None:
    product = Operation(name="up", kind="matmul", m=1024, n=512, k=192, bytes=0, count=3)
    flops = 3 * 2 * 1024 * 512 * 192
    assert seconds(product) == pytest.approx(flops / (0.8 * 100e12 * 192 / 256) + 3 * 1e-6)


def test_passes_and_copies_move_bytes_at_speeds_of_their_own() -> None:
    moved: dict[str, Any] = {"name": "pass", "bytes": 1e9, "count": 2}
    slow = replace(BARE, elementwise_passes=1.5)
    one = Operation(kind="elementwise", **moved)
    assert float(compute.operation_s(one, KERNEL, 1e14, slow)) == pytest.approx(2 * 1.5 * 1e9 / 0.8e12)
    assert seconds(Operation(kind="stream", **moved)) == pytest.approx(2 * 1e9 / 0.5e12)


def test_a_loss_in_steps_passes_over_logits_fourteen_times() -> None:
    """Forward: widened, maximum, difference, exponential, sum, quotient; then scaled and narrowed. One kernel each way
    reads and writes them once."""
    cut = cut_of(LLAMA, 96, Layout(micro_batch=2), 2)
    steps, fused = (operations.cross_entropy(1000, cut, Kernels(fused_loss=fused)) for fused in (False, True))
    assert [op.bytes for op in (*steps.forward, *steps.input_gradient)] == [1000 * (6 + 32), 1000 * (6 + 8)]
    assert [op.bytes for op in (*fused.forward, *fused.input_gradient)] == [8000, 8000]
    assert [op.kind for op in (*steps.forward, *fused.forward)] == ["stream", "elementwise"]


def test_a_wave_that_is_not_full_costs_a_whole_one() -> None:
    """384 × 128 on four cores: 3 tiles of 4, 6 halves of 8, or 12 quarters of 12 at 0.8 of the speed; two such products
    fill three waves of halves at 0.95."""
    one = Operation(name="up", kind="matmul", m=384, n=128, k=64, bytes=0)
    assert compute.wave_quantisation(one, TILED) == pytest.approx(1 / 0.8)
    assert compute.wave_quantisation(replace(one, batch=2), TILED) == pytest.approx(1 / 0.95)


def test_eight_bits_speed_up_products_and_not_attention() -> None:
    device = replace(DEVICE, flops_per_s={"bf16": 100e12, "fp8": 200e12})
    core = Operation(name="attention", kind="attention", m=4096, n=2048, k=64, batch=8, products=2, bytes=0)
    product = Operation(name="up", kind="matmul", m=1024, n=512, k=192, bytes=0)
    wide, narrow = (
        [float(compute.total_s([work], device, precision, BARE)) for work in (core, product)]
        for precision in ("bf16", "fp8")
    )
    assert narrow == pytest.approx([wide[0], wide[1] / (2 * compute.EIGHT_BIT)])


def test_the_optimizer_moves_its_bytes() -> None:
    assert float(compute.optimizer_s(1e9, BARE, DEVICE)) == pytest.approx(1e9 * 40 / (1e12 * 0.87))


def test_what_messages_cost_the_compute_beside_them() -> None:
    assert (compute.overlap_tax(DEVICE), compute.overlap_tax(TILED)) == (1.0, compute.OVERLAP_TAX)


# ---- the tensor axis and experts -------------------------------------------------------------------------------------


def waits(engine: Engine = BARE, cluster: ClusterSpec = CLUSTER, model: ModelSpec = LLAMA, **chosen: Any) -> Any:
    """Seconds of the tensor axis: embedding and head forward, layer forward and backward."""
    found = costs(model, JOB, cluster, engine, of([Layout(**{"micro_batch": 2, **chosen})]))
    parts = (found.embedding_forward, found.head_forward, found.layer_forward, found.layer_backward)
    return [float(np.ravel(part.tensor_s)[0]) for part in parts]


def test_each_half_block_and_each_end_of_the_model_sends_once_each_way() -> None:
    """The loss sends three numbers per token."""
    whole, loss = collective("all_reduce", WIDE, 4), 3 * collective("all_reduce", TOKENS * 4, 4)
    assert waits(tensor=4) == pytest.approx([whole, loss, 2 * whole, 2 * whole])
    half = collective("all_gather", WIDE, 4)
    expected = [half, half + loss, 4 * half, 4 * half]
    kept = replace(BARE, kernels=Kernels(keep_gathered=1.0))
    assert waits(kept, tensor=4, sequence_parallel=True) == pytest.approx(expected)


def test_inputs_that_were_not_kept_are_gathered_again_beside_products() -> None:
    """One for each half-block: on a processor that moves its bytes itself, nothing is beside anything."""
    half = collective("all_gather", WIDE, 4)
    for keep, times in ((0.0, 6), (0.25, 5.5), (1.0, 4)):
        engine = replace(BARE, kernels=Kernels(keep_gathered=keep))
        assert waits(engine, tensor=4, sequence_parallel=True)[3] == pytest.approx(times * half)
    cheap = replace(BARE, kernels=Kernels(keep_gathered=1.0, selective="cheap"))
    dropped = waits(cheap, tensor=4, sequence_parallel=True, recompute="selective")[3]
    assert dropped == pytest.approx(6 * half)


def test_messages_beside_products_cost_what_outlasts_those_or_their_tax() -> None:
    """Sums of input gradients beside the weight gradients of qkv (192 tokens, 96 to 40 rows) and up (96 to 120)."""
    together = replace(BARE, async_gradients=True)
    for rate in (1e9, 1e13):
        cluster = replace(GPUS, intra_node=replace(LINK, latency_s=0.0, bytes_per_s=rate))
        message = collective("all_reduce", WIDE, 4, cluster=cluster)
        block = operations.layer(LLAMA, cut_of(LLAMA, JOB.seq_len, Layout(tensor=4, micro_batch=2), 2), Kernels())
        beside = {work.name: float(compute.total_s([work], TILED, "bf16", together)) for work in block.weight_gradient}
        hidden = [beside[f"{name} weight gradient"] for name in ("qkv", "up")]
        expected = sum(max(compute.OVERLAP_TAX * message, message - work) for work in hidden)
        assert waits(together, cluster, tensor=4)[3] == pytest.approx(expected)


def test_tokens_go_to_their_experts_and_back() -> None:
    model = replace(LLAMA, num_experts=4, experts_per_token=2)
    place = network.placement(CLUSTER, 4, 2)
    once = float(network.all_to_all_s(CLUSTER, 2 * WIDE, place))
    alone = [a - b for a, b in zip(waits(model=model, data=4, tensor=2), waits(data=4, tensor=2), strict=True)]
    assert alone == pytest.approx([0.0, 0.0, 2 * once, 2 * once], abs=1e-12)
    cut = float(network.all_to_all_s(CLUSTER, WIDE, place))
    chosen = {"data": 4, "tensor": 2, "sequence_parallel": True}
    alone = [a - b for a, b in zip(waits(model=model, **chosen), waits(**chosen), strict=True)]
    assert alone[2:] == pytest.approx([2 * cut, 2 * cut])


def test_keys_and_values_go_round_and_their_gradients_too() -> None:
    """Four ranks of the context axis, 48 tokens each: three rounds, beside attention."""
    slow = replace(CLUSTER, intra_node=replace(LINK, bytes_per_s=1e8))
    layout = Layout(context=4, micro_batch=2)
    block = operations.layer(LLAMA, cut_of(LLAMA, JOB.seq_len, layout, 2), Kernels())
    core, back = block.forward, block.input_gradient
    took = [
        float(compute.total_s([work for work in works if work.kind == "attention"], DEVICE, "bf16", BARE, backward=way))
        for works, way in ((core, False), (back, True))
    ]
    rounds = 3 * (2e-6 + 2 * 48 * 32 * 2 / 1e8)
    assert waits(cluster=slow, context=4)[2:] == pytest.approx([rounds - took[0], 2 * rounds - took[1]])


# ---- layers and stages -----------------------------------------------------------------------------------------------


def layer_passes(engine: Engine = BARE, **chosen: Any) -> Any:
    found = costs(LLAMA, JOB, CLUSTER, engine, of([Layout(**{"micro_batch": 2, **chosen})]))
    return [
        {name: float(np.ravel(getattr(part, name))[0]) for name in ("compute_s", "tensor_s", "recompute_s", "total_s")}
        for part in (found.layer_forward, found.layer_backward)
    ]


def test_backward_is_both_gradients_and_what_is_made_again() -> None:
    block = operations.layer(LLAMA, cut_of(LLAMA, JOB.seq_len, Layout(tensor=2, micro_batch=2), 2), Kernels())
    inputs = float(compute.total_s(block.input_gradient, DEVICE, "bf16", BARE, backward=True))
    weights = float(compute.total_s(block.weight_gradient, DEVICE, "bf16", BARE))
    core = float(compute.total_s([work for work in block.forward if work.again], DEVICE, "bf16", BARE))
    for recompute, again in (("none", 0.0), ("selective", core), ("full", None)):
        forward, backward = layer_passes(tensor=2, recompute=recompute)
        assert backward["compute_s"] == pytest.approx(inputs + weights)
        again = forward["total_s"] if again is None else again
        assert backward["recompute_s"] == pytest.approx(again)
        assert backward["total_s"] == pytest.approx(inputs + weights + backward["tensor_s"] + again)


def test_a_host_may_take_longer_for_backward() -> None:
    slow = replace(BARE, host_layer_s=1.0, host_backward=1.5)
    assert [part["total_s"] for part in layer_passes(slow)] == [1.0, 1.5]


def test_stages_have_their_layers_and_ends_and_hosts() -> None:
    """Four and three layers; the head's work is on the last stage."""
    plain, slow = (group(replace(BARE, host_micro_batch_s=host), pipeline=2).times for host in (0.0, 1.0))
    block = operations.layer(LLAMA, cut_of(LLAMA, JOB.seq_len, Layout(micro_batch=2), 2), Kernels())
    forward, weight = (
        float(compute.total_s(works, DEVICE, "bf16", BARE)) for works in (block.forward, block.weight_gradient)
    )
    priced = costs(LLAMA, JOB, CLUSTER, BARE, of([Layout(micro_batch=2)]))
    first, last = (float(np.ravel(p.total_s)[0]) for p in (priced.embedding_forward, priced.head_forward))
    assert plain.forward_s[0] == pytest.approx([4 * forward + first, 3 * forward + last])
    scattered = float(np.ravel(priced.embedding_backward.total_s)[0])
    assert plain.weight_s[0] == pytest.approx([4 * weight + scattered, 3 * weight])
    assert slow.forward_s[0] - plain.forward_s[0] == pytest.approx([1.0, 1.0])
    assert slow.backward_s[0] == pytest.approx(plain.backward_s[0])


@pytest.mark.parametrize("waited", [0.0, 0.25, 1.0])
def test_transfers_are_waited_for_or_on_their_way(waited: float) -> None:
    """Both ends of one lose the share that is waited for; three stages have two between them."""
    transfer = 2e-6 + WIDE / 100e9
    free, some = (group(replace(BARE, blocking_transfers=share), pipeline=3).times for share in (0.0, waited))
    assert some.transfer_s[0] == pytest.approx((1 - waited) * transfer)
    assert some.forward_s[0] - free.forward_s[0] == pytest.approx(np.array([1, 1, 0]) * waited * transfer, abs=1e-15)
    assert some.backward_s[0] - free.backward_s[0] == pytest.approx(np.array([0, 1, 1]) * waited * transfer, abs=1e-15)


def test_a_boundary_may_be_sent_in_parts_that_are_gathered_again() -> None:
    """Where the sequence is cut each rank has a part of its own anyway, and gathers nothing."""
    gather = collective("all_gather", WIDE, 4)
    for scattered, cut, size, more in (
        (False, False, WIDE, 0.0),
        (True, False, WIDE / 4, gather),
        (False, True, WIDE / 4, 0.0),
        (True, True, WIDE / 4, 0.0),
    ):
        engine = replace(BARE, scatter_boundary=scattered)
        times = group(engine, pipeline=2, tensor=4, sequence_parallel=cut).times
        assert times.transfer_s[0] == pytest.approx(2e-6 + size / 100e9 + more)


def test_a_stage_of_nanotron_closes_when_it_has_its_share() -> None:
    """Four layers' worth of head behind sixteen layers: five of twenty are a quarter, ten are half."""
    heads = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 64}
    model = replace(LLAMA, num_layers=16, hidden=2048, ffn=8192, vocab=2**17, **heads)
    for stages, expected in ((2, [10, 6]), (4, [5, 5, 5, 1]), (3, [7, 7, 2])):
        layouts = of([Layout(pipeline=stages, micro_batch=2)])
        assert stage_layers(model, 96, replace(BARE, balance="thresholds"), layouts).tolist() == expected


def test_weight_gradients_that_are_put_off_are_not_counted_twice() -> None:
    times = timeline.StageTimes(
        forward_s=np.array([[1.0]]),
        backward_s=np.array([[2.0]]),
        weight_s=np.array([[0.5]]),
        transfer_s=np.array([0.0]),
    )
    assert timeline.replay_s("zb-h1", times, 0, 1, 1, 3) == pytest.approx(9.0)


def test_the_bound_counts_round_trips_with_their_transfers() -> None:
    """The first of four ranks holds four micro-batches: of five, two trips of four stages of 3 s and six transfers."""
    ones = np.ones((1, 4))
    times = timeline.StageTimes(forward_s=ones, backward_s=2 * ones, weight_s=ones, transfer_s=np.array([0.5]))
    least = timeline.bound("1f1b", times, timeline.stage_places("1f1b", 4, 1), np.array([5]))[0]
    assert least == pytest.approx(2 * (12 + 6 * 0.5))
    assert timeline.replay_s("1f1b", times, 0, 4, 1, 5) == pytest.approx(least)


def test_parameters_are_gathered_before_each_pass_and_gradients_scattered_behind() -> None:
    """ZeRO 3, on a processor that hides nothing: seven layers' elements in bf16, their gradients in fp32."""
    plain, third = (group(data=8, zero=zero) for zero in (0, 3))
    (held,) = third.footprint.held.elements[0]
    ends = group(data=8, zero=0, stage_layers=(7,)).footprint.held.elements[0, 0]
    assert held == ends
    layer = (held - 2 * 1008 * 96 - 256) / 7  # the final norm takes 96 of 256 elements
    gather, scatter = collective("all_gather", 2 * layer, 8), collective("reduce_scatter", 4 * layer, 8)
    assert third.times.forward_s[0] - plain.times.forward_s[0] == pytest.approx(7 * gather)
    assert third.times.backward_s[0] - plain.times.backward_s[0] == pytest.approx(7 * (gather + scatter))
