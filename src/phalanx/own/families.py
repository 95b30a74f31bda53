"""Tables of cuts (own.cuts) for models of `transformers`, by their `config.model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from phalanx.errors import InputError

_LLAMA = {
    "*layers": "sequence",
    "*.self_attn": "tokens",
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp": "tokens",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
    "*embed_tokens": "vocabulary",
    "*lm_head": "vocabulary",
}

_GPT2 = {
    "*h": "sequence",
    "*.attn": "tokens",
    "*.attn.c_attn": "column of 3",
    "*.attn.split_size": "divided",
    "*.attn.c_proj": "row",
    "*.mlp": "tokens",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
    "*wte": "vocabulary",
    "*lm_head": "vocabulary",
}

_NEOX = {
    "*layers": "sequence",
    "*.attention": "tokens",
    "*.attention.query_key_value": "column",
    "*.attention.dense": "row",
    "*.mlp": "tokens",
    "*.mlp.dense_h_to_4h": "column",
    "*.mlp.dense_4h_to_h": "row",
    "*embed_in": "vocabulary",
    "*embed_out": "vocabulary",
    "*lm_head": "vocabulary",
}

_VIT = {
    "*.attention.[qkv]_proj": "column",
    "*.attention.o_proj": "row",
    "*.mlp.fc1": "column",
    "*.mlp.fc2": "row",
}

_BERT = {
    "*.attention.self.query": "column",
    "*.attention.self.key": "column",
    "*.attention.self.value": "column",
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.*.output.dense": "row",
}

TABLES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "*.self_attn.[qk]_norm": "heads"},
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "vit": _VIT,
    "bert": _BERT,
}

_OPTIONAL = ("*lm_head", "*embed_out", "*embed_tokens", "*wte", "*embed_in")
"""What a model without a head, or cut out of another, may lack."""


def table_of(module: nn.Module) -> dict[str, str]:
    """The table for a module of `transformers`. Raises InputError if there is none."""
    kind = str(getattr(getattr(module, "config", None), "model_type", None) or "")
    if kind not in TABLES:
        what = f"there is no table for {f'models of type {kind}' if kind else type(module).__name__}"
        known = ", ".join(TABLES)
        raise InputError(what, where="cuts", instead=f"a table of your own, as for {known} (phalanx.own.families)")
    endings = tuple(name for name, _ in module.named_modules())
    return {
        pattern: text
        for pattern, text in TABLES[kind].items()
        if pattern not in _OPTIONAL or any(name.endswith(pattern.removeprefix("*")) for name in endings)
    }
