"""The transport between CPU processes of one host: data goes through shared memory, with one copy in and one read out.

Each member writes into streams of its own (see `streams`), made at first use:

    stream 0        the group's collectives, read by all other members
    stream 1        the second halves of long sums: slices already added up
    stream 2 + …    messages to one member on one channel

A call becomes one task that posts its fragments and one that takes the others' (see `neighbours`), so that an async
call posts what there is room for and returns. Tasks of one stream, and of one group, run in the order of the calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.plan.comm import Group
from phalanx.trainer.comm import Call, Shape
from phalanx.trainer.neighbours import Blocker, CallUnderWay, Lane, Neighbours, Task
from phalanx.trainer.streams import ALIGN_BYTES, NUM_SLOTS, SLOT_BYTES, Fragment, Inlet, Outlet, Unopened, fragments

# From three members on, a longer sum goes in two halves: each member adds up a slice, then all collect the slices.
_TWO_HALVES_BYTES = 64 * 1024
_COLLECTIVES, _SECOND_HALVES, _MESSAGES = 0, 1, 2

# What one fragment holds: parts of tensors, each with its place in the slot, in elements.
Parts = list[tuple[int, Tensor]]


@dataclass(slots=True, eq=False)
class _Route:
    """How calls of one shape travel: tensors are seen as pieces of `lengths[i]` elements (the last one of a tensor may
    be shorter), `cut` into fragments. With `scatter`, a fragment carries a piece for each of the other members, side by
    side. `signature` stands for the shape."""

    dtype: torch.dtype
    lengths: tuple[int, ...]
    cut: tuple[Fragment, ...]
    scatter: bool
    signature: int
    at_once: bool  # one tensor, one piece, one fragment

    def parts(self, tensors: Sequence[Tensor], place: int) -> list[Parts]:
        """Piece `place` of every tensor, by fragment."""
        if self.at_once:
            return [[(0, tensors[0])]]
        flats = [tensor.view(-1) for tensor in tensors]
        result = []
        for _, pieces in self.cut:
            parts = []
            for number, start, stop, at in pieces:
                first = place * self.lengths[number]
                parts.append((at, flats[number][first + start : first + stop]))
            result.append(parts)
        return result


class SharedMemoryTransport:
    """The Transport among members of one host. `number` tells this group from the others that these ranks form."""

    def __init__(self, neighbours: Neighbours, group: Group, index: int, number: int) -> None:
        self._neighbours, self._ranks, self._index, self._number = neighbours, group.ranks, index, number
        self._size = group.size
        self._peers = tuple(member for member in range(group.size) if member != index)
        # Where, in what each of them scatters, the part for this member lies: nobody sends one to itself.
        self._areas = tuple(index - (index > peer) for peer in self._peers)
        self._no_areas = (0,) * len(self._peers)
        self._all_inlets: list[Inlet] = []
        self._outlets: dict[tuple[int, int], Outlet] = {}
        self._inlets: dict[tuple[int, int], Inlet] = {}
        self._collectives = neighbours.lane()
        self._messages: dict[tuple[int, int], Lane] = {}
        self._starters: dict[str, Callable[[Call, CallUnderWay], None]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "send": self._send,
            "recv": self._recv,
            "barrier": self._all_reduce,
        }

    def start(self, call: Call) -> CallUnderWay | None:
        """See `Transport.start`."""
        under_way = CallUnderWay(self._neighbours)
        if call.shape.route is None:
            call.shape.route = self._route(call.shape)
        self._starters[call.shape.operation](call, under_way)
        self._neighbours.ring_all()
        return under_way if under_way.num_tasks else None

    def close(self) -> None:
        """The memory lives as long as a reader maps it; leaving is said once for all groups (`Neighbours.close`)."""
        self._outlets.clear()
        self._inlets.clear()
        self._all_inlets = []

    def _all_reduce(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        if route.scatter:
            sent = self._post(route, self._scattered(route, call.tensors), under_way)
            task = self._sum_in_halves(route, call, under_way, *sent)
        else:
            parts = route.parts(call.tensors, 0)
            sent = self._post(route, parts, under_way)
            task = self._take_sums(route, parts, parts, call.shape.op, *sent)
        self._collectives.add(task, under_way)

    def _all_gather(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        for own, out in zip(call.tensors, call.out, strict=True):
            _copy(own.view(-1), out.view(self._size, -1)[self._index])
        self._post(route, route.parts(call.out, self._index), under_way)
        self._collectives.add(self._take_pieces(route, call.out), under_way)

    def _reduce_scatter(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        outlet, first = self._post(route, self._scattered(route, call.tensors), under_way)
        own, out = route.parts(call.tensors, self._index), route.parts(call.out, 0)
        self._collectives.add(self._take_sums(route, own, out, call.shape.op, outlet, first), under_way)

    def _broadcast(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        parts, root = route.parts(call.tensors, 0), call.shape.peer
        if root == self._index:
            self._post(route, parts, under_way)
        else:
            self._collectives.add(self._take(route, _COLLECTIVES, [(root, 0, parts)]), under_way)

    def _all_to_all(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        (tensor,), (out,) = call.tensors, call.out
        _copy(tensor.view(self._size, -1)[self._index], out.view(self._size, -1)[self._index])
        self._post(route, self._scattered(route, call.tensors), under_way)
        sources = [
            (peer, area, route.parts(call.out, peer)) for peer, area in zip(self._peers, self._areas, strict=True)
        ]
        self._collectives.add(self._take(route, _COLLECTIVES, sources), under_way)

    def _send(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        stream = _MESSAGES + call.shape.channel
        outlet = self._outlets.get((call.shape.peer, stream))
        if outlet is None:  # room for two messages, so that a sender need not wait for the receiver
            num_slots = max(NUM_SLOTS, 2 * len(route.cut))
            outlet = self._make_outlet(stream, (call.shape.peer,), num_slots)
        _post(outlet, route, route.parts(call.tensors, 0), under_way)

    def _recv(self, call: Call, under_way: CallUnderWay) -> None:
        route: _Route = call.shape.route
        peer, channel = call.shape.peer, call.shape.channel
        lane = self._messages.get((peer, channel))
        if lane is None:
            lane = self._messages[peer, channel] = self._neighbours.lane()
        lane.add(self._take(route, _MESSAGES + channel, [(peer, 0, route.parts(call.tensors, 0))]), under_way)

    def _route(self, shape: Shape) -> _Route:
        """Decide how calls of this shape travel."""
        operation, size = shape.operation, self._size
        num_bytes = sum(shape.lengths) * shape.dtype.itemsize
        lengths, scatter = shape.lengths, operation in ("reduce_scatter", "all_to_all")
        if operation == "all_reduce" and size > 2 and num_bytes > _TWO_HALVES_BYTES:
            lengths, scatter = tuple(-(-length // size) for length in lengths), True
        elif scatter:
            lengths = tuple(length // size for length in lengths)
        align = ALIGN_BYTES // shape.dtype.itemsize
        capacity = SLOT_BYTES // shape.dtype.itemsize // (size - 1 if scatter else 1) // align * align
        cut = fragments(lengths, capacity, align)
        at_once = operation != "all_gather" and not scatter and len(lengths) == len(cut) == 1
        kind = "message" if operation in ("send", "recv") else operation
        root = shape.peer if operation == "broadcast" else -1
        signature = zlib.crc32(repr((kind, shape.purpose, shape.op, shape.dtype, shape.lengths, root)).encode())
        return _Route(shape.dtype, lengths, cut, scatter, signature, at_once)

    def _scattered(self, route: _Route, tensors: Sequence[Tensor]) -> list[Parts]:
        """For each fragment, the parts for all other members, side by side."""
        by_peer = [route.parts(tensors, peer) for peer in self._peers]
        return [
            [(area * used + at, part) for area, parts in enumerate(by_peer) for at, part in parts[number]]
            for number, (used, _) in enumerate(route.cut)
        ]

    def _post(
        self, route: _Route, parts: list[Parts], under_way: CallUnderWay, stream: int = _COLLECTIVES
    ) -> tuple[Outlet, int]:
        """Post a collective's fragments, or what there is room for. Returns the number of the first in its stream."""
        outlet = self._outlets.get((-1, stream)) or self._make_outlet(stream, self._peers)
        first = outlet.promised
        outlet.promised += len(parts)
        _post(outlet, route, parts, under_way)
        return outlet, first

    def _take(self, route: _Route, stream: int, sources: Sequence[tuple[int, int, list[Parts]]]) -> Task:
        """Copy out what each (member, area, parts) of `sources` posted in that area."""
        inlets = yield from self._open(stream, [member for member, _, _ in sources])
        for number, (used, _) in enumerate(route.cut):
            for inlet, (_, area, parts) in zip(inlets, sources, strict=True):
                while not inlet.ready():
                    yield inlet
                slot = inlet.slot(route.signature)
                for at, part in parts[number]:
                    part.copy_(inlet.view(route.dtype, slot, area * used + at, part.shape))
                inlet.took()

    def _take_pieces(self, route: _Route, tensors: Sequence[Tensor], stream: int = _COLLECTIVES) -> Task:
        """Copy out what every other member posted as its piece."""
        yield from self._take(route, stream, [(peer, 0, route.parts(tensors, peer)) for peer in self._peers])

    def _take_sums(
        self, route: _Route, own: list[Parts], out: list[Parts], op: str, outlet: Outlet, first: int
    ) -> Task:
        """Add up, in rank order, this member's parts and what the others posted for it.

        No fragment is added up before it was posted: sums may overwrite what is sent.
        """
        inlets = self._all_inlets or (yield from self._open_all())
        areas = self._areas if route.scatter else self._no_areas
        for number, (used, _) in enumerate(route.cut):
            while outlet.posted <= first + number:
                yield outlet
            posted = []
            for inlet, area in zip(inlets, areas, strict=True):
                while not inlet.ready():
                    yield inlet
                posted.append((inlet, inlet.slot(route.signature), area * used))
            for (at, mine), (_, target) in zip(own[number], out[number], strict=True):
                terms = []
                for inlet, slot, start in posted:
                    terms.append(inlet.view(route.dtype, slot, start + at, mine.shape))
                terms.insert(self._index, mine)
                reduce_in_order(terms, op, target)
            for inlet in inlets:
                inlet.took()

    def _sum_in_halves(self, route: _Route, call: Call, under_way: CallUnderWay, outlet: Outlet, first: int) -> Task:
        """Add up this member's piece of every tensor, then collect the other pieces from the others."""
        own = route.parts(call.tensors, self._index)
        yield from self._take_sums(route, own, own, call.shape.op, outlet, first)
        self._post(route, own, under_way, _SECOND_HALVES)
        yield from self._take_pieces(route, call.tensors, _SECOND_HALVES)

    def _open(self, stream: int, members: Sequence[int]) -> Generator[Blocker, None, list[Inlet]]:
        """The reading ends of these members' streams, waited for where they are not there yet."""
        inlets = []
        for member in members:
            inlet = self._inlets.get((member, stream))
            if inlet is None:
                writer, key = self._ranks[member], (self._number, stream)
                unopened = Unopened(self._neighbours, writer, key)
                while not unopened.ready():
                    yield unopened
                inlet = Inlet(self._neighbours, writer, *self._neighbours.memory.pop((writer, key)))
                self._inlets[member, stream] = inlet
            inlets.append(inlet)
        return inlets

    def _open_all(self) -> Generator[Blocker, None, list[Inlet]]:
        self._all_inlets = yield from self._open(_COLLECTIVES, self._peers)
        return self._all_inlets

    def _make_outlet(self, stream: int, readers: tuple[int, ...], num_slots: int = NUM_SLOTS) -> Outlet:
        ranks = tuple(self._ranks[reader] for reader in readers)
        outlet = Outlet(self._neighbours, (self._number, stream), ranks, num_slots)
        self._outlets[readers[0] if stream >= _MESSAGES else -1, stream] = outlet
        return outlet


