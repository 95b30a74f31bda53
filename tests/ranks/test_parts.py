"""The engine's parts alone, each against a plain reference: initial weights, dropout, optimizer, operations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from single import batch, collect, solo_engine
from tiny import tiny_model, tiny_plan

from phalanx.plan.layout import Coord, Layout
from phalanx.plan.shards import Parameter, Rectangle, rank_buffers
from phalanx.spec.job import OptimizerSpec
from phalanx.trainer import dropout, kernels
from phalanx.trainer.chain import chain
from phalanx.trainer.flat import FlatBuffer, Weight, add_product, postponing
from phalanx.trainer.initial import draw, fill
from phalanx.trainer.optim import clip_coefficient, learning_rate, squared
from phalanx.trainer.process import keep_freed_memory

CPU = torch.device("cpu")


@given(st.data())
def test_any_slice_of_a_weight_can_be_drawn_alone(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    parameter = Parameter(name="w", shape=(rows, columns), std=0.5)
    whole = draw(parameter, Rectangle(start=(0, 0), stop=parameter.shape), seed=3)
    low = [data.draw(st.integers(0, size - 1)) for size in parameter.shape]
    high = [data.draw(st.integers(a + 1, size)) for a, size in zip(low, parameter.shape, strict=True)]
    part = draw(parameter, Rectangle(start=tuple(low), stop=tuple(high)), seed=3)
    assert torch.equal(part, whole[low[0] : high[0], low[1] : high[1]])


def test_weights_depend_on_seed_and_name_only() -> None:
    box = Rectangle(start=(0, 0), stop=(64, 64))
    first, second = (Parameter(name=name, shape=(64, 64), std=1.0) for name in "ab")
    assert not torch.equal(draw(first, box, 1), draw(second, box, 1))
    assert not torch.equal(draw(first, box, 1), draw(first, box, 2))


def test_scale_of_initial_weights_is_that_of_the_global_matrix() -> None:
    """A row-parallel weight of 4 tensor ranks has the spread of the whole: read from the shard it would be doubled."""
    model = tiny_model(hidden=256, ffn=1024, num_layers=8)
    for tensor in (1, 4):
        [buffer] = [b for b in rank_buffers(model, Layout(tensor=tensor), Coord(), 64) if b.name == "layers.0"]
        flat = FlatBuffer(buffer, torch.float32, CPU)
        flat.allocate_parameters()
        fill(flat, seed=1)
        assert flat.weights["down"].value.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
        assert flat.weights["up"].value.std().item() == pytest.approx(0.02, rel=0.02)


def test_dropout_masks_are_fair_and_independent() -> None:
    rows, columns = torch.arange(512).unsqueeze(1), torch.arange(512)
    masks = [
        dropout.keep_mask(dropout.site_key(1, step, layer, site), 0.25, torch.tensor(sequence), rows, columns)
        for step, layer, site, sequence in [
            (0, 0, "mlp", 0),
            (1, 0, "mlp", 0),
            (0, 1, "mlp", 0),
            (0, 0, "attention", 0),
            (0, 0, "mlp", 1),
        ]
    ]
    for mask in masks:
        assert mask.float().mean().item() == pytest.approx(0.75, abs=0.005)
        assert mask.float().mean(0).std().item() < 0.03  # a fair coin in every column: sqrt(0.75 × 0.25 / 512) = 0.019
        assert mask.float().mean(1).std().item() < 0.03
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert (first == second).float().mean().item() == pytest.approx(0.75**2 + 0.25**2, abs=0.01)


def test_what_dropout_keeps_makes_up_for_what_it_drops() -> None:
    """Each kept value is divided by the probability of being kept: the mean over all fates is the value."""
    keep = torch.tensor([True, True, True, False])
    assert dropout.apply(torch.full((4,), 6.0), keep, 0.25).tolist() == [8.0, 8.0, 8.0, 0.0]


def test_a_slice_of_an_activation_gets_its_slice_of_the_mask() -> None:
    whole = dropout.keep_mask(7, 0.5, torch.arange(4).view(4, 1, 1), torch.arange(6).view(6, 1), torch.arange(5))
    part = dropout.keep_mask(7, 0.5, torch.tensor([2]).view(1, 1, 1), torch.arange(3, 6).view(3, 1), torch.arange(5))
    assert torch.equal(part[0], whole[2, 3:6])


def weight(*shape: int) -> Weight:
    return Weight(torch.randn(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))


def plain(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


def test_products_are_postponed_until_an_error_too() -> None:
    flat = FlatBuffer(rank_buffers(tiny_model(), Layout(), Coord(), 32)[1], torch.float64, CPU)
    flat.allocate_gradients()
    leaf, rows = flat.weights["out"], torch.ones(2, 64, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError), postponing([flat]) as products:
        add_product(leaf, rows, rows)
        assert len(products) == 1 and not leaf.grad.any()
        raise ZeroDivisionError
    add_product(leaf, rows, rows)
    assert len(products) == 1 and (leaf.grad == 2.0).all()


@pytest.mark.parametrize("kind", ["rms", "layer", "swiglu", "gelu", "heads", "positions", "two"])
def test_operations_equal_plain_autograd(kind: str) -> None:
    torch.manual_seed(0)
    scale, shift, table = weight(8), weight(8), weight(5, 8)
    inputs = torch.randn(6, 8, dtype=torch.float64)
    mine, theirs = plain(inputs), plain(inputs)
    values = [plain(w.value) for w in (scale, shift, table)]
    place = torch.tensor([0, 1, 4, 4, 2, 0])
    angles = torch.randn(3, 2, dtype=torch.float64)
    if kind == "rms":
        output = chain([kernels.RMSNorm(scale, 1e-5)], mine)
        expected = torch.nn.functional.rms_norm(theirs, (8,), values[0], 1e-5)
    elif kind == "layer":
        output = chain([kernels.LayerNorm(scale, shift, 1e-5)], mine)
        expected = torch.nn.functional.layer_norm(theirs, (8,), values[0], values[1], 1e-5)
    elif kind == "swiglu":
        output = chain([kernels.SwiGLU()], mine)
        expected = torch.nn.functional.silu(theirs[:, :4]) * theirs[:, 4:]
    elif kind == "gelu":
        output = chain([kernels.GELU("tanh")], chain([kernels.GELU("none")], mine))
        expected = torch.nn.functional.gelu(torch.nn.functional.gelu(theirs), approximate="tanh")
    elif kind == "two":
        output = chain([kernels.RMSNorm(scale, 1e-5), kernels.SwiGLU()], mine)
        normed = torch.nn.functional.rms_norm(theirs, (8,), values[0], 1e-5)
        expected = torch.nn.functional.silu(normed[:, :4]) * normed[:, 4:]
    elif kind == "positions":
        output = kernels.add_positions(mine, table, place)
        expected = theirs + values[2][place]
    else:  # 2 sequences of 3 positions; one query head, no key turned back: heads of width 4
        split = kernels.SplitHeads((2, 3), 2, 1, (angles.cos(), angles.sin()))
        output = torch.cat(chain([split], mine.repeat(1, 2)), 1)
        heads = theirs.view(2, 3, 8).repeat(1, 1, 2).view(2, 3, 4, 4).transpose(1, 2)
        a, b = heads[:, :3].chunk(2, -1)
        turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        expected = torch.cat([turned, heads[:, 3:]], 1)
    assert torch.allclose(output, expected, atol=1e-12)
    direction = torch.randn_like(expected)
    output.backward(direction)
    expected.backward(direction)
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-12)
    for ours, value in zip((scale, shift, table), values, strict=True):
        assert torch.allclose(ours.grad, torch.zeros_like(value) if value.grad is None else value.grad, atol=1e-12)


def test_learning_rate_warms_up_and_falls_to_its_minimum() -> None:
    spec = OptimizerSpec(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(spec, step, 13) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(OptimizerSpec(lr=2.0, schedule="constant"), 99, 100) == 2.0
    assert learning_rate(OptimizerSpec(lr=2.0, schedule="linear"), 50, 101) == pytest.approx(1.0)


def test_clipping_scales_to_the_limit_only_from_above() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25)
    assert clip_coefficient(4.0, 0.0) == 1.0


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_update_equals_adamw_over_plain_parameters(precision: str) -> None:
    """Three clipped steps on flat slices against torch's AdamW on separate tensors, decay on matrices only."""
    spec = OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_norm=0.1)
    plan = tiny_plan(Layout(micro_batch=4), tiny_model("gpt2"), precision=precision, optimizer=spec)
    engine = solo_engine(plan)
    theirs = {name: value.clone().requires_grad_() for name, value in collect(engine.data.slices, "parameters").items()}
    decayed = [value for value in theirs.values() if value.dim() > 1]
    others = [value for value in theirs.values() if value.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=spec.betas, eps=spec.eps)
    for step in range(3):
        tokens, labels = batch(plan, seed=step)
        loss = engine.forward_backward(engine.micro_batches(tokens, labels, tokens.numel(), step))
        _, norm, _ = engine.totals(loss)
        for name, value in collect(engine.data.slices, "gradients").items():
            theirs[name].grad = value.clone()
        assert norm > 0.1
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.1)
        reference.step()
        engine.update(1e-2, clip_coefficient(norm, 0.1))
        for name, value in collect(engine.data.slices, "parameters").items():
            assert torch.allclose(value, theirs[name].detach(), rtol=1e-5, atol=1e-7), (step, name)


