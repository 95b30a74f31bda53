"""The rules that every hybrid-parallel trainer must keep, by number.

A rule is proven by a test below named after it, or by the one that PROVEN points to.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run_worlds
from simulated import engines, pieces_of
from single import batch, collect, solo_engine
from tiny import tiny_model, tiny_plan, toy_cluster
from torch import Tensor

from phalanx.plan.comm import Group
from phalanx.plan.groups import groups
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import padded_vocab, rank_stages
from phalanx.planner.search import search
from phalanx.trainer import dropout
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.flat import Weight
from phalanx.trainer.loss import Objective, head_loss
from phalanx.trainer.optim import clip_coefficient, squared_norm
from phalanx.trainer.tensor_parallel import TensorParallel
from phalanx.trainer.world import World

TESTS = Path(__file__).resolve().parent.parent

PROVEN = {
    1: "pure/plan/test_shards.py::test_neighbouring_ranks_share_the_tensor_axis",
    3: "ranks/test_layouts.py::test_layout_equals_one_process",
    12: "ranks/test_cases.py::test_case_1_and_2_unequal_token_counts",
    14: "ranks/test_rules.py::test_rule_13_each_buffer_is_final_once_in_the_last_micro_batch",
    18: "ranks/test_parts.py::test_dropout_masks_are_fair_and_independent",
    19: "ranks/test_layouts.py::test_dropout_does_not_depend_on_the_layout",
    21: "ranks/test_parts.py::test_any_slice_of_a_weight_can_be_drawn_alone",
    24: "ranks/test_loss.py::test_smoothing_spreads_over_the_ids_of_all_ranks",
    25: "ranks/test_cases.py::test_case_17_and_18_padded_vocabulary_is_invisible",
    26: "pure/plan/test_schedule.py::test_peak_live_is_the_stated_number",
    28: "ranks/test_layouts.py::test_unusual_layout_equals_one_process",
    30: "ranks/test_checkpoint.py::test_a_continued_run_is_the_same_run",
}


def test_every_rule_has_a_test() -> None:
    here = {int(number) for number in re.findall(r"^def test_rule_(\d+)", Path(__file__).read_text(), re.MULTILINE)}
    assert here | set(PROVEN) == set(range(1, 31))
    for place in PROVEN.values():
        file, _, name = place.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


def forward_backward(engine: Engine, *, seed: int = 0) -> Tensor:
    tokens, labels = batch(engine.plan, seed=seed)
    mine = list(engine.positions)
    return engine.forward_backward(engine.micro_batches(tokens[mine], labels[mine], tokens.numel(), 0))


def on_rank(world: World, plan: Plan) -> Engine:
    return Engine(plan, world.coord, world.comm, world.device)


def test_rule_2_the_data_axis_is_what_is_left_of_the_devices() -> None:
    plan = tiny_plan(Layout(tensor=2, pipeline=2, data=2), precision="fp32")
    found = search(plan.model, plan.job, toy_cluster(8), {"tensor": 2, "pipeline": 2})
    assert {(plan.layout.data, plan.layout.num_ranks) for plan in found.plans} == {(2, 8)}


def test_rule_4_all_ranks_create_all_groups_in_one_order() -> None:
    """Each rank makes the Comms of its own groups in the order of one list, which no rank enters into."""
    layout, model = Layout(tensor=2, pipeline=2, data=2), tiny_model(num_kv_heads=1, tied=True)
    order = list(dict.fromkeys(group.name for group in groups(model, layout)))
    made = run_worlds(layout, lambda world: list(world._comms), model=model)
    assert order == ["world", "tensor", "data", "pipeline", "kv", "tied"]
    assert made == [order] * 8


def test_rule_5_both_copies_of_a_tied_embedding_start_equal() -> None:
    every = engines(tiny_plan(Layout(tensor=2, pipeline=2), tiny_model(tied=True)))
    for tensor in range(2):
        first, last = every[tensor].buffers[0].weights["tokens"], every[2 + tensor].buffers[-1].weights["head"]
        assert first.value.std() > 0.01
        assert torch.equal(first.value, last.value)


def copies_after_training(world: World, plan: Plan) -> Tensor:
    engine = on_rank(world, plan)
    for step in range(20):
        loss = forward_backward(engine, seed=step)
        engine.synchronize()
        engine.totals(loss)
        engine.update(1e-2, 1.0)
    engine.data.wait_for_parameters()
    weights = engine.buffers[0 if world.coord.pipeline == 0 else -1].weights
    return weights["tokens" if world.coord.pipeline == 0 else "head"].value.clone()


@pytest.mark.parametrize("zero", [0, 1])
def test_rule_6_tied_copies_stay_equal_to_the_last_bit(zero: int) -> None:
    """Case 11: the data axis sums before the pair does, whether the optimizer is cut or not; 20 steps."""
    layout = Layout(pipeline=2, data=2, zero=zero, micro_batch=2)
    model = tiny_model(tied=True, num_layers=2, hidden=32)
    plan = tiny_plan(layout, model, seq_len=8, precision="fp32")
    first, *others = run_worlds(layout, copies_after_training, plan, model=model)
    assert all(torch.equal(first, other) for other in others)
    alone = solo_engine(replace(plan, layout=Layout()))
    assert not torch.equal(first, alone.buffers[0].weights["tokens"].value)  # it has trained


def test_rule_7_copies_count_once_and_positions_live_on_the_first_stage() -> None:
    for tied, expected in ((True, 164_032), (False, 180_032)):
        every = engines(tiny_plan(Layout(tensor=2, pipeline=2, data=2), tiny_model(tied=tied)))
        pieces = [piece for engine in every for part in engine.data.slices for piece in part.rectangles()]
        assert sum(box.num_elements for _, box, _ in pieces) > 2 * expected
        owned = [piece for pieces in pieces_of(every) for piece in pieces if piece.owned and piece.kind == "weight"]
        assert sum(piece.tensor.numel() for piece in owned) == expected
    every = engines(tiny_plan(Layout(pipeline=4), tiny_model("gpt2")))
    assert [any("positions" in buffer.weights for buffer in engine.buffers) for engine in every] == [True, *[False] * 3]


@pytest.mark.parametrize(
    ("layout", "pairs"),
    [
        (Layout(), []),
        (Layout(tensor=4), []),
        (Layout(pipeline=2), [(0, 1)]),
        (Layout(pipeline=2, virtual_stages=2, schedule="interleaved-1f1b"), [(0, 1)]),
        (Layout(pipeline=3, tensor=2), [(0, 4), (1, 5)]),
        (Layout(pipeline=2, virtual_stages=2, schedule="zb-v"), []),  # the last stage lies on the first rank
    ],
)
def test_rule_8_the_pair_is_the_first_and_the_last_virtual_stage(layout: Layout, pairs: list[tuple[int, int]]) -> None:
    found = groups(tiny_model(tied=True), layout)
    assert [group.ranks for group in found if group.name == "tied"] == pairs


def purposes(world: World, plan: Plan) -> list[str]:
    engine = on_rank(world, plan)
    loss = forward_backward(engine)
    engine.synchronize()
    engine.totals(loss)
    engine.update(1e-2, 1.0)
    return [purpose for _, purpose, _ in world.recorder.messages]


def test_rule_9_order_at_the_end_of_backward() -> None:
    """Division by the tokens comes first of all here, in the loss."""
    layout = Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True)
    model = tiny_model(num_kv_heads=1, tied=True, num_layers=2, hidden=32)
    order = ["gradients", "replicated gradients", "kv copy gradients", "tied gradients", "loss and norm", "parameters"]
    for said in run_worlds(layout, purposes, tiny_plan(layout, model, seq_len=8), model=model):
        assert [purpose for purpose in said if purpose in order] == order


def norm_gradients(world: World, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Gradients of replicated values before and after they are synchronized, and how many messages that took."""
    engine = on_rank(world, plan)
    forward_backward(engine)

    def replicated() -> dict[str, Tensor]:
        parts = [part for part in engine.data.slices if part.part.copies == "tensor"]
        return {name: value.clone() for name, value in collect(parts, "gradients").items()}

    before = replicated()
    engine.synchronize()
    keys = [key for key in world.recorder.messages if key[1] == "replicated gradients"]
    return before, replicated(), len(keys)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_rule_10_replicated_gradients_are_summed_under_sequence_parallelism_only(
    style: str, sequence_parallel: bool
) -> None:
    """Norms of all layers, the final one included, biases behind a sum, learned positions."""
    model = tiny_model(style, bias=style == "gpt2")
    plan = tiny_plan(Layout(tensor=2, sequence_parallel=sequence_parallel), model)
    expected = solo_engine(replace(plan, layout=Layout()))
    forward_backward(expected)
    right = collect(expected.data.slices, "gradients")
    results = run_worlds(plan.layout, norm_gradients, plan, model=model)
    names = set(results[0][1])
    assert "model.norm.weight" in names
    assert any("o_proj.bias" in name for name in names) == (style == "gpt2")
    for before, after, num_messages in results:
        assert num_messages == sequence_parallel
        for name in names:
            assert torch.allclose(after[name], right[name], rtol=1e-9, atol=1e-15), name
            assert torch.equal(before[name], after[name]) != sequence_parallel, name


