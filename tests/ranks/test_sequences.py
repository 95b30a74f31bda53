"""Documents that stand alone in a packed sequence, against each document by itself; case 26 of the field cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run_worlds
from single import batch, collect, document_positions, solo_engine
from tiny import STYLES, tiny_model, tiny_plan
from torch import Tensor

from phalanx.data.source import NOT_SUPERVISED, Source
from phalanx.data.tokens import TokenWriter, mask_path
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.job import DataSet, DataSpec, OptimizerSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.loop import train_in
from phalanx.trainer.micro_batch import MicroBatch
from phalanx.trainer.world import World
from phalanx.watch.metrics import read

SEPARATE = DataSpec(documents="separate")


def alone(plan: Plan, tokens: Tensor, labels: Tensor, positions: Tensor) -> list[MicroBatch]:
    """Each document as a sequence, and micro-batch, of its own."""
    begins = (positions.flatten() == 0).nonzero().flatten().tolist()
    pairs = zip(begins, [*begins[1:], tokens.numel()], strict=True)
    return [
        MicroBatch(
            tokens=tokens.flatten()[begin:end].unsqueeze(0),
            labels=labels.flatten()[begin:end].unsqueeze(0),
            sequences=torch.zeros(1, dtype=torch.int64),
            num_supervised=int((labels >= 0).sum()),
        )
        for begin, end in pairs
    ]


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in collect(engine.data.slices, "gradients").items()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("style", STYLES)
def test_packed_documents_compute_what_each_computes_alone(style: str, recompute: Any) -> None:
    model = tiny_model(style, num_layers=2)
    packed = solo_engine(tiny_plan(Layout(micro_batch=2, recompute=recompute), model, global_batch=4, data=SEPARATE))
    tokens, labels = batch(packed.plan)
    positions = document_positions(packed.plan, 0)
    labels[:, ::3] = NOT_SUPERVISED
    num_supervised = int((labels >= 0).sum())
    loss = packed.forward_backward(packed.micro_batches(tokens, labels, num_supervised, 0, positions))
    documents = alone(packed.plan, tokens, labels, positions)
    apart = solo_engine(tiny_plan(Layout(recompute=recompute), model, global_batch=len(documents)))
    assert loss.item() == pytest.approx(apart.forward_backward(documents).item(), rel=1e-10)
    expected = gradients(apart)
    scale = max(value.norm().item() for value in expected.values())
    for name, value in gradients(packed).items():
        assert (value - expected[name]).norm() <= 1e-10 * (expected[name].norm() + 1e-6 * scale), name


def test_attention_written_out_for_dropout_sees_the_same_documents() -> None:
    """So little dropout that nothing is dropped."""
    losses = []
    for dropout in (0.0, 1e-9):
        engine = solo_engine(tiny_plan(Layout(), tiny_model(attention_dropout=dropout), global_batch=2, data=SEPARATE))
        tokens, labels = batch(engine.plan)
        positions = document_positions(engine.plan, 0)
        losses.append(engine.forward_backward(engine.micro_batches(tokens, labels, 64, 0, positions)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)


def packed_file(folder: Path, lengths: list[int], seed: int) -> DataSpec:
    """Documents of random tokens, the last of which are the same for each seed."""
    with TokenWriter(folder / f"tokens-{seed}", np.uint16) as writer:
        for number, length in enumerate(lengths):
            draw = np.random.default_rng(1 if number == len(lengths) - 1 else 10 * seed + number)
            writer.add(draw.integers(0, 250, length))
            writer.end_document()
    return DataSpec(path=str(folder / f"tokens-{seed}"), documents="separate")


def loss_of_the_last_document(world: World, plan: Plan) -> float:
    """The loss of the only step's sequence, whose supervised labels are those of its last document."""
    engine = Engine(plan, world.coord, world.comm, world.device)
    read = Source.of(plan.job, plan.model.vocab).batch(0, list(engine.positions))
    read.labels[:, :20] = NOT_SUPERVISED
    loss = engine.forward_backward(engine.read(read, 0))
    return engine.totals(loss)[0]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2, sequence_parallel=True)], ids=str)
def test_case_26_a_document_does_not_see_the_one_before(layout: Layout, tmp_path: Path) -> None:
    """Document B is unmoved, to the bit, by what stands in document A."""
    found = []
    for seed in (2, 3):
        data = packed_file(tmp_path, [20, 13], seed)
        plan = tiny_plan(layout, global_batch=1, precision="fp32", data=data)
        found.append(run_worlds(layout, loss_of_the_last_document, plan, model=plan.model))
    assert found[0] == found[1]
    assert found[0][0] > 1


def test_case_26_the_end_of_a_document_does_not_predict_the_next(tmp_path: Path) -> None:
    data = packed_file(tmp_path, [20, 13], 2)
    source = Source(data, seq_len=32, seed=1, global_batch=1, vocab=250)
    read = source.batch(0, [0])
    assert (read.labels[0] == NOT_SUPERVISED).nonzero()[0].tolist() == [19]
    assert read.num_supervised == 31
    assert read.positions is not None
    assert read.positions[0].tolist() == [*range(20), *range(12)]
    assert source.describe(1)[-1] == "attention stays within each document"
    joined = Source(DataSpec(path=data.path), seq_len=32, seed=1, global_batch=1, vocab=250)
    assert "attention crosses the ends of documents" in joined.describe(1)[-1]


def train_on(world: World, plan: Plan, run_dir: RunDir) -> None:
    train_in(world, plan, run_dir)


def losses(plan: Plan, run_dir: RunDir) -> list[float]:
    run_dir.create()
    run_worlds(plan.layout, train_on, plan, run_dir, model=plan.model)
    return [record.loss for record in read(run_dir.metrics)]


def test_case_45_a_mixture_goes_on_where_it_was_with_another_data_size(tmp_path: Path) -> None:
    """Two sets, one of which has a mask, documents apart; 4 steps on data 2, then on data 4 instead of on data 2."""
    paths = [packed_file(tmp_path, [30] * 40, seed).path for seed in (2, 3)]
    mask_path(tmp_path / "tokens-3").write_bytes((np.arange(1200) % 3 > 0).astype(np.uint8).tobytes())
    sets = tuple(DataSet(path=str(path), weight=weight) for path, weight in zip(paths, (0.7, 0.3), strict=True))
    optimizer = OptimizerSpec(lr=1e-2, schedule="constant")
    job = {"data": DataSpec(sets=sets, documents="separate"), "precision": "fp32", "optimizer": optimizer}
    plan = tiny_plan(Layout(data=2, zero=1), tiny_model(num_layers=1), num_steps=8, **job)
    straight = losses(plan, RunDir(tmp_path / "straight"))
    half = replace(plan, job=replace(plan.job, num_steps=4))
    assert losses(half, RunDir(tmp_path / "halves")) == straight[:4]
    wider = replace(plan, layout=Layout(data=4, zero=1))
    assert losses(wider, RunDir(tmp_path / "halves")) == pytest.approx(straight, rel=1e-5)
