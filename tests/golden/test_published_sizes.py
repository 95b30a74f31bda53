"""Parameter counts of named models against the published ones.

Exact numbers are those of the published weights (the sum over a model's safetensors files, buffers not counted); papers
print billions.
"""

from __future__ import annotations

import pytest

from phalanx.spec import models

WEIGHTS = {
    "gpt2": 124_439_808,  # huggingface.co/openai-community/gpt2 and its -medium, -large, -xl
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,  # huggingface.co/meta-llama
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,  # huggingface.co/Qwen
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,  # huggingface.co/mistralai/Mixtral-8x7B-v0.1, -8x22B-v0.1
    "mixtral-8x22b": 140_620_634_112,
    "mistral-7b": 7_248_023_552,  # huggingface.co/mistralai/Mistral-7B-v0.3
}

BILLIONS = {  # SC21 (arXiv 2104.04473), table 1
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18b": 18.4,
    "megatron-39b": 39.1,
    "megatron-76b": 76.1,
    "megatron-145b": 145.6,
    "megatron-310b": 310.1,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_published_weights(name):
    assert models.named(name).num_parameters == WEIGHTS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_sc21_table_1(name):
    assert round(models.named(name).num_parameters / 1e9, 1) == BILLIONS[name]


def test_models_whose_papers_round():
    assert models.named("gpt-3-175b").num_parameters == pytest.approx(175.0e9, rel=0.003)  # arXiv 2005.14165, table 2.1
    assert round(models.named("mt-nlg-530b").num_parameters / 1e9) == 530  # arXiv 2201.11990, title


def test_every_named_model_is_checked():
    own = {"tiny", "tiny-gpt2", "demo"}
    assert {*WEIGHTS, *BILLIONS, "gpt-3-175b", "mt-nlg-530b"} | own == set(models.names())


def test_flops_of_sc21():
    """SC21 eq. 3 counts 96 B s L h² (1 + s/6h + V/16Lh) with a recompute of the layers; without it the model FLOPs of a
    token are three times the forward (Korthikanti et al. 2022: 72 B s L h² (1 + s/6h + V/12Lh))."""
    model = models.named("megatron-145b")
    layers, h, v, s = model.num_layers, model.hidden, model.vocab, 2048
    expected = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.flops_per_token(s) == pytest.approx(expected, rel=1e-12)


def test_tiny_is_the_small_model_of_the_field_cases():
    assert models.named("tiny").num_layer_parameters == 36_992
    assert models.named("tiny").num_parameters == 180_032
