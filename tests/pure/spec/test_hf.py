"""config.json in and out: what is taken, what is refused, and rotary scaling by its published numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import SpecError
from phalanx.spec import hf, models
from phalanx.spec.model import ModelSpec, RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 250}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
QWEN2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, keys: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(keys) if not isinstance(keys, str) else keys, encoding="utf-8")
    return path


def read(folder: Path, keys: object) -> ModelSpec:
    return models.from_config(write(folder, keys))


def complaint(folder: Path, keys: object) -> str:
    with pytest.raises(SpecError) as caught:
        read(folder, keys)
    assert str(caught.value).startswith(str(folder / "config.json"))
    return str(caught.value)


class TestFamilies:
    def test_llama(self, tmp_path):
        expected = dataclasses.replace(
            models.named("tiny"), name=tmp_path.name, rope_theta=500000.0, max_seq_len=64, norm_eps=1e-5
        )
        assert read(tmp_path, LLAMA) == expected
        assert models.from_config(tmp_path) == expected, "the folder will do"

    def test_what_is_left_out(self, tmp_path):
        keys = dict(LLAMA)
        for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "architectures"):
            del keys[key]
        model = read(tmp_path, {**keys, "head_dim": None})
        assert (model.num_kv_heads, model.norm_eps, model.rope_theta, model.head_dim) == (4, 1e-6, 10_000.0, 16)
        assert (model.tied, model.qkv_bias, model.bias) == (False, False, False)

    def test_llama_with_biases(self, tmp_path):
        model = read(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32})
        assert (model.qkv_bias, model.bias, model.head_dim, model.q_rows) == (True, True, 32, 128)

    def test_mistral_and_qwen2(self, tmp_path):
        llama = read(tmp_path, LLAMA)
        assert read(tmp_path, MISTRAL) == llama
        assert read(tmp_path, {**MISTRAL, "sliding_window": 64}) == llama, "a window that holds every sequence"
        assert read(tmp_path, QWEN2) == dataclasses.replace(llama, qkv_bias=True)

    def test_qwen3(self, tmp_path):
        llama = read(tmp_path, LLAMA)
        keys = {**LLAMA, "model_type": "qwen3", "use_sliding_window": False}
        assert read(tmp_path, {**keys, "head_dim": 16}) == dataclasses.replace(llama, qk_norm=True)
        assert read(tmp_path, keys).head_dim == 128, "whatever the hidden size"

    def test_gpt2(self, tmp_path):
        model = read(tmp_path, GPT2)
        assert (model.ffn, model.activation, model.tied, model.qkv_bias, model.bias) == (
            256, "gelu_tanh", True, True, True,
        )  # fmt: skip
        assert (model.dropout, model.attention_dropout, model.norm_eps, model.init_std) == (0.1, 0.1, 1e-5, 0.02)
        model = read(tmp_path, {**GPT2, "n_inner": 100, "activation_function": "gelu", "tie_word_embeddings": False})
        assert (model.ffn, model.activation, model.tied) == (100, "gelu", False)

    def test_known_by_its_class_alone(self, tmp_path):
        keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
        assert read(tmp_path, keys) == read(tmp_path, LLAMA)
        keys = {key: value for key, value in GPT2.items() if key != "model_type"}
        assert read(tmp_path, {**keys, "architectures": ["GPT2LMHeadModel"]}) == read(tmp_path, GPT2)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {**LLAMA, "model_type": "mixtral"},
            ['unknown architecture "mixtral"', "did you mean mistral?", "gpt2, llama"],
        ),
        ({**LLAMA, "model_type": "gemma"}, ['unknown architecture "gemma"', "known: gpt2, llama, mistral, qwen2"]),
        ({"hidden_size": 64}, ["missing key model_type", "known: gpt2"]),
        ({**LLAMA, "hidden_act": "gelu"}, ['hidden_act = "gelu"', "known: silu"]),
        ({**GPT2, "activation_function": "relu"}, ['activation_function = "relu"', "gelu_new"]),
        ({**LLAMA, "attention_bias": True}, ["attention_bias = true with mlp_bias = false"]),
        ({**LLAMA, "mlp_bias": True}, ["attention_bias = false with mlp_bias = true"]),
        ({**LLAMA, "quantization_config": {"bits": 4}}, ["quantised"]),
        ({**LLAMA, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ['unknown rope_type "yarn"', "llama3"]),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ['unknown rope_type "dynamic"', "linear"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, ["missing factor", 'rope_type "linear" needs factor']),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["missing low_freq_factor"]),
        ({**LLAMA, "rope_scaling": "llama3"}, ['rope_scaling = "llama3"']),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["one setting for all layers"]),
        ({**MISTRAL, "sliding_window": 32}, ["sliding_window = 32", "set it to null"]),
        ({**LLAMA, "model_type": "mistral", "max_position_embeddings": 8192}, ["sliding_window = 4096"]),
        ({**QWEN2, "use_sliding_window": True}, ["sliding_window = 32"]),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx = true"]),
        ({**GPT2, "scale_attn_weights": False}, ["scale_attn_weights = false"]),
        ({**GPT2, "embd_pdrop": 0.0}, ["embd_pdrop differs from resid_pdrop"]),
        ({**LLAMA, "hidden_size": "big"}, ["config.json: hidden_size", 'hidden = "big"', "a whole number"]),
        ({**LLAMA, "vocab_size": -1}, ["config.json: vocab_size", "vocab = -1", "at least 1"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["config.json: num_key_value_heads", "num_kv_heads = 3"]),
        ("{", ["config.json:1", "is not JSON"]),
        ("[]", ["is [], not a table of keys"]),
    ],
)
def test_refused(tmp_path, keys, words):
    said = complaint(tmp_path, keys)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(("keys", "num_required"), [(LLAMA, 6), (GPT2, 5), (MISTRAL, 7), (QWEN2, 7)])
def test_missing_keys_are_all_named(tmp_path, keys, num_required):
    with pytest.raises(SpecError) as caught:
        read(tmp_path, {"model_type": keys["model_type"], "sliding_window": None})
    missing = [problem.what.removeprefix("missing key ") for problem in caught.value.problems]
    assert len(missing) == num_required
    assert set(missing) <= set(keys)
    assert all(problem.where == str(tmp_path / "config.json") for problem in caught.value.problems)


def test_missing_file(tmp_path):
    with pytest.raises(SpecError, match=r"config.json: does not exist"):
        models.from_config(tmp_path)


class TestRotaryScaling:
    """Ratios of scaled to plain frequencies, worked out by hand from Llama 3.1's rule."""

    def ratios(self, folder: Path, scaling: dict[str, object], head_dim: int = 16) -> list[float]:
        keys = {**LLAMA, "head_dim": head_dim}
        plain = read(folder, keys).rope_inverse_frequencies()
        scaled = read(folder, {**keys, "rope_scaling": scaling}).rope_inverse_frequencies()
        return [after / before for after, before in zip(scaled, plain, strict=True)]

    def test_llama31(self, tmp_path):
        ratios = self.ratios(tmp_path, LLAMA31)
        assert ratios == pytest.approx([1, 1, 1, 1, 0.371122, 0.125, 0.125, 0.125], abs=5e-7)
        model = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA31})
        assert model.rope_inverse_frequencies()[4] == pytest.approx(5.24846e-4, rel=1e-5)
        assert read(tmp_path, LLAMA).rope_inverse_frequencies()[4] == pytest.approx(1.41421356e-3, rel=1e-8)

    def test_llama31_at_its_own_head_width(self, tmp_path):
        ratios = self.ratios(tmp_path, LLAMA31, head_dim=128)
        kept, divided = sum(ratio == 1 for ratio in ratios), sum(ratio == pytest.approx(0.125) for ratio in ratios)
        assert (kept, len(ratios) - kept - divided, divided) == (29, 6, 29)
        assert ratios == sorted(ratios, reverse=True)

    @pytest.mark.parametrize("name", ["type", "rope_type"])
    def test_linear(self, tmp_path, name):
        assert self.ratios(tmp_path, {name: "linear", "factor": 8.0}) == pytest.approx([0.125] * 8)

    def test_default_and_null_change_nothing(self, tmp_path):
        assert self.ratios(tmp_path, {"rope_type": "default"}) == [1.0] * 8
        assert read(tmp_path, {**LLAMA, "rope_scaling": None}) == read(tmp_path, LLAMA)

    def test_both_spellings_of_the_library(self, tmp_path):
        old = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA31})
        new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        assert read(tmp_path, {**new, "rope_parameters": {**LLAMA31, "rope_theta": 500000.0}}) == old

    def test_written_as_it_was_read(self, tmp_path):
        model = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA31})
        assert hf.config(model)["rope_scaling"] == LLAMA31


