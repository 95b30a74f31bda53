"""Crew: worker processes that tokenize parts, each on one core.

A worker holds one end of a pipe and nothing else of its builder: when the builder dies, however, the pipe fails and the
worker ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from phalanx.data.parts import Part
from phalanx.data.tokenize import Counts, PartWriter, Recipe
from phalanx.errors import RunError


def tokenize(
    todo: Mapping[int, Part], recipe: Recipe, folder: Path, num_workers: int, done: Callable[[float], None]
) -> None:
    """Write the parts `todo` into `folder` with `num_workers` processes; `done` is told the bytes of input that they
    have got through. A single part is written here, on all cores as far as `tokenizers` can.

    Raises what a worker raises (DataError, OSError), and RunError where one is killed. Finished parts stay.
    """
    if len(todo) == 1:
        ((number, part),) = todo.items()
        PartWriter(recipe, folder).write(number, part, done)
        return
    waiting, busy = iter(todo.items()), dict[Connection, int]()
    with ExitStack() as stack:
        workers = {}
        for _ in range(min(num_workers, len(todo))):
            connection, process = stack.enter_context(_worker(recipe, folder))
            workers[connection] = process
            _give(connection, waiting, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                message = _received(ready, workers[ready], busy[ready])
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Counts):
                    del busy[ready]
                    _give(ready, waiting, busy)
                else:
                    done(message)


def _give(connection: Connection, waiting: Iterator[tuple[int, Part]], busy: dict[Connection, int]) -> None:
    """The next part, if there is one, to a worker that has none."""
    following = next(waiting, None)
    if following is not None:
        busy[connection], _ = following
        with suppress(BrokenPipeError):  # it is dead: that is noticed where its answer is awaited
            connection.send(following)


def _received(connection: Connection, process: SpawnProcess, number: int) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        often = ", often the kernel's when memory runs out" if code == -signal.SIGKILL else ""
        what = f"a worker {how}{often}, in part {number:,}; the finished parts are kept: run the same command again"
        raise RunError(what) from None


@contextmanager
def _worker(recipe: Recipe, folder: Path) -> Iterator[tuple[Connection, SpawnProcess]]:
    """A worker, ended when this ends. It is spawned: a fork would hold the pipes of all workers before it, and the
    threads of `tokenizers` do not survive one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, recipe, folder), name="phalanx data build", daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.terminate()
        process.join()


def _work(connection: Connection, recipe: Recipe, folder: Path) -> None:
    """A worker: parts come in, bytes done and at last counts go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the builder ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        try:
            writer = PartWriter(recipe, folder)
            while True:
                number, part = connection.recv()
                connection.send(writer.write(number, part, connection.send))
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 (the builder raises it)
            connection.send(error)
    except (BrokenPipeError, ConnectionResetError):  # the builder is gone
        return
