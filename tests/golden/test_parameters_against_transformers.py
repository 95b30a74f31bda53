"""Parameter counts against `transformers`, which builds the models without memory (the meta device)."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.spec import hf, models


def num_parameters(config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


def ours(config: transformers.PretrainedConfig, folder) -> int:
    """Through the file that transformers itself writes."""
    config.save_pretrained(folder)
    return models.from_config(folder).num_parameters


@st.composite
def llama_sizes(draw):
    num_kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1), (2, 3)]))
    num_heads = num_kv_heads * groups
    return {
        "hidden_size": num_heads * draw(st.sampled_from([2, 8, 10])),
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": draw(st.integers(10, 70)),
        "max_position_embeddings": draw(st.integers(4, 30)),
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


@settings(max_examples=20)
@given(sizes=llama_sizes(), bias=st.booleans(), head_dim=st.sampled_from([None, 4]))
def test_llama(tmp_path_factory, sizes, bias, head_dim):
    config = transformers.LlamaConfig(**sizes, attention_bias=bias, mlp_bias=bias, head_dim=head_dim)
    assert ours(config, tmp_path_factory.mktemp("llama")) == num_parameters(config)


@settings(max_examples=10)
@given(sizes=llama_sizes())
def test_mistral(tmp_path_factory, sizes):
    config = transformers.MistralConfig(**sizes, sliding_window=None)
    assert ours(config, tmp_path_factory.mktemp("mistral")) == num_parameters(config)


@settings(max_examples=10)
@given(sizes=llama_sizes())
def test_qwen2(tmp_path_factory, sizes):
    config = transformers.Qwen2Config(**sizes)
    assert ours(config, tmp_path_factory.mktemp("qwen2")) == num_parameters(config)


@settings(max_examples=10)
@given(sizes=llama_sizes(), head_dim=st.sampled_from([4, 10]))
def test_qwen3(tmp_path_factory, sizes, head_dim):
    config = transformers.Qwen3Config(**sizes, head_dim=head_dim)
    assert ours(config, tmp_path_factory.mktemp("qwen3")) == num_parameters(config)


@settings(max_examples=10)
@given(
    num_heads=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    n_inner=st.sampled_from([None, 24]),
    tied=st.booleans(),
    vocab=st.integers(10, 70),
)
def test_gpt2(tmp_path_factory, num_heads, num_layers, n_inner, tied, vocab):
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=12,
        n_embd=8 * num_heads,
        n_layer=num_layers,
        n_head=num_heads,
        n_inner=n_inner,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    assert ours(config, tmp_path_factory.mktemp("gpt2")) == num_parameters(config)


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2-xl", "llama-2-70b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "tiny"]
)
def test_the_configuration_that_we_write_builds_the_same_model(tmp_path, name):
    model = models.named(name)
    (tmp_path / "config.json").write_text(json.dumps(hf.config(model)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__.removesuffix("Config") in hf.FAMILIES[config.model_type]
    assert num_parameters(config) == model.num_parameters


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b", "tiny"])
def test_rotary_frequencies(tmp_path, name):
    model = models.named(name)
    (tmp_path / "config.json").write_text(json.dumps(hf.config(model)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    assert torch.tensor(model.rope_inverse_frequencies()).tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
