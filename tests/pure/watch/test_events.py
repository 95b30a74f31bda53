"""The ring file: what is written is read, also after death, and nothing that was half written is believed."""

import errno
import os
import signal
import struct
import subprocess
import sys
import time

import pytest

from phalanx.errors import RunError
from phalanx.watch import events
from phalanx.watch.events import (
    NUM_CALLS,
    RingWriter,
    copy_ring,
    in_words,
    process_status,
    read_ring,
    remove_dead_rings,
    ring_path,
)


@pytest.fixture
def ring(tmp_path):
    writer = RingWriter(tmp_path / "rank.ring", rank=2, coords="pipeline 1 data 0 tensor 0")
    yield writer
    writer.close()


def call(ring, sequence=1, **where):
    site = ring.site("tensor", (2, 3), "all_reduce", "mlp output", "sum", "float32")
    return ring.begin(site, sequence=sequence, num_bytes=1024, **where)


def test_what_is_written_is_read(ring):
    ring.step, ring.micro_batch, ring.phase = 3, 1, ring.intern("forward")
    first = call(ring, 7)
    ring.wait(first)
    ring.end(first)
    site = ring.site("pipeline", (0, 2), "recv", "activations", dtype="bfloat16")
    second = ring.begin(site, sequence=5, num_bytes=64, peer=0, channel=1)
    state = read_ring(ring.path)
    assert (state.pid, state.parent_pid, state.rank) == (os.getpid(), os.getppid(), 2)
    assert state.coords == "pipeline 1 data 0 tensor 0"
    assert state.waiting is None
    done, open_ = state.calls
    assert (done.number, done.group, done.members, done.operation) == (first, "tensor", (2, 3), "all_reduce")
    assert (done.purpose, done.reduce_op, done.dtype, done.num_bytes) == ("mlp output", "sum", "float32", 1024)
    assert (open_.purpose, open_.reduce_op, open_.dtype, open_.num_bytes) == ("activations", "", "bfloat16", 64)
    assert (done.sequence, done.step, done.micro_batch, done.phase) == (7, 3, 1, "forward")
    assert (done.peer, done.channel) == (None, None)
    assert done.begin_s <= done.wait_s <= done.end_s <= time.monotonic()
    assert (open_.number, open_.peer, open_.channel, open_.wait_s, open_.end_s) == (second, 0, 1, None, None)
    assert state.under_way == (open_,)


def test_times_of_a_ring_are_comparable_with_those_of_other_hosts(ring, tmp_path):
    ring.end(call(ring))
    copy_ring(ring.path, tmp_path / "copy.ring")
    for state in (read_ring(ring.path), read_ring(tmp_path / "copy.ring")):
        age_s = time.time() - (state.wall_clock_offset_s + state.calls[0].end_s)
        assert abs(age_s - (time.monotonic() - state.calls[0].end_s)) < 1  # both clocks run on


def test_the_last_calls_are_kept_in_order(ring):
    for sequence in range(1, 3 * NUM_CALLS):
        ring.end(call(ring, sequence))
    assert [c.sequence for c in read_ring(ring.path).calls] == list(range(2 * NUM_CALLS, 3 * NUM_CALLS))


def test_an_old_call_that_ends_late_does_not_touch_its_successor(ring):
    old = call(ring)
    numbers = [call(ring) for _ in range(NUM_CALLS)]
    ring.wait(old)
    ring.end(old)
    state = read_ring(ring.path)
    assert [c.number for c in state.calls] == numbers
    assert all(c.wait_s is None and c.end_s is None for c in state.calls)


def test_a_record_cut_short_is_left_out(ring):
    for sequence in (1, 2, 3):
        ring.end(call(ring, sequence))
    data = bytearray(ring.path.read_bytes())
    start = len(data) - NUM_CALLS * 80 + 2 * 80
    assert struct.unpack_from("<Q", data, start) == (2,)
    data[start + 40 : start + 80] = bytes(40)
    ring.path.write_bytes(data)
    assert [c.sequence for c in read_ring(ring.path).calls] == [1, 3]


def test_words_for_a_waiting_rank(ring, monkeypatch):
    ring.step, ring.micro_batch = 3, 1
    ring.phase = ring.intern("forward")
    ring.wait(call(ring, 8))
    since = read_ring(ring.path).waiting.wait_s
    monkeypatch.setattr(events.time, "monotonic", lambda: since + 3.14)
    assert in_words(read_ring(ring.path)) == (
        "rank 2 (pipeline 1 data 0 tensor 0): waits 3.1 s in all_reduce 'mlp output' #8 "
        "of group tensor with ranks 2, 3, sum of float32; step 3, micro-batch 1, forward"
    )


def test_words_for_a_rank_outside_of_calls(ring):
    assert "has finished no call" in in_words(read_ring(ring.path))
    ring.end(call(ring, 7))
    call(ring, 8)
    words = in_words(read_ring(ring.path))
    assert "is in no call since 0.0 s" in words
    assert "last finished all_reduce 'mlp output' #7 of group tensor" in words
    assert "under way: 1, the oldest all_reduce 'mlp output' #8" in words


