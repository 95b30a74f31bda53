"""What the other members of a group are doing, from their ring files, when a call of this rank fails.

Ring files lie in the memory of a host: of members on other hosts, only their address is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import RunError
from phalanx.plan.comm import Group
from phalanx.trainer.comm import Call, dtype_name
from phalanx.watch.events import Call as Record
from phalanx.watch.events import RingState, in_words, process_status, read_ring
from phalanx.watch.ranks import ranks_in_words

_COUNTERPART = {"send": "recv", "recv": "send"}


def testify(group: Group, call: Call, *, index: int, rings: Mapping[int, Path], elsewhere: Mapping[int, str]) -> str:
    """A line for each member that this call waited for and that has not made it, or made another one in its place; and
    for each other host that it waited for.

    `index` is this rank's in the group, `rings` has the ring files that can be read, `elsewhere` the addresses of ranks
    on other hosts. Empty if there is nothing to tell.
    """
    message = call.shape.operation in _COUNTERPART
    waited_for = [call.shape.peer] if message else [member for member in range(group.size) if member != index]
    lines = []
    for rank in (group.ranks[member] for member in waited_for if group.ranks[member] in rings):
        try:
            state = read_ring(rings[rank])
        except (FileNotFoundError, RunError):
            lines.append(f"rank {rank} has left no record")
            continue
        came = [record for record in _like(state, group, group.ranks[index], call) if record.sequence >= call.sequence]
        if not came:
            status = process_status(state.pid)
            condition = f" [process {state.pid} is {status}]" if status in ("dead", "stopped") else ""
            lines.append(f"has not come: {in_words(state)}{condition}")
            continue
        same = next((record for record in came if record.sequence == call.sequence), None)
        if same and not _equal(same, call):
            lines.append(f"made another call: rank {rank}: {same} ({same.num_bytes} bytes); {same.place}")
    return "\n".join(lines + _other_hosts([group.ranks[member] for member in waited_for], elsewhere))


def _other_hosts(ranks: Sequence[int], elsewhere: Mapping[int, str]) -> list[str]:
    by_address: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in elsewhere:
            by_address.setdefault(elsewhere[rank], []).append(rank)
    return [
        f"on the host at {address}, not visible from here: rank{'s' if len(there) > 1 else ''} {ranks_in_words(there)}"
        for address, there in by_address.items()
    ]


def _like(state: RingState, group: Group, me: int, call: Call) -> list[Record]:
    """The other rank's records that share a sequence with this call: the group's collectives, or the other ends of the
    messages of this channel."""
    records = [record for record in state.calls if record.group == group.name and record.members == group.ranks]
    counterpart = _COUNTERPART.get(call.shape.operation)
    if counterpart is None:
        return [record for record in records if record.operation not in _COUNTERPART]
    wanted = (counterpart, me, call.shape.channel)
    return [record for record in records if (record.operation, record.peer, record.channel) == wanted]


def _equal(record: Record, call: Call) -> bool:
    shape = call.shape
    if (record.purpose, record.dtype or dtype_name(shape.dtype)) != (shape.purpose, dtype_name(shape.dtype)):
        return False  # a barrier is of no type
    mine = (shape.operation, shape.payload_bytes)
    same = (record.operation, record.num_bytes) == mine and record.reduce_op in ("", shape.op)
    return same or shape.operation in _COUNTERPART
