"""The agent: one per node, it starts the ranks and waits. `launch.local` runs it as `python -m phalanx.trainer.agent`.

On CPU it is a zygote: it imports torch once, while it has a single thread, and forks the ranks, so that eight of them
start in a fraction of a second. Where there are GPUs it starts fresh processes instead, since CUDA does not survive a
fork. It never restarts anything: how each rank ended goes into a file, and `launch.supervise` draws the conclusions.

All signals are blocked and taken one at a time from `sigtimedwait`: no handler ever interrupts anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import PhalanxError, Stopped
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer import process
from phalanx.trainer.console import Console
from phalanx.watch.events import copy_ring, remove_dead_rings, ring_path
from phalanx.watch.outcomes import Ending, Outcome, write_endings

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})

TICK_S = 0.1
RING_COPY_S = 2.0
# After the first failure the others get a moment to say what they saw, then to write their stacks, then to go.
SETTLE_S = 0.5
STACK_S = 0.3
TERMINATE_S = 2.0


@dataclass(slots=True, kw_only=True)
class Agent:
    """The ranks of a run on this node.

    `live` maps process ids to ranks; `orders` are signals still to be sent, each with the time it is due; `sent` are
    those that went out. `failed` is set by the first rank that does not finish, `stopped_by` by a request to stop,
    `saved` by the first rank that ended as asked, with its state saved.
    """

    plan_path: Path
    plan: Plan
    run_dir: RunDir
    entry: str
    live: dict[int, int] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    orders: list[tuple[float, signal.Signals]] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    stopped_by: signal.Signals | None = None
    failed: bool = False
    saved: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan; all of them are on this node."""
        return self.plan.layout.num_ranks

    def run(self, listener: socket.socket) -> int:
        """Start the ranks, serve their store on `listener`, wait for all of them. Returns the exit code."""
        remove_dead_rings()
        entry = process.load_entry(self.entry)  # with torch: what takes long
        if asked := signal.sigpending() & STOP_SIGNALS:
            return 128 + min(asked)
        console = Console.of(self.run_dir, self.num_ranks)
        self._start(listener, entry)
        store = _serve_store(listener)
        next_copy = time.monotonic()
        while self.live:
            received = signal.sigtimedwait({*STOP_SIGNALS, signal.SIGCHLD}, TICK_S)
            if received is not None and received.si_signo in STOP_SIGNALS:
                self._stop(signal.Signals(received.si_signo))
            self._send_due_orders()
            if time.monotonic() >= next_copy:
                next_copy += RING_COPY_S
                self._copy_rings(self.live.values())
            if not self.failed:  # from then on the report speaks
                console.relay()
            self._reap()
        if not self.failed:
            console.relay()
        console.close()
        del store
        self._tidy()
        if self.failed:
            return 3
        if self.stopped_by:
            return 128 + self.stopped_by
        return Stopped.exit_code if self.saved else 0

    def _start(self, listener: socket.socket, entry: process.Entry) -> None:
        """Start all ranks. They may look for the store at once: connections wait in the listener's queue."""
        port = listener.getsockname()[1]
        import torch

        if torch.cuda.is_available():
            for rank in range(self.num_ranks):
                self.live[self._spawn(rank, port)] = rank
            return
        process.keep_freed_memory()
        assert len(os.listdir("/proc/self/task")) == 1, "the agent has threads and must not fork"
        for rank in range(self.num_ranks):
            self.live[self._fork(rank, listener, entry)] = rank

    def _fork(self, rank: int, listener: socket.socket, entry: process.Entry) -> int:
        """Start one rank as a copy of this process. Returns its process id."""
        agent, port = os.getpid(), listener.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            listener.close()
            self.become(rank, port, agent, entry)
        os.setpgid(pid, pid)
        return pid

    def _spawn(self, rank: int, port: int) -> int:
        """Start one rank as a fresh process. Returns its process id."""
        files = [str(self.plan_path), str(self.run_dir.path)]
        command = [sys.executable, "-m", "phalanx.trainer.agent", *files, self.entry]
        command += ["--parent", str(os.getpid()), "--rank", str(rank), "--port", str(port)]
        return os.posix_spawn(sys.executable, command, os.environ, setpgroup=0)

    def become(self, rank: int, port: int, agent: int, entry: process.Entry) -> NoReturn:
        """Be rank `rank` from now on, until the end of this process."""
        code = 3
        try:
            process.die_with_parent(agent, signal.SIGKILL)
            os.setpgid(0, 0)
            os.environ.update(self._environment(rank, port))
            process.write_to(self.run_dir.log(rank))
            process.dump_stacks_on_request(self.run_dir.stack(rank))
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's business
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            code = process.run(entry, self.plan, self.run_dir, rank).exit_code
        except BaseException:  # noqa: BLE001 (a copy of the agent must never return into the agent's own code)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What `trainer.world` reads: the names that torchrun sets, so that there is one convention."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _stop(self, received: signal.Signals) -> None:
        """Somebody wants the run to end. Asked twice, or while a failure is being handled: at once."""
        now = time.monotonic()
        impatient = self.failed or self.stopped_by is not None
        self.stopped_by = self.stopped_by or received
        self.orders = [(now, signal.SIGKILL)]
        if not impatient:
            self.orders = [(now, signal.SIGTERM), (now + self.plan.job.checkpoint.grace_s, signal.SIGKILL)]

    def _fail(self) -> None:
        """The first rank has failed: end the others, in steps that let them leave evidence."""
        self.failed = True
        self._copy_rings(range(self.num_ranks))
        stacks = time.monotonic() + SETTLE_S
        terminate = stacks + STACK_S
        kill = terminate + TERMINATE_S
        self.orders = [(stacks, signal.SIGQUIT), (terminate, signal.SIGTERM), (kill, signal.SIGKILL)]

    def _send_due_orders(self) -> None:
        while self.orders and self.orders[0][0] <= time.monotonic():
            _, order = self.orders.pop(0)
            self.sent.add(order)
            for pid in self.live:
                _send(pid, order)

    def _reap(self) -> None:
        """Take note of every rank that has ended since the last call."""
        while self.live:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            rank = self.live.pop(pid)
            _send(pid, signal.SIGKILL)  # processes that it started and left behind
            self._copy_rings([rank])
            ring_path(self.run_dir.path, rank).unlink(missing_ok=True)
            code = os.waitstatus_to_exitcode(status)
            ending = Ending(
                rank=rank,
                host=socket.gethostname(),
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                by_agent=-code in self.sent,
                time_s=time.time(),
                peak_memory_bytes=usage.ru_maxrss * 1024,
            )
            self.endings.append(ending)
            outcome = Outcome.read(self.run_dir.outcome(rank))
            finished = code == 0 and outcome is not None and outcome.error is None
            self.saved = self.saved or code == Stopped.exit_code
            if not finished and not self.saved and not self.failed and self.stopped_by is None:
                self._fail()
            if outcome is not None and outcome.error is not None and code != Stopped.exit_code:
                with self.run_dir.log(rank).open("a", encoding="utf-8") as log:
                    log.write(outcome.error.traceback)

    def _copy_rings(self, ranks: Iterable[int]) -> None:
        """Bring the last records of these ranks to where they survive the host. A full disk must not end a run here."""
        for rank in ranks:
            try:
                copy_ring(ring_path(self.run_dir.path, rank), self.run_dir.ring(rank))
            except FileNotFoundError:  # it has none yet, or has ended well and removed it
                continue
            except OSError as error:
                sys.stderr.write(f"cannot keep the last records of rank {rank}: {error}\n")

    def _tidy(self) -> None:
        """Leave what `launch.supervise` needs, and nothing empty."""
        try:
            write_endings(self.run_dir.endings, self.endings)
        except OSError as error:
            sys.stderr.write(f"cannot keep how the ranks ended: {error}\n")
        for stack in self.run_dir.logs.glob("*.stack"):
            if stack.stat().st_size == 0:
                stack.unlink()