def test_rule_11_gradients_are_sums_whatever_the_size_of_the_data_axis() -> None:
    """One division, by the tokens of the global batch; the data axis only adds."""
    norms = set()
    for data in (1, 2, 4):
        plan = tiny_plan(Layout(data=data))
        norms.update(run_worlds(plan.layout, first_norm, plan, model=plan.model))
    assert max(norms) == pytest.approx(min(norms), rel=1e-12)


def first_norm(world: World, plan: Plan) -> float:
    engine = on_rank(world, plan)
    loss = forward_backward(engine)
    engine.synchronize()
    return engine.totals(loss)[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_rule_13_each_buffer_is_final_once_in_the_last_micro_batch(schedule: str) -> None:
    """And its gradients are then complete where they are accumulated, also those of parameters that got none."""
    plan = tiny_plan(Layout(micro_batch=2, schedule=schedule), tiny_model("gpt2", max_seq_len=64))
    now, final = [], {}
    engine = Engine(plan, Coord(), solo_comm, torch.device("cpu"), now.append)
    after_backward = engine.data.after_backward

    def spy(block: Any, *, last: bool) -> None:
        if last:
            assert block.buffer not in final
            assert now[-1] == engine.pipeline.actions[-1]
            final[block.buffer] = block.buffer.gradients.clone()
        after_backward(block, last=last)

    engine.data.after_backward = spy
    forward_backward(engine)
    assert len([action for action in now if action.kind == "backward"]) == 4
    assert list(final) == list(reversed(engine.buffers))
    assert all(torch.equal(gradients, buffer.gradients) for buffer, gradients in final.items())
    assert engine.buffers[0].weights["positions"].grad[32:].eq(0).all()  # beyond the sequence: no gradient


def solo_comm(name: str) -> SoloComm:
    return SoloComm(Group(name=name, ranks=(0,)))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=4, pipeline=2),
        Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True),
        Layout(tensor=2, data=4, zero=1),
        Layout(tensor=2, data=4, zero=1, zero_group=2),
    ],
    ids=str,
)
def test_rule_15_each_value_counts_once_in_the_norm(layout: Layout) -> None:
    """With all gradients 1, the squared norm over all ranks is the number of parameters."""
    model = tiny_model(tied=True, num_kv_heads=1, qkv_bias=True)
    total = 0.0
    for engine in engines(tiny_plan(layout, model)):
        for part in engine.data.slices:
            for _, _, stretch in part.rectangles():
                part.gradients[stretch] = 1.0
        total += squared_norm(engine.data.slices, engine.data.first_replica).item()
    assert total == pytest.approx(model.num_parameters, rel=1e-12)


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(pipeline=2, virtual_stages=2, schedule="interleaved-1f1b"), Layout(tensor=2)]
)
def test_rule_16_one_norm_clips_the_whole_model(layout: Layout) -> None:
    """Case 13: clipping at half of the true norm. The same bits on all ranks, min(1, limit / (norm + 1e-6))."""
    plan = tiny_plan(layout, tiny_model(tied=True))
    alone = solo_engine(replace(plan, layout=Layout()))
    true = alone.totals(forward_backward(alone))[1]
    first, *others = run_worlds(layout, first_norm, plan, model=plan.model)
    assert all(other == first for other in others)
    assert first == pytest.approx(true, rel=1e-12)
    assert clip_coefficient(first, true / 2) == pytest.approx(0.5 * true / (true + 1e-6), rel=1e-12)
    assert clip_coefficient(first, 2 * true) == 1.0


