"""How the processes of a run find each other: a key-value store at one address, in which each says who it is.

Whoever waits says for what, every NOTICE_S seconds: which address it tries, or which ranks are missing.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.errors import CommError, InputError, RunError
from phalanx.plan.module import ModulePlan, read_plan
from phalanx.plan.plan import Plan
from phalanx.watch.ranks import ranks_in_words

NOTICE_S = 10.0
_RUN = "run"  # the key under which the store says whose it is
_RETRY_S = 0.2
_ANSWER_S = 30.0
"""A store answers at once whoever connects, and this run's has said whose it is; torch would wait for ever."""


def say(line: str) -> None:
    """One line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def open_store(address: str, port: int, *, serve: bool, timeout_s: float) -> dist.Store:
    """A client of the store at this address; with `serve`, the store itself, which listens on loopback alone if that is
    the address.

    Raises InputError if the port is taken, CommError if nobody answers within the time limit, or no store.
    """
    limit = timedelta(seconds=timeout_s)
    if not serve:
        _await_listener(address, port, timeout_s)
        return _connect(address, port, limit)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # A host may resolve its own name to a loopback address, on which the other hosts would not find it.
        listener.bind((address if address in ("127.0.0.1", "localhost") else "", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InputError(
            f"rank 0 cannot serve the store on {address}:{port}: {error.strerror}",
            where="MASTER_ADDR, MASTER_PORT",
            instead="give an address of rank 0's host and a port that is free there",
        ) from error
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )


def check_run(store: dist.Store, rank: int, run: str, place: str) -> None:
    """See that the store at `place` is the one that rank 0 of `run` serves: it says so there, before anything else.

    Raises CommError if it is another run's, or another program's, whose port is the same.
    """
    if rank == 0:
        store.set(_RUN, run)
        return
    deadline = time.monotonic() + _ANSWER_S
    while not (known := store.check([_RUN])) and time.monotonic() < deadline:
        time.sleep(0.01)
    theirs = store.get(_RUN).decode() if known else "another program"
    if theirs != run:
        raise CommError(
            f"the store at {place} is that of {theirs}; this is {run}, whose rank 0 cannot serve one there: set "
            "MASTER_PORT to another port"
        )


def exchange(store: dist.Store, rank: int, num_ranks: int, name: str, value: Any, *, timeout_s: float) -> list[Any]:
    """Give every rank every rank's `value` (JSON), in rank order. Raises CommError, naming who is missing, after the
    time limit."""
    keys = [f"{name}/{other}" for other in range(num_ranks)]
    store.set(keys[rank], json.dumps(value))
    store.add(name, 1)
    deadline, next_notice = time.monotonic() + timeout_s, time.monotonic() + NOTICE_S
    pause_s = 0.001
    while store.add(name, 0) < num_ranks:  # a wait that times out would leave warnings of torch's on standard error
        if time.monotonic() >= min(deadline, next_notice):
            next_notice += NOTICE_S
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            come = f"{num_ranks - len(missing)} of {num_ranks} ranks have come; missing: {ranks_in_words(missing)}"
            if time.monotonic() >= deadline:
                raise CommError(f"rank {rank} waited {timeout_s:g} s for the others: {come}")
            say(f"rank {rank} waits: {come}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return [json.loads(store.get(key)) for key in keys]


def check_equal(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    plan: Plan | ModulePlan,
    facts: Sequence[Mapping[str, str]],
    *,
    timeout_s: float,
) -> None:
    """Raise RunError, the same on all ranks, if they were started with different plans or software: it names the ranks
    and what differs. `facts` holds each rank's, "plan" among them."""
    odd = {name: [other for other in range(num_ranks) if facts[other][name] != facts[0][name]] for name in facts[0]}
    lines = [
        f"{name}: {facts[0][name]} on rank 0, {facts[ranks[0]][name]} on ranks {ranks_in_words(ranks)}"
        for name, ranks in odd.items()
        if ranks
    ]
    if odd.get("plan"):
        other = odd["plan"][0]
        texts = exchange(store, rank, num_ranks, "plan", _text(plan) if rank in (0, other) else "", timeout_s=timeout_s)
        lines += [f"  {difference}" for difference in _plan(texts[0]).differences(_plan(texts[other]))]
    if lines:
        raise RunError("ranks were started with different plans or software\n" + "\n".join(lines))


def _connect(address: str, port: int, limit: timedelta) -> dist.Store:
    """A client of the store that listens there. Raises CommError if what listens is none."""
    answer: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            answer.append(dist.TCPStore(address, port, is_master=False, timeout=limit))
        except RuntimeError as error:
            answer.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(min(_ANSWER_S, limit.total_seconds()))
    found = answer[0] if answer else RuntimeError("it does not answer")
    if isinstance(found, RuntimeError):
        raise CommError(f"what listens on {address}:{port} is not this run's store: {_first_line(found)}") from found
    return found


def _await_listener(address: str, port: int, timeout_s: float) -> None:
    """Return as soon as somebody listens: the name may resolve, and the port open, later than this process starts."""
    deadline = time.monotonic() + timeout_s
    next_notice = time.monotonic() + NOTICE_S
    while True:
        resolved = address
        try:
            resolved = socket.gethostbyname(address)
            with socket.create_connection((address, port), timeout=NOTICE_S):
                return
        except OSError as error:
            tries = f"the store at {address}:{port} (resolved to {resolved}): {error.strerror or error}"
            if time.monotonic() >= deadline:
                raise CommError(f"nobody answered within {timeout_s:g} s: {tries}") from error
            if time.monotonic() >= next_notice:
                next_notice += NOTICE_S
                say(f"waits for {tries}")
        time.sleep(_RETRY_S)


def _text(plan: Plan | ModulePlan) -> str:
    return _through_file(lambda path: (plan.write(path), path.read_text())[1])


def _plan(text: str) -> Plan | ModulePlan:
    return _through_file(lambda path: (path.write_text(text), read_plan(path))[1])


def _through_file(use: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return use(Path(folder) / "plan.json")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
