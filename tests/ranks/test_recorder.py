"""What a rank counts, and that its ring file follows it."""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.plan.comm import Group
from phalanx.trainer.loop import Clock
from phalanx.trainer.recorder import Recorder
from phalanx.watch.events import RingWriter, read_ring
from phalanx.watch.metrics import AXES

GROUP = Group(name="data", ranks=(0, 2))


def test_counts_until_it_is_reset() -> None:
    recorder = Recorder()
    site = recorder.site(GROUP, "all_reduce", "gradients")
    for sequence in (1, 2):
        recorder.end(recorder.begin(site, sequence, 400))
    recorder.spent("data", time.perf_counter() - 1)
    assert recorder.messages == {("data", "gradients", "all_reduce"): [2, 800]}
    assert recorder.seconds["data"] >= 1
    recorder.reset()
    assert recorder.messages == recorder.seconds == {}
    recorder.begin(site, 3, 400)
    assert recorder.messages == {("data", "gradients", "all_reduce"): [1, 400]}


def test_a_clock_tells_whose_communication_a_rank_was_blocked_in() -> None:
    """Derived groups count for their axis; what all ranks wait for together is no compute."""
    recorder = Recorder()
    recorder.seconds.update({"tensor": 4.0, "world": 3.0})  # before the clock: as when a checkpoint was loaded
    clock = Clock(recorder)
    for group, seconds in {"tensor": 1.0, "kv": 0.5, "tied": 0.25, "world": 2.0}.items():
        recorder.seconds[group] = recorder.seconds.get(group, 0.0) + seconds
    assert dict(zip(AXES, clock.lap()[1:], strict=True)) == {"tensor": 1.5, "pipeline": 0.25, "data": 0, "world": 2}
    recorder.seconds["world"] += 1.0
    assert dict(zip(AXES, clock.lap()[1:], strict=True)) == {"tensor": 0, "pipeline": 0, "data": 0, "world": 1}


def test_the_ring_file_follows(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "0.ring", rank=0)
    recorder = Recorder(ring)
    recorder.step, recorder.micro_batch, recorder.phase = 5, 2, "backward"
    assert recorder.place == "step 5, micro-batch 2, backward"
    state = read_ring(ring.path)
    assert (state.step, state.micro_batch, state.phase) == (5, 2, "backward")
    number = recorder.begin(recorder.site(GROUP, "recv", "activations"), 7, 0, peer=2, channel=1)
    recorder.wait(number)
    waiting = read_ring(ring.path).waiting
    assert (waiting.operation, waiting.sequence, waiting.peer, waiting.channel) == ("recv", 7, 2, 1)
    assert (waiting.group, waiting.members, waiting.step) == ("data", (0, 2), 5)
    recorder.end(number)
    assert read_ring(ring.path).waiting is None
    ring.close()