def padding_of(world: World, plan: Plan) -> tuple[float, int]:
    engine = on_rank(world, plan)
    loss = forward_backward(engine)
    engine.synchronize()
    engine.totals(loss)
    engine.update(1e-2, 1.0)
    worst, count = 0.0, 0
    for part in engine.data.slices:
        padding = torch.ones_like(part.gradients, dtype=torch.bool)
        for _, _, stretch in part.rectangles():
            padding[stretch] = False
        worst = max(worst, *(values[padding].abs().sum().item() for values in (part.gradients, part.parameters)))
        count += int(padding.sum())
    return worst, count


def test_rule_17_padding_stays_zero() -> None:
    """In the norm, and after AdamW. (There is no fp16, whose overflow ranks would have to agree on.)"""
    layout = Layout(tensor=2, data=2, zero=1)
    plan = tiny_plan(layout, tiny_model(hidden=48, num_heads=2, head_dim=10, ffn=58, vocab=101))
    results = run_worlds(layout, padding_of, plan, model=plan.model)
    assert {worst for worst, _ in results} == {0.0}
    assert sum(count for _, count in results) > 1000


def test_rule_20_masks_need_no_generator() -> None:
    """A second forward gets the masks of the first, whatever was drawn between, and draws nothing itself."""
    places = torch.arange(64).view(4, 16, 1), torch.arange(8)
    torch.manual_seed(1)
    first = dropout.keep_mask(7, 0.5, *places)
    torch.rand(100)
    before = torch.get_rng_state()
    assert torch.equal(dropout.keep_mask(7, 0.5, *places), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_rule_22_the_padded_vocabulary_divides_and_is_never_drawn(tensor: int) -> None:
    every = engines(tiny_plan(Layout(tensor=tensor), tiny_model(vocab=201)))
    rows = torch.cat([engine.buffers[-1].weights["head"].value for engine in every])
    assert len(rows) == padded_vocab(every[0].plan.model, tensor) == math.ceil(201 / (16 * tensor)) * 16 * tensor
    assert rows[201:].eq(0).all()
    assert rows[:201].abs().sum(1).gt(0).all()


def cut_loss(world: World, inputs: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    rows = len(weight) // world.comm("tensor").size
    first = world.comm("tensor").index * rows
    mine = Weight(weight[first : first + rows].clone(), torch.zeros(rows, weight.shape[1]))
    activations = inputs.clone().requires_grad_()
    mine_only, tensor = range(first, first + rows), TensorParallel(world.comm("tensor"))
    loss = head_loss(activations, mine, labels, mine_only, 6, Objective(vocab=len(weight)), tensor)
    loss.backward()
    return loss.item(), activations.grad, mine.grad


def test_rule_23_the_loss_of_a_cut_vocabulary() -> None:
    """Logits in the thousands neither overflow nor lose the target, wherever it lies."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(shape, generator=generator) * 30 for shape in ((8, 16), (64, 16)))
    labels = torch.tensor([0, 15, 16, 31, 63, 40, -100, -100])
    theirs, table = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy(theirs @ table.t(), labels)
    expected.backward()
    assert expected > 1e3
    results = run_worlds(Layout(tensor=4), cut_loss, inputs, weight, labels, model=tiny_model())
    for loss, input_grad, _ in results:
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(input_grad, theirs.grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.cat([grad for *_, grad in results]), table.grad, rtol=1e-5, atol=1e-5)


def test_rule_27_layer_numbers_are_global() -> None:
    """Chunk c of stage p holds layers (c × pipeline + p) × k onward; names, masks and scales go by that number."""
    layout = Layout(pipeline=2, virtual_stages=2, schedule="interleaved-1f1b")
    model = tiny_model(num_layers=8)
    held = [
        [list(stage.layers) for stage in rank_stages(model, layout, Coord(pipeline=place), 8)] for place in range(2)
    ]
    assert held == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    layers = [block.index for engine in engines(tiny_plan(layout, model)) for block in blocks(engine)]
    assert layers == [0, 1, 4, 5, 2, 3, 6, 7]


def blocks(engine: Engine) -> list[Any]:
    return [block for stage in engine.pipeline.stages for block in stage.blocks if hasattr(block, "index")]


def test_rule_29_each_region_has_exactly_one_writer() -> None:
    """Of weights and of both moments, through flat buffers cut over the data axis."""
    model = tiny_model(tied=True, num_kv_heads=1)
    for layout in (
        Layout(tensor=2, pipeline=2, data=2, zero=1),
        Layout(tensor=4, data=2),
        Layout(data=4, pipeline=2, zero=3, zero_group=2),
    ):
        writers: dict[tuple[str, str], Tensor] = {}
        for piece in (piece for pieces in pieces_of(engines(tiny_plan(layout, model))) for piece in pieces):
            count = writers.setdefault((piece.kind, piece.parameter.name), torch.zeros(piece.parameter.shape))
            place = zip(piece.rectangle.start, piece.rectangle.stop, strict=True)
            count[tuple(slice(a, b) for a, b in place)] += piece.owned
        assert {kind for kind, _ in writers} == {"weight", "exp_avg", "exp_avg_sq"}
        assert all((count == 1).all() for count in writers.values())
        assert (
            functools.reduce(lambda total, count: total + count.numel(), writers.values(), 0)
            == 3 * model.num_parameters
        )