@pytest.mark.parametrize("count", [0, 5, 4096, 7_000_001])
def test_the_norm_of_a_long_slice_is_that_of_float64(count: int) -> None:
    """One float32 sum over 7 million squares is wrong by 2e-4; that of a slice must not depend on its length."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 1e-3
    assert squared(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)


def test_bf16_keeps_fp32_masters_gradients_and_moments() -> None:
    engine = solo_engine(tiny_plan(Layout(micro_batch=4), precision="bf16"))
    assert {buffer.parameters.dtype for buffer in engine.buffers} == {torch.bfloat16}
    assert {buffer.gradients.dtype for buffer in engine.buffers} == {torch.float32}
    assert {tensor.dtype for tensors in engine.optimizer.state() for tensor in tensors.values()} == {torch.float32}


def test_a_bf16_weight_that_moves_less_than_its_resolution_still_trains() -> None:
    """A norm weight of 1 moves by 1e-4 per step, a 40th of bf16's step there: the master must carry it."""
    engine = solo_engine(tiny_plan(Layout(micro_batch=8), precision="bf16"))
    [norm] = [part for part in engine.data.slices if part.buffer.layout.name == "head" and not part.part.decayed]
    for _ in range(100):
        for part in engine.data.slices:
            part.gradients.fill_(1.0)
        engine.update(1e-4, 1.0)
    assert norm.parameters[0].item() == pytest.approx(0.99, abs=0.004)


