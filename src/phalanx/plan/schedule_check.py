"""The proof that a Schedule can run: complete, in order, first in first out, free of deadlock, within its memory bound.

`check` is what stands between a schedule and the trainer, which executes whatever passes.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from phalanx.plan.schedule import SCHEDULES, Action, Schedule, ScheduleError, Transfer
from phalanx.plan.walk import ReceivePoints, just_in_time, receive_points

__all__ = ["Proof", "ScheduleError", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What `check` found besides what it demands.

    `peak_live`: by coordinate, the most chunks' worth of activations held at once. `just_in_time`: whether receives may
    also be left until the action that needs them, instead of at `walk.receive_points`.
    """

    peak_live: tuple[int, ...]
    just_in_time: bool


def check(schedule: Schedule) -> Proof:
    """Prove that `schedule` can run. Raises ScheduleError with the first reason found why it cannot.

    Every action exists once and waits for nothing that waits for it; memory stays within the bound stated for schedules
    of its name. Receiving at `receive_points`, messages come in the order in which they are sent on each channel, and
    nothing gets stuck: neither with one message buffered per channel, sends and receives blocking in listed order, nor
    with sends that wait for their receiver and are paired with receives, as on NCCL.
    """
    _check_placement(schedule)
    for coordinate in range(schedule.pipeline):
        _check_complete(schedule, coordinate)
        _check_order(schedule, coordinate)
        _check_peak(schedule, coordinate)
    reason = _stuck(_gaps(schedule, receive_points(schedule)))
    if reason:
        raise ScheduleError(f"{schedule.name}: {reason}")
    return Proof(
        peak_live=tuple(schedule.peak_live(coordinate) for coordinate in range(schedule.pipeline)),
        just_in_time=not _stuck(_gaps(schedule, just_in_time(schedule))),
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
    for kind, micro_batch, chunk in counts:
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


@dataclass(frozen=True, slots=True)
class _Gap:
    """Between two actions of a coordinate: what the one before sends, then what is received."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def _gaps(schedule: Schedule, receives: ReceivePoints) -> list[list[_Gap]]:
    """By coordinate, the gap before each action, and one after the last."""
    gaps = []
    for coordinate, actions in enumerate(schedule.actions):
        given = [schedule.gives(coordinate, action) for action in actions]
        sends = [(), *(() if gift is None or gift.local else (gift,) for gift in given)]
        gaps.append([_Gap(*pair) for pair in zip(sends, (*receives[coordinate], ()), strict=True)])
    return gaps


def _stuck(gaps: list[list[_Gap]]) -> str:
    """Why these calls cannot all be completed, in words; empty when they can."""
    return _out_of_order(gaps) or _buffered_deadlock(gaps) or _paired_deadlock(gaps)


def _channel(transfer: Transfer) -> tuple[int, int, int]:
    return transfer.source, transfer.destination, transfer.channel


def _out_of_order(gaps: list[list[_Gap]]) -> str:
    """First in, first out, per (source, destination, channel)."""
    sent: dict[tuple[int, int, int], deque[Transfer]] = {}
    for gap in (gap for own in gaps for gap in own):
        for transfer in gap.sends:
            sent.setdefault(_channel(transfer), deque()).append(transfer)
    for gap in (gap for own in gaps for gap in own):
        for transfer in gap.receives:
            first = sent[_channel(transfer)].popleft()
            if first != transfer:
                return f"{first} is sent before {transfer}, which is received first"
    return ""


def _buffered_deadlock(gaps: list[list[_Gap]]) -> str:
    """Run with one message buffered per channel: a send waits while it is full, a receive while it is empty."""
    calls = [
        deque(call for gap in own for call in (*((t, True) for t in gap.sends), *((t, False) for t in gap.receives)))
        for own in gaps
    ]
    full: set[tuple[int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for pending in calls:
            while pending and (_channel(pending[0][0]) in full) != pending[0][1]:
                transfer, sending = pending.popleft()
                (full.add if sending else full.remove)(_channel(transfer))
                moved = True
    waits = [f"to {'send' if call[0][1] else 'receive'} {call[0][0]}" for call in calls if call]
    return f"deadlock with one message buffered per channel, waiting {' and '.join(waits)}" if waits else ""


def _paired_deadlock(gaps: list[list[_Gap]]) -> str:
    """Run as NCCL does: what stands in one gap is posted together, and the gap is left when each call has met its
    counterpart."""
    groups = [[(*gap.sends, *gap.receives) for gap in own] for own in gaps]
    at = [0] * len(groups)
    posted = Counter(transfer for own in groups for transfer in own[0])
    moved = True
    while moved:
        moved = False
        for coordinate, own in enumerate(groups):
            while at[coordinate] < len(own) and all(posted[transfer] == 2 for transfer in own[at[coordinate]]):
                at[coordinate] += 1
                posted.update(own[at[coordinate]] if at[coordinate] < len(own) else ())
                moved = True
    waits = [
        str(transfer) for own, done in zip(groups, at, strict=True) for group in own[done:][:1] for transfer in group
    ]
    return f"deadlock with paired calls, waiting for {' and '.join(waits)}" if waits else ""
