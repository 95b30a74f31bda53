"""How ranks find each other: what they are told, what they check, and what they leave behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RankFailed, run_ranks, run_worlds
from tiny import tiny_model, tiny_plan
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from phalanx.errors import CommError, InputError, LayoutError, RunError
from phalanx.launch.environment import tell_torchrun
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer import rendezvous, streams, world
from phalanx.trainer.process_group import ProcessGroupTransport
from phalanx.trainer.shared_memory import SharedMemoryTransport
from phalanx.trainer.world import Process, first_host, join
from phalanx.watch.events import ring_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become(rank: int, num_ranks: int, port: int, **more: str) -> None:
    """Set what torchrun sets."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **more)


def joined(plan: Plan, run_dir: RunDir, function: Callable[[world.World], Any]) -> list[Any]:
    """Call `function(world)` on every rank of a plan, each having joined by itself."""
    port = free_port()

    def main(rank: int) -> Any:
        become(rank, plan.layout.num_ranks, port)
        member = join(plan, run_dir)
        result = function(member)
        member.close()
        return result

    return run_ranks(plan.layout.num_ranks, main)


def quick(plan: Plan, timeout_s: float) -> Plan:
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, comm_timeout_s=timeout_s))


def listening_addresses() -> set[str]:
    """Addresses on which this process listens, as the kernel lists them."""
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                found.add(local.partition(":")[0])
    return found


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_ranks_join_and_listen_on_loopback_only(tmp_path: Path, comm: Any) -> None:
    plan = tiny_plan(Layout(tensor=2, data=2))
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, comm=comm))

    def look(member: world.World) -> Any:
        total = torch.tensor([2.0**member.rank])
        member.comm("world").all_reduce(total, purpose="who is there")
        member.comm("pipeline").all_reduce(total, purpose="alone")
        kinds = {type(member._comms[name].transport) for name in ("world", "tensor", "data")}
        return total.item(), str(member.coord), kinds, listening_addresses(), ring_path(tmp_path, member.rank).exists()

    answers = joined(plan, RunDir(tmp_path), look)
    transport = SharedMemoryTransport if comm == "auto" else ProcessGroupTransport
    for rank, (total, coord, kinds, addresses, ring) in enumerate(answers):
        assert total == 15
        assert coord == str(plan.layout.coord(rank))
        assert kinds == {transport}
        assert addresses <= {"0100007F"}
        assert ring
        assert not ring_path(tmp_path, rank).exists()
        if comm == "auto":
            assert not addresses or rank == 0  # the store's


def test_one_process_needs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    member = join(tiny_plan(Layout()), RunDir(tmp_path))
    assert (member.rank, member.comm("world").size, member.comm("tensor").index) == (0, 1, 0)
    member.close()


def test_two_runs_side_by_side_do_not_meet(tmp_path: Path) -> None:
    def main(rank: int, ports: list[int]) -> float:
        run = rank // 2
        become(rank % 2, 2, ports[run])
        member = join(tiny_plan(Layout(data=2)), RunDir(tmp_path / str(run)))
        total = torch.tensor([10.0**run])
        for _ in range(20):
            member.comm("data").all_reduce(total, purpose="sum")
        member.close()
        return total.item() / 2**20

    assert run_ranks(4, main, [free_port(), free_port()]) == [1, 1, 10, 10]


def test_another_number_of_processes_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in become_environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match=r"the layout .* needs 4 processes, got 3"):
        join(tiny_plan(Layout(tensor=2, data=2)), RunDir(tmp_path))


def test_ranks_with_different_plans_are_named(tmp_path: Path) -> None:
    port, plan = free_port(), tiny_plan(Layout(data=3))

    def main(rank: int) -> str:
        become(rank, 3, port)
        mine = dataclasses.replace(plan, job=dataclasses.replace(plan.job, seed=plan.job.seed + (rank == 2)))
        with pytest.raises(RunError) as caught:
            join(mine, RunDir(tmp_path))
        time.sleep(0.5)  # rank 0 serves the store
        return str(caught.value)

    texts = run_ranks(3, main)
    assert len(set(texts)) == 1
    assert "on ranks 2" in texts[0]
    assert f"job.seed: {plan.job.seed} here, {plan.job.seed + 1} there" in texts[0]


def test_ranks_with_different_software_are_named(tmp_path: Path) -> None:
    port, plan = free_port(), tiny_plan(Layout(data=2))

    def main(rank: int) -> str:
        become(rank, 2, port)
        if rank == 1:
            torch.__version__ = "2.0.0"
        with pytest.raises(RunError) as caught:
            join(plan, RunDir(tmp_path))
        time.sleep(0.5)
        return str(caught.value)

    for text in run_ranks(2, main):
        assert "2.0.0 on ranks 1" in text


