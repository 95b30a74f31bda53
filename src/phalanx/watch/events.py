"""The ring file: what one rank is doing, readable by anyone on its host, even after the rank was killed.

Each rank records every communication call in a memory-mapped file, at its begin and at its end. The file holds the
last NUM_CALLS calls and a header that says where the rank is now (step, micro-batch, phase, the call it waits in). The
kernel owns the pages, so they survive any death of the writer but the host's. Writer and reader live here: nobody else
knows the format. A record costs about a microsecond, because what is textual is interned once in a table of strings.

    identity | state | strings: (length, UTF-8)* | ring: NUM_CALLS records

A writer can be killed, or overtaken by a reader, in the middle of a record. A record therefore begins and ends with its
number, and the reader copies until two copies agree.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import RunError
from phalanx.watch.ranks import as_ranges, from_ranges, ranks_in_words

NUM_CALLS = 128
_FAMILY = b"PHXRING"  # a magic number, pid and parent begin a ring file of any version
_MAGIC = _FAMILY + b"3"
_STRINGS_BYTES = 64 * 1024
_IDENTITY = struct.Struct("<8siiidd")  # magic, pid, parent, rank, wall clock minus monotonic, copied at
_OWNERS = struct.Struct("<8sii")
_COPIED_OFFSET = struct.calcsize("<8siiid")
_STATE = struct.Struct("<qiHdQd")  # step, micro-batch, phase, heartbeat, number of the call waited in, since
_STATE_OFFSET = 64
_USED = struct.Struct("<I")  # bytes of strings in use
_USED_OFFSET = 120
_STRINGS_OFFSET = 128
_LENGTH = struct.Struct("<H")
# number, site, phase, peer, channel, step, micro-batch, sequence, bytes, begin, wait, end, number again
_CALL = struct.Struct("<QHHiiqiQQdddQ")
_CALL_BYTES = _CALL.size
_TIME = struct.Struct("<d")
_WAIT_OFFSET = struct.calcsize("<QHHiiqiQQd")
_END_OFFSET = _WAIT_OFFSET + _TIME.size
_RING_OFFSET = _STRINGS_OFFSET + _STRINGS_BYTES
FILE_BYTES = _RING_OFFSET + NUM_CALLS * _CALL_BYTES
_NOBODY = -1
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One communication call. Times are seconds of the host's monotonic clock; None means that it has not come to that.

    `sequence` counts, from 1, the collectives of the group, or the messages of one (peer, channel, direction).
    `peer` is a global rank (send, recv, broadcast's root). `reduce_op` and `dtype` ("float32") are "" where there is
    nothing to reduce, or no tensor. `wait_s`: when the rank began to block for it.
    """

    number: int
    group: str
    members: tuple[int, ...]
    operation: str
    purpose: str
    reduce_op: str
    dtype: str
    num_bytes: int
    sequence: int
    peer: int | None
    channel: int | None
    step: int
    micro_batch: int
    phase: str
    begin_s: float
    wait_s: float | None
    end_s: float | None

    def __str__(self) -> str:
        """As `all_reduce 'mlp output' #8 of group tensor with ranks 2, 3, sum of float32`."""
        toward = {"send": "to", "recv": "from", "broadcast": "from"}.get(self.operation)
        peer = f" {toward} rank {self.peer}" if toward and self.peer is not None else ""
        channel = f" on channel {self.channel}" if self.channel is not None else ""
        group = f" of group {self.group} with ranks {ranks_in_words(self.members)}"
        kind = f", {f'{self.reduce_op} of ' if self.reduce_op else ''}{self.dtype}" if self.dtype else ""
        return f"{self.operation} '{self.purpose}' #{self.sequence}{peer}{channel}{group}{kind}"

    @property
    def place(self) -> str:
        """As `step 3, micro-batch 1, forward`."""
        return place_in_words(self.step, self.micro_batch, self.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingState:
    """One rank as its ring file shows it. `read_s` is the monotonic time at which the file was read, or copied.

    `calls` are the last ones in the order in which they began; `waiting` is the one that the rank blocks in, if any.
    Adding `wall_clock_offset_s` to a time gives Unix time, by which ranks of several hosts can be compared.
    """

    pid: int
    parent_pid: int
    rank: int
    coords: str
    host: str
    step: int
    micro_batch: int
    phase: str
    heartbeat_s: float
    read_s: float
    wall_clock_offset_s: float
    waiting: Call | None
    calls: tuple[Call, ...]

    @property
    def under_way(self) -> tuple[Call, ...]:
        """Calls that began and did not end, oldest first."""
        return tuple(call for call in self.calls if call.end_s is None)


class RingWriter:
    """Writes one rank's ring file. Replaces what an earlier run left at `path`.

    Raises RunError if the file cannot be made (its space is reserved at once, so that no later write can fail).
    """

    def __init__(self, path: Path, *, rank: int, coords: str = "") -> None:
        self.path = path
        self.step, self.micro_batch, self.phase = 0, -1, 0
        self._strings: dict[str, int] = {}
        self._used = 0
        self._number = 0
        self._waiting, self._since = 0, 0.0
        offset = time.time() - time.monotonic()
        self._map = _create(path, _IDENTITY.pack(_MAGIC, os.getpid(), os.getppid(), rank, offset, 0.0))
        for text in ("", coords, socket.gethostname()):
            self.intern(text)
        self.beat()

    def intern(self, text: str) -> int:
        """The number of a string in the file's table. When the table is full, new strings read as "" (number 0)."""
        number = self._strings.get(text)
        if number is None:
            data = text.encode()[: 2**16 - 1]
            start = _STRINGS_OFFSET + self._used
            if self._used + _LENGTH.size + len(data) > _STRINGS_BYTES or len(self._strings) >= 2**16:
                return 0
            self._map[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
            _LENGTH.pack_into(self._map, start, len(data))
            self._used += _LENGTH.size + len(data)
            _USED.pack_into(self._map, _USED_OFFSET, self._used)
            number = self._strings[text] = len(self._strings)
        return number

    def site(
        self, group: str, members: Sequence[int], operation: str, purpose: str, reduce_op: str = "", dtype: str = ""
    ) -> int:
        """Intern what is the same in every call made from one place; `begin` takes the number."""
        return self.intern(_SEPARATOR.join((group, as_ranges(members), operation, purpose, reduce_op, dtype)))

    def beat(self) -> None:
        """Say that the rank is alive, and where: `step`, `micro_batch` (-1: none) and `phase` (an interned string)."""
        where = (self.step, self.micro_batch, self.phase)
        _STATE.pack_into(self._map, _STATE_OFFSET, *where, time.monotonic(), self._waiting, self._since)

    def begin(self, site: int, sequence: int, num_bytes: int, peer: int = _NOBODY, channel: int = _NOBODY) -> int:
        """Record that a call began; returns its number for `wait` and `end`."""
        self._number = number = self._number + 1
        offset = _RING_OFFSET + number % NUM_CALLS * _CALL_BYTES
        where = (self.phase, peer, channel, self.step, self.micro_batch)
        _CALL.pack_into(
            self._map, offset, number, site, *where, sequence, num_bytes, time.monotonic(), 0.0, 0.0, number
        )
        return number

    def wait(self, number: int) -> None:
        """Record that the rank blocks from now on until the call `number` is complete."""
        self._waiting, self._since = number, time.monotonic()
        if self._number - number < NUM_CALLS:
            offset = _RING_OFFSET + number % NUM_CALLS * _CALL_BYTES + _WAIT_OFFSET
            _TIME.pack_into(self._map, offset, self._since)
        self.beat()

    def end(self, number: int) -> None:
        """Record that the call `number` is complete."""
        if self._number - number < NUM_CALLS:
            offset = _RING_OFFSET + number % NUM_CALLS * _CALL_BYTES + _END_OFFSET
            _TIME.pack_into(self._map, offset, time.monotonic())
        if self._waiting:
            self._waiting, self._since = 0, 0.0
            self.beat()

    def close(self) -> None:
        """Unmap the file and remove it: a rank that ended well leaves nothing behind."""
        self._map.close()
        self.path.unlink(missing_ok=True)


def ring_directory() -> Path:
    """Where ring files live: memory, not a disk that may be slow, full or remote."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def ring_path(run: Path, rank: int) -> Path:
    """The ring file of one rank of the run in folder `run`: other runs on this host have other names."""
    digest = hashlib.blake2s(str(run.resolve()).encode(), digest_size=8).hexdigest()
    return ring_directory() / f"phalanx-{os.getuid()}-{digest}-{rank:05d}.ring"


def remove_dead_rings() -> None:
    """Remove this user's ring files, of any version, whose writer is dead and whose writer's parent, who might still
    read it, is too; and what is none, under such a name."""
    for path in ring_directory().glob(f"phalanx-{os.getuid()}-*.ring"):
        try:
            with path.open("rb") as file:
                head = file.read(_OWNERS.size)
        except FileNotFoundError:
            continue
        owners = _OWNERS.unpack(head)[1:] if len(head) == _OWNERS.size and head.startswith(_FAMILY) else ()
        if all(process_status(pid) == "dead" for pid in owners):
            path.unlink(missing_ok=True)


def copy_ring(source: Path, destination: Path) -> None:
    """Copy a ring file (whole or not at all) and note the time, so that the copy tells how long a call had waited.

    Raises FileNotFoundError if there is none, OSError, and then leaves nothing.
    """
    data = bytearray(source.read_bytes())
    if len(data) >= _COPIED_OFFSET + _TIME.size:
        _TIME.pack_into(data, _COPIED_OFFSET, time.monotonic())
    beside = destination.with_suffix(".part")
    try:
        beside.write_bytes(data)
        beside.replace(destination)
    finally:
        beside.unlink(missing_ok=True)


def read_ring(path: Path) -> RingState:
    """Read a ring file or a copy of one, while its writer runs or after its death.

    Raises FileNotFoundError if there is none, RunError if the file is not a ring file of this version, or damaged.
    """
    data = _stable(path)
    if len(data) != FILE_BYTES or not data.startswith(_MAGIC):
        raise RunError(f"{path} is not a ring file of this version: {len(data)} bytes, beginning with {data[:8]!r}")
    _, pid, parent, rank, offset_s, copied_s = _IDENTITY.unpack_from(data, 0)
    step, micro_batch, phase, heartbeat_s, waiting, _ = _STATE.unpack_from(data, _STATE_OFFSET)
    try:
        text = dict(enumerate(_read_strings(data)))
        calls = sorted(_read_calls(data, text), key=lambda call: call.number)
    except (struct.error, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    return RingState(
        pid=pid,
        parent_pid=parent,
        rank=rank,
        coords=text.get(1, ""),
        host=text.get(2, ""),
        step=step,
        micro_batch=micro_batch,
        phase=text.get(phase, ""),
        heartbeat_s=heartbeat_s,
        read_s=copied_s or time.monotonic(),
        wall_clock_offset_s=offset_s,
        waiting=next((call for call in calls if call.number == waiting), None),
        calls=tuple(calls),
    )


def in_words(state: RingState) -> str:
    """One line: who the rank is, what it waits in or what it last finished, how long that has been, and where."""
    who = f"rank {state.rank}" + (f" ({state.coords})" if state.coords else "")
    if state.waiting:
        since = state.waiting.wait_s if state.waiting.wait_s is not None else state.waiting.begin_s
        return f"{who}: waits {state.read_s - since:.1f} s in {state.waiting}; {state.waiting.place}"
    finished = max(
        (call for call in state.calls if call.end_s is not None), key=lambda call: call.end_s or 0, default=None
    )
    since = max(state.heartbeat_s, finished.end_s if finished and finished.end_s else 0.0)
    words = f"{who}: is in no call since {state.read_s - since:.1f} s"
    words += f"; {place_in_words(state.step, state.micro_batch, state.phase)}"
    words += f"; last finished {finished}" if finished else "; has finished no call"
    if state.under_way:
        return words + f"; under way: {len(state.under_way)}, the oldest {state.under_way[0]}"
    return words


def place_in_words(step: int, micro_batch: int, phase: str) -> str:
    """As `step 3, micro-batch 1, forward`; a micro-batch below 0, or a phase "", is left out."""
    parts = [f"step {step}", f"micro-batch {micro_batch}" if micro_batch >= 0 else "", phase]
    return ", ".join(filter(None, parts))


def process_status(pid: int) -> str:
    """What the kernel says of a process of this host: "running", "sleeping", "stopped", "dead" …"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    names = {"R": "running", "D": "waits for a device", "T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}
    return names.get(stat.rpartition(")")[2].split()[0], "sleeping")


def _create(path: Path, identity: bytes) -> mmap.mmap:
    """A new file, zeros but for its identity, under a name of its own, renamed to `path`: a reader of the old file
    keeps the old one, and nobody takes the new one for an orphan."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            os.pwrite(descriptor, identity, 0)
            os.replace(beside, path)
            return mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunError(f"cannot make the ring file {path} of {FILE_BYTES} bytes: {error.strerror}") from error


def _stable(path: Path) -> bytes:
    """Two equal copies in a row mean that no record was being written meanwhile; a busy writer gets the last copy."""
    data, again = b"", path.read_bytes()
    for _ in range(5):
        if again == data:
            break
        data, again = again, path.read_bytes()
    return again


def _read_strings(data: bytes) -> list[str]:
    strings = []
    position = _STRINGS_OFFSET
    (used,) = _USED.unpack_from(data, _USED_OFFSET)
    if used > _STRINGS_BYTES:
        raise ValueError(f"{used} bytes of strings in a table of {_STRINGS_BYTES}")
    end = position + used
    while position < end:
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        strings.append(data[position : position + length].decode(errors="replace"))
        position += length
    return strings


def _read_calls(data: bytes, text: dict[int, str]) -> list[Call]:
    calls = []
    for index in range(NUM_CALLS):
        fields = _CALL.unpack_from(data, _RING_OFFSET + index * _CALL_BYTES)
        number, site, phase, peer, channel, step, micro_batch, sequence, num_bytes, *times, again = fields
        if number == 0 or number != again or number % NUM_CALLS != index:
            continue  # never used, or cut short by the writer's death
        names = text.get(site, "").split(_SEPARATOR)
        group, members, operation, purpose, *kind = names if len(names) == 6 else (*("?",) * 4, "", "")
        calls.append(
            Call(
                number=number,
                group=group,
                members=from_ranges(members),
                operation=operation,
                purpose=purpose,
                reduce_op=kind[0],
                dtype=kind[1],
                num_bytes=num_bytes,
                sequence=sequence,
                peer=None if peer == _NOBODY else peer,
                channel=None if channel == _NOBODY else channel,
                step=step,
                micro_batch=micro_batch,
                phase=text.get(phase, ""),
                begin_s=times[0],
                wait_s=times[1] or None,
                end_s=times[2] or None,
            )
        )
    return calls
