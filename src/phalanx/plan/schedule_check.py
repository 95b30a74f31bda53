"""The proof that a Schedule can run: complete, in order, first in first out, free of deadlock, within its memory bound.

`check` is what stands between a schedule and the trainer, which executes whatever passes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.plan.schedule import SCHEDULES, Action, Schedule, Transfer


class ScheduleError(AssertionError):
    """A schedule that must not run; the message says why. Ours to mend, never the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What `check` found: every coordinate's peak of live activations, in chunks, and whether the schedule also runs
    where a send waits for its receiver (`rendezvous`), not only where one message per channel is buffered."""

    num_actions: int
    peak_live: tuple[int, ...]
    rendezvous: bool


def check(schedule: Schedule) -> Proof:
    """Prove that `schedule` can run. Raises ScheduleError with the first reason found why it cannot."""
    _check_placement(schedule)
    for coordinate in range(schedule.pipeline):
        _check_complete(schedule, coordinate)
        _check_order(schedule, coordinate)
        _check_peak(schedule, coordinate)
    _check_first_in_first_out(schedule)
    stuck = buffered_deadlock(schedule)
    if stuck:
        raise ScheduleError(f"{schedule.name}: deadlock with one message buffered per channel: {'; '.join(stuck)}")
    return Proof(
        num_actions=sum(map(len, schedule.actions)),
        peak_live=tuple(schedule.peak_live(coordinate) for coordinate in range(schedule.pipeline)),
        rendezvous=not rendezvous_deadlock(schedule),
    )


def _check_placement(schedule: Schedule) -> None:
    slots = {(p, chunk) for p in range(schedule.pipeline) for chunk in range(schedule.virtual_stages)}
    if len(schedule.placement) != len(slots) or set(schedule.placement) != slots:
        raise ScheduleError(f"{schedule.name}: placement {schedule.placement} does not give each chunk one stage")
    if len(schedule.actions) != schedule.pipeline:
        raise ScheduleError(f"{schedule.name}: actions for {len(schedule.actions)} of {schedule.pipeline} coordinates")


def _check_complete(schedule: Schedule, coordinate: int) -> None:
    """Every (micro-batch, chunk) has one forward, and either one backward or one of each of its halves."""
    counts = Counter((act.kind, act.micro_batch, act.chunk) for act in schedule.actions[coordinate])
    for micro_batch in range(schedule.num_micro_batches):
        for chunk in range(schedule.virtual_stages):
            forward, backward, input_half, weight_half = (
                counts.pop((kind, micro_batch, chunk), 0)
                for kind in ("forward", "backward", "input_gradient", "weight_gradient")
            )
            if forward != 1 or (backward, input_half, weight_half) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"{schedule.name}, coordinate {coordinate}: micro-batch {micro_batch} on chunk {chunk} has "
                    f"{forward} forward, {backward} backward, "
                    f"{input_half} input gradient, {weight_half} weight gradient"
                )
    if counts:
        kind, micro_batch, chunk = next(iter(counts))
        stray = Action(kind=kind, micro_batch=micro_batch, chunk=chunk)
        raise ScheduleError(f"{schedule.name}, coordinate {coordinate}: {stray} does not exist")


def _check_order(schedule: Schedule, coordinate: int) -> None:
    """On one coordinate: forward before its gradients, input gradient before weight gradient."""
    before = {"backward": "forward", "input_gradient": "forward", "weight_gradient": "input_gradient"}
    done: set[tuple[str, int, int]] = set()
    for action in schedule.actions[coordinate]:
        needed = before.get(action.kind)
        if needed and (needed, action.micro_batch, action.chunk) not in done:
            raise ScheduleError(f"{schedule.name}, coordinate {coordinate}: {action} comes before its {needed}")
        done.add((action.kind, action.micro_batch, action.chunk))


def _check_peak(schedule: Schedule, coordinate: int) -> None:
    family = SCHEDULES.get(schedule.name)
    if family is None:
        return
    bound = family.peak_live(schedule.pipeline, schedule.virtual_stages, schedule.num_micro_batches, coordinate)
    peak = schedule.peak_live(coordinate)
    if peak > bound:
        raise ScheduleError(f"{schedule.name}, coordinate {coordinate}: {peak} live activations, bound {bound}")


def _check_first_in_first_out(schedule: Schedule) -> None:
    """Per (source, destination, channel) messages are received in the order in which they are sent."""
    sent: dict[tuple[int, int, int], list[Transfer]] = {}
    received: dict[tuple[int, int, int], list[Transfer]] = {}
    for coordinate, actions in enumerate(schedule.actions):
        for action in actions:
            for transfer, order in (
                (schedule.gives(coordinate, action), sent),
                (schedule.needs(coordinate, action), received),
            ):
                if transfer is not None and not transfer.local:
                    order.setdefault(_channel(transfer), []).append(transfer)
    for channel, transfers in sent.items():
        for position, (out, into) in enumerate(zip(transfers, received.get(channel, []), strict=False)):
            if out != into:
                raise ScheduleError(
                    f"{schedule.name}: message {position} of its channel is sent as {out}, received as {into}"
                )


def _channel(transfer: Transfer) -> tuple[int, int, int]:
    return transfer.source, transfer.destination, transfer.channel


def buffered_deadlock(schedule: Schedule, depth: int = 1) -> tuple[str, ...]:
    """Run with `depth` messages buffered per channel: a send waits while its channel is full, a receive until its
    message is there. Returns, for each coordinate that never ends, what it waits for."""
    channels: dict[tuple[int, int, int], deque[Transfer]] = {}
    handed_over: set[Transfer] = set()
    calls = [deque(_calls(schedule, coordinate)) for coordinate in range(schedule.pipeline)]
    moved = True
    while moved:
        moved = False
        for pending in calls:
            while pending and _complete(*pending[0], channels, handed_over, depth):
                pending.popleft()
                moved = True
    return tuple(
        f"coordinate {coordinate} waits to {pending[0][0]} {pending[0][1]}"
        for coordinate, pending in enumerate(calls)
        if pending
    )


def _calls(schedule: Schedule, coordinate: int) -> Iterator[tuple[str, Transfer]]:
    """The sends and receives of one coordinate, in listed order."""
    for action in schedule.actions[coordinate]:
        for call, transfer in (
            ("receive", schedule.needs(coordinate, action)),
            ("send", schedule.gives(coordinate, action)),
        ):
            if transfer is not None:
                yield call, transfer


def _complete(
    call: str,
    transfer: Transfer,
    channels: dict[tuple[int, int, int], deque[Transfer]],
    handed_over: set[Transfer],
    depth: int,
) -> bool:
    """Whether this call can be completed now; if so, completes it."""
    if transfer.local:
        if call == "send":
            handed_over.add(transfer)
        return transfer in handed_over
    channel = channels.setdefault(_channel(transfer), deque())
    if call == "send":
        if len(channel) == depth:
            return False
        channel.append(transfer)
        return True
    if not channel:
        return False
    channel.popleft()
    return True


def rendezvous_deadlock(schedule: Schedule) -> tuple[Transfer, ...]:
    """Run with paired calls, as NCCL does: between two actions a coordinate posts what the first gives and what the
    second needs as one group, and goes on when both have met their counterpart. Returns the transfers that never do."""
    groups = [_groups(schedule, coordinate) for coordinate in range(schedule.pipeline)]
    at = [0] * schedule.pipeline
    posted: dict[Transfer, set[int]] = {}
    for coordinate in range(schedule.pipeline):
        _post(groups[coordinate][0], coordinate, posted)
    moved = True
    while moved:
        moved = False
        for coordinate, own in enumerate(groups):
            while at[coordinate] < len(own) and all(len(posted[t]) == 2 for t in own[at[coordinate]]):
                at[coordinate] += 1
                moved = True
                if at[coordinate] < len(own):
                    _post(own[at[coordinate]], coordinate, posted)
    stuck = [own[done] for own, done in zip(groups, at, strict=True) if done < len(own)]
    return tuple(transfer for group in stuck for transfer in group)


def _groups(schedule: Schedule, coordinate: int) -> list[list[Transfer]]:
    """Per gap between actions: what the action before gives and what the action after needs."""
    actions = schedule.actions[coordinate]
    given = [None, *(schedule.gives(coordinate, action) for action in actions)]
    needed = [*(schedule.needs(coordinate, action) for action in actions), None]
    return [[t for t in gap if t is not None and not t.local] for gap in zip(given, needed, strict=True)]


def _post(group: list[Transfer], coordinate: int, posted: dict[Transfer, set[int]]) -> None:
    for transfer in group:
        posted.setdefault(transfer, set()).add(coordinate)
