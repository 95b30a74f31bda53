"""Contenders of a benchmark: each is a set of processes, forked for one turn, that all take steps at the same time."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from phalanx.trainer.process import die_with_parent

Steps = Generator[Mapping[str, float], None, None]
"""Takes one optimizer step per item, which holds the seconds that this rank was blocked in, by kind (empty where nobody
counted them). The first one prepares, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`load()` imports what is needed, in the process that then forks `num_ranks` ranks, so that no contender carries
    the modules of another. Each rank runs `steps(rank, folder)`; `folder` is empty, of this turn only, and shared.
    `copies`: how many times the ranks do the same work, side by side; CPU seconds are those of one.
    """

    name: str
    num_ranks: int
    steps: Callable[[int, Path], Steps]
    load: Callable[[], None] = lambda: None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The best of the steps of one turn: other programs only ever make a step slower.

    `cpu_s` is summed over ranks; `wall_s` lasts until the last rank is done; `blocked` is the average rank's share of
    that step that it was blocked in, by kind; `idle` the share of the cores' time that no rank used; `peak_bytes` the
    largest resident memory of a rank.
    """

    cpu_s: float
    wall_s: float
    blocked: Mapping[str, float]
    idle: float
    peak_bytes: int


def take_turn(contender: Contender, num_steps: int, num_warm_ups: int = 1) -> Turn:
    """Start the contender's ranks, take its steps, and end it. Raises RuntimeError with the traceback of a rank that
    fails. Call it in a process with one thread."""
    sys.stdout.flush()
    with TemporaryDirectory() as folder:
        leader, connections = _fork_leader(contender, Path(folder))
        try:
            steps = [_step_together(contender, connections) for _ in range(num_warm_ups + num_steps)][num_warm_ups:]
        except BaseException:
            os.kill(leader, signal.SIGKILL)  # and its ranks with it
            raise
        finally:
            for connection in connections:
                connection.close()
            os.waitpid(leader, 0)
    wall_s, answers = min(steps, key=lambda step: step[0])
    kinds = {kind for answer in answers for kind in answer["blocked_s"]}
    return Turn(
        cpu_s=min(sum(answer["cpu_s"] for answer in answers) for _, answers in steps) / contender.copies,
        wall_s=wall_s,
        blocked={
            kind: sum(answer["blocked_s"].get(kind, 0.0) for answer in answers) / len(answers) / wall_s
            for kind in sorted(kinds)
        },
        idle=1 - sum(answer["cpu_s"] for answer in answers) / wall_s / min(len(answers), os.cpu_count() or 1),
        peak_bytes=max(answer["peak_bytes"] for answer in steps[-1][1]),
    )


def _step_together(contender: Contender, connections: Sequence[socket.socket]) -> tuple[float, list[dict]]:
    """One step of all ranks: its wall seconds and what each rank says of it."""
    start_s = time.perf_counter()
    for connection in connections:
        connection.send(b"go")
    answers = []
    for rank, connection in enumerate(connections):
        answer = json.loads(connection.recv(1 << 20) or b'{"error": "died without a word"}')
        if "error" in answer:
            raise RuntimeError(f"{contender.name}, rank {rank}: {answer['error']}")
        answers.append(answer)
    return time.perf_counter() - start_s, answers


def _fork_leader(contender: Contender, folder: Path) -> tuple[int, list[socket.socket]]:
    """Start a process that loads what the contender needs and forks its ranks. Returns its process id and a connection
    to each rank. When it ends, so do the ranks."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(contender.num_ranks)]
    parent = os.getpid()
    leader = os.fork()
    if leader:
        for _, theirs in pairs:
            theirs.close()
        return leader, [ours for ours, _ in pairs]
    try:
        die_with_parent(parent, signal.SIGKILL)
        contender.load()
        for ours, _ in pairs:
            ours.close()
        for rank, (_, connection) in enumerate(pairs):
            if os.fork() == 0:
                die_with_parent(os.getppid(), signal.SIGKILL)
                _serve(contender, rank, folder, connection)
        while True:
            os.wait()
    except ChildProcessError:
        pass  # all ranks have ended, and said why
    finally:
        os._exit(0)


def _serve(contender: Contender, rank: int, folder: Path, connection: socket.socket) -> NoReturn:
    """Be one rank: a step for every message, until the other end is closed."""
    try:
        steps = contender.steps(rank, folder)
        while connection.recv(16):
            before_s = time.process_time()
            blocked_s = next(steps)
            answer = {
                "cpu_s": time.process_time() - before_s,
                "blocked_s": dict(blocked_s),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
            connection.send(json.dumps(answer).encode())
        steps.close()
    except BaseException:  # noqa: BLE001 (the benchmark raises it)
        connection.send(json.dumps({"error": traceback.format_exc()}).encode())
    finally:
        os._exit(0)
