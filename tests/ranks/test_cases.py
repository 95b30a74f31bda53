"""What people who train on several devices really hit, by number.

Cases that another test proves: 6, 40, 43, 45 and 46 test_order and test_source, 26 and 45 test_sequences, 36 test_main,
41 and 68 (b) test_validation, 10 and 16 test_layouts, 11 and 13 test_rules (6, 16), 15, 31, 35
test_legality and test_stages, 23 test_parts (scale of initial weights), 33 test_environment.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run_worlds
from single import batch, collect, solo_engine
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.data.source import Batch
from phalanx.errors import RunError
from phalanx.plan.layout import Layout, Reduce
from phalanx.plan.plan import Plan
from phalanx.spec.job import OptimizerSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.flat import Weight, add_product
from phalanx.trainer.guards import Guards
from phalanx.trainer.loop import Clock, step
from phalanx.trainer.optim import learning_rate
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.world import World
from phalanx.watch.metrics import StepRecord, steady


class Supervised:
    """A data source whose sequence i has `counts[i]` supervised tokens."""

    def __init__(self, plan: Plan, counts: list[int], *, same: bool = False) -> None:
        self.plan, self.counts, self.same = plan, counts, same

    def batch(self, number: int, positions: list[int]) -> Batch:
        tokens, labels = batch(self.plan, seed=number)
        if self.same:
            tokens[:], labels[:] = tokens[0].clone(), labels[0].clone()
        for row, count in zip(labels, self.counts, strict=True):
            row[count:] = -100
        return Batch(
            tokens=tokens[positions].numpy(), labels=labels[positions].numpy(), num_supervised=sum(self.counts)
        )


def first_step(engine: Engine, source: Supervised) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and gradients as the optimizer gets them (of what lies on this rank)."""
    read = source.batch(0, list(engine.positions))
    tokens, labels = map(torch.from_numpy, (read.tokens, read.labels))
    loss = engine.forward_backward(engine.micro_batches(tokens, labels, read.num_supervised, 0))
    engine.synchronize()
    total, norm, _ = engine.totals(loss)
    return total, norm, {name: value.clone() for name, value in collect(engine.data.slices, "gradients").items()}


def first_step_on_rank(world: World, source: Supervised) -> tuple[float, float, dict[str, Tensor]]:
    return first_step(Engine(source.plan, world.coord, world.comm, world.device), source)


def one_step(engine: Engine, source: Supervised, number: int) -> StepRecord:
    """The loop's own step."""
    return step(engine, source, Clock(Recorder()), StopRequest(), Guards(engine), number)


def everywhere(source: Supervised) -> list[tuple[float, float, dict[str, Tensor]]]:
    return run_worlds(source.plan.layout, first_step_on_rank, source, model=source.plan.model)


