"""What every process that trains does around its work, whoever started it: die with its parent, use memory and threads
well, and say how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from phalanx.errors import InputError
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.watch.outcomes import Outcome

Entry = Callable[[Plan, RunDir], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_NEVER_MAPPED, _LARGE_BYTES = 1 << 30, 8 << 20


def load_entry(name: str) -> Entry:
    """The function that `module:function` names. Raises InputError if there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"the entry {name} cannot be loaded: {error}", instead="give it as module:function") from error


def run(entry: Entry, plan: Plan, run_dir: RunDir, rank: int) -> Outcome:
    """Call the entry, whatever it raises, and leave its outcome in the run folder, or on standard error where nothing
    can be written there."""
    try:
        entry(plan, run_dir)
    except BaseException as error:  # noqa: BLE001 (kept for the report, whatever it is)
        outcome = Outcome.now(rank, error)
    else:
        outcome = Outcome.now(rank, None)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        outcome.write(run_dir.outcome(rank))
    except OSError as error:
        said = outcome.error.traceback if outcome.error else ""
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{said}rank {rank} cannot say in the run folder how it ended: {error}\n")
    return outcome


def hang_up(keep: Collection[int] = ()) -> None:
    """Shut down every socket of this process but standard streams and `keep`, so that other ranks see at once that this
    one has failed, although it lives on to report. Linux only: elsewhere nothing happens."""
    folder = Path("/proc/self/fd")
    for descriptor in [int(entry.name) for entry in folder.iterdir()] if folder.exists() else []:
        if descriptor <= 2 or descriptor in keep:
            continue
        # It may be no socket, not connected, or gone meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # Gloo's thread would abort
                sock.shutdown(socket.SHUT_RDWR)


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send `how` to this process when its parent ends, even by SIGKILL; end now if `parent` is already
    gone. Linux only: elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how))
    if os.getppid() != parent:
        os._exit(128 + how)


def keep_freed_memory() -> None:
    """Tell glibc to reuse large freed blocks instead of returning them to the kernel, which would zero each page anew
    at the next step: worth 4 % of a step on CPU. Elsewhere nothing happens."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _NEVER_MAPPED)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def own_mapping() -> Iterator[None]:
    """In here glibc gives blocks of 8 MiB and more mappings of their own, unless it has room: freed, they go back to
    the kernel. For one that comes and goes, as ZeRO 3 gathers and frees, `keep_freed_memory` is wrong: what is made
    meanwhile settles where it was, the next one finds no room, and in time all that ever were take memory."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _NEVER_MAPPED)


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


def write_to(log: Path) -> None:
    """Send standard output and error of this process, native code's too, to the end of `log`."""
    _redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def write_to_both(log: Path) -> None:
    """Send standard output and error to the end of `log` and, through a small process of its own, to where standard
    output went before: it lives until the last writer is gone. Call it while this process has one thread."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            os.close(write_end)
            # Slurm signals every process of a step: this one lives on until all that is said has passed.
            for interrupt in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(interrupt, signal.SIG_IGN)
            with log.open("ab", buffering=0) as file:
                while chunk := os.read(read_end, 1 << 16):
                    os.write(1, chunk)
                    with contextlib.suppress(OSError):  # a full disk costs lines of the log, not the run
                        file.write(chunk)
        finally:
            os._exit(0)
    os.close(read_end)
    _redirect(write_end)


def _redirect(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def dump_stacks_on_request(path: Path) -> None:
    """On SIGQUIT, write the Python stacks of all threads to `path`, even while native code hangs; on a crash in native
    code, write them to standard error."""
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, file=path.open("w", encoding="utf-8"), all_threads=True)
