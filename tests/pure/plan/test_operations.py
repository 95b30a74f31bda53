"""Bytes and products of single operations by hand: what no recorder of matrix products and kept tensors sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import tiny_model

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Layout
from phalanx.plan.operations import Block, Kernels, Operation

LLAMA = tiny_model(num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, ffn=128)
TOKENS, E = 2 * 32, 2
"""Two sequences of 32 tokens, in bf16."""


def layer(kernels: Kernels = Kernels(), **chosen: int) -> Block:  # noqa: B008 (frozen)
    return operations.layer(LLAMA, cut_of(LLAMA, 32, Layout(micro_batch=2, **chosen), E), kernels)


def named(block: Block, name: str) -> Operation:
    (found,) = [work for work in (*block.forward, *block.input_gradient, *block.weight_gradient) if work.name == name]
    return found


def test_causal_attention_is_two_products_forward_and_five_backward_over_half_of_the_scores() -> None:
    """Forward reads q, k, v and writes the output; backward reads these and the output's gradient, writes three."""
    there, back = named(layer(), "attention"), named(layer(), "attention gradient")
    scores = 2 * 4 * 32 * 32 / 2
    assert (there.flops, back.flops) == (2 * 2 * scores * 16, 2 * 5 * scores * 16)
    assert there.bytes == TOKENS * (64 + 32 + 32 + 64) * E
    assert back.bytes == 2 * there.bytes


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("norm1", 2 * 64, 4 * 64),  # input and output; input, gradient, the residual's gradient read and written
        ("residual1", 3 * 64, 0),
        ("rotary", 2 * (64 + 32), 2 * (64 + 32)),  # query and key heads read and written
        ("activation", 3 * 128, 5 * 128),  # gate, up and their product; these two, its gradient, and theirs
    ],
)
def test_passes_over_memory(name: str, forward: int, backward: int) -> None:
    block = layer()
    assert named(block, name).bytes == TOKENS * forward * E
    assert named(block, f"{name} gradient").bytes == TOKENS * backward * E


@pytest.mark.parametrize(("fused", "moved"), [("always", 2 * 4), ("never", 2)])
def test_a_weight_gradient_is_added_to_its_sum(fused: str, moved: int) -> None:
    """fp32 sums are read and written by the product itself, or by a pass that reads the product as well."""
    block = layer(Kernels(fused_sum=fused))  # type: ignore[arg-type]
    product = named(block, "down weight gradient")
    assert product.bytes == 64 * 128 * moved + TOKENS * (64 + 128) * E
    sums = [work.bytes for work in block.weight_gradient if work.name == "down sum"]
    assert sums == ([] if fused == "always" else [64 * 128 * (2 + 2 * 4)])


def test_logits_of_what_is_left_over_are_a_shorter_chunk() -> None:
    """64 tokens in chunks of 24: two whole ones and one of 16."""
    kernels, cut = Kernels(head_rows=24), cut_of(LLAMA, 32, Layout(micro_batch=2), E)
    found = operations.head(replace(LLAMA, vocab=256), cut, kernels)
    products = [(work.m, work.count) for work in found.forward if work.name == "logits"]
    assert products == [(24, 2), (16, 1)]
    assert not found.input_gradient or all(work.kind == "elementwise" for work in found.input_gradient)


def test_the_loss_is_one_kernel_each_way_or_a_pass_for_each_of_its_steps() -> None:
    """fp32 of bf16 logits: read and written once each way; or widened, read for their maximum, less it, their
    exponentials, read for the sum, divided by it; and the gradient scaled and narrowed."""
    cut, logits, wide = cut_of(LLAMA, 32, Layout(micro_batch=2), E), 1000, 4
    fused, steps = (operations.cross_entropy(logits, cut, Kernels(fused_loss=way)) for way in (True, False))
    assert (named(fused, "loss").bytes, named(fused, "loss gradient").bytes) == (2 * logits * wide, 2 * logits * wide)
    passes = (E + wide) + wide + 2 * wide + 2 * wide + wide + 2 * wide
    assert (named(steps, "loss").bytes, named(steps, "loss gradient").bytes) == (
        logits * passes,
        logits * (2 * wide + wide + E),
    )
