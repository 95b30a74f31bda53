"""Neighbours: the other ranks of this host, and how to sleep until one of them has done something.

Every two ranks share a Unix socket, in Linux' abstract namespace, so that no name is left anywhere. It carries few
things: descriptors of shared memory, a last word when a rank leaves or gives up, and the end of file that the kernel
sends when a rank dies. Every rank has a bell (an eventfd) that the others ring when it sleeps and something has come
for it. Nobody spins.

What is under way is cut into tasks: generators that yield whatever they cannot go on without (a Blocker). A lane runs
its tasks one after another. Whoever waits for one call lets all lanes go on, so that no call starves behind another.
"""

from __future__ import annotations

import array
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import Protocol

from phalanx.errors import CommError

# A sleeper looks again after this time even if no bell rang: should the processor have reordered a store of the one
# with a load of the other, where the fences below are weaker than on x86, then a call comes late instead of never.
_LOOK_AGAIN_S = 0.1
_PACKET_BYTES = 4096
_GREETING = struct.Struct("<i")  # rank
_HERE_IS, _LEAVING, _GIVING_UP = b"H", b"L", b"G"
_KEY = struct.Struct("<II")  # group number, stream number

Key = tuple[int, int]


class Blocker(Protocol):
    """Something that a task waits for."""

    ranks: tuple[int, ...]

    def ready(self) -> bool:
        """Whether the task can go on."""

    def flag(self, sleeping: bool) -> None:
        """Tell whoever can unblock it that this rank sleeps and wants its bell rung, or no longer does."""


Task = Generator[Blocker, None, None]


class CallUnderWay:
    """A call of a transport: complete when none of its tasks is left; the last one stands in `lane`."""

    __slots__ = ("_neighbours", "lane", "num_tasks")

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours, self.num_tasks = neighbours, 0
        self.lane: Lane | None = None

    def ready(self) -> bool:
        """See `Pending.ready`."""
        if self.lane is not None:
            self._neighbours.go_on(self.lane)
        return not self.num_tasks

    def wait(self, timeout_s: float) -> None:
        """See `Pending.wait`."""
        self._neighbours.wait(self, timeout_s)


class Lane:
    """Tasks that must run one after another; false when there are none."""

    __slots__ = ("_neighbours", "_tasks", "blocker")
    blocker: Blocker

    def __init__(self, neighbours: Neighbours) -> None:
        self._tasks: deque[tuple[Task, CallUnderWay]] = deque()
        self._neighbours = neighbours

    def add(self, task: Task, call: CallUnderWay) -> None:
        """Queue a task of a call; it runs at the next `advance`."""
        call.num_tasks += 1
        call.lane = self
        self._tasks.append((task, call))
        self._neighbours.active[self] = None
        self._neighbours.added = True

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def run(self) -> None:
        """Go on as far as possible, then to `blocker`, which the first unfinished task waits for."""
        tasks = self._tasks
        while tasks:
            task, call = tasks[0]
            blocker = next(task, None)
            if blocker is not None:
                self.blocker = blocker
                return
            call.num_tasks -= 1
            tasks.popleft()
        self._neighbours.active.pop(self, None)


