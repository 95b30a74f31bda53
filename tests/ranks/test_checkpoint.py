"""Training through checkpoints: a continued run is the same run, and damage is passed over, named or refused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import RankFailed, run_worlds
from single import solo_engine
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.folder import whole
from phalanx.checkpoint.saver import Saver
from phalanx.data.tokens import TokenWriter
from phalanx.errors import CheckpointError, CommError, RunError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec, DataSpec, OptimizerSpec
from phalanx.trainer.continuation import Continuation
from phalanx.trainer.loop import train_in
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import World
from phalanx.watch import metrics

MODEL = tiny_model(num_layers=2, hidden=32, head_dim=8, ffn=48, vocab=50)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataSpec:
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    with TokenWriter(prefix, np.uint16) as writer:
        writer.add(np.random.default_rng(0).integers(0, MODEL.vocab, 4 * 16 * 5 + 1))
        writer.end_document()
    return DataSpec(path=str(prefix))


def plan_of(data: DataSpec, layout: Layout, *, steps: int = 6, every: int = 0, keep: int = 3, **changes: Any) -> Plan:
    resume, verify = changes.pop("resume", "auto"), changes.pop("verify", True)
    optimizer = changes.pop("optimizer", OptimizerSpec(lr=1e-2, clip_norm=0.5, warmup_steps=3, schedule="constant"))
    checkpoint = CheckpointSpec(every_steps=every, keep=keep, resume=resume, verify=verify)
    job = {
        "global_batch": 4,
        "seq_len": 16,
        "num_steps": steps,
        "precision": "fp32",
        "data": data,
        "checkpoint": checkpoint,
        "optimizer": optimizer,
    }
    return tiny_plan(layout, changes.pop("model", MODEL), **(job | changes))


def train(plan: Plan, run_dir: RunDir, prepare: Callable[[World], None] | None = None) -> str:
    """Train on all ranks, in this process if there is one; returns what was said.

    `prepare`, if given, runs on each rank first, and may be the death of it.
    """
    run_dir.create()
    said = run_dir.path / "said"

    def main(world: World) -> None:
        if prepare:
            prepare(world)
        with said.open("w") if world.rank == 0 else open(os.devnull, "w") as file, contextlib.redirect_stdout(file):
            try:
                train_in(world, plan, run_dir)
            except CommError:
                if not prepare:
                    raise
                os.kill(os.getpid(), signal.SIGKILL)  # the others are dead already

    if plan.layout == Layout() and not prepare:
        main(World(rank=0, layout=plan.layout, device=torch.device("cpu"), recorder=Recorder(), comms={}))
    else:
        run_worlds(plan.layout, main, model=plan.model, mortal=range(plan.layout.num_ranks) if prepare else ())
    return said.read_text()


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of all tensor files of a checkpoint."""
    whole(path)
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def losses(run_dir: RunDir) -> list[tuple[float, float, float]]:
    return [(record.loss, record.gradient_norm, record.learning_rate) for record in metrics.read(run_dir.metrics)]


LAYOUTS = {
    "one": Layout(),
    "2x1x2": Layout(tensor=2, data=2, zero=1, sequence_parallel=True),
    "zero 3": Layout(data=2, zero=3),
    "pipeline": Layout(pipeline=2),
    "powersgd": Layout(data=2, reduce="powersgd", reduce_rank=2, zero=1),
    "top-k": Layout(data=2, reduce="top-k", reduce_fraction=0.05),
}


@pytest.mark.parametrize(
    ("name", "precision", "steps"),
    [
        ("one", "fp32", 20),
        ("2x1x2", "bf16", 6),
        ("zero 3", "fp32", 6),
        ("pipeline", "fp32", 6),
        ("pipeline", "fp16", 4),
        ("powersgd", "fp32", 4),
        ("top-k", "bf16", 4),
    ],
)
def test_a_continued_run_is_the_same_run(data, tmp_path, name, precision, steps):
    layout = LAYOUTS[name]
    straight, broken = RunDir(tmp_path / "straight"), RunDir(tmp_path / "broken")
    half = steps // 2
    train(plan_of(data, layout, steps=steps, precision=precision), straight)
    plan = plan_of(data, layout, steps=steps, every=half, precision=precision)
    train(plan, broken, die_at(half + 2))
    assert [step for step, _ in folders.checkpoints(broken.checkpoints)] == [half]
    said = train(plan, broken)
    assert f"going on from step {half}" in said
    assert "anew" not in said
    assert losses(broken) == losses(straight)
    assert contents(broken.checkpoint(steps)) == contents(straight.checkpoint(steps))