def test_case_1_and_2_unequal_token_counts() -> None:
    """10 and 100 supervised tokens: in one micro-batch, in two, on two data ranks. Never a mean of means: sequences of
    means 2 and 4 have the mean (10 × 2 + 100 × 4) / 110 = 3.818182, not 3."""
    model = tiny_model(max_seq_len=128)
    whole, accumulated, parallel = (
        Supervised(tiny_plan(layout, model, global_batch=2, seq_len=128, precision="fp32"), [10, 100])
        for layout in (Layout(micro_batch=2), Layout(), Layout(data=2))
    )
    loss, norm, gradients = first_step(solo_engine(whole.plan), whole)
    few, many = (
        first_step(solo_engine(whole.plan), Supervised(whole.plan, counts))[0] for counts in ([10, 0], [0, 100])
    )
    assert few != pytest.approx(many, rel=1e-4)
    assert loss == pytest.approx((10 * few + 100 * many) / 110, rel=1e-6)
    for other in (first_step(solo_engine(accumulated.plan), accumulated), *everywhere(parallel)):
        assert other[0] == pytest.approx(loss, rel=1e-6)
        assert other[1] == pytest.approx(norm, rel=1e-5)
        for name, value in other[2].items():
            assert (value - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


def test_case_3_the_micro_batch_does_not_change_the_run() -> None:
    curves = {}
    for micro_batch in (8, 4, 2, 1):
        plan = tiny_plan(Layout(micro_batch=micro_batch), precision="fp32", seq_len=16)
        source = Supervised(plan, [1, 3, 16, 7, 2, 12, 9, 5])
        [(curves[micro_batch], _, _)] = run_worlds(plan.layout, run_steps, source, 20, model=plan.model)
    for curve in curves.values():
        assert curve[0].loss == pytest.approx(curves[8][0].loss, rel=1e-6)
        assert curve[0].gradient_norm == pytest.approx(curves[8][0].gradient_norm, rel=1e-5)
        assert curve[-1].loss == pytest.approx(curves[8][-1].loss, rel=1e-4)
    assert curves[8][-1].loss != pytest.approx(curves[8][0].loss, rel=1e-2)
    rates = [learning_rate(OptimizerSpec(lr=1e-2), number, 20) for number in range(20)]
    assert [record.learning_rate for record in curves[8]] == rates


def test_case_4_the_gradient_scale_does_not_depend_on_the_number_of_micro_batches() -> None:
    """The norm before clipping, at step 1: AdamW hides the scale from the loss curve."""
    layouts = [Layout(), *(Layout(pipeline=2, micro_batch=size) for size in (4, 2, 1))]
    sources = [Supervised(tiny_plan(layout, precision="fp32"), [32] * 8) for layout in layouts]
    norms = [norm for source in sources for _, norm, _ in everywhere(source)]
    assert max(norms) == pytest.approx(min(norms), rel=1e-5)


def run_steps(world: World, source: Supervised, num_steps: int) -> tuple[list[StepRecord], list[Tensor], list[Tensor]]:
    """The loop's own steps on one rank; its weights before and after."""
    engine = Engine(source.plan, world.coord, world.comm, world.device)
    before = [buffer.parameters.clone() for buffer in engine.buffers]
    records = [one_step(engine, source, number) for number in range(num_steps)]
    engine.data.wait_for_parameters()
    return records, before, [buffer.parameters.clone() for buffer in engine.buffers]


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(micro_batch=2), [0, 0, 5, 3, 0, 32, 0, 0]),  # whole micro-batches
        (Layout(data=2), [0, 0, 0, 0, 9, 3, 1, 7]),  # all of one data rank
        (Layout(pipeline=2, data=2), [0, 0, 0, 0, 0, 0, 0, 1]),
    ],
    ids=["micro-batches", "data rank", "all but one token"],
)
def test_case_8_what_has_no_supervised_token_adds_nothing(layout: Layout, counts: list[int]) -> None:
    plan = tiny_plan(layout)
    alone = Supervised(replace(plan, layout=Layout(micro_batch=8)), counts)
    loss, norm, _ = first_step(solo_engine(alone.plan), alone)
    assert math.isfinite(loss) and loss > 1
    for found in everywhere(Supervised(plan, counts)):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-10)


def test_case_8_an_empty_step_changes_no_weight() -> None:
    layout = Layout(data=2, zero=1)
    source = Supervised(tiny_plan(layout), [0] * 8)
    for records, before, after in run_worlds(layout, run_steps, source, 1, model=source.plan.model):
        assert (records[0].loss, records[0].gradient_norm) == (0.0, 0.0)
        assert "no supervised token, no update" in records[0].line(1)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def keeping(world: World, sources: list[Supervised]) -> list[list[Tensor]]:
    """What a lossy reduction keeps after each step, the first of them with the first source."""
    engine = Engine(sources[0].plan, world.coord, world.comm, world.device)
    guards, states = Guards(engine), []
    assert engine.data.lossy
    for number, source in enumerate(sources):
        step(engine, source, Clock(Recorder()), StopRequest(), guards, number)
        states.append([tensor.clone() for _, tensor in engine.data.lossy.kept()])
    return states


@pytest.mark.parametrize("reduce", ["powersgd", "top-k"])
def test_case_8_an_empty_step_sends_nothing_of_what_a_reduction_keeps(reduce: Reduce) -> None:
    plan = tiny_plan(Layout(data=2, reduce=reduce), tiny_model(num_layers=1), precision="fp32")
    full, empty = Supervised(plan, [32] * 8), Supervised(plan, [0] * 8)
    for first, second, third in run_worlds(plan.layout, keeping, [full, empty, full], model=plan.model):
        assert all(map(torch.equal, first, second))
        assert not all(map(torch.equal, second, third))


def poisoned(world: World, source: Supervised, what: str) -> tuple[str, int, bool]:
    """Three steps, the third with NaN in the loss of data rank 1 or inf in a gradient of stage 1 there. Returns the
    error, the steps done, and whether the weights are those of before."""
    engine = Engine(source.plan, world.coord, world.comm, world.device)
    whole = engine.forward_backward
    done = 0

    def forward_backward(batches: Any) -> Tensor:
        loss = whole(batches)
        if done == 2 and world.coord.data == 1 and world.coord.pipeline == 1:
            if what == "loss":
                return loss * math.nan
            engine.data.slices[0].gradients[3] = math.inf
        return loss

    engine.forward_backward = forward_backward
    try:
        for number in range(3):
            engine.data.wait_for_parameters()
            before = [buffer.parameters.clone() for buffer in engine.buffers]
            one_step(engine, source, number)
            done += 1
    except RunError as error:
        same = all(torch.equal(a, buffer.parameters) for a, buffer in zip(before, engine.buffers, strict=True))
        return str(error), done, same
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_case_9_a_nan_on_one_rank_stops_all_alike(what: str) -> None:
    layout = Layout(pipeline=2, data=2, zero=1)
    source = Supervised(tiny_plan(layout), [32] * 8)
    results = run_worlds(layout, poisoned, source, what, model=source.plan.model)
    assert [(done, same) for _, done, same in results] == [(2, True)] * 4
    [text] = {text for text, *_ in results}
    assert "not both finite" in text
    assert ("gradient of model.layers.2" in text and "(rank 3)" in text) == (what == "gradient"), text


