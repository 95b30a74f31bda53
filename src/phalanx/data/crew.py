"""Crew: worker processes that tokenize parts, each on one core.

A worker holds one end of a pipe and nothing else of its builder: when the builder dies, however, the pipe fails and the
worker ends. Workers are started afresh, not forked: the threads of `tokenizers` do not survive a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from phalanx.data.parts import Part
from phalanx.data.tokenize import Counts, PartWriter, Recipe
from phalanx.errors import RunError

PROGRAM = "import sys; from phalanx.data.crew import work; work(int(sys.argv[1]))"


def tokenize(
    todo: Sequence[Part], recipe: Recipe, folder: Path, num_workers: int, done: Callable[[float], None]
) -> None:
    """Write the parts `todo` into `folder` with `num_workers` processes; `done` is told the bytes of input that they
    have got through. A single part is written here, on all cores as far as `tokenizers` can.

    Raises what a worker raises (DataError, OSError), and RunError where one is killed. Finished parts stay.
    """
    if len(todo) == 1:
        PartWriter(recipe, folder).write(todo[0], done)
        return
    waiting, busy = iter(todo), dict[Connection, Part]()
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


def _give(connection: Connection, waiting: Iterator[Part], busy: dict[Connection, Part]) -> None:
    """The next part, if there is one, to a worker that has none."""
    following = next(waiting, None)
    if following is not None:
        busy[connection] = following
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: noticed where its answer is awaited
            connection.send(following)


def _received(connection: Connection, process: subprocess.Popen[bytes], part: Part) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        code = process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        often = ", often the kernel's when memory runs out" if code == -signal.SIGKILL else ""
        files = ", ".join(str(span.file.path) for span in part.spans[:3])
        what = f"a worker {how}{often}, in {files}; the finished parts are kept: run the same command again"
        raise RunError(what) from None


@contextmanager
def _worker(recipe: Recipe, folder: Path) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """A worker, ended when this ends. Ctrl-C in a terminal does not reach it: its builder ends it."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    theirs.close()
    with process, Connection(ours.detach()) as connection:
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send((recipe, folder))
            yield connection, process
        finally:
            process.terminate()


def work(descriptor: int) -> None:
    """Be a worker: a recipe and parts come in, bytes done and at last counts go out."""
    with Connection(descriptor) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            writer = PartWriter(*connection.recv())
            while True:
                connection.send(writer.write(connection.recv(), connection.send))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise  # the builder is gone, or has no more to do
        except Exception as error:  # noqa: BLE001 (the builder raises it)
            connection.send(error)
