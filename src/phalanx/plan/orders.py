"""Orders: per schedule one pure function (pipeline size, virtual stages, micro-batches) → actions by coordinate."""

from __future__ import annotations

from typing import TypeAlias

from phalanx.plan.actions import Action

Orders: TypeAlias = tuple[tuple[Action, ...], ...]


def gpipe(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """All forwards, then all backwards, newest first, so that the activations in cache are the ones needed next
    (GPipe, arXiv 1811.06965)."""
    forwards = [Action(kind="forward", micro_batch=i) for i in range(num_micro_batches)]
    backwards = [Action(kind="backward", micro_batch=i) for i in reversed(range(num_micro_batches))]
    return (tuple(forwards + backwards),) * pipeline


def one_forward_one_backward(pipeline: int, virtual_stages: int, num_micro_batches: int) -> Orders:
    """As many forwards as there are stages behind this one, then one forward and one backward in turn, then the
    backwards left over (PipeDream-Flush in SC21, arXiv 2104.04473, section 2.2)."""
    forwards = [Action(kind="forward", micro_batch=i) for i in range(num_micro_batches)]
    backwards = [Action(kind="backward", micro_batch=i) for i in range(num_micro_batches)]
    return tuple(_alternate(forwards, backwards, num_ahead=pipeline - 1 - coordinate) for coordinate in range(pipeline))


def _alternate(forwards: list[Action], backwards: list[Action], num_ahead: int) -> tuple[Action, ...]:
    """`num_ahead` forwards, then forward and backward in turn, then the backwards left over."""
    num_ahead = min(num_ahead, len(forwards))
    actions = forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        actions += [forward, backward]
    return tuple(actions + backwards[len(forwards) - num_ahead :])