def _serve_store(listener: socket.socket) -> Any:
    """The ranks' key-value store. Its server is a thread, so it starts after the last fork."""
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _send(pid: int, order: signal.Signals) -> None:
    """Send to a rank, or, to kill, to everything that it started as well (a rank leads a process group of its own)."""
    with contextlib.suppress(ProcessLookupError):
        if order == signal.SIGKILL:
            os.killpg(pid, order)
        else:
            os.kill(pid, order)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; returns the exit code: 0 all ranks finished, 2 wrong input, 3 a rank failed, 128 + n stopped by
    signal n."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    parser = argparse.ArgumentParser(prog="python -m phalanx.trainer.agent", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("entry")
    parser.add_argument("--parent", type=int, required=True, help="process id of whoever started the agent")
    parser.add_argument("--listener", type=int, help="inherited descriptor of the store's socket")
    parser.add_argument("--rank", type=int, help="be this rank instead, of the agent that is the parent")
    parser.add_argument("--port", type=int, help="of the parent's store")
    given = parser.parse_args(arguments)
    process.die_with_parent(given.parent, signal.SIGTERM)
    try:
        plan, run_dir = Plan.read(given.plan), RunDir(given.run_dir)
        agent = Agent(plan_path=given.plan, plan=plan, run_dir=run_dir, entry=given.entry)
        if given.rank is not None:
            agent.become(given.rank, given.port, given.parent, process.load_entry(agent.entry))
        return agent.run(socket.socket(fileno=given.listener))
    except PhalanxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
