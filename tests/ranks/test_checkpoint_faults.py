"""Kills at every moment of a save, and disks that refuse: the last published checkpoint is whole, always.

The state here is one number in every element, the step, so that a mixture of two saves cannot hide. PHALANX_KILLS=50
kills at so many moments instead of ten.

By number, as the tests have them: 16, 17, 20, 21 and 22 stand here; 18, 19, 36 and 37 in
test_checkpoint; 23 and 24 in test_train_command; 25 in test_agent; 41 in test_rundir.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from helpers import RankFailed, run_worlds
from simulated import engines, pieces_of
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint import parts, saver, tensor_file
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.saver import Saver
from phalanx.errors import CheckpointError, CommError
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.state import state
from phalanx.trainer.world import World

MODEL = tiny_model(num_layers=2, hidden=32, head_dim=8, ffn=48, vocab=50)
LAYOUT = Layout(tensor=1, data=2, zero=1)


def save_steps(
    run_dir: RunDir, steps: range, prepare: Callable[[int], None] = lambda rank: None, keep: int = 2, **limits: float
) -> list[list[str] | None]:
    """Two ranks save every step in the background, until something happens to them. Returns what each was told to say,
    None for those that died; a rank whose peer died dies too."""
    run_dir.create()
    plan = tiny_plan(LAYOUT, MODEL, checkpoint=CheckpointSpec(keep=keep))

    def main(world: World) -> list[str]:
        said: list[str] = []
        pieces = list(state(Engine(plan, world.coord, world.comm, world.device)))
        try:
            saves = Saver(run_dir, plan, pieces, world.comm("world"), say=said.append)
            prepare(world.rank)
            for step in steps:
                for piece in pieces:
                    piece.tensor.fill_(float(step))
                saves.save(step, {"step": step}, background=True)
            saves.wait()
        except CommError:
            die()
        return said

    return run_worlds(LAYOUT, main, model=MODEL, mortal=range(2), **limits)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def newest(run_dir: RunDir) -> int:
    """The step of the newest whole checkpoint, after all of it was read, checked and found to be of that step."""
    found = folders.find(run_dir.checkpoints)
    assert found is not None and found.passed_over == ()
    manifest = folders.whole(found.path)
    (pieces,) = pieces_of(engines(tiny_plan(Layout(), MODEL)))
    read_pieces(found.path, manifest, pieces)
    values = {value for piece in pieces for value in piece.tensor.unique().tolist()}
    assert values == {float(found.step)} and manifest.extra == {"step": found.step}
    return found.step


MOMENTS = {
    "before any data": (saver, "write_part", 3, 2),
    "in the midst of the data": (tensor_file.os, "fsync", 2 * 8 + 2, 2),
    "before the manifest": (parts, "_assert_complete", 3, 2),
    "before the rename": (parts, "sync_folder", 2 * 2 + 1, 2),
    "after the rename": (parts, "sync_folder", 2 * 2 + 2, 3),
    "while the old one is deleted": (folders.shutil, "rmtree", 1, 3),
}
"""What is called for the n-th time when the kill comes, in the save of step 3, and the step that must then be found."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_the_last_checkpoint(tmp_path, moment):
    module, name, number, expected = MOMENTS[moment]

    def prepare(rank: int) -> None:
        if rank == 0:
            lethal(module, name, number)

    run_dir = RunDir(tmp_path)
    assert save_steps(run_dir, range(1, 6), prepare) == [None, None]
    assert newest(run_dir) == expected
    said, _ = save_steps(run_dir, range(expected + 1, expected + 2))
    assert newest(run_dir) == expected + 1
    left = any("dead run left unfinished" in line for line in said)
    assert left == (moment != "after the rename")
    assert not list(run_dir.checkpoints.glob("*.tmp-*"))


def test_a_kill_of_another_rank_leaves_the_last_checkpoint(tmp_path):
    run_dir = RunDir(tmp_path)
    save_steps(run_dir, range(1, 6), lambda rank: lethal(tensor_file.os, "fsync", 2 * 4 + 2) if rank else None)
    assert newest(run_dir) == 2