def test_words_name_the_peer_and_channel(ring):
    site = ring.site("pipeline", (0, 2), "recv", "activations")
    ring.wait(ring.begin(site, sequence=6, num_bytes=8, peer=0, channel=1))
    assert "in recv 'activations' #6 from rank 0 on channel 1 of group pipeline" in in_words(read_ring(ring.path))


def test_readable_after_sigkill(tmp_path):
    path = tmp_path / "killed.ring"
    program = (
        "import sys, time; from pathlib import Path; from phalanx.watch.events import RingWriter\n"
        "ring = RingWriter(Path(sys.argv[1]), rank=1); ring.step = 9\n"
        "ring.wait(ring.begin(ring.site('data', (0, 1), 'barrier', 'start'), sequence=4, num_bytes=0))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    while process_status(process.pid) != "stopped":
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    assert process_status(process.pid) == "dead"
    state = read_ring(path)
    assert state.waiting.purpose == "start"
    assert state.waiting.step == 9


def test_a_copy_tells_how_long_the_call_had_waited_then(ring, tmp_path, monkeypatch):
    ring.wait(call(ring))
    copy_ring(ring.path, tmp_path / "copy.ring")
    at = read_ring(tmp_path / "copy.ring").read_s
    monkeypatch.setattr(events.time, "monotonic", lambda: at + 1000)
    assert "waits 0.0 s" in in_words(read_ring(tmp_path / "copy.ring"))
    assert "waits 1000.0 s" in in_words(read_ring(ring.path))


def test_a_full_table_of_strings_loses_names_only(ring):
    for number in range(3000):
        ring.intern(f"a rather long name of a site, number {number}")
    ring.end(call(ring, 5))
    (last,) = read_ring(ring.path).calls
    assert (last.sequence, last.purpose, last.members) == (5, "?", ())


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.ring"
    path.write_bytes(b"something else")
    with pytest.raises(RunError, match="not a ring file"):
        read_ring(path)
    with pytest.raises(FileNotFoundError):
        read_ring(tmp_path / "none.ring")
    with pytest.raises(RunError, match="cannot make the ring file"):
        RingWriter(tmp_path / "no folder" / "x.ring", rank=0)


@pytest.mark.parametrize("used", [2**17, 2**32 - 1])
def test_a_damaged_table_of_strings_is_refused(ring, used):
    data = bytearray(ring.path.read_bytes())
    struct.pack_into("<I", data, 120, used)
    ring.path.write_bytes(data)
    with pytest.raises(RunError, match=f"is damaged: {used} bytes of strings in a table of 65536"):
        read_ring(ring.path)


def test_damaged_members_are_refused(ring):
    ring.end(call(ring))
    ring.path.write_bytes(ring.path.read_bytes().replace(b"\x1f2,3\x1f", b"\x1f2,x\x1f"))
    with pytest.raises(RunError, match="is damaged: invalid literal"):
        read_ring(ring.path)


def test_a_copy_that_does_not_fit_leaves_nothing(ring, tmp_path, monkeypatch):
    def full(path, data):
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(events.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        copy_ring(ring.path, tmp_path / "copy.ring")
    assert list(tmp_path.iterdir()) == [ring.path]


def test_runs_do_not_meet(tmp_path):
    assert len({ring_path(tmp_path / run, rank) for run in "ab" for rank in range(3)}) == 6
    assert ring_path(tmp_path / "a" / ".." / "b", 0) == ring_path(tmp_path / "b", 0)


def test_only_rings_without_writer_and_reader_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "ring_directory", lambda: tmp_path)
    mine = RingWriter(ring_path(tmp_path / "mine", 0), rank=0)
    orphan = RingWriter(ring_path(tmp_path / "orphan", 0), rank=0)
    read_later = RingWriter(ring_path(tmp_path / "read later", 0), rank=0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for ring, pid, parent in ((orphan, child.pid, child.pid), (read_later, child.pid, os.getpid())):
        data = bytearray(ring.path.read_bytes())
        struct.pack_into("<ii", data, 8, pid, parent)
        ring.path.write_bytes(data)
    broken = ring_path(tmp_path / "broken", 0)
    broken.write_bytes(b"")
    newer, older = (ring_path(tmp_path / name, 0) for name in ("of a newer version", "of an older version, orphaned"))
    newer.write_bytes(struct.pack("<8sii40x", b"PHXRING9", os.getpid(), child.pid))
    older.write_bytes(struct.pack("<8sii40x", b"PHXRING1", child.pid, child.pid))
    remove_dead_rings()
    assert set(tmp_path.glob("*.ring")) == {mine.path, read_later.path, newer}
    newer.unlink()
    for ring in (mine, orphan, read_later):
        ring.close()
    assert not list(tmp_path.glob("*.ring"))
