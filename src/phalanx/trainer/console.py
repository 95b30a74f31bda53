"""What the terminal shows of the ranks' logs: all that rank 0 writes; of the others only warnings, each once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import BinaryIO

from phalanx.rundir import RunDir
from phalanx.watch.ranks import ranks_in_words

# Python's warnings and logging, and the lines of torch's native code ("[W1129 15:55:30 …").
_WARNING = re.compile(rb"\w*Warning: |\bWARNING\b|^\[W\d+ ")
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class _Tail:
    """What one rank adds to its log. `partial` is a line that has not ended yet."""

    log: BinaryIO
    partial: bytes = b""

    def new(self) -> bytes:
        return self.log.read(_CHUNK_BYTES) or b""

    def new_lines(self) -> list[bytes]:
        *lines, self.partial = (self.partial + self.new()).split(b"\n")
        return lines


@dataclass(slots=True)
class Console:
    """Follows the logs of `num_ranks` ranks from where they end now. The logs are the truth; nothing is only here."""

    tails: list[_Tail]
    warned: dict[bytes, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: RunDir, num_ranks: int) -> Console:
        """The console of a run that is about to start."""
        logs = [run_dir.log(rank).open("ab+", buffering=0) for rank in range(num_ranks)]
        for log in logs:
            log.seek(0, os.SEEK_END)
        return cls([_Tail(log) for log in logs])

    def relay(self) -> None:
        """Show what is new."""
        first, *others = self.tails
        while chunk := first.new():
            _show(chunk)
        for rank, tail in enumerate(others, start=1):
            for line in filter(_WARNING.search, tail.new_lines()):
                ranks = self.warned.setdefault(line, [])
                if not ranks:
                    _show(f"rank {rank}: ".encode() + line + b"\n")
                ranks.append(rank)

    def close(self) -> None:
        """Show how often warnings came again, and on which ranks."""
        for line, ranks in self.warned.items():
            if len(ranks) > 1:
                words = f"{len(ranks)} times on ranks {ranks_in_words(sorted(set(ranks)))}: "
                _show(words.encode() + line + b"\n")
        for tail in self.tails:
            tail.log.close()


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more, or a disk is full: no reason to stop a run
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