def norms_over_training(world: World, source: Supervised) -> list[dict[str, Tensor]]:
    """All weights that tensor ranks hold copies of, after each of 20 steps."""
    engine = Engine(source.plan, world.coord, world.comm, world.device)
    kept = []
    for number in range(20):
        one_step(engine, source, number)
        parts = [part for part in engine.data.slices if part.part.copies == "tensor"]
        kept.append({name: value.clone() for name, value in collect(parts, "parameters").items()})
    return kept


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_case_14_norms_under_sequence_parallelism(style: str) -> None:
    """Copies equal to the bit on all tensor ranks after every step, and as without sequence parallelism."""
    model = tiny_model(style, num_layers=2)
    curves = {}
    for sequence_parallel in (False, True):
        plan = tiny_plan(Layout(tensor=2, sequence_parallel=sequence_parallel, micro_batch=8), model, seq_len=8)
        first, second = run_worlds(plan.layout, norms_over_training, Supervised(plan, [8] * 8), model=model)
        curves[sequence_parallel] = first
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
    last, expected = curves[True][-1], curves[False][-1]
    assert "model.norm.weight" in last
    for name, value in expected.items():
        assert (last[name] - value).norm() <= 1e-5 * value.norm(), name
        assert not torch.equal(value, curves[False][0][name])


def zero_head_loss(world: World, plan: Plan) -> tuple[float, float]:
    """The first loss with a head of zeros, and the largest gradient of its padding rows."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    engine.buffers[-1].weights["head"].value.zero_()
    loss, _, _ = first_step(engine, Supervised(plan, [32] * 8))
    piece = next(piece for piece in engine.buffers[-1].layout.pieces if "lm_head" in piece.parameter.name)
    padding = engine.buffers[-1].weights["head"].grad[piece.rectangle.shape[0] :]
    return loss, padding.abs().sum().item()


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("vocab", "expected"), [(250, 5.521461), (256, 5.545177)])
def test_case_17_and_18_padded_vocabulary_is_invisible(vocab: int, expected: float, tensor: int) -> None:
    """ln(vocabulary), with padding (250 → 256) and without; never ln(vocabulary) + ln(tensor)."""
    plan = tiny_plan(Layout(tensor=tensor), tiny_model(vocab=vocab), precision="fp32")
    for loss, padding in run_worlds(plan.layout, zero_head_loss, plan, model=plan.model):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert loss == pytest.approx(math.log(vocab), rel=1e-6)
        assert padding == 0.0


def dropped(world: World, source: Supervised) -> tuple[float, list[Tensor]]:
    """This rank's own share of the loss, and its copies of replicated weights after 3 steps."""
    engine = Engine(source.plan, world.coord, world.comm, world.device)
    read = source.batch(0, list(engine.positions))
    tokens, labels = map(torch.from_numpy, (read.tokens, read.labels))
    share = engine.forward_backward(engine.micro_batches(tokens, labels, read.num_supervised, 0)).item()
    for number in range(3):
        one_step(engine, source, number)
    return share, [part.parameters.clone() for part in engine.data.slices if part.part.copies == "tensor"]


def test_case_20_dropout_masks() -> None:
    """The same sequence on both data ranks is dropped differently; copies stay equal over the tensor axis, with and
    without sequence parallelism, which does not change the loss either."""
    model = tiny_model(dropout=0.1, attention_dropout=0.1)
    shares = []
    for sequence_parallel in (False, True):
        plan = tiny_plan(Layout(tensor=2, data=2, sequence_parallel=sequence_parallel), model, global_batch=2)
        source = Supervised(plan, [32] * 2, same=True)
        results = run_worlds(plan.layout, dropped, source, model=model)
        (loss, copies), (same_loss, same_copies), (other_loss, _), _ = results
        assert loss == same_loss
        assert all(torch.equal(a, b) for a, b in zip(copies, same_copies, strict=True))
        assert other_loss != pytest.approx(loss, rel=1e-4)
        shares.append(loss)
    assert shares[0] == pytest.approx(shares[1], rel=1e-10)


