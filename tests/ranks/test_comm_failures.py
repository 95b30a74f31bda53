"""What happens when a member dies, stops, goes away or calls something else: an error in words, on all, at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Faults, RankFailed, run_group, run_worlds
from tiny import tiny_model

from phalanx.errors import CommError
from phalanx.plan.layout import Layout
from phalanx.trainer import process
from phalanx.watch.events import process_status

BOTH = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])


def complaint(call: Callable[[], Any]) -> tuple[str, float]:
    """The text of the CommError that a call raises, and how long it took to come."""
    began_s = time.monotonic()
    with pytest.raises(CommError) as caught:
        call()
    return str(caught.value), time.monotonic() - began_s


@BOTH
def test_the_death_of_a_member_ends_the_others_at_once(shared_memory: bool) -> None:
    def program(comm: Any) -> Any:
        comm.recorder.step, comm.recorder.micro_batch, comm.recorder.phase = 3, 1, "forward"
        comm.all_reduce(torch.ones(10), purpose="before")
        if comm.index == 1:
            time.sleep(0.3)  # the others are in the call
            os.kill(os.getpid(), signal.SIGKILL)
        return complaint(lambda: comm.all_reduce(torch.ones(1_000_000), purpose="mlp output"))

    answers = run_group(3, program, mortal=[1], timeout_s=50, shared_memory=shared_memory)
    assert answers[1] is None
    for text, seconds in (answers[0], answers[2]):
        assert seconds < 25
        assert "all_reduce 'mlp output' #2 (4000000 bytes) of group group (0, 1, 2) failed in step 3" in text
        if shared_memory:
            assert "rank 1 has died" in text
        assert "has not come: rank 1" in text


@BOTH
def test_a_member_that_hangs_up_ends_the_others_though_it_lives(shared_memory: bool) -> None:
    known, tell = os.pipe()

    def program(comm: Any) -> Any:
        pids = torch.zeros(2, dtype=torch.int64)
        pids[comm.index] = os.getpid()
        comm.all_reduce(pids, purpose="process ids")
        if comm.index == 1:
            os.read(known, 1)  # the other one has the sum, too
            process.hang_up()
            time.sleep(50)  # until the other one has noticed
        os.write(tell, b".")
        answer = complaint(lambda: comm.all_reduce(torch.ones(1_000_000), purpose="mlp output"))
        status = process_status(int(pids[1]))
        os.kill(int(pids[1]), signal.SIGKILL)
        return *answer, status

    (text, seconds, status), _ = run_group(2, program, mortal=[1], timeout_s=50, shared_memory=shared_memory)
    os.close(known)
    os.close(tell)
    assert "failed in step 0" in text
    assert seconds < 25
    assert status not in ("dead", "stopped")


def test_all_learn_of_the_first_death_even_if_they_wait_for_somebody_else() -> None:
    """Rank 0 waits for rank 1, which waits for rank 3, which dies: nobody blames rank 1."""

    def program(world: Any) -> str:
        if world.rank == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        name = "data" if world.rank == 1 else "tensor"
        return complaint(lambda: world.comm(name).all_reduce(torch.ones(1), purpose="sum"))[0]

    answers = run_worlds(Layout(data=2, tensor=2), program, model=tiny_model(), mortal=[3], timeout_s=50)
    assert all("rank 3 has died" in text for text in answers[:3])


@BOTH
def test_a_stopped_member_runs_into_the_time_limit(shared_memory: bool) -> None:
    def program(comm: Any) -> Any:
        pids = torch.zeros(2, dtype=torch.int64)
        pids[comm.index] = os.getpid()
        comm.all_reduce(pids, purpose="process ids")
        if comm.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        while "T" not in Path(f"/proc/{int(pids[1])}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        answer = complaint(lambda: comm.barrier(purpose="end of step"))
        os.kill(int(pids[1]), signal.SIGKILL)
        return answer

    (text, seconds), _ = run_group(2, program, mortal=[1], timeout_s=1.5, shared_memory=shared_memory)
    assert seconds >= 1.5
    assert "the time limit of 1.5 s is over" in text
    assert "barrier 'end of step' #2" in text
    assert "has not come: rank 1" in text
    assert "last finished all_reduce 'process ids' #1" in text
    assert "is stopped" in text


def test_one_time_limit_ends_all_ranks() -> None:
    """Rank 1 sleeps before the reduction (case 69): the others' patience differs, their end does not."""

    def program(comm: Any) -> Any:
        comm._timeout_s = 1.0 if comm.index == 0 else 40.0
        if comm.index == 1:
            time.sleep(3)
        return complaint(
            lambda: [comm.all_reduce(torch.ones(1), purpose="gradients"), comm.barrier(purpose="end of step")]
        )

    answers = run_group(3, program)
    assert "the time limit of 1 s is over" in answers[0][0]
    for text, seconds in answers[1:]:
        assert "rank 0 gave up: the time limit of 1 s is over" in text
        assert seconds < 25


def test_a_member_that_has_finished_is_not_waited_for() -> None:
    def program(comm: Any) -> str | None:
        comm.barrier(purpose="start")
        if comm.index == 1:
            return None
        return complaint(lambda: comm.barrier(purpose="one more"))[0]

    text, _ = run_group(2, program, timeout_s=50)
    assert "rank 1 has ended its work and will not come" in text


