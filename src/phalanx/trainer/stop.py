"""Requests to stop, agreed on: a signal to any rank ends all of them after the same step, with their state saved."""

from __future__ import annotations

import signal
from types import FrameType

from phalanx.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they end a job: SIGTERM at preemption, SIGUSR1 where the job asked for a warning."""


class StopRequest:
    """Whether somebody has asked this rank to stop, and whether all ranks agreed to.

    A rank that left alone would leave the others waiting; so `vote` travels in a message that every step sends anyway,
    and `count` sees the same sum on all ranks.
    """

    def __init__(self) -> None:
        self.vote = 0.0
        self.agreed = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.vote = 1.0

    def count(self, votes: float) -> None:
        """Take the votes of all ranks."""
        self.agreed = self.agreed or votes > 0

    def leave(self, step: int, again: str) -> Stopped:
        """What to raise once the state after `step` steps is saved; `again` is the command that goes on."""
        return Stopped(f"stopped after step {step} as asked, with everything saved; {again} goes on from there")
