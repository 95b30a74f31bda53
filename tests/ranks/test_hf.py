"""Hugging Face folders in and out, held against `transformers` on small random models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, family
from safetensors.torch import load_file, save_file
from simulated import engines, gather, pieces_of, scramble
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint.hf import export
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.rewrite import to_checkpoint
from phalanx.checkpoint.weights import open_weights
from phalanx.errors import CheckpointError, DamagedCheckpointError, SpecError
from phalanx.plan.layout import Layout
from phalanx.spec.models import from_config

TOKENS = torch.arange(40).view(2, 20) * 37 % 250


def save(name: str, folder: Path, **how):
    """A model of a family, saved as `transformers` does."""
    model = family(name)
    model.save_pretrained(folder, **how)
    return model


def load(path: Path, **how):
    """The model that transformers makes of a folder, in which it must find all it needs and nothing more."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **how)
    assert not any(info.values()), info
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def checkpoint(folder: Path, plan, seed: int = 5):
    """A checkpoint of `plan` with random state, as all its ranks write it; and the state."""
    every = pieces_of(engines(plan))
    scramble(every, seed)
    aside = folder / "aside"
    aside.mkdir()
    for rank, pieces in enumerate(every):
        write_part(aside, rank, 7, pieces)
    publish(aside, folder / "step-000007", plan, 7, {}, len(every))
    return folder / "step-000007", gather(every)


