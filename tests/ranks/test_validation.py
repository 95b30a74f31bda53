"""Validation: the same loss in every layout, over all of a set whatever its size, and no trace of it in training."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run_worlds
from matrix import UNUSUAL
from messages import Messages, added
from single import solo_engine
from tiny import tiny_model, tiny_plan

from phalanx.data.source import Source
from phalanx.data.tokens import TokenWriter, mask_path
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.traffic import validation_traffic
from phalanx.rundir import RunDir
from phalanx.spec.job import DataSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer import loop
from phalanx.trainer.engine import Engine
from phalanx.trainer.loop import train_in
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.validation import Validation
from phalanx.trainer.world import World
from phalanx.watch.metrics import StepRecord, read

NUM_TOKENS = 650  # labels: 20 samples of 32 and 9 more; in rounds of 8, the third has 5 sequences, one of them short
NUM_ROUNDS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train` and `held-out`, which has a mask, so that numbers of supervised tokens are uneven."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(1)
    for name, num_tokens in (("train", 2000), ("held-out", NUM_TOKENS)):
        with TokenWriter(folder / name, np.uint16) as writer:
            for document in np.array_split(random.integers(0, 250, num_tokens), 40):
                writer.add(document)
                writer.end_document()
    mask_path(folder / "held-out").write_bytes((random.random(NUM_TOKENS) < 0.7).astype(np.uint8).tobytes())
    return folder


def plan_of(files: Path, layout: Layout, model: ModelSpec, *, documents: str = "joined", **job: Any) -> Plan:
    data = DataSpec(path=str(files / "train"), validation_path=str(files / "held-out"), documents=documents)
    return tiny_plan(layout, model, data=data, **job)


def source_of(plan: Plan) -> Source:
    return Source.of(plan.job, plan.model.vocab)


def validated(world: World, plan: Plan) -> tuple[float | None, Messages, int]:
    """The loss, the messages, and the bytes that parameters and gradients hold beyond what they did before."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    held = storage(engine)
    world.recorder.reset()
    loss = Validation(engine, source_of(plan), StopRequest()).loss()
    return loss, dict(world.recorder.messages), storage(engine) - held


def storage(engine: Engine) -> int:
    return sum(each.untyped_storage().size() for b in engine.buffers for each in (b.parameters, b.gradients))


def claimed(plan: Plan, coord: Coord) -> Messages:
    return {
        key: [NUM_ROUNDS * each for each in of_round]
        for key, of_round in added(validation_traffic(plan, coord)).items()
    }


@functools.cache
def by_training(files: Path, model: ModelSpec, documents: str) -> float:
    """The mean over the set as training on one process would show it, a round at a time."""
    plan = plan_of(files, Layout(micro_batch=8), model, documents=documents)
    engine, source, total, count = solo_engine(plan), source_of(plan), 0.0, 0
    for number in range(source.num_rounds):
        batch = source.validation(number, range(8))
        total += engine.forward_backward(engine.read(batch, number)).item() * batch.num_supervised
        count += batch.num_supervised
    assert source.num_rounds == NUM_ROUNDS
    labels = np.fromfile(mask_path(files / "held-out"), np.uint8)[1:].sum()
    assert (count == labels) == (documents == "joined")
    return total / count


DROPOUT = tiny_model(dropout=0.3, attention_dropout=0.3)
CASES = {
    "one process": (tiny_model(), Layout(micro_batch=4)),
    "all axes": (tiny_model("gpt2"), Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True, zero=1)),
    "dropout": (DROPOUT, Layout(tensor=2, pipeline=2)),
    "zero 3 within 2": UNUSUAL["zero 3 within 2, pipeline"],
    "chunks": UNUSUAL["chunks, sequence"],
    **{name: UNUSUAL[name] for name in ("zb-v", "zero 3, tied", "zero 3, interleaved")},
}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_finds_the_same_loss(case: str, files: Path) -> None:
    model, layout = CASES[case]
    documents = "separate" if case in ("all axes", "dropout", "zb-v") else "joined"
    plan = plan_of(files, layout, model, documents=documents)
    expected = by_training(files, replace(model, dropout=0.0, attention_dropout=0.0), documents)
    results = run_worlds(layout, validated, plan, model=model)
    assert len({loss for loss, _, _ in results}) == 1, "not the same bits on all ranks"
    for rank, (loss, messages, grown) in enumerate(results):
        assert loss == pytest.approx(expected, rel=1e-10)
        assert messages == claimed(plan, layout.coord(rank)), f"rank {rank}"
        assert grown == 0