def test_who_has_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four tasks start (cases 81 and 83)."""
    port, plan = free_port(), quick(tiny_plan(Layout(data=4)), 1.5)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.5)
    said: list[str] = []
    monkeypatch.setattr(rendezvous, "say", said.append)

    def main(rank: int) -> Any:
        become(rank, 4, port)
        with pytest.raises(CommError) as caught:
            join(plan, RunDir(tmp_path))
        time.sleep(0.5)
        return str(caught.value), said

    for text, notices in run_ranks(3, main):
        assert "3 of 4 ranks have come; missing: 3" in text
        assert any("3 of 4 ranks have come; missing: 3" in notice for notice in notices)


def test_an_address_where_nobody_listens_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    said: list[str] = []
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.2)
    monkeypatch.setattr(rendezvous, "say", said.append)
    with pytest.raises(CommError, match=rf"within 0.7 s: the store at localhost:{port} \(resolved to 127.0.0.1\)"):
        rendezvous.open_store("localhost", port, serve=False, timeout_s=0.7)
    assert said
    assert all(f"the store at localhost:{port}" in line for line in said)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match=f"127.0.0.1:{other.getsockname()[1]}: Address already in use"):
            rendezvous.open_store("127.0.0.1", other.getsockname()[1], serve=True, timeout_s=1)


def become_task(rank: int, job: int, port: int) -> None:
    """Set what srun sets, of a job of two tasks on one node."""
    os.environ.update(SLURM_JOB_ID=str(job), SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    os.environ.update(SLURM_NTASKS="2", SLURM_STEP_NUM_NODES="1", MASTER_PORT=str(port))


def test_jobs_of_slurm_that_share_a_port_do_not_meet(tmp_path: Path) -> None:
    """The first job's rank 0 serves, and waits for its rank 1. Both ranks of the second end at once, with a reason."""
    port, plan = free_port(), tiny_plan(Layout(data=2))

    def main(rank: int) -> Any:
        number, job = rank % 2, 100 + rank // 2
        become_task(number, job, port)
        if job == 101:  # once the first job's rank 0 is there
            rendezvous._await_listener("127.0.0.1", port, 30.0)
            with pytest.raises((InputError, CommError)) as caught:
                join(plan, RunDir(tmp_path / "101"))
            (tmp_path / f"refused {number}").touch()
            return str(caught.value)
        while number == 1 and len(list(tmp_path.glob("refused *"))) < 2:
            time.sleep(0.02)
        member = join(plan, RunDir(tmp_path / "100"))
        total = torch.ones(1)
        member.comm("data").all_reduce(total, purpose="sum")
        member.close()
        return total.item()

    *sums, taken, other = run_ranks(4, main)
    assert sums == [2, 2]
    assert f"127.0.0.1:{port}: Address already in use" in taken
    assert f"127.0.0.1:{port} is that of step 0 of Slurm's job 100; this is step 0 of Slurm's job 101" in other


def test_what_listens_and_is_no_store_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(CommError, match=f"listens on 127.0.0.1:{port} is not this run's store: it does not answer"):
            rendezvous.open_store("127.0.0.1", port, serve=False, timeout_s=30)


def test_a_store_of_another_program_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    store = rendezvous.open_store("127.0.0.1", port := free_port(), serve=True, timeout_s=30)
    with pytest.raises(CommError, match=f"at 127.0.0.1:{port} is that of another program; this is step 0 of"):
        rendezvous.check_run(store, 1, "step 0 of Slurm's job 7", f"127.0.0.1:{port}")


def test_no_room_for_shared_memory_falls_back_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(world, "say", said.append)

    def main(member: world.World) -> Any:
        total = torch.ones(1)
        member.comm("tensor").all_reduce(total, purpose="sum")
        return total.item(), type(member._comms["tensor"].transport), said

    monkeypatch.setattr(world, "why_not_here", lambda: "no room")
    answers = run_worlds(Layout(tensor=2), main, model=tiny_model())
    assert [answer[:2] for answer in answers] == [(2.0, ProcessGroupTransport)] * 2
    assert [len(answer[2]) for answer in answers] == [1, 0]
    assert "(no room)" in answers[0][2][0]


