"""Hugging Face folders in and out, held against `transformers` on small random models."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import FAMILIES, family

from phalanx.checkpoint.hf import export, to_checkpoint
from phalanx.checkpoint.weights import open_weights

TOKENS = torch.arange(40).view(2, 20) * 37 % 250


@pytest.fixture
def folder(tmp_path):
    """A function that saves a model as `transformers` does and returns it with its folder."""

    def save(name: str, **how):
        model = family(name)
        model.save_pretrained(tmp_path / "theirs", **how)
        return model, tmp_path / "theirs"

    return save


def load(path):
    """The model that transformers makes of a folder, in which it must find all it needs and nothing more."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_keep_every_weight(name, folder, tmp_path):
    model, path = folder(name)
    to_checkpoint(open_weights(path), tmp_path / "ours")
    export(open_weights(tmp_path / "ours"), tmp_path / "out")
    back = load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, model(TOKENS).logits)
    before, after = dict(model.named_parameters()), dict(back.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
