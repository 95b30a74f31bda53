"""Start a Python script as several ranks on this machine, each a process of its own, and wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from phalanx.launch.local import FORWARDED
from phalanx.launch.port import listen

_POLL_S = 0.05
_GRACE_S = 5.0
"""After the first rank failed, the others get this long to end by themselves: they have something to say, too."""


def start_script(num_ranks: int, command: Sequence[str]) -> int:
    """Run `command` (a script and its arguments) as `num_ranks` ranks, which find each other as under torchrun. Signals
    are passed on, Ctrl-C and SIGHUP as SIGTERM, which asks a rank to stop; a second signal ends it. Returns 0, or the
    exit code of the first rank that failed (128 + n if signal n ended it)."""
    # From here until rank 0 listens there, the port is free to others. A script may use torch alone, which takes no
    # socket that is open already; should somebody come between, rank 0 says so and the run ends.
    with listen(os.environ.get("MASTER_PORT")) as free:
        address, port = free.getsockname()
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ranks: list[subprocess.Popen[bytes]] = []

    asked = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        passed_on = signal.SIGKILL if asked else number if number == signal.SIGUSR1 else signal.SIGTERM
        asked = True
        for rank in ranks:
            rank.send_signal(passed_on)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # Ctrl-C in the terminal reaches this process alone, which passes it on.
            environment = {**os.environ, **shared, **own}
            ranks.append(subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True))
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    failed: int | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        codes = [rank.returncode for rank in ranks if rank.poll()]
        if codes and failed is None:
            failed, deadline = codes[0], time.monotonic() + _GRACE_S
    codes = [rank.returncode for rank in ranks if rank.poll()]
    code = failed if failed is not None else codes[0] if codes else 0
    return 128 - code if code < 0 else code