def test_what_is_trained_for_does_not_matter(files: Path) -> None:
    """Validation shows the cross-entropy, whatever else is in the loss of training."""
    plan = plan_of(files, Layout(), tiny_model(), label_smoothing=0.2, z_loss=1e-2)
    loss = Validation(solo_engine(plan), source_of(plan), StopRequest()).loss()
    assert loss == pytest.approx(by_training(files, tiny_model(), "joined"), rel=1e-10)


def run(world: World, plan: Plan, run_dir: RunDir) -> None:
    train_in(world, plan, run_dir)


def metrics(files: Path, folder: Path, layout: Layout, *, every: int) -> list[Any]:
    plan = plan_of(files, layout, tiny_model(), num_steps=5, precision="fp32")
    data = replace(plan.job.data, validate_every_steps=every)
    plan = replace(plan, job=replace(plan.job, data=data))
    run_dir = RunDir(folder)
    run_dir.create()
    run_worlds(layout, run, plan, run_dir, model=plan.model)
    return read(run_dir.metrics)


def test_training_goes_on_as_if_nothing_had_been(files: Path, tmp_path: Path) -> None:
    layout = Layout(pipeline=2, data=2, zero=3)
    often = metrics(files, tmp_path / "often", layout, every=2)
    seldom = metrics(files, tmp_path / "seldom", layout, every=0)
    assert [record.validation_loss is not None for record in often] == [False, True, False, True, True]
    assert [record.validation_loss is not None for record in seldom] == [False] * 4 + [True]
    assert [(record.loss, record.gradient_norm) for record in often] == [
        (record.loss, record.gradient_norm) for record in seldom
    ]
    assert often[-1].validation_loss == seldom[-1].validation_loss
    assert often[1].validation_loss != often[3].validation_loss
    assert all(record.validation_s > 0 for record in often if record.validation_loss is not None)


class Ticks:
    """A clock that goes on by a second whenever it is asked, and by 1,000 in validation."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def validation(self, record: StepRecord) -> StepRecord:
        self.now += 1000.0
        return replace(record, validation_loss=1.0, validation_s=1000.0)


def run_by_ticks(world: World, plan: Plan, run_dir: RunDir) -> None:
    """In a process of its own, so nothing has to be put back."""
    ticks = Ticks()
    loop.time = ticks  # type: ignore[assignment]
    Validation.add_to = lambda self, record: ticks.validation(record)  # type: ignore[method-assign]
    train_in(world, plan, run_dir)


def test_case_93_the_time_of_validation_belongs_to_no_step(files: Path, tmp_path: Path) -> None:
    plan = plan_of(files, Layout(data=2), tiny_model(num_layers=1), num_steps=4, precision="fp32")
    plan = replace(plan, job=replace(plan.job, data=replace(plan.job.data, validate_every_steps=2)))
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_worlds(plan.layout, run_by_ticks, plan, run_dir, model=plan.model)
    assert [record.validation_loss for record in read(run_dir.metrics)] == [None, 1.0, None, 1.0]
    assert all(record.step_s < 100 for record in read(run_dir.metrics))


def asked_to_stop(world: World, plan: Plan) -> tuple[float | None, bool, int]:
    stop = StopRequest()
    stop.vote = float(world.rank == 1)
    validation = Validation(Engine(plan, world.coord, world.comm, world.device), source_of(plan), stop)
    loss = validation.loss()
    return loss, stop.agreed, world.recorder.messages["world", "validation loss", "all_reduce"][0]


def test_all_leave_validation_together_when_one_is_asked_to_stop(files: Path) -> None:
    layout = Layout(pipeline=2, data=2)
    plan = plan_of(files, layout, tiny_model())
    assert run_worlds(layout, asked_to_stop, plan, model=plan.model) == [(None, True, 1)] * 4


def test_no_validation_is_due_without_data_for_it(files: Path) -> None:
    plan = plan_of(files, Layout(), tiny_model())
    plan = replace(plan, job=replace(plan.job, data=DataSpec(path=str(files / "train"))))
    validation = Validation(solo_engine(plan), source_of(plan), StopRequest())
    assert not any(validation.due(step) for step in range(plan.job.num_steps + 1))