class Neighbours:
    """This rank's connections to the other ranks of its host.

    `names` maps each of them, this rank too, to the name of the socket it listens on: see `Listener`. All must come
    within `timeout_s`. `memory[(rank, key)]` holds the descriptors of shared memory that came and were not yet taken.
    Behind `with fence: pass`, a locked instruction, all that was stored before is visible to others before anything
    after is loaded.
    """

    def __init__(self, rank: int, names: Mapping[int, str], listener: Listener, *, timeout_s: float) -> None:
        self.rank = rank
        self.memory: dict[tuple[int, Key], tuple[int, bytes]] = {}
        self.active: dict[Lane, None] = {}
        self.added = False
        self.fence = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bells: dict[int, int] = {}
        self._to_ring: set[int] = set()
        self._broken = ""
        self._sockets: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._connect(names, listener, timeout_s)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._by_descriptor = {sock.fileno(): peer for peer, sock in self._sockets.items()}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def lane(self) -> Lane:
        """A new lane."""
        return Lane(self)

    def send_memory(self, rank: int, key: Key, payload: bytes, descriptor: int) -> None:
        """Hand shared memory to another rank, where it appears in `memory`."""
        try:
            packet = _HERE_IS + _KEY.pack(*key) + payload
            socket.send_fds(self._sockets[rank], [packet], [descriptor])
        except OSError as error:
            self._hear_all()
            raise CommError(self._broken or f"rank {rank} cannot be reached: {error.strerror}") from error

    def ring(self, rank: int) -> None:
        """Have the bell of a rank that flagged itself as sleeping rung, when this rank has done what it can at once."""
        self._to_ring.add(rank)

    def ring_all(self) -> None:
        """Ring the bells that are due."""
        for rank in self._to_ring:
            os.eventfd_write(self._bells[rank], 1)
        self._to_ring.clear()

    def go_on(self, lane: Lane) -> None:
        """Let one lane go on as far as it can. Raises CommError for calls that do not match, and ever after."""
        if self._broken:
            raise CommError(self._broken)
        try:
            lane.run()
        except BaseException as error:  # the task is lost, so nothing after it may succeed
            self._give_up(f"rank {self.rank} gave up: {error or type(error).__name__}")
            raise
        if self._to_ring:
            self.ring_all()

    def advance(self) -> list[Blocker]:
        """Let all lanes go on as far as they can; returns what they wait for."""
        self.added = True
        while self.added:  # a task may add to a lane that had its turn already
            self.added = False
            for lane in tuple(self.active):
                self.go_on(lane)
        return [lane.blocker for lane in self.active]

    def wait(self, call: CallUnderWay, timeout_s: float) -> None:
        """Sleep and work until a call is complete. Raises CommError if a rank of this host died or gave up, after
        `timeout_s`, and for calls that do not match. Whatever it is, every rank of this host fails from then on."""
        deadline = time.monotonic() + timeout_s
        while call.num_tasks:
            blockers = self.advance()
            if not call.num_tasks:
                return
            for blocker in blockers:
                blocker.flag(True)
            with self.fence:
                pass
            try:
                if not any(blocker.ready() for blocker in blockers):
                    self._sleep(deadline, timeout_s, blockers)
            finally:
                for blocker in blockers:
                    blocker.flag(False)

    def close(self) -> None:
        """Leave: the others take the end of this rank for a good one."""
        for sock in self._sockets.values():
            _say(sock, _LEAVING)
            sock.close()
        for descriptor, _ in self.memory.values():
            os.close(descriptor)
        for bell in (self._bell, *self._bells.values()):
            os.close(bell)
        self._poll.close()
        self._sockets, self.memory, self._bells = {}, {}, {}

    def _sleep(self, deadline: float, timeout_s: float, blockers: list[Blocker]) -> None:
        """Sleep until the bell rings, a socket speaks, or it is time to look again."""
        if self._broken:
            raise CommError(self._broken)
        if self._left:
            gone = sorted(rank for blocker in blockers for rank in blocker.ranks if rank in self._left)
            if gone:
                raise CommError(f"rank {gone[0]} has ended its work and will not come")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            self._give_up(f"rank {self.rank} gave up: the time limit of {timeout_s:g} s is over")
            raise CommError(f"the time limit of {timeout_s:g} s is over")
        for descriptor, _ in self._poll.poll(min(remaining, _LOOK_AGAIN_S)):
            if descriptor == self._bell:
                os.eventfd_read(descriptor)
            else:
                self._hear(self._by_descriptor[descriptor])

    def _hear_all(self) -> None:
        while spoke := [descriptor for descriptor, _ in self._poll.poll(0) if descriptor != self._bell]:
            for descriptor in spoke:
                self._hear(self._by_descriptor[descriptor])

    def _hear(self, rank: int) -> None:
        """Read one packet from another rank's socket."""
        sock = self._sockets[rank]
        try:
            packet, descriptors, _, _ = socket.recv_fds(sock, _PACKET_BYTES, 1)
        except ConnectionResetError:  # it died before it had read what we sent
            packet, descriptors = b"", []
        kind, rest = packet[:1], packet[1:]
        if kind == _HERE_IS:
            key = _KEY.unpack_from(rest)
            self.memory[rank, key] = (descriptors[0], rest[_KEY.size :])
            return
        if kind == _GIVING_UP:
            self._broken = self._broken or rest.decode(errors="replace")
            return
        self._poll.unregister(sock)
        if kind == _LEAVING:
            self._left.add(rank)
        else:
            self._give_up(f"rank {rank} has died")

    def _give_up(self, reason: str) -> None:
        """Nothing can be waited for any more. Tell the others, so that all of them name the first cause."""
        if not self._broken:
            self._broken = reason
            for sock in self._sockets.values():
                _say(sock, _GIVING_UP + reason.encode()[: _PACKET_BYTES - 1])

    def _connect(self, names: Mapping[int, str], listener: Listener, timeout_s: float) -> None:
        """Connect to all lower ranks, accept all higher ones, and exchange bells."""
        greeting = _GREETING.pack(self.rank)
        try:
            for peer in sorted(peer for peer in names if peer < self.rank):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.settimeout(timeout_s)
                sock.connect("\0" + names[peer])
                socket.send_fds(sock, [greeting], [self._bell])
                self._greet(sock)
            listener.socket.settimeout(timeout_s)
            while len(self._sockets) < len(names) - 1:
                sock, _ = listener.socket.accept()
                sock.settimeout(timeout_s)
                if _user(sock) == os.getuid():
                    socket.send_fds(sock, [greeting], [self._bell])
                    self._greet(sock)
        except OSError as error:
            missing = sorted(set(names) - set(self._sockets) - {self.rank})
            raise CommError(f"rank {self.rank} could not connect to ranks {missing} of this host: {error}") from error
        finally:
            listener.socket.close()

    def _greet(self, sock: socket.socket) -> None:
        """Learn who is at the other end of a new connection."""
        packet, (bell,), _, _ = socket.recv_fds(sock, _GREETING.size, 1)
        (rank,) = _GREETING.unpack(packet)
        sock.setblocking(False)
        self._sockets[rank], self._bells[rank] = sock, bell


class Listener:
    """The socket on which a rank waits for its neighbours, under a random name that it tells them through the store."""

    def __init__(self) -> None:
        self.name = f"phalanx-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind("\0" + self.name)
        self.socket.listen(1024)


def _user(sock: socket.socket) -> int:
    """The user at the other end: abstract names are open to everybody on this host."""
    credentials = array.array("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return credentials[1]


def _say(sock: socket.socket, packet: bytes) -> None:
    """Send a last word to a rank that may be gone or not listening: then it needs none."""
    try:
        sock.send(packet)
    except OSError:
        return
