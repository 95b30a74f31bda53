"""One executor runs any schedule: random legal orders give the gradients of one process and hold what is claimed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import run_worlds
from single import masked_batch, solo_engine
from tiny import tiny_model, tiny_plan

from phalanx.plan.actions import Action
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import SCHEDULES, Schedule, schedule
from phalanx.rundir import RunDir
from phalanx.trainer import engine as engines
from phalanx.trainer import pipeline_parallel
from phalanx.trainer.engine import Engine
from phalanx.trainer.world import World
from phalanx.watch.actions import ActionsWriter, measured


def shuffled(made: Schedule, seed: int, *, split: bool) -> Schedule:
    """The stages and micro-batches of `made` in a random order that respects what needs what."""
    backward = "input_gradient" if split else "backward"
    last = made.num_stages - 1
    needs: dict[tuple[Any, int, int], list[tuple[Any, int, int]]] = {}
    for stage, i in itertools.product(range(last + 1), range(made.num_micro_batches)):
        needs["forward", stage, i] = [("forward", stage - 1, i)] if stage else []
        needs[backward, stage, i] = [(backward, stage + 1, i) if stage < last else ("forward", stage, i)]
        if split:
            needs["weight_gradient", stage, i] = [(backward, stage, i)]
    chance, done = random.Random(seed), []
    while len(done) < len(needs):
        done.append(chance.choice([key for key in needs if key not in done and set(needs[key]) <= set(done)]))
    actions: list[list[Action]] = [[] for _ in range(made.pipeline)]
    for kind, stage, i in done:
        coordinate, chunk = made.placement[stage]
        actions[coordinate].append(Action(kind=kind, micro_batch=i, chunk=chunk))
    return replace(made, name="random", actions=tuple(map(tuple, actions)))


@pytest.mark.parametrize("seed", range(6))
def test_random_order_gives_the_gradients_of_one_process(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 1 + seed % 2
    name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    layout = Layout(pipeline=2, data=1 + seed % 3, virtual_stages=chunks, schedule=name)
    plan = tiny_plan(layout, tiny_model("gpt2"), global_batch=12)
    order = shuffled(schedule(name, 2, chunks, 12 // layout.data), seed, split=seed >= 3)
    expected = truth(plan)
    monkeypatch.setattr(engines, "schedule", lambda *sizes: order)
    for result in run_worlds(layout, first_step, plan, model=plan.model):
        assert result == pytest.approx(expected, rel=1e-10)


def first_step(world: World, plan: Plan) -> tuple[float, float]:
    return loss_and_norm(Engine(plan, world.coord, world.comm, world.device))


def loss_and_norm(engine: Engine) -> tuple[float, float]:
    tokens, labels, num_supervised = masked_batch(engine.plan, 0)
    mine = list(engine.positions)
    loss = engine.forward_backward(engine.micro_batches(tokens[mine], labels[mine], num_supervised, 0))
    engine.synchronize()
    total, norm, _ = engine.totals(loss)
    return total, norm


def truth(plan: Plan) -> tuple[float, float]:
    return loss_and_norm(solo_engine(replace(plan, layout=Layout(micro_batch=4))))


LIVE = [
    (name, pipeline)
    for name, family in SCHEDULES.items()
    for pipeline in (2, 4)
    if pipeline * family.virtual_stages[0] <= 8
]


@pytest.mark.parametrize(("name", "pipeline"), LIVE)
def test_live_activations_are_those_that_the_schedule_says(name: str, pipeline: int) -> None:
    """After every action, a rank holds as many forwards without their gradients as `Schedule.live` counts."""
    virtual_stages = SCHEDULES[name].virtual_stages[0]
    layout = Layout(pipeline=pipeline, schedule=name, virtual_stages=virtual_stages)
    plan = tiny_plan(layout, tiny_model(num_layers=8))
    expected = schedule(name, pipeline, virtual_stages, 8)
    for rank, live in enumerate(run_worlds(layout, held, plan, model=plan.model)):
        assert live == list(expected.live(rank))[:-1]
        assert max(live) == expected.peak_live(rank)


def held(world: World, plan: Plan) -> list[int]:
    """Between all actions of a step, the number of forwards that this rank still keeps something of."""
    steps: list[Any] = []
    plain = pipeline_parallel._Step

    def remembered(**values: Any) -> Any:
        steps.append(plain(**values))
        return steps[-1]

    pipeline_parallel._Step = remembered
    live: list[int] = []
    engine = Engine(
        plan,
        world.coord,
        world.comm,
        world.device,
        lambda action: live.append(len(steps[-1].kept) + len(steps[-1].postponed)),
    )
    loss_and_norm(engine)
    return live[1:]


def timed(world: World, plan: Plan, run_dir: RunDir) -> None:
    engine = Engine(plan, world.coord, world.comm, world.device)
    loss_and_norm(engine)
    ActionsWriter(run_dir.actions(world.rank), 1, pytest.fail).after(1, engine.pipeline.times_s)


def test_measured_actions_begin_when_what_they_need_is_there(tmp_path: Path) -> None:
    """Waiting is no part of an action: it begins after the one that it waits for has begun on the other rank."""
    layout = Layout(pipeline=2, schedule="zb-v", virtual_stages=2)
    run_dir, plan = RunDir(tmp_path), tiny_plan(layout)
    run_dir.create()
    run_worlds(layout, timed, plan, run_dir, model=plan.model)
    made = schedule(layout.schedule, 2, 2, 8)
    step, walk = measured(run_dir, layout, made)
    assert step == 1
    began = {}
    for place, actions in enumerate(made.actions):
        times = list(zip(walk.starts_s[place], walk.ends_s[place], strict=True))
        assert times == sorted(times)
        assert all(start < end for start, end in times)
        for action, (start, _) in zip(actions, times, strict=True):
            began[action.kind, made.stages[place][action.chunk], action.micro_batch] = start
    for (kind, stage, micro_batch), start in began.items():
        before = stage - 1 if kind == "forward" else stage + 1
        if kind != "weight_gradient" and (kind, before, micro_batch) in began:
            assert start > began[kind, before, micro_batch]
