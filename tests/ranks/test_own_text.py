"""Token files for a module of one's own: samples, labels, and the GPT of examples/own that is trained on them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_modules import first_step, on_ranks, relative

import phalanx
from phalanx.data.tokens import TokenWriter, mask_path
from phalanx.errors import DataError, InputError, LayoutError
from phalanx.own.prepare import prepare
from phalanx.own.text import TokenDataset
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.spec.job import JobSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "own"))
import gpt

SEQ_LEN = 4


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """21 tokens, which count up: 5 samples and nothing left."""
    with TokenWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add(np.arange(21))
        writer.end_document()
    return tmp_path / "tokens"


def test_each_label_is_the_token_that_comes_next(prefix: Path) -> None:
    data = phalanx.TokenDataset(prefix, SEQ_LEN, vocab=21)
    assert len(data) == 5
    assert [data[number][0].tolist() for number in (0, 4)] == [[0, 1, 2, 3], [16, 17, 18, 19]]
    assert [labels.tolist() for _, labels in data] == [list(range(4 * n + 1, 4 * n + 5)) for n in range(5)]


def test_what_the_mask_leaves_out_is_no_label(prefix: Path) -> None:
    mask_path(prefix).write_bytes(bytes([1, 1, 0, 1, 0] + [1] * 16))
    tokens, labels = TokenDataset(prefix, SEQ_LEN, vocab=21)[0]
    assert (tokens.tolist(), labels.tolist()) == ([0, 1, 2, 3], [1, -100, 3, -100])
    logits = torch.zeros(SEQ_LEN, 21)
    assert F.cross_entropy(logits, labels, reduction="sum") == pytest.approx(2 * np.log(21))


def test_what_a_dataset_refuses(prefix: Path) -> None:
    with pytest.raises(DataError, match="token id 20 at position 20"):
        TokenDataset(prefix, SEQ_LEN, vocab=20)[4]
    with pytest.raises(DataError, match="has 21 tokens, a sample of 21 needs one more"):
        TokenDataset(prefix, 21, vocab=21)
    with pytest.raises(InputError, match="TokenDataset: seq_len = 0"):
        TokenDataset(prefix, 0, vocab=21)
    with pytest.raises(IndexError, match="sample 5 of 5"):
        TokenDataset(prefix, SEQ_LEN, vocab=21)[5]


def make_gpt() -> torch.nn.Module:
    torch.manual_seed(1)
    return gpt.GPT()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Of unequally many labels that count."""
    tokens = torch.randint(gpt.VOCAB, (8, 17), generator=torch.Generator().manual_seed(2))
    labels = tokens[:, 1:].clone()
    labels[:3, :9] = -100
    return tokens[:, :-1], labels


def test_the_gpt_has_the_loss_and_gradients_of_one_process() -> None:
    job = JobSpec(global_batch=8, seq_len=16, num_steps=1, precision="fp32")
    plan = ModulePlan(job=job, layout=Layout(pipeline=2, data=2, zero=1, micro_batch=2))
    options = {"blocks": phalanx.Blocks(path="blocks")}
    loss, gradients = on_ranks(plan.layout, first_step, plan, make_gpt, batch(), gpt.next_token, options)[0]
    module = make_gpt()
    expected = F.cross_entropy(module(batch()[0]).flatten(0, 1), batch()[1].flatten())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert relative(gradients[name], parameter.grad) < 1e-5, name


def test_a_refusal_shows_the_call_and_not_the_way_to_it() -> None:
    job = JobSpec(global_batch=8, seq_len=16, num_steps=1, precision="fp32")
    with pytest.raises(LayoutError, match="needs 2 processes, got 1") as refused:
        prepare(torch.nn.Linear(2, 2), ModulePlan(job=job, layout=Layout(data=2, micro_batch=2)))
    assert len(refused.traceback) <= 3, "this test, prepare, and what raises"
