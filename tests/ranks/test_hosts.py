"""Several hosts: ranks that share a machine use its memory, ranks that do not use the network, and the numbers are
those of one process. The hosts are network namespaces of this machine (`benchmarks/hosts.py`)."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import run_ranks
from single import masked_batch, solo_engine
from tiny import tiny_model, tiny_plan, write_run_file

from phalanx.errors import CommError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.engine import Engine
from phalanx.trainer.process_group import ProcessGroupTransport
from phalanx.trainer.shared_memory import SharedMemoryTransport
from phalanx.trainer.world import World, join

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from hosts import Hosts, hosts, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

BITS_PER_S = 1e9
NUM_STEPS = 3


def losses(engine: Engine, num_steps: int = NUM_STEPS) -> list[float]:
    found = []
    for number in range(num_steps):
        tokens, labels, num_supervised = masked_batch(engine.plan, number)
        mine = list(engine.positions)
        loss = engine.forward_backward(engine.micro_batches(tokens[mine], labels[mine], num_supervised, number))
        engine.synchronize()
        total, norm, _ = engine.totals(loss)
        found += [total, norm]
        engine.update(1e-2, 1.0)
    return found


def engine_of(world: World, plan: Plan) -> Engine:
    return Engine(plan, world.coord, world.comm, world.device)


def on_hosts(network: Hosts, plan: Plan, run_dir: RunDir, function: Any, **options: Any) -> list[Any]:
    """Call `function(world)` on every rank of the plan, each on its host and having joined by itself."""

    def main(rank: int) -> Any:
        network.become(rank, plan.layout.num_ranks)
        if rank == 0:  # as where /etc/hosts gives a host's own name a loopback address
            os.environ["MASTER_ADDR"] = "127.0.1.1"
        world = join(plan, run_dir)
        result = function(world)
        world.close()
        return result

    return run_ranks(plan.layout.num_ranks, main, **options)


SHARED, NETWORK = SharedMemoryTransport, ProcessGroupTransport


@pytest.mark.parametrize(
    ("layout", "transports"),
    [
        (Layout(tensor=2, data=2, zero=1), {"world": NETWORK, "tensor": SHARED, "data": NETWORK}),
        (Layout(pipeline=2, tensor=2, sequence_parallel=True), {"tensor": SHARED, "pipeline": NETWORK}),
    ],
    ids=str,
)
def test_two_hosts_equal_one_process(tmp_path: Path, layout: Layout, transports: dict[str, type]) -> None:
    plan = tiny_plan(layout, tiny_model(tied=True))

    def train(world: World) -> Any:
        used = {name: type(comm.transport) for name, comm in world._comms.items()}
        return losses(engine_of(world, plan)), used

    expected = losses(solo_engine(tiny_plan(Layout(micro_batch=4), plan.model)))
    with hosts(2, bits_per_s=BITS_PER_S) as network:
        for found, used in on_hosts(network, plan, RunDir(tmp_path), train):
            assert found == pytest.approx(expected, rel=1e-10)
            assert transports.items() <= used.items()


def test_the_end_of_one_host_ends_the_others(tmp_path: Path) -> None:
    plan = tiny_plan(Layout(tensor=2, data=2), comm_timeout_s=50.0)

    def train(world: World) -> tuple[str, float]:
        engine = engine_of(world, plan)
        losses(engine, 1)
        if world.rank >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(CommError) as caught:
            losses(engine, 2)
        return str(caught.value), time.monotonic() - began_s

    with hosts(2, bits_per_s=BITS_PER_S) as network:
        answers = on_hosts(network, plan, RunDir(tmp_path), train, mortal=[2, 3])
    for rank, (text, seconds) in enumerate(answers[:2]):
        assert text.startswith(f"rank {rank}: all_reduce 'gradients' #2 "), text
        assert text.endswith(f"on the host at 10.77.0.2, not visible from here: rank {rank + 2}"), text
        assert ": a member has gone: Connection closed by peer [10.77.0.2]:" in text or "reset" in text, text
        assert seconds < 25


def test_phalanx_train_on_two_hosts_says_once_who_failed(tmp_path: Path) -> None:
    """Started as torchrun does; rank 1, alone on its host, is killed: rank 0 says so for both."""
    write_run_file(tmp_path, Layout(data=2), num_steps=1_000_000)
    program = [str(Path(sys.executable).parent / "phalanx"), "train", "run.toml", "--run-dir", "run"]
    with hosts(2, bits_per_s=BITS_PER_S) as network, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            process = subprocess.Popen(
                program,
                cwd=tmp_path,
                env=os.environ | network.environ(rank, 2),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=functools.partial(network.enter, rank),
            )
            stack.callback(process.kill)
            processes.append(stack.enter_context(process))
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
        while not metrics.exists() or not metrics.read_text():
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.05)
        processes[1].kill()
        said, _ = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 3
    assert said.count("phalanx: Run failed") == 1
    assert "rank 1 (pipeline 0 data 1 tensor 0) on its host left no word: it was killed" in said
    assert (tmp_path / "run" / "failure.txt").exists()
