"""The step-time benchmark measures what it says, and says no when an aim is missed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import crew  # noqa: E402
import peer  # noqa: E402
import step_time  # noqa: E402


def turn(cpu_s, peak_gib=0.5):
    return crew.Turn(cpu_s=cpu_s, wall_s=1.0, blocked={}, idle=0.0, peak_bytes=int(peak_gib * 2**30))


def steps(rank, folder):
    try:
        (folder / f"rank-{rank}").touch()
        while True:
            start_s = time.process_time()
            while time.process_time() - start_s < 0.05 * (rank + 1):
                pass
            yield {"tensor": 0.01}
    finally:
        (folder.parent / f"{folder.name}-{rank}-closed").touch()


def test_a_turn_sums_the_cpu_seconds_of_its_ranks_and_ends_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    measured = crew.take_turn(crew.Contender(name="busy", num_ranks=3, steps=steps), num_steps=2)
    assert measured.cpu_s >= 0.3
    assert measured.wall_s >= 0.15
    assert measured.blocked["tensor"] == pytest.approx(0.01 / measured.wall_s)
    assert measured.peak_bytes > 2**20
    assert len(list(tmp_path.glob("*-closed"))) == 3


def test_a_rank_that_fails_is_named_with_its_traceback():
    def fails(rank, folder):
        yield {}
        assert rank != 1, "no luck"
        yield {}

    with pytest.raises(RuntimeError, match=r"unlucky, rank 1: (?s:.*)AssertionError: no luck"):
        crew.take_turn(crew.Contender(name="unlucky", num_ranks=2, steps=fails), num_steps=1)


def test_only_what_exceeds_its_aim_by_more_than_5_percent_fails():
    aims = {
        "one process": {"cpu": {"plain": 0.95}, "peak_gib": 0.5},
        "tensor 2": {"cpu": {"one process": 1.1, "DTensor": 0.7}, "peak_gib": 0.5},
        "data 2": {"cpu": {"one process": 1.0}},
    }
    turns = {
        "plain": [turn(2.0), turn(4.0), turn(1.0)],
        "one process": [turn(1.98), turn(3.9), turn(9.0)],  # the median of 0.99, 0.975 and 9
        "tensor 2": [turn(2.4, 0.53), turn(4.7, 0.53), turn(9.0, 0.53)],  # of 1.21, 1.21 and 1
    }
    assert step_time.failures(turns, aims) == [
        "tensor 2: 1.21 of the CPU seconds of one process, aim 1.1",
        "tensor 2: 0.53 GiB per process, aim 0.5",
    ]
    assert not step_time.failures({"one process": turns["one process"]}, aims)


def test_every_layout_has_an_aim_and_every_peer_exists():
    aims = json.loads((BENCHMARKS / "aims.json").read_text(encoding="utf-8"))
    assert set(aims) == set(step_time.LAYOUTS)
    bases = {base for aim in aims.values() for base in aim["cpu"]}
    assert bases <= {reference.name for reference in step_time.references()} | set(step_time.LAYOUTS)


def test_a_peer_is_compared_round_by_round():
    mine, theirs = (crew.Contender(name=name, num_ranks=1, steps=steps) for name in ("ours", "theirs"))
    turns = {"ours": [turn(1.0), turn(4.0), turn(1.2)], "theirs": [turn(2.0), turn(5.0), turn(2.0)]}
    columns = peer.table("peer", {"data 2": (mine, theirs)}, turns).columns
    cells = [next(iter(column.cells)) for column in columns]
    assert cells == ["data 2", "1.20", "2.00", "0.60", "0.50", "1.00", "1.00", "0.50", "0.50"]
