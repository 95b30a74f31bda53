"""Every layout against one process: the same loss, the same norm, the same gradient of every parameter, in float64; and
every message that a step sends against what `plan.traffic` claims.

Gradients are compared as the optimizer gets them, with several micro-batches, unequal numbers of supervised tokens and
clipping off: AdamW hides a wrong scale.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import run_worlds
from late import Late
from matrix import UNUSUAL, layouts, models
from messages import claimed, counted
from single import collect, document_positions, masked_batch, solo_engine
from tiny import STYLES, tiny_model, tiny_plan
from torch import Tensor

from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.spec.job import DataSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer.comm import GroupComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.world import World

NUM_STEPS = 3
TOLERANCE = 1e-10


def train(engine: Engine) -> dict[str, Any]:
    """A few steps. Returns losses, norms, and the first step's gradients and last weights as (name, box, values)."""
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):
        tokens, labels, num_supervised = masked_batch(engine.plan, step)
        mine, positions = list(engine.positions), document_positions(engine.plan, step)
        positions = None if positions is None else positions[mine]
        batches = engine.micro_batches(tokens[mine], labels[mine], num_supervised, step, positions)
        loss = engine.forward_backward(batches)
        engine.synchronize()
        total, norm, _ = engine.totals(loss)
        losses.append(total)
        norms.append(norm)
        if step == 0:
            gradients = pieces(engine, "gradients")
        engine.update(1e-2, 1.0)
    engine.data.wait_for_parameters()
    return {"losses": losses, "norms": norms, "gradients": gradients, "buffers": padding(engine.data.buffers)}


def pieces(engine: Engine, which: str) -> list[tuple[str, Any, Tensor]]:
    return [
        (piece.parameter.name, box, getattr(part, which)[stretch].view(box.shape).clone())
        for part in engine.data.slices
        for piece, box, stretch in part.rectangles()
    ]


def padding(buffers: tuple[FlatBuffer, ...]) -> float:
    """The largest absolute value that stands in padding: must stay zero."""
    worst = 0.0
    for buffer in buffers:
        real = torch.zeros(buffer.layout.num_elements, dtype=torch.bool)
        for piece in buffer.layout.pieces:
            real[piece.offset : piece.offset + piece.rectangle.num_elements] = True
        for values in (buffer.parameters, buffer.gradients):
            if not real.all() and values.untyped_storage().size():
                worst = max(worst, values[~real].abs().max().item())
    return worst


def on_rank(world: World, plan: Plan, *, late: bool = False) -> dict[str, Any]:
    for group in groups(plan.model, plan.layout) if late else ():
        if isinstance(comm := world.comm(group.name), GroupComm):
            Late.install(comm)
    engine = Engine(plan, world.coord, world.comm, world.device)
    result = {**train(engine), "messages": {key: list(count) for key, count in counted(engine, world).items()}}
    if late:  # updates without a forward between them that waits for parameters
        engine.update(1e-2, 1.0)
        engine.update(1e-2, 1.0)
        engine.data.wait_for_parameters()
    return result


@functools.cache
def reference(model: ModelSpec, **job: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    engine = solo_engine(tiny_plan(Layout(micro_batch=4), model, **job))
    tokens, labels, num_supervised = masked_batch(engine.plan, 0)
    positions = document_positions(engine.plan, 0)
    engine.forward_backward(engine.micro_batches(tokens, labels, num_supervised, 0, positions))
    gradients = {name: value.clone() for name, value in collect(engine.data.slices, "gradients").items()}
    result = train(solo_engine(tiny_plan(Layout(micro_batch=4), model, **job)))
    return result["losses"], result["norms"], gradients


def check_against_one_process(model: ModelSpec, layout: Layout, *, late: bool = False, **job: Any) -> None:
    plan = tiny_plan(layout, model, **job)
    work = functools.partial(on_rank, late=late)
    losses, norms, gradients = reference(model, **job)
    names = set()
    for rank, result in enumerate(run_worlds(plan.layout, work, plan, model=plan.model, timeout=90)):
        assert result["losses"] == pytest.approx(losses, rel=TOLERANCE), f"loss on rank {rank}"
        assert result["norms"] == pytest.approx(norms, rel=TOLERANCE), f"norm on rank {rank}"
        assert result["buffers"] == 0.0, f"padding on rank {rank}"
        assert result["messages"] == claimed(plan, plan.layout.coord(rank)), f"messages of rank {rank}"
        for name, box, value in result["gradients"]:
            whole = gradients[name]
            expected = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            error = (value - expected).norm().item()
            assert error <= TOLERANCE * (whole.norm().item() + 1e-6 * norms[0]), f"{name} {box} on rank {rank}: {error}"
            names.add(name)
    assert names == set(gradients)


DROPOUT = [
    Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True),
    Layout(tensor=4),
    Layout(tensor=2, sequence_parallel=True, micro_batch=2),
    Layout(pipeline=2, data=4),
]


OBJECTIVE = [
    Layout(tensor=4, data=2, zero=1),
    Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True),
    Layout(pipeline=2, data=2, zero=3),
]


@pytest.mark.parametrize("layout", OBJECTIVE, ids=str)
def test_smoothing_and_z_loss_do_not_depend_on_the_layout(layout: Layout) -> None:
    """The last rank's part of the vocabulary is the smaller one: 250 ids are padded to 256."""
    check_against_one_process(tiny_model(tied=True), layout, label_smoothing=0.1, z_loss=1e-2)


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_layout_equals_one_process(case: str) -> None:
    model, layout = UNUSUAL[case]
    check_against_one_process(model, layout)


LATE = ("chunks, sequence", "interleaved", "zero 2", "zero 3, tied")


@pytest.mark.parametrize("case", LATE)
def test_nothing_is_read_before_it_was_waited_for(case: str) -> None:
    model, layout = UNUSUAL[case]
    check_against_one_process(model, layout, late=True)


SEPARATE = {
    **{name: UNUSUAL[name] for name in ("interleaved", "zero 3, tied", "selective recompute, sequence")},
    "zb-v": UNUSUAL["zb-v"],
    "recompute": UNUSUAL["recompute"],
    "learned, all axes": (tiny_model("gpt2"), Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True, zero=1)),
    "dropout": (
        tiny_model(dropout=0.1, attention_dropout=0.1),
        Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="full", micro_batch=2),
    ),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_separate_documents_do_not_depend_on_the_layout(case: str) -> None:
    model, layout = SEPARATE[case]
    check_against_one_process(model, layout, data=DataSpec(documents="separate"))


@pytest.mark.parametrize("layout", DROPOUT, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_dropout_does_not_depend_on_the_layout(style: str, layout: Layout) -> None:
    check_against_one_process(tiny_model(style, dropout=0.1, attention_dropout=0.1), layout)


@pytest.mark.parametrize(
    ("name", "layout"), layouts(), ids=[f"{name} {layout}".replace(", micro-batch 1", "") for name, layout in layouts()]
)
def test_layout_equals_one_process(name: str, layout: Layout) -> None:
    check_against_one_process(models()[name], layout)