def test_what_a_member_sent_before_it_finished_arrives() -> None:
    def program(comm: Any) -> list[float] | None:
        if comm.index == 0:
            for number in range(3):
                comm.send(torch.full((1000,), float(number)), to=1, channel=0, purpose="last words")
            return None
        time.sleep(0.5)
        received = []
        for _ in range(3):
            tensor = torch.empty(1000)
            comm.recv(tensor, source=0, channel=0, purpose="last words")
            received.append(tensor[-1].item())
        return received

    assert run_group(2, program)[1] == [0, 1, 2]


@BOTH
def test_a_slower_member_ends_the_last_sum_though_the_others_have_left(shared_memory: bool) -> None:
    def program(comm: Any) -> float:
        tensors = [torch.ones(length) for length in (10, 100_000)]
        works = [comm.all_reduce(tensor, purpose="last", async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        small = torch.ones(10)
        last = comm.all_reduce(small, purpose="last of all", async_op=True)
        time.sleep(0.5 * (comm.index == 1))
        last.wait()
        return (sum(map(torch.sum, tensors)) + small.sum()).item()

    assert run_group(3, program, shared_memory=shared_memory) == [3 * 100_020] * 3


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param(
            lambda comm: (comm.all_reduce(torch.ones(4), purpose="a"), comm.all_reduce(torch.ones(4), purpose="b")),
            lambda comm: (comm.all_reduce(torch.ones(4), purpose="b"), comm.all_reduce(torch.ones(4), purpose="a")),
            "all_reduce 'b' #1",
            id="order (case 70)",
        ),
        pytest.param(
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a"),
            lambda comm: comm.all_reduce(torch.ones(6), purpose="a"),
            "24 bytes",
            id="size (case 71)",
        ),
        pytest.param(
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a"),
            lambda comm: comm.all_reduce(torch.ones(4).bfloat16(), purpose="a"),
            "8 bytes",
            id="dtype (case 71)",
        ),
        pytest.param(
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a"),
            lambda comm: comm.broadcast(torch.ones(4), root=1, purpose="a"),
            "broadcast 'a' #1",
            id="operation (case 71)",
        ),
        pytest.param(
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a"),
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a", op="max"),
            "max of float32",
            id="max instead of sum",
        ),
        pytest.param(
            lambda comm: comm.all_reduce(torch.ones(4), purpose="a"),
            lambda comm: comm.all_reduce(torch.ones(2).double(), purpose="a"),
            "sum of float64",
            id="dtype in as many bytes",
        ),
        pytest.param(
            lambda comm: (comm.all_reduce(torch.ones(4), purpose="a"), comm.all_reduce(torch.ones(4), purpose="b")),
            lambda comm: comm.all_reduce(torch.ones(4), purpose="b"),
            "all_reduce 'b' #1",
            id="one left out",
        ),
    ],
)
def test_different_calls_are_not_mixed(first: Any, second: Any, words: str) -> None:
    def program(comm: Any) -> str:
        text, _ = complaint(lambda: [(first if comm.index == 0 else second)(comm), comm.barrier(purpose="end")])
        time.sleep(0.5)  # a rank that fails leaves its records to the others
        return text

    texts = run_group(2, program, timeout_s=50)
    assert any(words in text for text in texts)
    assert all("made another call here" in text for text in texts)


def test_a_call_that_is_never_made_is_named() -> None:
    def program(comm: Any) -> str | None:
        tensor = torch.zeros(3)
        if comm.index == 0:
            comm.send(tensor, to=1, channel=1, purpose="gradients")
            time.sleep(1.5)
            return None
        comm.recv(tensor, source=0, channel=1, purpose="gradients")
        return complaint(lambda: comm.recv(tensor, source=0, channel=1, purpose="gradients"))[0]

    text = run_group(2, program, timeout_s=0.7)[1]
    assert "recv 'gradients' #2 from rank 0 on channel 1" in text
    assert "has not come: rank 0" in text
    assert "last finished send 'gradients' #1" in text


@BOTH
def test_faults_strike_at_their_rank_and_step(shared_memory: bool) -> None:
    faults = Faults().fail_at(rank=1, step=2)

    def program(comm: Any) -> Any:
        faults.install(comm)
        for step in range(4):
            comm.recorder.step = step
            comm.all_reduce(torch.ones(2), purpose="sum")

    with pytest.raises(RankFailed, match="injected fault on rank 1 in step 2") as failed:
        run_group(2, program, shared_memory=shared_memory)
    assert failed.value.rank == 1


def test_a_stall_is_named() -> None:
    faults = Faults().stall_at(rank=1, step=2, seconds=5)

    def program(comm: Any) -> str:
        faults.install(comm)

        def train() -> None:
            for step in range(4):
                comm.recorder.step = step
                comm.all_reduce(torch.ones(2), purpose="sum")

        return complaint(train)[0]

    text = run_group(2, program, timeout_s=1)[0]
    assert "all_reduce 'sum' #3" in text
    assert "failed in step 2" in text
    assert "has not come: rank 1" not in text  # its record says that it is in the call: the fault is below