@pytest.mark.parametrize(
    "some", [{}, {"recompute_every": 3}, {"recompute_layers": (1,)}], ids=["all", "every third", "first"]
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_case_21_recompute_repeats_the_dropout_masks(recompute: str, some: dict[str, Any]) -> None:
    """Gradients with and without it are the same bits."""
    plan = tiny_plan(Layout(micro_batch=2), tiny_model(dropout=0.5, attention_dropout=0.5), precision="fp32")
    source = Supervised(plan, [32] * 8)
    loss, norm, gradients = first_step(solo_engine(plan), source)
    again = first_step(solo_engine(replace(plan, layout=replace(plan.layout, recompute=recompute, **some))), source)
    assert again[:2] == (loss, norm)
    assert all(torch.equal(value, again[2][name]) for name, value in gradients.items())


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_case_48_masks_follow_from_the_number_of_the_step(kind: str) -> None:
    """Each step has its own, and a run that goes on draws those that it would have drawn: nothing else decides them."""
    engine = solo_engine(tiny_plan(Layout(micro_batch=8), tiny_model(num_layers=1, **{kind: 0.5})))
    tokens, labels = batch(engine.plan)
    first, second, again = (
        engine.forward_backward(engine.micro_batches(tokens, labels, tokens.numel(), step)).item() for step in (0, 1, 0)
    )
    assert again == first != pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize(("gradients", "expected"), [([1.0] * 512, 512.0), ([256.0, 1.0], 257.0)])
def test_case_28_bf16_gradients_accumulate_in_fp32(gradients: list[float], expected: float) -> None:
    target = Weight(torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1))
    for gradient in gradients:
        add_product(target, torch.full((1, 1), gradient, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16))
    assert target.grad.item() == expected


def decayed(world: World, plan: Plan) -> dict[str, tuple[Tensor, Tensor]]:
    """What an update with decay does beyond one without, from equal gradients; and the weights before."""
    results = []
    for weight_decay in (0.1, 0.0):
        job = replace(plan.job, optimizer=OptimizerSpec(lr=0.01, weight_decay=weight_decay, clip_norm=0.0))
        engine = Engine(replace(plan, job=job), world.coord, world.comm, world.device)
        before = {name: value.clone() for name, value in collect(engine.data.slices, "parameters").items()}
        first_step(engine, Supervised(plan, [32] * 8))
        engine.update(0.01, 1.0)
        results.append(collect(engine.data.slices, "parameters"))
    return {name: (results[1][name] - results[0][name], before[name]) for name in before}


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(data=2, zero=1)], ids=str)
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_case_30_decay_acts_on_matrices_only(style: str, layout: Layout) -> None:
    plan = tiny_plan(layout, tiny_model(style, num_layers=1))
    for rank in run_worlds(layout, decayed, plan, model=plan.model):
        assert any("norm" in name for name in rank)
        for name, (difference, before) in rank.items():
            here = ~before.isnan()  # the rest lies on other ranks
            if before.dim() == 1:
                assert difference[here].eq(0).all(), name
            else:
                assert torch.allclose(difference[here], 0.001 * before[here], rtol=0, atol=1e-15), name


@pytest.mark.parametrize(
    "layout", [Layout(data=4), Layout(tensor=4), Layout(pipeline=4), Layout(tensor=2, data=2)], ids=str
)
def test_case_91_tokens_are_counted_once(layout: Layout) -> None:
    """512 tokens per step, whatever the layout; a quarter of the speed per device. All ranks say the same."""
    source = Supervised(tiny_plan(layout, seq_len=64), [64] * 8)
    results = run_worlds(layout, run_steps, source, 1, model=source.plan.model)
    [record] = {records[0].line(1): records[0] for records, _, _ in results}.values()
    assert record.tokens_per_s * record.step_s == pytest.approx(512)
    assert record.tokens_per_s_per_device * record.step_s == pytest.approx(512 / 4)
    assert math.fsum(record.share.values()) == pytest.approx(1)


def test_case_93_the_first_step_is_not_in_the_average() -> None:
    seconds = [5.0, 0.1, 0.1, 0.1, 5.1, 0.1, 0.1, 0.1, 0.1, 0.1]  # a save in step 5
    records = [
        StepRecord(
            step=number,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=1.0,
            step_s=step_s,
            tokens_per_s=1.0,
            tokens_per_s_per_device=1.0,
            share={},
        )
        for number, step_s in enumerate(seconds, start=1)
    ]
    assert steady(records) == 0.1