def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32() -> None:
    """256 equal contributions and one more: a bf16 sum would stand still at 256."""
    target = Weight(torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1))
    from phalanx.trainer.flat import add_product

    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(512):
        add_product(target, one, one)
    assert target.grad.item() == 512.0


def test_bf16_training_follows_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        engine = solo_engine(tiny_plan(Layout(micro_batch=4), precision=precision))
        tokens, labels = batch(engine.plan)
        for step in range(20):
            loss = engine.forward_backward(engine.micro_batches(tokens, labels, tokens.numel(), step))
            losses[precision] = engine.totals(loss)[0]
            engine.update(1e-3, 1.0)
    assert losses["bf16"] < 5.0
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


def _resident_blocks(rank: int, num_blocks: int) -> float:
    """Gather and free blocks one after another while each leaves something behind. How much the peak of resident memory
    grew, in blocks."""
    keep_freed_memory()
    model = tiny_model(hidden=512, ffn=1536, num_layers=num_blocks)
    buffers = [b for b in rank_buffers(model, Layout(), Coord(), 64) if b.name.startswith("layers")]
    flats = [FlatBuffer(buffer, torch.float32, CPU) for buffer in buffers]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): the peak begins anew
    before, kept = _peak_bytes(), []
    for flat in flats:
        flat.allocate_parameters()
        kept.append([torch.ones(size) for size in (3, 65_536) for _ in range(3)])
        flat.free_parameters()
    left = sum(tensor.nbytes for tensors in kept for tensor in tensors)
    return (_peak_bytes() - before - left) / flats[0].parameters.nbytes


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_blocks_that_come_and_go_take_the_memory_of_those_that_are_there() -> None:
    (grown,) = run_ranks(1, _resident_blocks, 8)
    assert grown < 2.0  # what is left may lie in memory that this process had before, so no less is promised
