"""Several ranks inside a test: processes forked from it, each of which runs a function."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import CommError
from phalanx.plan.comm import Group
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.trainer.comm import Call, GroupComm, Pending, Transport
from phalanx.trainer.process import die_with_parent
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import World, connect
from phalanx.watch.events import RingWriter

torch.set_num_threads(1)  # a process with idle threads must not be forked

# After the first rank has failed, the others get this long to end by themselves.
_GRACE_S = 3.0


class RankFailed(AssertionError):  # it is what the test asserts
    """A rank raised, died or did not end in time. `rank` is the first one, `cause` its exception if it had one."""

    def __init__(self, rank: int, text: str, cause: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.cause = rank, cause


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, mortal: Collection[int] = ()
) -> list[Any]:
    """Call `function(rank, *args)` in `num_ranks` forked processes; returns what they return, in rank order.

    Whatever they return or raise must pickle. Raises RankFailed for the first rank that raises or dies, and if not all
    have ended after `timeout` seconds; ranks in `mortal` may die (they return None). No process outlives the call.
    """
    pids: dict[int, int] = {}
    results: dict[int, Any] = {}
    failure: RankFailed | None = None
    deadline = time.monotonic() + timeout
    sys.stdout.flush()
    sys.stderr.flush()
    with selectors.DefaultSelector() as selector:
        try:
            for rank in range(num_ranks):
                pids[rank], pipe = _fork(rank, function, args)
                selector.register(pipe, selectors.EVENT_READ, (rank, bytearray()))
            while selector.get_map():
                events = selector.select(deadline - time.monotonic()) if deadline > time.monotonic() else []
                if not events:
                    missing = sorted(key.data[0] for key in selector.get_map().values())
                    failure = failure or RankFailed(missing[0], f"ranks {missing} had not ended after {timeout} s")
                    break
                for key, _ in events:
                    rank, data = key.data
                    chunk = os.read(key.fd, 1 << 20)
                    data += chunk
                    if chunk:
                        continue
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    result = _result(rank, bytes(data), rank in mortal)
                    if not isinstance(result, RankFailed):
                        results[rank] = result
                    elif failure is None or (isinstance(failure.cause, CommError) and _earlier(result, failure)):
                        failure = result
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if failure:
        raise failure from failure.cause
    return [results[rank] for rank in range(num_ranks)]


def run_worlds(layout: Layout, function: Callable[..., Any], *args: Any, model: ModelSpec, **options: Any) -> list[Any]:
    """Call `function(world, *args)` in one forked process per rank of `layout`; see `_run` and `run_ranks`."""
    return _run(layout, groups(model, layout), lambda world: function(world, *args), **options)


def run_group(size: int, function: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Call `function(comm)` in `size` processes that form one group; see `run_worlds`."""
    group = Group(name="group", ranks=tuple(range(size)))
    return _run(Layout(data=size), [group], lambda world: function(world.comm("group")), **options)


def _run(
    layout: Layout,
    all_groups: Sequence[Group],
    function: Callable[[World], Any],
    *,
    timeout: float = 60.0,
    timeout_s: float = 30.0,
    mortal: Collection[int] = (),
    shared_memory: bool = True,
) -> list[Any]:
    """`timeout_s` is the Comms' own time limit; without `shared_memory` they talk through Gloo."""
    with tempfile.TemporaryDirectory() as folder:

        def main(rank: int) -> Any:
            world = _world(Path(folder), layout, all_groups, rank, timeout_s, shared_memory)
            result = function(world)
            world.close()
            return result

        return run_ranks(layout.num_ranks, main, timeout=timeout, mortal=mortal)


def _world(
    folder: Path, layout: Layout, all_groups: Sequence[Group], rank: int, timeout_s: float, shared_memory: bool
) -> World:
    rings = {other: folder / f"{other}.ring" for other in range(layout.num_ranks)}
    recorder = Recorder(RingWriter(rings[rank], rank=rank, coords=str(layout.coord(rank))))
    comms, neighbours = connect(
        all_groups,
        rank=rank,
        num_ranks=layout.num_ranks,
        store=dist.FileStore(str(folder / "store"), layout.num_ranks),
        recorder=recorder,
        timeout_s=timeout_s,
        shared_memory=shared_memory,
        rings=rings,
    )
    device = torch.device("cpu")
    return World(rank=rank, layout=layout, device=device, recorder=recorder, comms=comms, neighbours=neighbours)


def _fork(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int]:
    """Start one rank. Returns its process id and the pipe on which its pickled result will come."""
    parent = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        die_with_parent(parent, signal.SIGKILL)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's own time limit is the parent's
        os.close(read_end)
        try:
            answer = ("returned", function(rank, *args))
        except BaseException as error:  # noqa: BLE001  # all of it goes to the parent
            answer = ("raised", (_picklable(error), traceback.format_exc()))
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(answer, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _result(rank: int, data: bytes, mortal: bool) -> Any:
    if not data:
        return None if mortal else RankFailed(rank, "died without a word")
    kind, value = pickle.loads(data)
    if kind == "returned":
        return value
    error, text = value
    return RankFailed(rank, f"raised\n{text}", error)


def _earlier(new: RankFailed, old: RankFailed) -> bool:
    """Whether `new` is rather the cause: a rank that complains about its peers is a victim."""
    return not isinstance(new.cause, CommError)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever its __reduce__ or __init__ does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Faults:
    """Faults of one rank at one step, put under a Comm: `Faults().fail_at(rank=1, step=2).install(comm)`."""

    def __init__(self) -> None:
        self._planned: dict[tuple[int, int], Callable[[str], None]] = {}

    def fail_at(self, *, rank: int, step: int) -> Faults:
        """The first call of this rank in this step raises RuntimeError."""

        def fail(where: str) -> None:
            raise RuntimeError(f"injected fault on {where}")

        self._planned[rank, step] = fail
        return self

    def stall_at(self, *, rank: int, step: int, seconds: float) -> Faults:
        """The first call of this rank in this step sleeps before it does anything."""
        self._planned[rank, step] = lambda where: time.sleep(seconds)
        return self

    def install(self, comm: GroupComm) -> None:
        """Put the faults of this Comm's rank between it and its transport."""
        comm.transport = _Faulty(comm.transport, comm, dict(self._planned))


class _Faulty:
    """A Transport that first does what is planned."""

    def __init__(
        self, transport: Transport, comm: GroupComm, planned: dict[tuple[int, int], Callable[[str], None]]
    ) -> None:
        self._transport, self._comm, self._planned = transport, comm, planned

    def start(self, call: Call) -> Pending | None:
        rank, step = self._comm.group.ranks[self._comm.index], self._comm.recorder.step
        fault = self._planned.pop((rank, step), None)
        if fault:
            fault(f"rank {rank} in step {step}")
        return self._transport.start(call)

    def close(self) -> None:
        self._transport.close()
