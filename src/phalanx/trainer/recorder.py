"""Recorder: what this rank really sent, how long it was blocked, and where it is; kept in memory and in its ring file.

`messages` is the fact that `plan.traffic` must equal: each call is counted once, by its payload as the Comm protocol
defines it, before any transport sees it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from phalanx.plan.comm import Group
from phalanx.watch.events import RingWriter, place_in_words

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Site:
    """What all calls made from one place share: `key` is (group, purpose, operation), `ring` its number in the ring."""

    key: Key
    ring: int


class Recorder:
    """Counts and times the calls of all Comms of one rank. `ring` None keeps no ring file.

    `messages[(group, purpose, operation)]` is [count, payload bytes]; `seconds[group]` the seconds that the rank spent
    inside calls of that group: posting, waiting, and adding up what came. Both since the last `reset`.
    """

    def __init__(self, ring: RingWriter | None = None) -> None:
        self.ring = ring
        self.messages: dict[Key, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self._step, self._micro_batch, self._phase = 0, -1, ""

    @property
    def step(self) -> int:
        """The optimizer step under way; setting it also says that this rank is alive."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self.ring:
            self.ring.step = step
            self.ring.beat()

    @property
    def micro_batch(self) -> int:
        """The micro-batch under way; -1 outside of micro-batches."""
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        if self.ring:
            self.ring.micro_batch = micro_batch
            self.ring.beat()

    @property
    def phase(self) -> str:
        """What the rank does: "data", "forward", "backward", "optimizer", "checkpoint" …"""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self.ring:
            self.ring.phase = self.ring.intern(phase)
            self.ring.beat()

    @property
    def place(self) -> str:
        """As `step 3, micro-batch 1, forward`: for error messages."""
        return place_in_words(self._step, self._micro_batch, self._phase)

    def site(self, group: Group, operation: str, purpose: str, reduce_op: str = "", dtype: str = "") -> Site:
        """Describe a place that calls; made once per place, used by every `begin` from there."""
        number = self.ring.site(group.name, group.ranks, operation, purpose, reduce_op, dtype) if self.ring else 0
        return Site((group.name, purpose, operation), number)

    def begin(self, site: Site, sequence: int, payload_bytes: int, peer: int = -1, channel: int = -1) -> int:
        """Count a call and record its begin. `peer` is a global rank. Returns the call's number."""
        entry = self.messages.get(site.key)
        if entry is None:
            entry = self.messages[site.key] = [0, 0]
        entry[0] += 1
        entry[1] += payload_bytes
        if self.ring is None:
            return 0
        return self.ring.begin(site.ring, sequence, payload_bytes, peer, channel)

    def wait(self, number: int) -> None:
        """Record that the rank blocks from now on until the call is complete."""
        if self.ring:
            self.ring.wait(number)

    def end(self, number: int) -> None:
        """Record that the call is complete."""
        if self.ring:
            self.ring.end(number)

    def spent(self, group: str, since_s: float) -> None:
        """Add the time from `since_s` (time.perf_counter) until now to the group's seconds."""
        self.seconds[group] = self.seconds.get(group, 0.0) + time.perf_counter() - since_s

    def reset(self) -> None:
        """Forget counts and seconds: a new step begins."""
        self.messages.clear()
        self.seconds.clear()