def die_at(step: int) -> Callable[[World], None]:
    """Kill every rank as it begins `step`; saves before it are waited for, so that the disk's speed decides nothing."""

    def prepare(world: World) -> None:
        class Mortal(Recorder):
            @Recorder.step.setter
            def step(self, value: int) -> None:
                Recorder.step.fset(self, value)
                if value == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        world.recorder.__class__ = Mortal
        save = Saver.save
        Saver.save = lambda self, *arguments, background: save(self, *arguments)

    return prepare


ONE = Layout()


def test_another_layout_goes_on_with_the_same_losses(data, tmp_path):
    """In float64, so that only a wrong value, not the order of sums, can make a difference."""
    straight, moved = RunDir(tmp_path / "straight"), RunDir(tmp_path / "moved")
    train(plan_of(data, ONE, steps=6, precision="fp64"), straight)
    layouts = [
        Layout(tensor=2, data=2, zero=1, sequence_parallel=True),
        Layout(pipeline=3, stage_layers=(1, 0, 1)),  # whose second rank has nothing to save or load
        ONE,
    ]
    for steps, layout in zip([2, 4, 6], layouts, strict=True):
        train(plan_of(data, layout, steps=steps, precision="fp64"), moved)
    for there, here in zip(losses(straight), losses(moved), strict=True):
        assert here == pytest.approx(there, rel=1e-9)


def test_errors_of_a_reduction_begin_anew_on_another_layout(data, tmp_path):
    run_dir = RunDir(tmp_path)
    train(plan_of(data, LAYOUTS["top-k"], steps=1), run_dir)
    assert list(run_dir.checkpoint(1).glob("reduction-0000?.safetensors"))
    said = train(plan_of(data, LAYOUTS["powersgd"], steps=2), run_dir)
    assert "errors of the powersgd reduction begin anew: there are none of this layout" in said
    assert "begin anew" not in train(plan_of(data, LAYOUTS["powersgd"], steps=3), run_dir)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> RunDir:
    """A run of 6 steps on one rank, with checkpoints after 2, 4 and 6."""
    run_dir = RunDir(tmp_path_factory.mktemp("finished"))
    train(plan_of(data, ONE, every=2), run_dir)
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> RunDir:
    """A copy of it to do harm to."""
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def steps_of(run_dir: RunDir) -> list[int]:
    return [step for step, _ in folders.checkpoints(run_dir.checkpoints)]


def test_a_finished_run_changes_nothing(data, run_dir):
    before = {path: path.stat().st_mtime_ns for path in run_dir.checkpoints.rglob("*")}
    assert "already at step 6 of 6" in train(plan_of(data, ONE, every=2), run_dir)
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.checkpoints.rglob("*")}


def test_more_steps_and_another_rate_are_honoured_and_said(data, run_dir):
    optimizer = OptimizerSpec(lr=5e-3, clip_norm=0.5, warmup_steps=3, schedule="constant")
    said = train(plan_of(data, ONE, steps=8, optimizer=optimizer), run_dir)
    assert "job.num_steps: 8 here, 6 there" in said and "job.optimizer.lr: 0.005 here, 0.01 there" in said
    assert "job.checkpoint" not in said
    assert [rate for _, _, rate in losses(run_dir)[-3:]] == [1e-2, 5e-3, 5e-3]


def test_a_run_that_ends_where_it_has_just_saved_saves_once(data, tmp_path):
    """As one that is told to stop at that step."""
    run_dir, plan = RunDir(tmp_path), plan_of(data, ONE, every=2)
    run_dir.create()
    said: list[str] = []
    continuation = Continuation(solo_engine(plan), run_dir, said.append)
    continuation.restore()
    continuation.after(2)
    continuation.finish(2)
    assert steps_of(run_dir) == [2] and len(said) == 1


def test_a_last_state_that_cannot_be_saved_is_a_failed_run(data, tmp_path, monkeypatch):
    run_dir, plan = RunDir(tmp_path), plan_of(data, ONE)
    run_dir.create()
    said: list[str] = []
    continuation = Continuation(solo_engine(plan), run_dir, said.append)
    continuation.restore()
    monkeypatch.setattr(Saver, "_check_space", refuse)
    with pytest.raises(RunError, match=r"the state after step 6 could not be saved; .* there is none"):
        continuation.finish(6)
    assert said == ["checkpoint of step 6 NOT saved: No space left on device"]


