"""Orders: per schedule one pure function (pipeline size, virtual stages, micro-batches) → actions by coordinate.

Orders are written in steps: F0 is the forward of the next micro-batch on chunk 0, B0 its backward, I0 the input
gradient alone, W the oldest weight gradient that an I has left undone. So every chunk takes micro-batches in their
order, and gradients add up in the same order under every schedule.

Where a published order wants a least number of micro-batches, it is written down for so many, and the steps of those
that do not exist are left out: what was in order stays in order.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterable
from typing import TypeAlias

from phalanx.plan.actions import Action, ActionKind

Orders: TypeAlias = tuple[tuple[Action, ...], ...]

_KINDS: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "input_gradient"}


def breadth_first(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """All forwards, chunk by chunk, then backwards (arXiv 2211.05953); with one chunk it is GPipe (1811.06965)."""
    chunks = range(virtual_stages)
    steps = _repeat(*((f"F{chunk}", num_micro_batches) for chunk in chunks))
    steps += _repeat(*((f"B{chunk}", num_micro_batches) for chunk in reversed(chunks)))
    return (_unroll(steps, num_micro_batches),) * pipeline


def one_forward_one_backward(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """As many forwards as there are stages behind this one, then one forward and one backward in turn, then the
    backwards left over (PipeDream-Flush in SC21, arXiv 2104.04473, section 2.2)."""
    forwards, backwards = ["F0"] * num_micro_batches, ["B0"] * num_micro_batches
    return tuple(
        _unroll(_alternate(forwards, backwards, num_ahead=pipeline - 1 - coordinate), num_micro_batches)
        for coordinate in range(pipeline)
    )


def interleaved(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """1F1B over several chunks, which take turns after each round of micro-batches (SC21, section 2.2).

    The last coordinate runs all forwards of the first round but those of the last chunk ahead of its first backward,
    and each one before it two more.
    """
    chunks = range(virtual_stages)
    rounds = interleaved_rounds(pipeline, num_micro_batches)
    forwards = [f"F{chunk}" for size in rounds for chunk in chunks for _ in range(size)]
    backwards = [f"B{chunk}" for size in rounds for chunk in reversed(chunks) for _ in range(size)]
    ahead = (virtual_stages - 1) * rounds[0]
    return tuple(
        _unroll(_alternate(forwards, backwards, ahead + 2 * (pipeline - 1 - coordinate)), num_micro_batches)
        for coordinate in range(pipeline)
    )


def interleaved_rounds(pipeline: int, num_micro_batches: int) -> list[int]:
    """How many micro-batches each round takes, largest first: all alike where they can be, and none shorter than the
    pipeline, because a micro-batch comes back for its next chunk only after so many steps."""
    num_rounds = max(1, num_micro_batches // pipeline)
    size, longer = divmod(num_micro_batches, num_rounds)
    return [size + 1] * longer + [size] * (num_rounds - longer)


def zero_bubble_h1(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """1F1B whose weight gradients lag by the coordinate's number, so that the stages before get their gradients sooner
    and the lagging ones fill the end of the step (ZB-H1, arXiv 2401.10241, section 3)."""
    num = max(num_micro_batches, pipeline)
    return tuple(
        _unroll(
            _repeat(
                ("F0", pipeline - 1 - coordinate),
                ("F0 I0", coordinate),
                ("F0 I0 W", num - pipeline + 1),
                ("I0 W", pipeline - 1 - coordinate),
                ("W", coordinate),
            ),
            num_micro_batches,
        )
        for coordinate in range(pipeline)
    )


def zero_bubble_v(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """Two chunks in a V: a micro-batch turns round on the last coordinate and ends where it began, so that the first
    coordinate starts backward at once and every one holds as much (ZB-V, arXiv 2405.15362)."""
    num = max(num_micro_batches, 2 * pipeline)
    return tuple(
        _unroll(
            _repeat(
                ("F0", 2 * (pipeline - coordinate) - 1),
                ("F1 F0", coordinate),
                ("F1 I1 W", pipeline - coordinate),
                ("F0 I0 W F1 I1 W", num - 2 * pipeline + coordinate + 1),
                ("I0 W F1 I1 W", pipeline - coordinate - 1),
                ("I0 I1", coordinate),
                ("I0 W", pipeline - coordinate),
                ("W", coordinate * 2),
            ),
            num_micro_batches,
        )
        for coordinate in range(pipeline)
    )


def dualpipe_v(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """Two chunks in a V whose forwards and backwards lie side by side, so that each can hide the other's communication
    (DualPipeV: DualPipe of arXiv 2412.19437, cut in half)."""
    num = max(num_micro_batches, 2 * pipeline)
    orders = []
    for coordinate in range(pipeline):
        behind = pipeline - coordinate - 1
        whole, split = divmod(coordinate + 1, 2)
        steps = _repeat(
            ("F0", 2 * behind),
            ("F0 F1", coordinate + 1),
            ("I1 W F1", behind),
            ("F0 B1 F1 B0", num - 2 * pipeline + coordinate + 1),
            ("B1 F1 B0", behind),
            ("B1 B0", whole),
            ("B1 I0", split),
            ("I1 I0", whole),
            ("W I0", behind),
            ("W", coordinate + 1),
        )
        orders.append(_unroll(steps, num_micro_batches))
    return tuple(orders)


def _repeat(*phases: tuple[str, int]) -> list[str]:
    """Each phase is some steps and how often they are repeated."""
    return [step for steps, times in phases for _ in range(times) for step in steps.split()]


def _alternate(forwards: list[str], backwards: list[str], num_ahead: int) -> list[str]:
    """`num_ahead` forwards, then forward and backward in turn, then the backwards left over."""
    num_ahead = min(num_ahead, len(forwards))
    num_pairs = len(forwards) - num_ahead
    pairs = zip(forwards[num_ahead:], backwards[:num_pairs], strict=True)
    return forwards[:num_ahead] + [step for pair in pairs for step in pair] + backwards[num_pairs:]


def _unroll(steps: Iterable[str], num_micro_batches: int) -> tuple[Action, ...]:
    """Steps as actions: each gets its micro-batch by counting; those that do not exist are left out."""
    taken: Counter[tuple[bool, int]] = Counter()
    undone: deque[tuple[int, int]] = deque()
    actions = []
    for step in steps:
        kind: ActionKind = "weight_gradient"
        if step == "W":
            micro_batch, chunk = undone.popleft()
        else:
            kind, chunk = _KINDS[step[0]], int(step[1:])
            micro_batch = taken[kind == "forward", chunk]
            taken[kind == "forward", chunk] += 1
        if kind == "input_gradient":
            undone.append((micro_batch, chunk))
        if micro_batch < num_micro_batches:
            actions.append(_action(kind, micro_batch, chunk))
    return tuple(actions)


@functools.lru_cache(maxsize=2**16)
def _action(kind: ActionKind, micro_batch: int, chunk: int) -> Action:
    """Equal actions of all coordinates are one value: making it costs more than all else here."""
    return Action(kind=kind, micro_batch=micro_batch, chunk=chunk)
