"""What all ranks check together: planted differences between copies are found and named; a step without finite numbers
changes nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import run_worlds
from poisoned import Poisoned, held, run
from single import solo_engine
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.errors import RunError
from phalanx.plan.layout import Coord, Layout, Reduce
from phalanx.plan.plan import Plan
from phalanx.trainer.engine import Engine
from phalanx.trainer.guards import MAX_SKIPPED_IN_A_ROW, Guards, checksum
from phalanx.trainer.world import World
from phalanx.watch.metrics import StepRecord

ALL_GROUPS = Layout(tensor=2, pipeline=2, data=2)  # tied, with one kv head: every group of copies there is


def weight(engine: Engine, buffer: str, ending: str) -> Tensor:
    """The first parameter of a buffer whose name ends so, flat."""
    for each in engine.buffers:
        for piece in each.layout.pieces:
            if each.layout.name == buffer and piece.parameter.name.endswith(ending):
                return each.values(piece).view(-1)
    raise AssertionError(buffer)


# The first parameter of a buffer whose name ends so; the rank that holds another value; what is said.
PLANTED = {
    "a data replica has drifted": ("layers.0", "mlp.down_proj.weight", Coord(data=1, tensor=1), "rank 3", "rank 1"),
    "a norm of one rank": ("head", "norm.weight", Coord(pipeline=1, tensor=1), "rank 5", "rank 4"),
    "a norm of heads": ("layers.0", "self_attn.q_norm.weight", Coord(tensor=1), "rank 1", "rank 0"),
    "a copy of a kv head": ("layers.0", "self_attn.k_proj.weight", Coord(data=1, tensor=1), "rank 3", "rank 2"),
    "an end of a tied embedding": ("head", "embed_tokens.weight", Coord(pipeline=1), "rank 4", "rank 0"),
}


def answers(world: World, plan: Plan) -> list[str]:
    """What the check says, of sound ranks and then of each planted difference: one bit of one element on one rank."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    said = [answer(engine)]
    for buffer, ending, where, *_ in PLANTED.values():
        if world.coord == where:
            values = weight(engine, buffer, ending)
            values.view(torch.int32)[5] ^= 1
        said.append(answer(engine))
        if world.coord == where:
            values.view(torch.int32)[5] ^= 1
    return said


def answer(engine: Engine) -> str:
    try:
        Guards(engine).check_copies(7)
    except RunError as error:
        return str(error)
    return ""


def test_one_bit_of_a_copy_is_found_and_named_on_all_ranks() -> None:
    plan = tiny_plan(ALL_GROUPS, tiny_model(tied=True, qk_norm=True, num_kv_heads=1, num_layers=2), precision="fp32")
    results = run_worlds(ALL_GROUPS, answers, plan, model=plan.model)
    for sound, *planted in results:
        assert sound == ""
        assert len(planted) == len(PLANTED)
        for text, (buffer, ending, _, rank, first) in zip(planted, PLANTED.values(), strict=True):
            assert text.startswith("after step 7, copies that should be equal are not")
            name = f"model.{buffer}.{ending}" if buffer.startswith("layers") else f"model.{ending}"
            assert f"{name} on {rank} is not that of {first}" in text, text
    assert len({tuple(said) for said in results}) == 1


def test_stages_that_hold_no_copies_have_nothing_to_compare() -> None:
    """The first stage is the embedding alone, all of it cut; the last one has a norm."""
    layout = Layout(tensor=2, pipeline=2, stage_layers=(0, 1))
    plan = tiny_plan(layout, tiny_model(num_layers=1))
    assert run_worlds(layout, first_answer, plan, model=plan.model) == [""] * 4


def first_answer(world: World, plan: Plan) -> str:
    return answer(Engine(plan, world.coord, world.comm, world.device))


