"""How the ranks of a run ended, told twice: what a rank says itself (Outcome: it finished, or this exception) and what
its agent saw (Ending: exit code or signal). A rank that was killed says nothing, one that called `exit(0)` lies by its
exit code; only both together tell the cause. Writer and reader of both files stand here."""

from __future__ import annotations

import json
import re
import signal
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import phalanx
from phalanx.errors import CommError, PhalanxError
from phalanx.rundir import write_whole

# What Gloo and the store say when a peer is gone or late: a consequence, unless nobody has a better explanation.
_PEER_ERRORS = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|timed out|socket timeout|connectFullMesh|"
    r"remote peer|peer closed|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError:
    """An exception that ended a rank. `for_users` if its text alone says everything (a PhalanxError)."""

    kind: str
    text: str
    file: str
    line: int
    function: str
    traceback: str
    exit_code: int
    for_users: bool
    blames_peer: bool

    @classmethod
    def of(cls, error: BaseException) -> RaisedError:
        """Describe an exception. Its place is the innermost frame that is no library's."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not _is_library(frame.filename)]
        frame = (own or frames or [traceback.FrameSummary("?", 0, "?")])[-1]
        text = str(error)
        return cls(
            kind=type(error).__name__,
            text=text,
            file=frame.filename,
            line=frame.lineno or 0,
            function=frame.name,
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            exit_code=error.exit_code if isinstance(error, PhalanxError) else 3,
            for_users=isinstance(error, PhalanxError),
            blames_peer=isinstance(error, CommError | ConnectionError)
            or (isinstance(error, RuntimeError) and _PEER_ERRORS.search(text) is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What rank `rank` says at its end: `error` is None if it finished its work. `time_s` is Unix time."""

    rank: int
    host: str
    time_s: float
    error: RaisedError | None

    @classmethod
    def now(cls, rank: int, error: BaseException | None) -> Outcome:
        """The outcome of this process, at this moment."""
        raised = None if error is None else RaisedError.of(error)
        return cls(rank=rank, host=socket.gethostname(), time_s=time.time(), error=raised)

    @property
    def exit_code(self) -> int:
        """What the rank's process should end with."""
        return self.error.exit_code if self.error else 0

    def write(self, path: Path) -> None:
        """Write as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """What `write` wrote; None if the rank did not come to say anything."""
        if not path.exists():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        error = values.pop("error")
        return cls(error=None if error is None else RaisedError(**error), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the agent saw a rank end: `exit_code`, or the `signal` that killed it; neither where there was no agent and
    the rank says nothing. `peak_memory_bytes` is 0 where nobody measured it. `by_agent` if the agent was already
    ending all ranks and this signal was its own. `time_s` is Unix time."""

    rank: int
    host: str
    exit_code: int | None
    signal: int | None
    by_agent: bool
    time_s: float
    peak_memory_bytes: int

    def __str__(self) -> str:
        """In words, as `was killed by signal 9 (SIGKILL), often the kernel's out-of-memory killer`."""
        if self.exit_code is None and self.signal is None:
            return "left no word: it was killed, or crashed in native code, or still runs"
        if self.signal is None:
            early = "left early with" if self.exit_code == 0 else "ended with"
            return f"{early} exit code {self.exit_code}"
        return f"was killed by {signal_in_words(self.signal)}"


def write_endings(path: Path, endings: Iterable[Ending]) -> None:
    """Write all endings as one JSON list, in the order in which they were seen."""
    write_whole(path, json.dumps([asdict(ending) for ending in endings], indent=1) + "\n")


def read_endings(path: Path) -> tuple[Ending, ...] | None:
    """What `write_endings` wrote; None if the agent did not come to write it."""
    if not path.exists():
        return None
    return tuple(Ending(**values) for values in json.loads(path.read_text(encoding="utf-8")))


def signal_in_words(number: int) -> str:
    """As `signal 11 (SIGSEGV), an invalid memory access in native code`."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = _SIGNAL_HINTS.get(name, "")
    return f"signal {number} ({name})" + (f", {hint}" if hint else "")


_SIGNAL_HINTS = {
    "SIGKILL": "often the kernel's out-of-memory killer",
    "SIGSEGV": "an invalid memory access in native code",
    "SIGBUS": "an invalid memory access, often a full /dev/shm or a file cut short",
    "SIGABRT": "native code gave up: its reason stands in the log",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "somebody asked it to end",
    "SIGXCPU": "a limit on processor time",
    "SIGXFSZ": "a limit on file size",
}

_LIBRARY_FOLDERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN_FOLDER = str(Path(phalanx.__file__).parent)


def _is_library(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_LIBRARY_FOLDERS) and not file.startswith(_OWN_FOLDER))