def refuse(saver: Saver) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_only_the_newest_are_kept(data, tmp_path):
    run_dir = RunDir(tmp_path)
    train(plan_of(data, ONE, every=1, keep=2), run_dir)
    assert steps_of(run_dir) == [6, 5]


def harm(path: Path, how: str) -> None:
    weights = next(path.glob("weight-*"))
    content = bytearray(weights.read_bytes())
    if how == "missing":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(content[:-100])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "flipped":
        content[-100] ^= 4
        weights.write_bytes(content)
    elif how == "of another step":
        shutil.copy(path.with_name("step-000002") / weights.name, weights)
    elif how == "header":
        content[20] ^= 4
        weights.write_bytes(content)
    elif how == "manifest of another":
        shutil.copy(path.with_name("step-000002") / "manifest.json", path / "manifest.json")
    elif how == "plan":
        (path / "plan.json").write_text((path / "plan.json").read_text().replace("1e-", "2e-"))


DAMAGE = {
    "missing": "No such file",
    "cut": "bytes of",
    "empty": "has 0 bytes of",
    "flipped": "weight of model",
    "of another step": "checksum does not match",
    "header": "(header): the checksum does not match",
    "manifest of another": "manifest.json: is of step 2",
    "plan": "plan.json",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_named(data, run_dir, how):
    untouched = contents(run_dir.checkpoint(6))
    harm(run_dir.checkpoint(6), how)
    said = train(plan_of(data, ONE), run_dir)
    assert "passed over, for it is not whole" in said and DAMAGE[how] in said and "step-000006" in said
    assert "going on from step 4" in said and "set aside as step-000006.aside-" in said
    assert contents(run_dir.checkpoint(6)) == untouched, "the run came to the same end again"


def test_an_explicit_checkpoint_that_is_damaged_stops_all_ranks(data, run_dir):
    path = run_dir.checkpoint(6)
    harm(path, "flipped")
    with pytest.raises(RankFailed) as caught:
        train(plan_of(data, Layout(data=2, zero=1), resume=str(path)), run_dir)
    assert isinstance(caught.value.cause, CheckpointError)
    for word in ("weight-00000.safetensors", "bytes ", "weight of model.", "checksum"):
        assert word in str(caught.value.cause)
    assert steps_of(run_dir) == [6, 4, 2]


def test_no_whole_checkpoint_is_no_reason_to_start_anew(data, run_dir):
    for step in (2, 4, 6):
        harm(run_dir.checkpoint(step), "flipped")
    refused(plan_of(data, ONE), run_dir, r"(?s)no checkpoint is whole.*step-000006.*step-000004.*step-000002")


def test_checksums_can_be_left_out(data, run_dir):
    harm(run_dir.checkpoint(6), "flipped")
    assert "going on from step 6" in train(plan_of(data, ONE, verify=False), run_dir)


def test_going_back_sets_the_later_ones_aside(data, run_dir):
    said = train(plan_of(data, ONE, steps=5, resume=str(run_dir.checkpoint(2))), run_dir)
    assert "going on from step 2" in said and said.count("set aside as") == 2
    assert steps_of(run_dir) == [5, 2]


def test_two_runs_in_one_folder_are_refused(data, run_dir, tmp_path):
    other = RunDir(tmp_path / "other")
    train(plan_of(data, ONE, steps=1), other)
    for resume in ("never", str(other.checkpoint(1))):
        refused(plan_of(data, ONE, resume=resume), run_dir, "already has checkpoints, the newest of step 6")
    said = train(plan_of(data, ONE, steps=2, resume=str(run_dir.checkpoint(2))), RunDir(tmp_path / "third"))
    assert "already at step 2 of 2" in said


def refused(plan: Plan, run_dir: RunDir, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        train(plan, run_dir)


OTHERS = {
    "num_layers": (3, r"model.num_layers is 2 in the checkpoint and 3 here"),
    "tied": (True, r"model.tied is False in the checkpoint and True here"),
    "rope_theta": (5e5, r"model.rope_theta is 10000.0 in the checkpoint and 500000.0 here"),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_model_is_refused_by_its_first_difference(data, run_dir, field):
    value, match = OTHERS[field]
    refused(plan_of(data, ONE, steps=9, model=replace(MODEL, **{field: value})), run_dir, match)


def test_another_global_batch_would_skip_samples(data, run_dir):
    refused(plan_of(data, ONE, steps=9, global_batch=8), run_dir, "24 samples were read in 6 steps.*it would be 48")


def test_another_type_is_refused_not_rounded(data, run_dir):
    refused(plan_of(data, ONE, steps=9, precision="fp64"), run_dir, "is F32 in the checkpoint and F64 here")
