"""One contract for every Comm: over shared memory, Gloo, threads, and for one member alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import run_threads

from phalanx.plan.comm import Group
from phalanx.trainer.comm import Counting, GroupComm, SoloComm
from phalanx.trainer.recorder import Recorder

Runner = Callable[..., list[Any]]


def by_threads(size: int, function: Callable[[Any], Any]) -> list[Any]:
    return run_threads(size, function)


def by_gloo(size: int, function: Callable[[Any], Any]) -> list[Any]:
    return run_group(size, function, shared_memory=False)


def by_shared_memory(size: int, function: Callable[[Any], Any]) -> list[Any]:
    return run_group(size, function)


RUNNERS = {"threads": by_threads, "gloo": by_gloo, "shared memory": by_shared_memory}
SIZES = (2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers of widely different size, so that another order of addition gives another sum."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-8, 8, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponents
    return (numbers * 100).to(dtype) if not dtype.is_floating_point else numbers.to(dtype)


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].float() if terms[0].dtype.itemsize == 2 else terms[0].clone()
    for term in terms[1:]:
        total += term
    return total.to(terms[0].dtype)


def lengths(dtype: torch.dtype) -> tuple[int, ...]:
    """More than one fragment where it costs least, and not a multiple of anything."""
    return (300_001 if dtype == torch.float32 else 1001), 1, 7


def every_operation(comm: Any, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """What each operation gives one member."""
    index, size = comm.index, comm.size
    mine = [values(index, length, dtype=dtype, seed=length) for length in lengths(dtype)]
    results = {}
    for op in ("sum", "max"):
        tensors = [tensor.clone() for tensor in mine]
        comm.all_reduce(tensors, purpose="several", op=op)
        alone = mine[0].clone()
        comm.all_reduce(alone, purpose="alone", op=op)
        results[op] = [*tensors, alone]
    whole = [values(index, size * 5, 3, dtype=dtype, seed=1), values(index, size * 2, dtype=dtype, seed=2)]
    out = [torch.empty(5, 3, dtype=dtype), torch.empty(2, dtype=dtype)]
    comm.reduce_scatter(whole, out=out, purpose="pieces")
    in_place = whole[0].clone()
    comm.reduce_scatter(in_place, out=in_place[index * 5 : index * 5 + 5], purpose="in place")
    results["reduce_scatter"] = [*out, in_place[index * 5 : index * 5 + 5].clone()]
    pieces = [values(index, 5, 3, dtype=dtype, seed=3), values(index, 2, dtype=dtype, seed=4)]
    gathered = [torch.empty(size * 5, 3, dtype=dtype), torch.empty(size * 2, dtype=dtype)]
    comm.all_gather(pieces, out=gathered, purpose="pieces")
    in_place = torch.zeros(size * 5, 3, dtype=dtype)
    in_place[index * 5 : index * 5 + 5] = pieces[0]
    comm.all_gather(in_place[index * 5 : index * 5 + 5], out=in_place, purpose="in place")
    results["all_gather"] = [*gathered, in_place]
    for root in range(size):
        tensors = [values(index, 4, 2, dtype=dtype, seed=5), values(index, 3, dtype=dtype, seed=6)]
        comm.broadcast(tensors, root=root, purpose="from one")
        results[f"broadcast {root}"] = tensors
    exchanged = torch.empty(size * 2, 3, dtype=dtype)
    comm.all_to_all(values(index, size * 2, 3, dtype=dtype, seed=7), out=exchanged, purpose="exchange")
    results["all_to_all"] = [exchanged]
    comm.barrier(purpose="end")
    return results


def what_it_should_be(index: int, size: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """The same, from what all members sent."""

    def sent(seed: int, *shape: int) -> list[torch.Tensor]:
        return [values(rank, *shape, dtype=dtype, seed=seed) for rank in range(size)]

    five, two = slice(index * 5, index * 5 + 5), slice(index * 2, index * 2 + 2)
    first = in_order(sent(1, size * 5, 3))[five]
    reduced = [sent(length, length) for length in (*lengths(dtype), lengths(dtype)[0])]
    return {
        "sum": [in_order(terms) for terms in reduced],
        "max": [torch.stack(terms).amax(0) for terms in reduced],
        "reduce_scatter": [first, in_order(sent(2, size * 2))[two], first],
        "all_gather": [torch.cat(sent(3, 5, 3)), torch.cat(sent(4, 2)), torch.cat(sent(3, 5, 3))],
        "all_to_all": [torch.cat([term[two] for term in sent(7, size * 2, 3)])],
        **{f"broadcast {root}": [sent(5, 4, 2)[root], sent(6, 3)[root]] for root in range(size)},
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_every_operation(runner: Runner, size: int) -> None:
    answers = runner(size, lambda comm: {dtype: every_operation(comm, dtype) for dtype in DTYPES})
    for index, by_dtype in enumerate(answers):
        for dtype, results in by_dtype.items():
            expected = what_it_should_be(index, size, dtype)
            assert results.keys() == expected.keys()
            for name, tensors in results.items():
                for got, wanted in zip(tensors, expected[name], strict=True):
                    assert torch.equal(got, wanted), f"{name} of {dtype} on member {index}"


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_messages_keep_their_order_per_pair_and_channel(runner: Runner) -> None:
    def program(comm: Any) -> list[list[float]]:
        others = [member for member in range(comm.size) if member != comm.index]
        sent = []
        for peer in others:  # two messages ahead on each channel, before anybody receives
            for number in range(2):
                for channel in (0, 1):
                    tensor = torch.full((50_000,), 100.0 * comm.index + 10 * channel + number)
                    sent.append(comm.send(tensor, to=peer, channel=channel, purpose="ahead", async_op=True))
        received = []
        for peer in reversed(others):
            for channel in (1, 0):
                for _ in range(2):
                    tensor = torch.empty(50_000)
                    comm.recv(tensor, source=peer, channel=channel, purpose="ahead")
                    assert (tensor == tensor[0]).all()
                    received.append(tensor[0].item())
        for work in sent:
            work.wait()
        return received

    for index, received in enumerate(runner(3, program)):
        others = [member for member in reversed(range(3)) if member != index]
        assert received == [100.0 * p + 10 * c + n for p in others for c in (1, 0) for n in range(2)]


def test_shared_memory_holds_two_messages_of_any_size_for_a_receiver_that_is_late() -> None:
    def program(comm: Any) -> None:
        for number in range(2):
            if comm.index == 0:
                comm.send(torch.full((2_000_000,), float(number)), to=1, channel=0, purpose="large")
        comm.barrier(purpose="sender is done")
        for number in range(2):
            if comm.index == 1:
                tensor = torch.empty(2_000_000)
                comm.recv(tensor, source=0, channel=0, purpose="large")
                assert (tensor == number).all()

    by_shared_memory(2, program)


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_many_calls_under_way_at_once(runner: Runner) -> None:
    """More than any transport has room for: the oldest must go on while the newest are posted."""

    def program(comm: Any) -> list[torch.Tensor]:
        buckets = [values(comm.index, 400_000, seed=bucket) for bucket in range(8)]
        works = [comm.all_reduce(bucket, purpose="bucket", async_op=True) for bucket in buckets]
        pieces = [torch.empty(200_000) for _ in buckets]
        whole = [values(comm.index, 400_000, seed=10 + bucket) for bucket in range(8)]
        works += [
            comm.reduce_scatter(tensor, out=piece, purpose="pieces", async_op=True)
            for tensor, piece in zip(whole, pieces, strict=True)
        ]
        total = torch.ones(1)
        comm.all_reduce(total, purpose="between")
        for work in works:
            work.wait()
            work.wait()
        return [*buckets, *pieces, total]

    for index, results in enumerate(runner(2, program)):
        for bucket in range(8):
            assert torch.equal(results[bucket], values(0, 400_000, seed=bucket) + values(1, 400_000, seed=bucket))
            whole = values(0, 400_000, seed=10 + bucket) + values(1, 400_000, seed=10 + bucket)
            assert torch.equal(results[8 + bucket], whole.view(2, -1)[index])
        assert results[-1].item() == 2


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_each_call_is_counted_once_by_its_payload(runner: Runner) -> None:
    def program(comm: Any) -> dict[Any, list[int]]:
        comm.all_reduce([torch.zeros(3), torch.zeros(4)], purpose="a")
        comm.all_reduce(torch.zeros(3), purpose="a", async_op=True).wait()
        comm.all_gather(torch.zeros(2), out=torch.zeros(4), purpose="b")
        comm.reduce_scatter(torch.zeros(4), out=torch.zeros(2), purpose="c")
        comm.broadcast(torch.zeros(5), root=1, purpose="d")
        comm.all_to_all(torch.zeros(4), out=torch.zeros(4), purpose="e")
        if comm.index == 0:
            comm.send(torch.zeros(6, dtype=torch.bfloat16), to=1, channel=0, purpose="f")
        else:
            comm.recv(torch.zeros(6, dtype=torch.bfloat16), source=0, channel=0, purpose="f")
        comm.barrier(purpose="g")
        assert comm.recorder.seconds[comm.group.name] > 0
        return {key[1:]: counted for key, counted in comm.recorder.messages.items()}

    for index, counted in enumerate(runner(2, program)):
        message = {("f", "send"): [1, 12]} if index == 0 else {("f", "recv"): [1, 0]}
        assert (
            counted
            == {
                ("a", "all_reduce"): [2, 40],
                ("b", "all_gather"): [1, 16],
                ("c", "reduce_scatter"): [1, 16],
                ("d", "broadcast"): [1, 20],
                ("e", "all_to_all"): [1, 16],
                ("g", "barrier"): [1, 0],
            }
            | message
        )


def random_program(seed: int, size: int, num_calls: int) -> Callable[[Any], list[torch.Tensor]]:
    """A program that all members run: random calls, sizes, dtypes and order of waiting, the same on every member."""

    def program(comm: Any) -> list[torch.Tensor]:
        choose = random.Random(seed)
        under_way: list[tuple[Any, list[torch.Tensor]]] = []
        results: list[torch.Tensor] = []

        def finish(entry: tuple[Any, list[torch.Tensor]]) -> None:
            entry[0].wait()
            results.extend(entry[1])

        for number in range(num_calls):
            kind = choose.choice(["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "ring"])
            dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.int32])
            lengths = [choose.choice([0, 1, 5, 1000, 70_000, 400_000]) for _ in range(choose.choice([1, 1, 2, 3]))]
            async_op = choose.random() < 0.6
            root, channel = choose.randrange(size), choose.randrange(2)
            op = choose.choice(["sum", "max"])

            def fresh(scale: int = 1, number: int = number, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
                return [values(comm.index, scale * length, dtype=dtype, seed=number) for length in lengths]  # noqa: B023

            if kind == "all_reduce":
                tensors = fresh()
                work = comm.all_reduce(tensors, purpose="r", op=op, async_op=async_op)
            elif kind == "broadcast":
                tensors = fresh()
                work = comm.broadcast(tensors, root=root, purpose="b", async_op=async_op)
            elif kind == "all_gather":
                tensors = [tensor.new_empty(size * tensor.numel()) for tensor in fresh()]
                work = comm.all_gather(fresh(), out=tensors, purpose="g", async_op=async_op)
            elif kind == "reduce_scatter":
                tensors = [tensor.new_empty(tensor.numel()) for tensor in fresh()]
                work = comm.reduce_scatter(fresh(size), out=tensors, purpose="s", async_op=async_op)
            else:
                (tensor, *_), to, source = fresh(), (comm.index + 1) % size, (comm.index - 1) % size
                tensors = [torch.empty_like(tensor)]
                sent = comm.send(tensor, to=to, channel=channel, purpose="m", async_op=True)
                work = comm.recv(tensors[0], source=source, channel=channel, purpose="m", async_op=async_op)
                under_way.append((sent, []))
            under_way.append((work, tensors))
            while under_way and choose.random() < 0.4:
                finish(under_way.pop(0))
        for entry in under_way:
            finish(entry)
        return results

    return program


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_random_programs_over_shared_memory(seed: int, size: int) -> None:
    program = random_program(seed, size, 16)
    for got, wanted in zip(by_shared_memory(size, program), run_threads(size, program), strict=True):
        assert len(got) == len(wanted)
        for number, (mine, truth) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(mine, truth), f"tensor {number}"


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_random_programs_over_gloo(seed: int, size: int) -> None:
    program = random_program(seed, size, 12)
    for got, wanted in zip(by_gloo(size, program), run_threads(size, program), strict=True):
        for mine, truth in zip(got, wanted, strict=True):
            assert torch.equal(mine, truth)


def test_alone() -> None:
    comm = SoloComm(Group(name="tensor", ranks=(3,)))
    tensor = values(0, 4, 2)
    same = tensor.clone()
    comm.all_reduce(same, purpose="a").wait()
    assert torch.equal(same, tensor)
    for call in (comm.all_gather, comm.reduce_scatter, comm.all_to_all):
        out = torch.empty(4, 2)
        call(tensor, out=out, purpose="b").wait()
        assert torch.equal(out, tensor)
    comm.all_gather([tensor], out=[tensor], purpose="in place")
    comm.broadcast(same, root=0, purpose="c")
    comm.barrier(purpose="d")
    with pytest.raises(AssertionError, match="one member"):
        comm.send(tensor, to=0, channel=0, purpose="e")


def test_counting_moves_nothing_and_counts_all() -> None:
    group = Group(name="data", ranks=(0, 4))
    comm = GroupComm(group, 1, Counting(group, 1), Recorder())
    whole, piece = torch.arange(4.0), torch.empty(2)
    comm.reduce_scatter(whole, out=piece, purpose="gradients")
    assert piece.tolist() == [2, 3]
    comm.all_gather(piece, out=whole, purpose="parameters")
    assert whole.tolist() == [2, 3, 2, 3]
    comm.recv(piece, source=0, channel=0, purpose="activations")
    assert piece.tolist() == [0, 0]
    comm.all_reduce(whole, purpose="norm", async_op=True).wait()
    assert comm.recorder.messages == {
        ("data", "gradients", "reduce_scatter"): [1, 16],
        ("data", "parameters", "all_gather"): [1, 16],
        ("data", "activations", "recv"): [1, 0],
        ("data", "norm", "all_reduce"): [1, 16],
    }


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.all_reduce(torch.zeros(4, 4).t(), purpose="x"), "not contiguous"),
        (lambda comm: comm.all_reduce([torch.zeros(1), torch.zeros(1).int()], purpose="x"), "in one call"),
        (lambda comm: comm.all_gather(torch.zeros(2), out=torch.zeros(3), purpose="x"), "2 times 2 elements are not 3"),
        (lambda comm: comm.reduce_scatter(torch.zeros(3), out=torch.zeros(1), purpose="x"), "are not 3"),
        (lambda comm: comm.all_to_all(torch.zeros(3), out=torch.zeros(3), purpose="x"), "do not split"),
        (lambda comm: comm.send(torch.zeros(3), to=1, channel=0, purpose="x"), "with oneself"),
        (lambda comm: comm.recv(torch.zeros(3), source=2, channel=0, purpose="x"), "member 2 of 2"),
        (lambda comm: comm.all_gather(torch.zeros(2), out=torch.zeros(4).int(), purpose="x"), "into torch.int32"),
    ],
)
def test_mistakes_of_ours_are_caught_before_anything_moves(call: Callable[[Any], Any], words: str) -> None:
    group = Group(name="data", ranks=(0, 4))
    with pytest.raises(AssertionError, match=words):
        call(GroupComm(group, 1, Counting(group, 1), Recorder()))


def test_tensors_with_gradients_are_moved_outside_of_autograd() -> None:
    def program(comm: Any) -> bool:
        leaf = torch.ones(4, requires_grad=True)
        comm.all_reduce(leaf, purpose="x")
        out = torch.empty(4)
        comm.reduce_scatter(torch.ones(8, requires_grad=True), out=out, purpose="y")
        return leaf.grad_fn is None and out.grad_fn is None and leaf.tolist() == [2] * 4 and out.tolist() == [2] * 4

    assert all(by_shared_memory(2, program))
    assert all(by_gloo(2, program))