def edit(folder: Path, change) -> None:
    """Rewrite the folder's tensors after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_keep_every_weight(name, tmp_path):
    model = save(name, tmp_path / "theirs")
    to_checkpoint(open_weights(tmp_path / "theirs"), tmp_path / "ours")
    export(open_weights(tmp_path / "ours"), tmp_path / "out")
    back = load(tmp_path / "out")
    assert torch.equal(logits(back), logits(model))
    before, after = dict(model.named_parameters()), dict(back.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    keys = ("bos_token_id", "eos_token_id")
    for config in (back.config, back.generation_config):
        assert [getattr(config, key) for key in keys] == [getattr(model.config, key) for key in keys]


@pytest.mark.parametrize(("tied", "num_elements"), [(False, 180_032), (True, 164_032)])
def test_export_puts_the_shards_of_every_axis_together(tied, num_elements, tmp_path):
    layout = Layout(tensor=4, pipeline=2, data=2, zero=1)
    plan = tiny_plan(layout, tiny_model(tied=tied, num_kv_heads=4, vocab=241), precision="fp32")
    path, state = checkpoint(tmp_path, plan)
    num_elements += 4 * 2 * 2 * 16 * 64 - (2 - tied) * 9 * 64  # 4 kv heads instead of 2; 241 tokens instead of 250
    assert export(open_weights(path), tmp_path / "out", shard_bytes=200_000) == 4 * num_elements
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * num_elements
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 220_000 for file in files)
    model = load(tmp_path / "out")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_elements
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state["weight", name]), name


def test_export_rounds_once_to_another_type(tmp_path):
    model = save("gpt2", tmp_path / "theirs")
    export(open_weights(tmp_path / "theirs"), tmp_path / "out", dtype="BF16")
    back = load(tmp_path / "out", dtype="auto")
    assert all(parameter.dtype == torch.bfloat16 for parameter in back.parameters())
    after = dict(back.named_parameters())
    assert all(torch.equal(after[name], value.bfloat16()) for name, value in model.named_parameters())


def test_export_takes_no_folder_that_exists_and_leaves_nothing_behind(tmp_path):
    save("llama", tmp_path / "theirs")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        export(open_weights(tmp_path / "theirs"), tmp_path / "there")
    mixture = tiny_plan(Layout(), tiny_model(activation="gelu"), precision="fp32")
    path, _ = checkpoint(tmp_path, mixture)
    with pytest.raises(SpecError, match="no known family"):
        export(open_weights(path), tmp_path / "out")
    path, _ = checkpoint(tmp_path / "there", tiny_plan(Layout(), precision="fp32"))
    for file in path.glob("weight-*"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        export(open_weights(path), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


LAYOUTS = {
    "tensor 2 × pipeline 2 × data 2": Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True),
    "tensor 4, two copies of each kv head": Layout(tensor=4),
    "two chunks": Layout(pipeline=2, virtual_stages=2, schedule="interleaved-1f1b"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3"])
def test_every_layout_reads_its_slices(name, layout, tmp_path):
    model = save(name, tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs")
    every = pieces_of(engines(tiny_plan(LAYOUTS[layout], weights.model, precision="fp32")))
    for pieces in every:
        weights.fill(pieces)
    truth = dict(model.named_parameters())
    held = {name: value for (kind, name), value in gather(every).items() if kind == "weight"}
    assert held.keys() == truth.keys()
    assert all(torch.equal(held[name], truth[name]) for name in truth)
    for pieces in every:  # copies too
        for piece in pieces:
            box = piece.rectangle
            part = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            assert piece.kind != "weight" or torch.equal(piece.tensor, truth[piece.parameter.name][part])


def test_every_layout_reads_the_slices_of_fused_and_transposed_tensors(tmp_path):
    save("gpt2", tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs")
    held = []
    for layout in (Layout(), Layout(tensor=2, pipeline=2, data=2, zero=1)):
        every = pieces_of(engines(tiny_plan(layout, weights.model, precision="fp32")))
        for pieces in every:
            weights.fill(pieces)
        held.append(gather(every))
    assert all(torch.equal(held[0][key], held[1][key]) for key in held[0])


def test_a_tied_head_in_the_file(tmp_path):
    model = save("llama tied", tmp_path / "theirs")
    open_weights(tmp_path / "theirs")  # tied, and no head in the file
    head = model.lm_head.weight.detach()
    edit(tmp_path / "theirs", lambda tensors: tensors.update({"lm_head.weight": head.clone()}))
    open_weights(tmp_path / "theirs")  # tied, and a head that is equal
    edit(tmp_path / "theirs", lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(CheckpointError, match="said to be tied") as caught:
        open_weights(tmp_path / "theirs")
    assert "model.tied = false keeps both" in str(caught.value)
    untied = replace(from_config(tmp_path / "theirs"), tied=False)
    assert not open_weights(tmp_path / "theirs", untied).model.tied
    edit(tmp_path / "theirs", lambda tensors: tensors.pop("lm_head.weight"))
    configure(tmp_path / "theirs", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight \[250, 64\]") as caught:
        open_weights(tmp_path / "theirs")
    assert "model.tied = true" in str(caught.value)


def test_all_tensors_that_do_not_fit_are_listed_with_both_shapes(tmp_path):
    save("llama", tmp_path / "theirs")

    def spoil(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 3)
        tensors["model.norm.weight"] = torch.zeros(65)
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int8)

    edit(tmp_path / "theirs", spoil)
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "theirs")
    assert len(caught.value.problems) == 4
    for said in (
        "missing: model.layers.1.mlp.up_proj.weight [128, 64]",
        "unexpected: model.layers.9.mlp.up_proj.weight [2, 3]",
        "wrong shape: model.norm.weight is [65] in the folder and [64] in the model",
        "model.layers.0.input_layernorm.weight is of type I8",
    ):
        assert said in str(caught.value)


def test_names_of_old_gpt2_folders(tmp_path):
    model = save("gpt2", tmp_path / "theirs")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    edit(tmp_path / "theirs", rename)
    export(open_weights(tmp_path / "theirs"), tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_folders_that_are_not_whole_or_not_known(tmp_path):
    with pytest.raises(CheckpointError, match="there are no weights"):
        open_weights(tmp_path)
    for file, said in (
        ("model.safetensors", r"no config\.json"),
        (".metadata", r"no config\.json"),
        ("common.pt", "Megatron"),
    ):
        (tmp_path / file).touch()
        with pytest.raises(CheckpointError, match=said):
            open_weights(tmp_path)
    save("llama", tmp_path / "theirs", max_shard_size="200KB")
    cut = sorted((tmp_path / "theirs").glob("model-*"))[1]
    data = cut.read_bytes()
    cut.write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        open_weights(tmp_path / "theirs")
    cut.unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing, though the index names it"):
        open_weights(tmp_path / "theirs")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(DamagedCheckpointError, match="not an index"):
        open_weights(tmp_path / "theirs")
    index.unlink()
    (tmp_path / "theirs" / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        open_weights(tmp_path / "theirs")
    configure(tmp_path / "theirs", model_type="gemma2")
    with pytest.raises(SpecError, match='unknown architecture "gemma2"'):
        open_weights(tmp_path / "theirs")


def test_weights_of_another_model_are_refused(tmp_path):
    save("llama", tmp_path / "theirs")
    model = open_weights(tmp_path / "theirs").model
    open_weights(tmp_path / "theirs", replace(model, name="mine", max_seq_len=32, init_std=0.1))
    with pytest.raises(CheckpointError, match=r"model\.rope_theta is 10000\.0 in the checkpoint and 500000\.0 here"):
        open_weights(tmp_path / "theirs", replace(model, rope_theta=5e5))