def drifted_shard(world: World, plan: Plan, copies: str) -> tuple[str, str]:
    """What is found before and after rank 3 has changed an element of its shard, of a part held in `copies`."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    sound = answer(engine)
    if world.rank == 3:
        for part in engine.data.slices:
            if part.part.copies == copies and part.buffer.layout.name == "layers.0":
                part.parameters[0] += 1.0
    return sound, answer(engine)


@pytest.mark.parametrize(
    ("layout", "copies", "name", "first"),
    [
        (Layout(tensor=2, data=2, zero=3), "tensor", "norm", 2),
        (Layout(data=4, zero=3, zero_group=2), "none", "gate_proj", 1),
    ],
    ids=["norms over the tensor axis", "replicas"],
)
def test_copies_of_shards(layout: Layout, copies: str, name: str, first: int) -> None:
    """Under ZeRO 3 only shards lie on a rank: it compares its own with those who hold the same."""
    plan = tiny_plan(layout, tiny_model(num_layers=1), precision="bf16")
    for sound, found in run_worlds(plan.layout, drifted_shard, plan, copies, model=plan.model):
        assert sound == ""
        assert name in found and f"on rank 3 is not that of rank {first}" in found, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_checksums_see_values_and_places(dtype: torch.dtype) -> None:
    values = torch.randn((1 << 20) + 5, dtype=dtype)
    sums = {int(checksum(values))}
    for place in (0, 1, 17, len(values) - 1):
        changed = values.clone()
        changed[place] = -changed[place]
        sums.add(int(checksum(changed)))
    swapped = values.clone()
    swapped[0], swapped[-1] = values[-1], values[0]
    sums.add(int(checksum(swapped)))
    assert len(sums) == 6
    assert int(checksum(values.clone())) in sums


def spoil_gradients(engine: Engine, rank: int) -> None:
    """On one rank, what the pipeline has added up gets an infinite element, in this step alone."""
    if engine.comm("world").index != rank:
        return
    finish = engine.data.finish

    def spoiled() -> None:
        engine.data.finish = finish
        finish()
        engine.data.slices[0].gradients[3] = math.inf

    engine.data.finish = spoiled


def skipping(world: World, plan: Plan) -> tuple[list[StepRecord], bool, bool]:
    """Five steps, of which the third has an infinite gradient on rank 1. Whether that one changed anything, and
    whether the next one did."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    guards = Guards(engine)
    source = Poisoned(engine, lambda engine, number: spoil_gradients(engine, 1) if number == 2 else None)
    records, states = [], [held(engine)]
    for number in range(5):
        records.append(run(engine, source, guards, number))
        states.append(held(engine))
    same = [all(map(torch.equal, before, after)) for before, after in itertools.pairwise(states)]
    return records, same[2], same[3]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(pipeline=2, data=2, zero=1), "bf16"), (Layout(tensor=2), "fp32"), (Layout(data=2, zero=3), "fp32")],
    ids=str,
)
def test_a_skipped_step_changes_nothing_and_is_counted(layout: Layout, precision: str) -> None:
    plan = tiny_plan(layout, tiny_model(num_layers=2), precision=precision, on_non_finite="skip")
    for records, skipped_changes_nothing, next_changes_nothing in run_worlds(layout, skipping, plan, model=plan.model):
        assert skipped_changes_nothing
        assert not next_changes_nothing
        assert [record.skipped_steps for record in records] == [0, 0, 1, 1, 1]
        assert [record.is_finite for record in records] == [True, True, False, True, True]
        assert "skipped (1 so far)" in records[2].line(5)


def spoil_reduction(engine: Engine) -> None:
    """An infinite element on rank 1 before gradients are summed, in this step alone."""
    if engine.comm("world").index == 1:
        lossy = engine.data.lossy
        assert lossy
        reduce = lossy.all_reduce

        def spoiled(buffers: Any) -> Any:
            lossy.all_reduce = reduce  # type: ignore[method-assign]
            buffers[0].gradients[3] = math.inf
            return reduce(buffers)

        lossy.all_reduce = spoiled  # type: ignore[method-assign]


def recovering(world: World, plan: Plan) -> list[bool]:
    engine = Engine(plan, world.coord, world.comm, world.device)
    guards = Guards(engine)
    source = Poisoned(engine, lambda engine, number: spoil_reduction(engine) if number == 1 else None)
    return [run(engine, source, guards, number).is_finite for number in range(3)]


@pytest.mark.parametrize("reduce", ["powersgd", "top-k"])
def test_reductions_that_keep_something_recover_from_a_skipped_step(reduce: Reduce) -> None:
    plan = tiny_plan(Layout(data=2, reduce=reduce), tiny_model(num_layers=1), precision="fp32", on_non_finite="skip")
    assert run_worlds(plan.layout, recovering, plan, model=plan.model) == [[True, False, True]] * 2


def poison_weights(engine: Engine, number: int) -> None:
    """An infinite row of the embedding: every sequence that holds its token has no finite loss."""
    if engine.coord.pipeline == 0:
        weight(engine, "embedding", "embed_tokens.weight")[:64] = math.inf


class OneToken(Poisoned):
    """Token 0 stands in the sequence at place 5 of the global batch alone."""

    def batch(self, number: int, positions: list[int]) -> Any:
        whole = super().batch(number, positions)
        whole.tokens[whole.tokens == 0] = 1
        for row, position in zip(whole.tokens, positions, strict=True):
            if position == 5:
                row[0] = 0
        return whole


def stopping(world: World, plan: Plan) -> tuple[str, int]:
    engine = Engine(plan, world.coord, world.comm, world.device)
    guards = Guards(engine)
    for number in range(MAX_SKIPPED_IN_A_ROW + 2):
        try:
            run(engine, OneToken(engine, poison_weights), guards, number)
        except RunError as error:
            return str(error), number
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize(("on_non_finite", "steps"), [("stop", 0), ("skip", MAX_SKIPPED_IN_A_ROW)])
def test_stopping_names_the_micro_batch_and_the_parameter(on_non_finite: str, steps: int) -> None:
    """Data rank 1 trains on places 4 to 7, two at a time: place 5 is in its first micro-batch."""
    layout = Layout(pipeline=2, data=2, micro_batch=2)
    plan = tiny_plan(layout, tiny_model(num_layers=2), precision="fp32", on_non_finite=on_non_finite)
    results = run_worlds(layout, stopping, plan, model=plan.model)
    assert len(set(results)) == 1
    text, number = results[0]
    assert number == steps
    assert "it comes from micro-batch 0 (loss nan (rank 3))" in text
    assert "gradient of model.embed_tokens.weight (rank 0, 1)" in text
    assert ("10 steps before this one were skipped" in text) == (on_non_finite == "skip")


def test_a_fault_that_does_not_come_again_is_no_micro_batch() -> None:
    engine = solo_engine(tiny_plan(Layout(), tiny_model(num_layers=1)))
    source = Poisoned(engine, lambda engine, number: spoil_gradients(engine, 0))
    with pytest.raises(RunError, match="no micro-batch does so when it runs alone once more"):
        run(engine, source, Guards(engine), 0)
