"""Checkpoints made of others: the mean of several, and the same state with every tensor whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from simulated import assert_equal, engines, gather, pieces_of, read, scramble, write
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint import rewrite
from phalanx.checkpoint.folder import whole
from phalanx.cli.main import main
from phalanx.plan.layout import Layout

MODEL = tiny_model("llama", num_layers=5, hidden=32, ffn=48, head_dim=8, vocab=50, tied=True)


def checkpoint(folder: Path, layout: Layout, seed: int, model=MODEL):
    """A checkpoint of arbitrary state, and that state."""
    every = pieces_of(engines(tiny_plan(layout, model, global_batch=24)))
    scramble(every, seed)
    return write(folder, tiny_plan(layout, model, global_batch=24), every), gather(every)


def load(path: Path, layout: Layout):
    every = pieces_of(engines(tiny_plan(layout, MODEL, global_batch=24)))
    read(path, every)
    return gather(every)


def test_resharded_it_holds_the_same_in_whole_tensors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rewrite, "PART_BYTES", 100_000)
    path, truth = checkpoint(tmp_path / "a", Layout(tensor=2, pipeline=2, data=2, zero=1), 1)
    (path / "tokenizer.json").write_text("{}")
    assert main(["checkpoint", "reshard", str(path), "-o", str(tmp_path / "whole")]) == 0
    assert "step-000007" in capsys.readouterr().out
    assert_equal(load(tmp_path / "whole", Layout(tensor=2, data=2)), truth)
    there, here = whole(path), whole(tmp_path / "whole")
    assert (here.step, here.extra) == (there.step, there.extra)
    assert (tmp_path / "whole" / "plan.json").read_bytes() == (path / "plan.json").read_bytes()
    assert (tmp_path / "whole" / "tokenizer.json").is_file()
    files = sorted((tmp_path / "whole").glob("weight-*.safetensors"))
    names = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    assert {("weight", name): tensor for name, tensor in names.items()}.keys() == {k for k in truth if k[0] == "weight"}
    assert main(["checkpoint", "verify", str(tmp_path / "whole")]) == 0
    assert "all checksums match" in capsys.readouterr().out


def test_the_mean_of_several(tmp_path, capsys):
    """Whatever layouts wrote them; the result holds weights alone."""
    layouts = [Layout(data=2, zero=1), Layout(tensor=2), Layout()]
    made = [checkpoint(tmp_path / str(seed), layout, seed) for seed, layout in enumerate(layouts)]
    paths = [str(path) for path, _ in made]
    assert main(["checkpoint", "average", *paths, "-o", str(tmp_path / "mean")]) == 0
    found = {entry.name for entry in whole(tmp_path / "mean").tensors}
    mean = load_file(tmp_path / "mean" / "weight-00000.safetensors")
    assert found == set(mean)
    for name, tensor in mean.items():
        want = sum(state["weight", name] for _, state in made) / 3
        torch.testing.assert_close(tensor.double(), want, rtol=1e-6, atol=1e-7)
    assert {entry.kind for entry in whole(tmp_path / "mean").tensors} == {"weight"}


def test_the_mean_of_one_is_itself(tmp_path):
    path, truth = checkpoint(tmp_path / "a", Layout(), 3)
    rewrite.average([path, path], tmp_path / "mean", say=print)
    for name, tensor in load_file(tmp_path / "mean" / "weight-00000.safetensors").items():
        assert torch.equal(tensor, truth["weight", name].float())


def test_other_models_have_no_mean(tmp_path, capsys):
    path, _ = checkpoint(tmp_path / "a", Layout(), 1)
    other = tiny_model(num_layers=5, hidden=32, ffn=96, head_dim=8, vocab=50, tied=True)
    path2, _ = checkpoint(tmp_path / "b", Layout(), 1, other)
    assert main(["checkpoint", "average", str(path), str(path2), "-o", str(tmp_path / "mean")]) == 2
    said = capsys.readouterr().err
    assert "model.ffn is 96 in the checkpoint and 48 here" in said and "b/step-000007" in said
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("action", ["average", "reshard", "import", "export"])
def test_nothing_is_overwritten_and_nothing_is_left(tmp_path, action, capsys):
    path, _ = checkpoint(tmp_path / "a", Layout(), 1)
    before = sorted(file.name for file in tmp_path.iterdir())
    assert main(["checkpoint", action, str(path), "-o", str(tmp_path / "a")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["checkpoint", action, str(path), "-o", str(path / "manifest.json" / "b")]) == 2
    assert "manifest.json/b: cannot be written: " in capsys.readouterr().err
    flipped = path / "weight-00000.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 1
    flipped.write_bytes(data)
    assert main(["checkpoint", action, str(path), "-o", str(tmp_path / "new")]) == 2
    assert "weight-00000.safetensors" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    shutil.rmtree(path)