def _post(outlet: Outlet, route: _Route, parts: list[Parts], under_way: CallUnderWay) -> None:
    """Post what there is room for, unless earlier calls still wait for room; leave a task for the rest."""
    posted = 0
    if not outlet.lane:
        while posted < len(parts) and outlet.ready():
            outlet.post(route.dtype, parts[posted], route.signature)
            posted += 1
    if posted < len(parts):
        outlet.lane.add(_post_rest(outlet, route, parts[posted:]), under_way)


def _post_rest(outlet: Outlet, route: _Route, parts: list[Parts]) -> Task:
    for fragment in parts:
        while not outlet.ready():
            yield outlet
        outlet.post(route.dtype, fragment, route.signature)


def reduce_in_order(terms: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Sum (or take the maximum of) the terms, first to last; `out` may be one of them. More than two float16 or
    bfloat16 terms are added in fp32 and rounded once."""
    combine = torch.add if op == "sum" else torch.maximum
    if len(terms) > 2:
        total = terms[0]
        if op == "sum" and total.dtype.itemsize == 2 and total.is_floating_point():
            total = total.float()
            for term in terms[1:]:
                total.add_(term)
            out.copy_(total)
            return
        for term in terms[1:-1]:
            total = combine(total, term)
        terms = (total, terms[-1])
    combine(terms[0], terms[1], out=out)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy unless they are the same memory already."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