def lethal(module: object, name: str, number: int) -> None:
    """Let the `number`-th call of a function be the end of this process."""
    original, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            die()
        return original(*args, **kwargs)

    setattr(module, name, call)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PHALANX_KILLS", "10"))))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, seed):
    """Each rank dies at a moment of its own while one save follows on the other; the survivor dies of that."""
    delays = random.Random(seed).choices([0.02 + 0.03 * i for i in range(20)], k=2)
    run_dir = RunDir(tmp_path)
    save_steps(run_dir, range(1, 2))

    def prepare(rank: int) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process in the kernel, as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, delays[rank])

    assert save_steps(run_dir, range(2, 100_000), prepare) == [None, None]
    reached = newest(run_dir)
    save_steps(run_dir, range(reached + 1, reached + 2))
    assert newest(run_dir) == reached + 1


def test_a_rank_that_cannot_write_ends_nothing(tmp_path):
    """A limit on the size of files, on one rank, that is lifted after two failed saves."""
    run_dir = RunDir(tmp_path)

    def prepare(rank: int) -> None:
        if rank == 1:
            fail(saver, "write_part", [2, 3])

    said, other = save_steps(run_dir, range(1, 6), prepare, keep=0)
    assert other == []
    failed = [line for line in said if "NOT saved" in line]
    assert [line.split()[3] for line in failed] == ["2", "3"]
    assert all("rank 1" in line and "No space left on device" in line for line in failed)
    assert [step for step, _ in folders.checkpoints(run_dir.checkpoints)] == [5, 4, 1]
    assert newest(run_dir) == 5


@pytest.mark.parametrize(("error", "ends"), [(MemoryError(), False), (ZeroDivisionError("of ours"), True)])
def test_a_writer_that_dies_leaves_the_last_checkpoint(tmp_path, error, ends):
    """Number 22. The thread that writes is a part of its rank: nobody can kill it alone, but it can fail."""
    run_dir = RunDir(tmp_path)

    def prepare(rank: int) -> None:
        if rank == 1:
            fail(saver, "write_part", [2], error)

    if ends:
        with pytest.raises(RankFailed, match="ZeroDivisionError: of ours"):
            save_steps(run_dir, range(1, 4), prepare)
        assert newest(run_dir) == 1
        return
    said, _ = save_steps(run_dir, range(1, 4), prepare)
    assert "checkpoint of step 2 NOT saved, training goes on: rank 1: MemoryError" in said
    assert newest(run_dir) == 3


def fail(module: object, name: str, numbers: list[int], error: Exception | None = None) -> None:
    """Let some calls of a function meet `error`, or a full disk, really: on /dev/full."""
    original, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) in numbers:
            if error:
                raise error
            with open("/dev/full", "wb") as full:
                full.write(b"x")
        return original(*args, **kwargs)

    setattr(module, name, call)


