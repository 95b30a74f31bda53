"""What each kind of reduction makes of gradients: how far it is from the sum, and where the rest of it stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import run_group, run_worlds
from messages import claimed, counted
from single import batch
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.plan.comm import Comm, Work
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.reduction import WITH_ERRORS, matrices, num_largest
from phalanx.plan.shards import rank_buffers
from phalanx.trainer.engine import Engine
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.reduction import PowerSGD, Rounded, TopK
from phalanx.trainer.world import World

SIZE = 3
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def run(messages: Iterator[Work]) -> None:
    """All messages, one after another."""
    while True:
        try:
            next(messages).wait()
        except StopIteration as end:
            end.value.wait()
            return


def gradients(member: int, magnitude: float = 1.0) -> Tensor:
    """Gradients of one member, of magnitudes that differ by up to e⁴."""
    generator = torch.Generator().manual_seed(member)
    spread = torch.randn(2, 960, generator=generator)
    return magnitude * spread[0] * spread[1].exp()


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("magnitude", [1.0, 1e6, 1e-9])
def test_rounded_sums_err_by_two_roundings(dtype: torch.dtype, magnitude: float) -> None:
    """Each term is rounded once and the sum once; below float16's normal numbers the spacing is absolute."""

    def member(comm: Comm) -> tuple[Tensor, Tensor]:
        whole, piece = gradients(comm.index, magnitude), torch.empty(960 // SIZE)
        scattered = whole.clone()
        run(Rounded(dtype).reduce_scatter(comm, [scattered], [piece]))
        run(Rounded(dtype).all_reduce(comm, [whole]))
        return whole, piece

    terms = torch.stack([gradients(index, magnitude) for index in range(SIZE)]).double()
    results = run_group(SIZE, member)
    bound = 2.02 * ROUNDOFF[dtype] * terms.abs().sum(0)
    if dtype == torch.float16:
        bound += SIZE * 2.0**-24 * 2 * SIZE * terms.abs().max() / torch.finfo(dtype).max
    assert all(torch.equal(whole, results[0][0]) for whole, _ in results)
    for sums in (results[0][0], torch.cat([piece for _, piece in results])):
        error = (sums.double() - terms.sum(0)).abs()
        assert (error <= bound).all()
        assert error.max() > 0


def test_rounding_hides_neither_infinity_nor_silence() -> None:
    def member(comm: Comm) -> list[bool]:
        lost = torch.tensor([1.0, torch.inf if comm.index == 1 else 2.0])
        nothing = torch.zeros(2)
        for dtype in ROUNDOFF:
            run(Rounded(dtype).all_reduce(comm, [nothing]))
            assert nothing.tolist() == [0.0, 0.0]
        run(Rounded(torch.float16).all_reduce(comm, [lost]))
        return lost.isfinite().tolist()

    assert all(not all(finite) for finite in run_group(2, member))


def layer(seed: int, rank_of_sum: int = 0) -> FlatBuffer:
    """The buffer of one layer with random gradients; matrices of this rank, alike but for a factor, if it is given."""
    plan = tiny_plan(Layout(), tiny_model("gpt2"))
    buffer = FlatBuffer(rank_buffers(plan.model, plan.layout, Coord(), 32)[1], torch.float32, torch.device("cpu"))
    buffer.allocate_gradients()
    renew(buffer, seed, rank_of_sum)
    return buffer


def renew(buffer: FlatBuffer, seed: int, rank_of_sum: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in buffer.weights.values():
        rows, *columns = weight.grad.shape
        if rank_of_sum and columns:
            common = torch.Generator().manual_seed(7)
            left = torch.randn(rows, rank_of_sum, generator=common)
            weight.grad.copy_((seed + 1) * left @ torch.randn(rank_of_sum, *columns, generator=common))
        else:
            weight.grad.copy_(torch.randn(weight.grad.shape, generator=generator))


def lossy_sums(kind: str) -> None:
    """Three reductions in a row: all members get the same, and with all errors it is the sum of what was put in."""

    def member(comm: Comm) -> list[tuple[Tensor, Tensor, Tensor]]:
        buffer, seen = layer(comm.index), []
        reduction: Any = PowerSGD([buffer], comm, 2, 1) if kind == "powersgd" else TopK([buffer], comm, 0.05)
        for number in range(3):
            renew(buffer, 10 * number + comm.index)
            put_in = buffer.gradients.clone()
            run(reduction.all_reduce([buffer]))
            seen.append((put_in, buffer.gradients.clone(), left_out(reduction, buffer)))
        reduction.forget()
        assert not left_out(reduction, buffer).any()
        return seen

    every = run_group(SIZE, member)
    owed = torch.zeros_like(every[0][0][0])
    for number in range(3):
        put_in, got, errors = (torch.stack(each) for each in zip(*(seen[number] for seen in every), strict=True))
        assert all(torch.equal(got[0], other) for other in got)
        expected = put_in.sum(0) + owed
        assert torch.allclose(got[0] + errors.sum(0), expected, atol=1e-4)
        owed = errors.sum(0)
        assert owed.norm() > 0.1 * expected.norm()  # it did leave something out


def left_out(reduction: Any, buffer: FlatBuffer) -> Tensor:
    """The errors of one buffer, as flat as its gradients."""
    errors = torch.zeros_like(buffer.gradients)
    if isinstance(reduction, TopK):
        return errors + reduction._errors[buffer]
    for weight in buffer.weights.values():
        if weight.grad in reduction._errors:
            start = weight.grad.storage_offset()
            errors[start : start + weight.grad.numel()] = reduction._errors[weight.grad].flatten()
    return errors


@pytest.mark.parametrize("kind", ["powersgd", "top-k"])
def test_what_is_not_sent_is_kept(kind: str) -> None:
    lossy_sums(kind)


def test_power_sgd_is_exact_where_the_sum_has_its_rank() -> None:
    def member(comm: Comm) -> tuple[Tensor, float]:
        buffer = layer(comm.index, rank_of_sum=3)
        reduction = PowerSGD([buffer], comm, 3, 1)
        assert len(reduction._errors) == len(list(matrices(buffer.layout, 3))) == 4
        expected = sum(layer(index, rank_of_sum=3).gradients.double() for index in range(SIZE))
        run(reduction.all_reduce([buffer]))
        assert isinstance(expected, Tensor)
        return ((buffer.gradients - expected).norm() / expected.norm()).item(), left_out(
            reduction, buffer
        ).norm().item()

    for error, left in run_group(SIZE, member):
        assert error < 1e-5
        assert left < 1e-2


def test_power_sgd_is_exact_whatever_the_rank_of_what_cancels() -> None:
    """Only the sum must have the rank, which takes first factors that are alike on all members."""

    def member(comm: Comm) -> tuple[float, Tensor]:
        buffer = layer(comm.index, rank_of_sum=3)
        for number, weight in enumerate(buffer.weights.values()):
            noise = torch.randn(weight.grad.shape, generator=torch.Generator().manual_seed(number))
            weight.grad.add_(noise, alpha=1 if comm.index == 0 else -1 if comm.index == 1 else 0)
        expected = sum(layer(index, rank_of_sum=3).gradients.double() for index in range(SIZE))
        reduction = PowerSGD([buffer], comm, 3, 1)
        run(reduction.all_reduce([buffer]))
        assert isinstance(expected, Tensor)
        return ((buffer.gradients - expected).norm() / expected.norm()).item(), left_out(reduction, buffer)

    errors, left = zip(*run_group(SIZE, member), strict=True)
    assert max(errors) < 1e-5
    assert left[0].norm() > 1.0 and sum(left).norm() < 1e-2 * left[0].norm()


def test_top_k_sends_the_largest() -> None:
    def member(comm: Comm) -> tuple[Tensor, Tensor, int]:
        buffer = layer(comm.index)
        mine = buffer.gradients.clone()
        run(TopK([buffer], comm, 0.01).all_reduce([buffer]))
        return mine, buffer.gradients, num_largest(buffer.layout, 0.01)

    results = run_group(2, member)
    expected = torch.zeros_like(results[0][0])
    for mine, _, count in results:
        places = mine.abs().argsort(descending=True)[:count]
        expected[places] += mine[places]
    assert torch.equal(results[0][1], expected)


KINDS = [
    Layout(data=2),
    Layout(data=2, reduce="bf16"),
    Layout(data=2, reduce="fp16", zero=2),
    Layout(data=2, reduce="powersgd", reduce_rank=8, zero=1),
    Layout(data=2, reduce="top-k", reduce_fraction=0.1),
    Layout(data=2, reduce="powersgd", reduce_rank=8, bucket_bytes=1),
]


def learn(world: World, plans: list[Plan]) -> list[tuple[float, Any]]:
    """The last loss of each plan on sequences where each token follows from the one before, and what a step sends."""
    results = []
    for plan in plans:
        engine = Engine(plan, world.coord, world.comm, world.device)
        tokens, mine = batch(plan)[0] % 16, list(engine.positions)
        batches = engine.micro_batches(tokens[mine], (5 * tokens[mine] + 3) % 16, tokens.numel(), 0)
        for _ in range(40):
            share = engine.forward_backward(batches)
            engine.synchronize()
            loss = engine.totals(share)[0]
            engine.update(3e-3, 1.0)
        results.append((loss, copy.deepcopy(counted(engine, world))))
    return results


def test_training_ends_near_the_loss_of_exact_sums() -> None:
    """From 5.5 at the start; and each kind sends what Traffic says."""
    model = tiny_model(num_layers=1)
    plans = [tiny_plan(layout, model, precision="fp32") for layout in KINDS]
    for rank, results in enumerate(run_worlds(Layout(data=2), learn, plans, model=model, timeout=120)):
        exact = results[0][0]
        assert exact < 0.1
        for plan, (loss, messages) in zip(plans, results, strict=True):
            apart = 0.2 if plan.layout.reduce in WITH_ERRORS else 1e-3
            assert loss == pytest.approx(exact, abs=apart), plan.layout
            assert messages == claimed(plan, Coord(data=rank)), plan.layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, tensor=2, zero=3, zero_group=2, reduce="fp16"),
        Layout(data=2, pipeline=2, zero=1, reduce="powersgd", reduce_rank=1, bucket_bytes=1),
    ],
    ids=str,
)
def test_traffic_knows_the_bytes(layout: Layout) -> None:
    plan = tiny_plan(layout, tiny_model("gpt2"))
    for rank, messages in enumerate(run_worlds(layout, count, plan, model=plan.model)):
        assert messages == claimed(plan, layout.coord(rank)), f"rank {rank}"


def count(world: World, plan: Plan) -> Any:
    return counted(Engine(plan, world.coord, world.comm, world.device), world)
