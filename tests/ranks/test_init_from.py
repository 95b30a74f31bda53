"""Training that starts with the weights of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import family
from helpers import run_worlds
from single import batch, collect, solo_engine
from tiny import tiny_job, toy_cluster

from phalanx.checkpoint.hf_names import places
from phalanx.checkpoint.rewrite import to_checkpoint
from phalanx.checkpoint.weights import open_weights
from phalanx.errors import CheckpointError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Rectangle
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec, DataSpec, OptimizerSpec
from phalanx.spec.models import from_config
from phalanx.trainer.continuation import Continuation
from phalanx.trainer.engine import Engine


def plan_from(folder: Path, layout: Layout, **job) -> Plan:
    """A plan that trains the folder's model from its weights."""
    start = CheckpointSpec(init_from=str(folder))
    return Plan(
        model=from_config(folder),
        cluster=toy_cluster(layout.num_ranks),
        job=tiny_job(checkpoint=start, **job),
        layout=layout,
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_one_step_equals_one_of_transformers(name, tmp_path):
    optimizer = OptimizerSpec(lr=1e-3, clip_norm=0.0, schedule="constant", weight_decay=0.1)
    reference = family(name)
    reference.save_pretrained(tmp_path / "theirs")
    reference.double()
    plan = plan_from(tmp_path / "theirs", Layout(micro_batch=2), optimizer=optimizer)
    engine, said = solo_engine(plan), []
    assert Continuation(engine, RunDir(tmp_path / "run"), said.append).restore() == 0
    assert said == [f"starting with the weights of {tmp_path / 'theirs'}"]
    tokens, labels = batch(plan)

    def their_loss():
        return torch.nn.functional.cross_entropy(reference(tokens).logits.flatten(0, 1), labels.flatten())

    def our_loss():
        loss = engine.forward_backward(engine.micro_batches(tokens, labels, tokens.numel(), 0))
        engine.synchronize()
        return loss.item()

    expected = their_loss()
    expected.backward()
    assert our_loss() == pytest.approx(expected.item(), rel=1e-8)
    gradients = {key: value.grad for key, value in reference.named_parameters()}
    norm = sum(gradient.square().sum().item() for gradient in gradients.values()) ** 0.5
    where = places(plan.model)
    for ours, gradient in collect(engine.data.slices, "gradients").items():
        place = where[ours]
        box = place.rectangle(Rectangle.of(tuple(gradient.shape)))
        theirs = gradients[place.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        error = (gradient - (theirs.t() if place.transposed else theirs)).norm()
        # A bias of keys shifts all scores of a row alike: its gradient is zero but for rounding.
        assert error < 1e-5 * theirs.norm() + 1e-7 * norm, ours

    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=optimizer.betas, eps=optimizer.eps).step()
    engine.update(1e-3, 1.0)
    after = their_loss().item()
    assert abs(after - expected.item()) > 1e-3
    assert our_loss() == pytest.approx(after, rel=1e-6)


def _held(world, plan, run_dir):
    engine = Engine(plan, world.coord, world.comm, world.device)
    Continuation(engine, run_dir, lambda line: None).restore()
    engine.data.wait_for_parameters()
    return collect(engine.data.slices, "parameters")


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_eight_ranks_start_with_the_weights_of_one_process(name, tmp_path):
    family(name).save_pretrained(tmp_path / "theirs")
    plan = plan_from(tmp_path / "theirs", Layout(tensor=2, pipeline=2, data=2, zero=1), precision="bf16")
    alone = solo_engine(replace(plan, layout=Layout()))
    Continuation(alone, RunDir(tmp_path / "alone"), lambda line: None).restore()
    truth = collect(alone.data.slices, "parameters")
    seen = dict.fromkeys(truth, False)
    for held in run_worlds(plan.layout, _held, plan, RunDir(tmp_path / "run"), model=plan.model):
        for key, value in held.items():
            known = ~value.isnan()
            assert torch.equal(value[known], truth[key][known]), key
            seen[key] = seen[key] | known
    assert all(places.all() for places in seen.values())


def test_a_checkpoint_is_a_start_too_and_resuming_goes_before(tmp_path):
    family("llama").save_pretrained(tmp_path / "theirs")
    to_checkpoint(open_weights(tmp_path / "theirs"), tmp_path / "ours")
    plan = plan_from(tmp_path / "theirs", Layout())
    plan = replace(plan, job=replace(plan.job, checkpoint=CheckpointSpec(init_from=str(tmp_path / "ours"))))
    engine = solo_engine(plan)
    drawn = collect(engine.data.slices, "parameters")
    first = Continuation(engine, RunDir(tmp_path / "run"), lambda line: None)
    assert first.restore() == 0
    weights = collect(engine.data.slices, "parameters")
    truth = dict(family("llama").named_parameters())
    assert all(torch.equal(weights[name], truth[name].double()) for name in truth)
    assert not any(torch.equal(weights[name], drawn[name]) for name in truth)
    with torch.no_grad():
        engine.buffers[0].parameters.mul_(2)
    first.finish(3)
    again, said = solo_engine(plan), []
    assert Continuation(again, RunDir(tmp_path / "run"), said.append).restore() == 3
    assert torch.equal(again.buffers[0].parameters, engine.buffers[0].parameters)
    assert not any("starting with" in line for line in said)
    assert f"checkpoint.init_from is not used, as the run goes on: {tmp_path / 'ours'}" in said


def test_weights_alone_are_nothing_to_resume(tmp_path):
    family("llama").save_pretrained(tmp_path / "theirs")
    to_checkpoint(open_weights(tmp_path / "theirs"), tmp_path / "ours")
    plan = plan_from(tmp_path / "theirs", Layout(), precision="fp32")
    plan = replace(plan, job=replace(plan.job, checkpoint=CheckpointSpec(resume=str(tmp_path / "ours"))))
    with pytest.raises(CheckpointError, match="holds weights alone") as caught:
        Continuation(solo_engine(plan), RunDir(tmp_path / "run"), lambda line: None).restore()
    assert f'checkpoint.init_from = "{tmp_path / "ours"}"' in str(caught.value)


def test_data_of_another_tokenizer_are_refused(tmp_path):
    family("llama").save_pretrained(tmp_path / "theirs")
    plan = plan_from(tmp_path / "theirs", Layout())
    (tmp_path / "data").mkdir()
    plan = replace(plan, job=replace(plan.job, data=DataSpec(path=str(tmp_path / "data" / "tokens"))))

    def start(theirs: dict, ours: dict) -> None:
        for folder, vocab in (("theirs", theirs), ("data", ours)):
            content = {"model": {"vocab": vocab}, "added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}
            (tmp_path / folder / "tokenizer.json").write_text(json.dumps(content))
        Continuation(solo_engine(plan), RunDir(tmp_path / "run"), lambda line: None).restore()

    start({"a": 1, "b": 2}, {"a": 1})
    with pytest.raises(CheckpointError, match='"b" is id 1 in the data and has id 2 in '):
        start({"a": 1, "b": 2}, {"b": 1})
    with pytest.raises(CheckpointError, match='"c" is id 3 in the data and has no id in '):
        start({"a": 1}, {"a": 1, "c": 3})
    for damaged in ({"model": None}, {"model": {"vocab": 3}}, {"model": {"vocab": {}}, "added_tokens": [{"id": 0}]}):
        (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match=r"theirs/tokenizer.json: is no tokenizer: its vocabulary"):
            Continuation(solo_engine(plan), RunDir(tmp_path / "run"), lambda line: None).restore()


def test_weights_of_another_model_are_refused_on_all_ranks(tmp_path):
    family("llama").save_pretrained(tmp_path / "theirs")
    plan = plan_from(tmp_path / "theirs", Layout(data=2))
    plan = replace(plan, model=replace(plan.model, ffn=64))

    def start(world):
        with pytest.raises(CheckpointError, match=r"model\.ffn is 128 in the checkpoint and 64 here"):
            _held(world, plan, RunDir(tmp_path / "run"))

    run_worlds(plan.layout, start, model=plan.model)
