"""fp16: every layout has the gradients of one process, all ranks decide on the loss scale together, and it goes on with
a run."""

from __future__ import annotations

import pytest
import torch
from helpers import run_worlds
from own_modules import cross_entropy, images, module_plan, on_ranks, small, step_in
from poisoned import Poisoned, held, run
from single import batch, collect, solo_engine
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.trainer import loss_scale
from phalanx.trainer.engine import Engine
from phalanx.trainer.guards import Guards
from phalanx.trainer.loss_scale import LossScale
from phalanx.trainer.world import World

LAYOUTS = {
    "one": Layout(micro_batch=2),
    "2x2x2": Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True, recompute="selective"),
    "zero bubble, fp16 sums": Layout(pipeline=2, data=2, schedule="zb-h1", reduce="fp16"),
    "zero 2, fp16 sums": Layout(data=2, pipeline=2, zero=2, reduce="fp16"),
    "zero 3": Layout(data=2, tensor=2, zero=3, recompute="full"),
}


def gradients(engine: Engine) -> tuple[float, float, dict[str, Tensor]]:
    tokens, labels = batch(engine.plan)
    batches = engine.micro_batches(tokens[engine.positions], labels[engine.positions], labels.numel(), step=0)
    loss = engine.forward_backward(batches)
    engine.synchronize()
    total, norm, _ = engine.totals(loss)
    return total, norm, {name: value.clone() for name, value in collect(engine.data.slices, "gradients").items()}


def gradients_on_rank(world: World, plan: Plan) -> tuple[float, float, dict[str, Tensor]]:
    return gradients(Engine(plan, world.coord, world.comm, world.device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    model = tiny_model(tied=True)
    expected_loss, expected_norm, expected = gradients(solo_engine(tiny_plan(Layout(micro_batch=2), model)))
    plan = tiny_plan(LAYOUTS[name], model, precision="fp16")
    for loss, norm, found in run_worlds(plan.layout, gradients_on_rank, plan, model=model):
        assert loss == pytest.approx(expected_loss, rel=5e-4)
        assert norm == pytest.approx(expected_norm, rel=5e-3)
        for key, values in found.items():
            here = ~values.isnan()
            difference = (values[here] - expected[key][here]).norm()
            assert difference <= 1e-2 * expected[key].norm(), key


def test_small_gradients_vanish_without_a_scale() -> None:
    """Of a million supervised tokens, each adds less than the smallest number of fp16."""
    engine = solo_engine(tiny_plan(Layout(micro_batch=8), precision="fp16"))
    tokens, labels = batch(engine.plan)
    zeros = {}
    for scale in (1.0, loss_scale.FIRST):
        engine.loss_scale.value = scale
        engine.forward_backward(engine.micro_batches(tokens, labels, 10**6, step=0))
        zeros[scale] = sum(int((part.gradients == 0).sum()) for part in engine.data.slices)
    assert zeros[1.0] > 2 * zeros[loss_scale.FIRST] + 10_000


def overflowing(world: World, plan: Plan) -> tuple[list[tuple[bool, float, int, str]], bool, float]:
    """Steps from a scale that is far too large, until one counts; then one whose gradients overflow on one rank."""

    def synchronize() -> None:
        if spoils and world.rank == 1:
            engine.data.slices[0].gradients.fill_(torch.inf)

        whole()

    engine, spoils = Engine(plan, world.coord, world.comm, world.device), False
    whole, engine.synchronize = engine.synchronize, synchronize  # type: ignore[method-assign]
    engine.loss_scale.value = 2.0**40
    source, guards, before, records = Poisoned(engine, lambda *_: None), Guards(engine), held(engine), []
    for number in range(40):
        record = run(engine, source, guards, number)
        records.append((record.updated, record.loss_scale, record.skipped_steps, record.line(40)))
        if record.updated:
            break
        assert all(a.equal(b) for a, b in zip(before, held(engine), strict=True))
    spoils, before = True, held(engine)
    assert not run(engine, source, guards, len(records)).updated
    unchanged = all(a.equal(b) for a, b in zip(before, held(engine), strict=True))
    return records, unchanged, engine.loss_scale.value


@pytest.mark.parametrize("layout", [Layout(data=2, pipeline=2, zero=1), Layout(data=2, zero=2, reduce="fp16")])
def test_all_ranks_skip_and_lower_the_scale_together(layout: Layout) -> None:
    plan = tiny_plan(layout, tiny_model(num_layers=2), precision="fp16")
    results = run_worlds(layout, overflowing, plan, model=plan.model)
    assert all(result == results[0] for result in results)
    records, unchanged, scale = results[0]
    assert unchanged and len(records) > 5
    assert [value for _, value, _, _ in records] == [2.0 ** (40 - number) for number in range(len(records))]
    assert [count for _, _, count, _ in records[:-1]] == list(range(1, len(records)))
    assert "skipped (1 so far), gradients overflow at a loss scale of 1,099,511,627,776" in records[0][3]
    assert scale == records[-1][1] / 2


def test_the_scale_grows_after_steps_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "STEPS_TO_GROW", 3)
    scale = LossScale("fp16")
    values = []
    for _ in range(40):
        scale.fitted()
        values.append(scale.value)
    assert values[:6] == [2.0**16, 2.0**16, 2.0**17, 2.0**17, 2.0**17, 2.0**18]
    assert max(values) == loss_scale.LARGEST
    other = LossScale("fp16")
    other.restore(scale.state())
    assert other.state() == scale.state()
    while scale.lower():
        pass
    assert scale.value == 1.0
    assert not LossScale("bf16").lower() and LossScale("fp32").value == 1.0


def test_what_keeps_errors_between_steps_is_refused() -> None:
    plan = tiny_plan(Layout(data=2, reduce="powersgd"), precision="fp16")
    [problem] = problems(plan.model, plan.job, plan.cluster, plan.layout)
    assert "between which fp16 changes the loss scale" in str(problem)


def own_training(world: World, plan: ModulePlan, scale: float) -> tuple[list[float], list[float], list[bool]]:
    step = step_in(world, small(), plan)
    step.engine.loss_scale.value = scale
    losses, norms, updated = [], [], []
    for number in range(3):
        losses.append(step.forward_backward(step.share(images(number)), cross_entropy))
        norms.append(step.gradient_norm)
        updated.append(step.update().updated)
    return losses, norms, updated


@pytest.mark.parametrize("layout", [Layout(micro_batch=4), Layout(data=2, micro_batch=2, zero=2)])
def test_modules_of_ones_own(layout: Layout) -> None:
    [(losses, norms, _)] = on_ranks(Layout(micro_batch=8), own_training, module_plan(Layout(micro_batch=8)), 1.0)
    for found, found_norms, updated in on_ranks(layout, own_training, module_plan(layout, precision="fp16"), 2.0**12):
        assert updated == [True] * 3
        assert found == pytest.approx(losses, rel=5e-3)
        assert found_norms == pytest.approx(norms, rel=1e-2)
    for *_, updated in on_ranks(layout, own_training, module_plan(layout, precision="fp16"), 2.0**40):
        assert updated == [False] * 3
