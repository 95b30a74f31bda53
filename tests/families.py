"""Small random models of `transformers`, one of each family and trait that we read and write."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _gpt2(**changes: Any) -> Any:
    config = {"n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 250}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"eos_token_id": 3, "bos_token_id": 3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(config | dropouts | ids | changes)))


def _llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


FAMILIES = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "llama 3.1": lambda: _llama(rope_theta=5e5, rope_scaling=LLAMA3),
    "llama linear": lambda: _llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, head_dim=24, sliding_window=None)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=24)),
    "gpt2": _gpt2,
    "gpt2 untied": lambda: _gpt2(tie_word_embeddings=False),
}


def family(name: str, seed: int = 0) -> Any:
    """The model, in fp32, with every parameter random: biases and norms too, which start as zeros and ones."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model