def test_a_file_size_limit_on_one_rank_ends_nothing(tmp_path):
    def prepare(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    said, _ = save_steps(RunDir(tmp_path), range(1, 3), prepare)
    said = without_waits(said)
    assert len(said) == 2 and all("rank 1: " in line and "File too large" in line for line in said)
    assert folders.checkpoints(RunDir(tmp_path).checkpoints) == []


def without_waits(said: list[str]) -> list[str]:
    """What was said, whatever the machine's pace."""
    return [line for line in said if not line.startswith("waited ")]


def test_a_slow_disk_is_waited_for_beyond_the_time_limit_of_communication(tmp_path):
    """One rank's writes take 2.5 s each, where ranks wait 1.5 s for each other and no longer."""
    run_dir = RunDir(tmp_path)

    def prepare(rank: int) -> None:
        if rank == 1:
            write = saver.write_part
            saver.write_part = lambda *arguments: (time.sleep(2.5), write(*arguments))

    said, other = save_steps(run_dir, range(1, 3), prepare, timeout_s=1.5)
    assert len(said) == 3 and said[1].startswith("waited ") and "for the checkpoint of step 1" in said[1]
    assert other == [] and newest(run_dir) == 2


def test_training_goes_on_while_the_disk_is_slow(tmp_path):
    """The state is copied when the save begins: what training does to it meanwhile is not in the checkpoint."""
    run_dir, plan = RunDir(tmp_path), tiny_plan(Layout(), MODEL, checkpoint=CheckpointSpec(keep=0))

    def main(world: World) -> list[bool]:
        pieces = list(state(Engine(plan, world.coord, world.comm, world.device)))
        saves, go_on, write = Saver(run_dir, plan, pieces, world.comm("world"), say=print), Event(), saver.write_part
        saver.write_part = lambda *arguments: (go_on.wait(), write(*arguments))
        done = []
        for value in (1.0, 2.0, 3.0):
            for piece in pieces:
                piece.tensor.fill_(value)
            if value == 1.0:
                saves.save(1, {"step": 1}, background=True)
            done.append(saves.poll())
        go_on.set()
        saves.wait()
        return done

    assert run_worlds(Layout(), main, model=MODEL) == [[False, False, False]]
    assert newest(run_dir) == 1


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Mounts small file systems in memory; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"cannot mount a small disk here: {result.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_told_with_numbers_and_tried_again(disk):
    """The state is 449 kB; the disk has room for one checkpoint and a half, so that the second save is not begun."""
    run_dir = RunDir(disk("size=800k"))
    said, _ = save_steps(run_dir, range(1, 4), keep=1)
    said = without_waits(said)
    assert "checkpoint" in said[0] and "step-000001" in said[0]
    assert len(said) == 3 and all("NOT saved" in line for line in said[1:])
    assert all("449,280 bytes are needed and " in line and " are free" in line for line in said[1:])
    assert newest(run_dir) == 1
    said, _ = save_steps(run_dir, range(4, 4))
    assert len(said) == 1, "as soon as the next run starts"
    assert said[0].startswith("checkpoints cannot be written as things are: rank 0: 449,280 bytes are needed")
    subprocess.run(["mount", "-o", "remount,size=2m", str(run_dir.path)], check=True)
    said, _ = save_steps(run_dir, range(4, 5))
    assert newest(run_dir) == 4 and not any("NOT" in line for line in said)


def test_a_disk_that_fills_up_in_the_midst_keeps_the_old_one(disk, monkeypatch):
    """Another program takes the space after it was found free."""
    run_dir = RunDir(disk("size=800k"))
    monkeypatch.setattr(Saver, "_check_space", lambda self: None)
    said, _ = save_steps(run_dir, range(1, 3), keep=1)
    assert "NOT saved" in said[-1] and "No space left on device" in said[-1]
    assert newest(run_dir) == 1
    assert not list(run_dir.checkpoints.glob("*.tmp-*")), "the half written one gives its space back"


def test_a_read_only_disk_is_told_and_ends_nothing(disk):
    run_dir = RunDir(disk("size=2m"))
    save_steps(run_dir, range(1, 2))
    subprocess.run(["mount", "-o", "remount,ro", str(run_dir.path)], check=True)
    said, _ = save_steps(run_dir, range(2, 4))
    said = without_waits(said)
    assert len(said) == 3 and all("Read-only file system" in line for line in said)
    assert newest(run_dir) == 1


def test_ranks_that_see_other_folders_are_told_at_the_start(tmp_path):
    plan = tiny_plan(LAYOUT, MODEL)

    def main(world: World) -> str:
        run_dir = RunDir(tmp_path / str(world.rank))
        run_dir.create()
        pieces = state(Engine(plan, world.coord, world.comm, world.device))
        with pytest.raises(CheckpointError) as caught:
            Saver(run_dir, plan, pieces, world.comm("world"), say=print)
        return str(caught.value)

    first, second = run_worlds(LAYOUT, main, model=MODEL)
    assert first == second and "not all ranks see the same run folder: rank 1: " in first


def test_state_with_no_owner_never_becomes_a_checkpoint(tmp_path):
    """A mistake of ours, not of the user."""
    plan = tiny_plan(Layout(), MODEL)
    (pieces,) = pieces_of(engines(plan))
    parts_folder = tmp_path / "aside"
    parts_folder.mkdir()
    write_part(parts_folder, 0, 1, pieces[3:])
    with pytest.raises(AssertionError, match=r"0 of 1600 elements of \w+ of model.embed_tokens.weight have an owner"):
        publish(parts_folder, tmp_path / "step-000001", plan, 1, {}, 1)
    assert folders.checkpoints(tmp_path) == []
