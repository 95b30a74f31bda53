"""docs/equations.md: numbered without gaps, every name in it is there, and what it says is what the code computes."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from phalanx.plan import operations, stages
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import rank_buffers
from phalanx.plan.traffic import traffic
from phalanx.spec import clusters, models
from phalanx.spec.job import JobSpec

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
DOCUMENTS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} | {"PERFORMANCE.md"}  # nccl-tests'
TEXT = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(phalanx(?:\.\w+)+)`", TEXT)))


def resolve(name: str) -> object:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_numbers_have_no_gaps():
    numbers = [int(number) for number in re.findall(r"^\*\*\((\d+)\) ", TEXT, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_equation_names_what_computes_it():
    for paragraph in re.split(r"^\*\*\(\d+\) ", TEXT, flags=re.MULTILINE)[1:]:
        assert re.search(r"`phalanx\.", paragraph.split("\n## ")[0]), paragraph


def test_every_name_is_there():
    assert len(NAMES) > 15
    for name in NAMES:
        resolve(name)


def test_what_the_code_cites_is_there():
    cited = []
    for path in (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.toml")):
        text = path.read_text(encoding="utf-8")
        assert not set(re.findall(r"[\w/-]+\.md\b", text)) - DOCUMENTS, path
        cited += re.findall(r"docs/equations\.md, (\d+)", text)
    assert len(cited) > 5
    assert all(f"\n**({number}) " in TEXT for number in cited), cited


MODELS = [
    dataclasses.replace(models.named(name), dropout=0.0, attention_dropout=0.0)
    for name in ("gpt2", "llama-3-8b", "qwen2.5-0.5b", "qwen3-0.6b", "tiny")
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
class TestModel:
    def test_parameters(self, model):
        h, q, k, f, u = model.hidden, model.q_rows, model.kv_rows, model.ffn, 2 if model.gated else 1
        n = 2 if model.norm == "layernorm" else 1
        layer = 2 * h * (q + k) + (u + 1) * h * f + 2 * n * h
        layer += (q + 2 * k) * model.qkv_bias + (h + u * f + h) * model.bias + 2 * model.head_dim * model.qk_norm
        assert model.num_layer_parameters == layer
        positions, head = model.max_seq_len * h * (model.positions == "learned"), model.vocab * h * (not model.tied)
        assert model.num_parameters == model.vocab * h + positions + model.num_layers * layer + n * h + head

    def test_flops(self, model):
        h, q, k, f, u, s = model.hidden, model.q_rows, model.kv_rows, model.ffn, 2 if model.gated else 1, 512
        matrices = 2 * (2 * h * (q + k) + (u + 1) * h * f)
        for core, causal in ((4 * s * q, False), (2 * (s + 1) * q, True)):
            expected = 3 * (model.num_layers * (matrices + core) + 2 * h * model.vocab)
            assert model.flops_per_token(s, causal=causal) == expected

    def test_stage_costs(self, model):
        h, q, k, f, u, s, t = model.hidden, model.q_rows, model.kv_rows, model.ffn, 2 if model.gated else 1, 512, 4
        copies = max(1, t // model.num_kv_heads)
        assert stages.layer_cost(model, s, t) == 4 * h * (q + k * copies) + 2 * (u + 1) * h * f + 2 * (s + 1) * q
        assert stages.head_cost(model) == (2 * h + 5) * model.vocab

    @pytest.mark.parametrize(("t", "cuts_rows"), [(1, False), (2, False), (2, True)])
    def test_kept_bytes(self, model, t, cuts_rows):
        layout, s, e, w = Layout(tensor=t, sequence_parallel=cuts_rows, micro_batch=2), 64, 2, 4
        h, q, k, f, u = model.hidden, model.q_rows, model.kv_rows, model.ffn, 2 if model.gated else 1
        n, rows = 2 if model.norm == "layernorm" else 1, 2 * s // (t if cuts_rows else 1)
        expected = e * (4 * rows * h + 2 * s * (2 * q + 2 * k + (u + 1) * f) / t)
        expected += w * (2 * n * rows + 2 * s * model.num_heads / t)
        if model.qk_norm:
            expected += 2 * s * (e * (q + 2 * k) + w * (model.num_heads + model.num_kv_heads)) / t
        block = operations.layer(model, cut_of(model, s, layout, e), operations.Kernels())
        assert block.kept_bytes == expected


@pytest.mark.parametrize("cuts_rows", [False, True])
def test_messages(cuts_rows):
    """The payloads that the equations write out, for the first of two stages on 2 × 2 × 2 ranks."""
    model, job = models.named("tiny"), JobSpec(global_batch=8, seq_len=32, num_steps=1, precision="bf16")
    layout = Layout(tensor=2, pipeline=2, data=2, micro_batch=2, zero=1, sequence_parallel=cuts_rows)
    plan = Plan(model=model, cluster=clusters.named("laptop"), job=job, layout=layout)
    tokens, h, e, w, m = 2 * 32, 64, 2, 4, 2
    rows = tokens // 2 if cuts_rows else tokens
    coord = Coord(pipeline=0)
    sent = traffic(plan, coord)

    def payload(group: str, purpose: str = "", operation: str = "") -> int:
        found = [each for each in sent if (each.group, purpose in each.purpose) == (group, True)]
        return sum(each.payload_bytes for each in found if operation in each.operation)

    num_layers = len(stages.split(model, job.seq_len, 2, tensor=2)[0].layers)
    sums = (4 * num_layers + 1) * m * tokens * h * e
    gathers = (4 * num_layers + 1) * m * tokens * h * e if cuts_rows else 0
    copies = payload("tensor", "replicated")
    assert payload("tensor") - copies == sums + gathers
    assert payload("pipeline", operation="send") == m * rows * h * e
    held = sum(buffer.num_elements for buffer in rank_buffers(model, layout, coord, job.seq_len))
    assert payload("data", "gradients") == held * w
    assert payload("data", "parameters") == held * e
    sent = traffic(plan, Coord(pipeline=1))
    assert payload("tensor", "loss") == m * 2 * 2 * tokens * w