@st.composite
def exportable(draw):
    style = draw(st.sampled_from(["gpt2", "llama", "llama with biases", "qwen2", "qwen3"]))
    num_kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    num_heads = num_kv_heads * (groups if style != "gpt2" else 1)
    head_dim = draw(st.sampled_from([2, 8]))
    sizes = {
        "name": "any",
        "num_layers": draw(st.integers(1, 4)),
        "hidden": num_heads * head_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim if style == "gpt2" else draw(st.sampled_from([head_dim, 6])),
        "ffn": draw(st.integers(1, 100)),
        "vocab": draw(st.integers(1, 100)),
        "max_seq_len": draw(st.integers(1, 100)),
        "tied": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "init_std": draw(st.sampled_from([0.02, 0.006])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if style == "gpt2":
        choices = {"norm": "layernorm", "positions": "learned", "qkv_bias": True, "bias": True}
        choices["activation"] = draw(st.sampled_from(["gelu", "gelu_tanh"]))
        choices["dropout"] = draw(st.sampled_from([0.0, 0.2]))
    else:
        choices = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
        choices["qkv_bias"] = style in ("qwen2", "llama with biases")
        choices["bias"], choices["qk_norm"] = style == "llama with biases", style == "qwen3"
        choices["rope_theta"] = draw(st.sampled_from([1e4, 5e5]))
        choices["rope_scaling"] = draw(
            st.sampled_from([None, RopeScaling(kind="linear", factor=2.0), RopeScaling(kind="llama3", factor=8.0)])
        )
    return ModelSpec(**sizes, **choices)


@given(exportable())
def test_written_and_read_again_is_the_same_model(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("model")
    assert dataclasses.replace(read(folder, hf.config(model)), name="any") == model


def test_a_mixture_that_no_family_has_cannot_be_written():
    mixture = dataclasses.replace(models.named("tiny"), norm="layernorm")
    with pytest.raises(SpecError, match=r"tiny mixes choices"):
        hf.config(mixture)