def test_a_limit_on_file_sizes_is_found_before_it_hurts() -> None:
    def main(rank: int) -> str | None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return streams.why_not_here()

    assert streams.why_not_here() is None
    assert "no room" in run_ranks(1, main)[0]


def test_nothing_is_left_after_sigkill_and_a_new_start(tmp_path: Path) -> None:
    plan, run_dir = tiny_plan(Layout(data=2)), RunDir(tmp_path)
    port, (mine, _, _) = free_port(), ring_path(run_dir.path, 0).name.rpartition("-")
    rings = mine.rpartition("-")[0]  # what those of all runs of this user begin with: others may go on meanwhile

    def memory() -> set[str]:
        found = {name for name in os.listdir("/dev/shm") if "phalanx" in name}
        return {name for name in found if name.startswith(mine) or not name.startswith(rings)}

    before = memory()

    def die(rank: int) -> None:
        become(rank, 2, port)
        member = join(plan, run_dir)
        member.comm("data").all_reduce(torch.ones(1_000_000), purpose="gradients")
        os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(2, die, mortal=[0, 1])
    assert len(memory() - before) == 2  # the ring files, for whoever asks why
    joined(plan, run_dir, lambda member: member.comm("data").all_reduce(torch.ones(1), purpose="again").wait())
    assert memory() <= before


def test_torchrun_and_our_agent_are_read_alike() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    process = Process.read(environ)
    assert process == Process(rank=3, num_ranks=4, local_rank=1, attempt=0, address="host", port=29500, serves=False)
    assert Process.read({**environ, "RANK": "0"}).serves
    agent = {**environ, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert (Process.read(agent).serves, Process.read(agent).attempt) == (False, 2)
    assert Process.read({}) is None


def test_torchrun_ends_its_report_with_what_we_say(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    tell_torchrun("the layout needs 4\n    → start 4", {"TORCHELASTIC_ERROR_FILE": str(path)})
    told = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    cause = str(ChildFailedError("phalanx", {0: told})).partition("Root Cause")[2]
    assert "the layout needs 4\n" in cause and "→ start 4" in cause and "To enable traceback" not in cause
    tell_torchrun("nobody asks", {})


def test_srun_is_read() -> None:
    environ = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[003-004]",
        "SLURM_RESTART_COUNT": "1",
    }
    process = Process.read(environ)
    assert (process.rank, process.num_ranks, process.attempt, process.serves) == (0, 4, 1, True)
    assert process.address == "node003"
    assert 10000 <= process.port < 30000
    assert process.run == "step 1 of Slurm's job 77"
    ports = {Process.read({**environ, "SLURM_JOB_ID": str(77 + n)}).port for n in range(2500)}
    assert len(ports) == 2500
    assert Process.read({**environ, "SLURM_STEP_ID": "2"}).port != process.port
    assert Process.read({**environ, "SLURM_STEP_NUM_NODES": "1"}).address == "127.0.0.1"
    assert Process.read({**environ, "MASTER_ADDR": "here", "MASTER_PORT": "5"}).address == "here"


@pytest.mark.parametrize(
    ("node_list", "first"),
    [("node[001-003,007]", "node001"), ("a1,b[2-3]", "a1"), ("rack1-n[08-11]", "rack1-n08"), ("one", "one")],
)
def test_first_host_of_a_node_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker")
    with pytest.raises(InputError, match=r"'\^lo,docker' is no network interface .*\n.*one plain name of: .*lo"):
        world._own_address("127.0.0.1", 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert world._own_address("127.0.0.1", 1) == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert world._own_address("127.0.0.1", 1) == "127.0.0.1"


def test_a_rank_that_fails_is_reported_before_its_victims(tmp_path: Path) -> None:
    def fail(member: world.World) -> None:
        if member.rank == 1:
            raise ValueError("the real cause")
        member.comm("world").barrier(purpose="wait for it")

    with pytest.raises(RankFailed, match="the real cause") as failed:
        joined(tiny_plan(Layout(data=3)), RunDir(tmp_path), fail)
    assert failed.value.rank == 1


def test_a_full_memory_disk_costs_the_records_and_not_the_run(tmp_path: Path, monkeypatch, capsys):
    """No room for a ring file: said once, and rank 0 of 1 joins all the same."""
    monkeypatch.setattr(world, "ring_path", lambda run, rank: tmp_path / "full" / "x.ring")
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    joined = join(tiny_plan(Layout()), RunDir(tmp_path))
    assert joined.recorder.ring is None
    joined.recorder.step = 1
    joined.close()
    assert "WARNING: cannot make the ring file" in capsys.readouterr().err
