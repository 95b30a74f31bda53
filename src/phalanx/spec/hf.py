"""config.json of Hugging Face folders, in and out: GPT-2, Llama, Mistral, Qwen2, Qwen3.

Only what is built here is accepted. A configuration that asks for anything else (sliding windows, another rotary
scaling, another activation) is refused: a model that is nearly the right one trains without a word and is wrong. Keys
that change no number of training (token ids, cache, dtype) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, SpecError
from phalanx.spec.document import Document, Place, read_text
from phalanx.spec.model import ModelSpec
from phalanx.spec.schema import shown, suggest

FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Known values of `model_type`, and the class that transformers has for each."""

_QWEN3_HEAD_DIM = 128  # Qwen3's own default, whatever the hidden size

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# ModelSpec's fields and their keys in config.json.
_GPT2_REQUIRED = {
    "num_layers": "n_layer",
    "hidden": "n_embd",
    "num_heads": "n_head",
    "vocab": "vocab_size",
    "max_seq_len": "n_positions",
}
_GPT2_OPTIONAL = {
    "ffn": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "attention_dropout": "attn_pdrop",
    "tied": "tie_word_embeddings",
}
_LLAMA_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_LLAMA_OPTIONAL = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
    "tied": "tie_word_embeddings",
}
_ROPE_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


class _Config:
    """The keys of one config.json, the ModelSpec fields taken from it so far, and what is wrong with it."""

    def __init__(self, file: Path, keys: Mapping[str, Any]) -> None:
        self.file = file
        self.keys = keys
        self.table: dict[str, Any] = {}
        self.places: dict[tuple[str, ...], Place] = {}
        self.problems: list[Problem] = []

    def refuse(self, what: str, instead: str) -> None:
        """Note one reason why this configuration cannot be used."""
        self.problems.append(Problem(what=what, where=str(self.file), instead=instead))

    def put(self, field: str, value: Any, key: str) -> None:
        """Take `value` for ModelSpec's `field`; it stands at `key`."""
        self.table[field] = value
        self.places[(field,)] = Place(text=f"{self.file}: {key}", folder=self.file.parent)

    def take(self, required: Mapping[str, str], optional: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        """Take fields from their keys. One that is null or left out has its family's default, if it has one."""
        for field, key in {**required, **optional}.items():
            value = self.keys.get(key)
            if value is not None:
                self.put(field, value, key)
            elif field in required:
                self.refuse(f"missing key {key}", "a configuration of this family always has it")
            elif field in defaults:
                self.put(field, defaults[field], key)

    def demand(self, key: str, legal: Any, why: str) -> None:
        """Refuse a `key` that is there and not `legal`."""
        value = self.keys.get(key, legal)
        if value != legal:
            self.refuse(f"{key} = {shown(value)} is not built here: {why}", f"only {key} = {shown(legal)}")


def document(path: Path, *, asked_at: str = "") -> Document:
    """ModelSpec's fields as the config.json at `path` (the file or its folder) gives them, as a document.

    `asked_at` is where the path was written. Raises SpecError for a file that is missing or not JSON, an unknown
    architecture, missing keys, and everything that is not built here.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _Config(file, _read(file, asked_at))
    family = _family(config)
    config.put("name", path.name if path.is_dir() else path.parent.name or family, "model_type")
    if config.keys.get("quantization_config"):
        config.refuse("quantization_config: quantised weights cannot be trained", "the folder of the original weights")
    _gpt2(config) if family == "gpt2" else _llama(config, family)
    if config.problems:
        raise SpecError(config.problems)
    return Document(table=config.table, places={(): Place(text=str(file), folder=file.parent), **config.places})


def _read(file: Path, asked_at: str) -> dict[str, Any]:
    text = read_text(file, asked_at=asked_at)
    try:
        keys = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"is not JSON: {error.msg}", where=f"{file}:{error.lineno}") from None
    if not isinstance(keys, dict):
        raise SpecError(f"is {shown(keys)}, not a table of keys", where=str(file), instead="a model's config.json")
    return keys


def _family(config: _Config) -> str:
    family = config.keys.get("model_type")
    if family is None:
        architectures = config.keys.get("architectures") or [""]
        family = str(architectures[0]).removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    if family in FAMILIES:
        return str(family)
    what = f'unknown architecture "{family}"' if family else "missing key model_type"
    raise SpecError(what, where=str(config.file), instead=suggest(str(family), FAMILIES))


def _gpt2(config: _Config) -> None:
    defaults = {"norm_eps": 1e-5, "init_std": 0.02, "attention_dropout": 0.1, "tied": True}
    config.take(_GPT2_REQUIRED, _GPT2_OPTIONAL, defaults)
    config.table["style"] = "gpt2"
    _activation(config, "activation_function", "gelu_new", _GELUS)
    dropout = config.keys.get("resid_pdrop", 0.1)
    config.put("dropout", dropout, "resid_pdrop")
    if config.keys.get("embd_pdrop", 0.1) != dropout:
        config.refuse("embd_pdrop differs from resid_pdrop: one dropout rate is built here", "give both the same value")
    config.demand("scale_attn_weights", True, "scores are always divided by the root of the head width")
    config.demand("scale_attn_by_inverse_layer_idx", False, "all layers scale alike")
    config.demand("add_cross_attention", False, "there is no encoder")


def _llama(config: _Config, family: str) -> None:
    defaults = {"norm_eps": 1e-6, "init_std": 0.02, "attention_dropout": 0.0, "tied": False}
    required = dict(_LLAMA_REQUIRED)
    if family != "llama":  # their own defaults are numbers that only fit one size
        required["num_kv_heads"] = "num_key_value_heads"
    config.take(required, _LLAMA_OPTIONAL, defaults)
    _activation(config, "hidden_act", "silu", {"silu": "swiglu"})
    attention_bias, mlp_bias = config.keys.get("attention_bias", False), config.keys.get("mlp_bias", False)
    if family == "qwen2":
        config.put("qkv_bias", True, "model_type")
    elif family == "qwen3":
        config.put("qk_norm", True, "model_type")
        config.put("head_dim", config.keys.get("head_dim") or _QWEN3_HEAD_DIM, "head_dim")
        config.demand("attention_bias", False, "its biases on attention without any on the feed-forward")
    elif attention_bias != mlp_bias:
        what = f"attention_bias = {shown(attention_bias)} with mlp_bias = {shown(mlp_bias)} is not built here"
        config.refuse(what, "both true, both false, or qwen2's: biases on q, k and v alone")
    elif attention_bias:
        config.put("qkv_bias", True, "attention_bias")
        config.put("bias", True, "mlp_bias")
    _rope(config)
    _window(config, family)


def _activation(config: _Config, key: str, default: str, known: Mapping[str, str]) -> None:
    name = config.keys.get(key, default)
    if name in known:
        config.put("activation", known[name], key)
    else:
        config.refuse(f"{key} = {shown(name)} is not built here", suggest(str(name), known))


def _rope(config: _Config) -> None:
    """Rotary frequencies: `rope_theta` and `rope_scaling`, or both in `rope_parameters` (transformers 5)."""
    key = "rope_parameters" if config.keys.get("rope_parameters") else "rope_scaling"
    rope = config.keys.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        config.refuse(f"{key} = {shown(rope)}: one setting for all layers is built here", "a flat table")
        return
    config.put("rope_theta", rope.get("rope_theta", config.keys.get("rope_theta", 10_000.0)), "rope_theta")
    if rope.get("partial_rotary_factor", config.keys.get("partial_rotary_factor", 1.0)) != 1.0:
        config.refuse("partial_rotary_factor: only whole heads are rotated here", "1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return
    wanted = {"linear": {"factor": "factor"}, "llama3": _ROPE_LLAMA3}.get(str(kind))
    if wanted is None:
        config.refuse(f"{key}: unknown rope_type {shown(kind)}", suggest(str(kind), ("default", "linear", "llama3")))
        return
    missing = [name for name in wanted.values() if name not in rope]
    if missing:
        config.refuse(f"{key}: missing {', '.join(missing)}", f'rope_type "{kind}" needs {", ".join(wanted.values())}')
        return
    scaling = {field: rope[name] for field, name in wanted.items()}
    config.put("rope_scaling", {"kind": kind, **scaling}, key)


def _window(config: _Config, family: str) -> None:
    """Refuse attention that sees only a window, unless the window holds every sequence."""
    if "sliding_attention" in (config.keys.get("layer_types") or ()):
        config.refuse("layer_types: sliding_attention is not built here", "only full_attention")
    if family == "llama" or (family.startswith("qwen") and not config.keys.get("use_sliding_window", False)):
        return
    window = config.keys.get("sliding_window", 4096)  # what both families take when the key is left out
    longest = config.keys.get("max_position_embeddings")
    if window is None or (isinstance(window, int) and isinstance(longest, int) and window >= longest):
        return
    instead = "set it to null, and max_position_embeddings to at most the window"
    config.refuse(f"sliding_window = {shown(window)} is not built here: every token sees all before it", instead)


def config(model: ModelSpec) -> dict[str, Any]:
    """The keys of a config.json that describes `model`: GPT-2, Llama, Qwen2 or Qwen3 (a Mistral without a window is a
    Llama).

    Raises SpecError for a mixture of choices that none of these families has.
    """
    gpt2 = (model.norm, model.positions, model.qkv_bias, model.bias) == ("layernorm", "learned", True, True)
    gpt2 = gpt2 and not model.qk_norm
    if gpt2 and not model.gated and model.num_kv_heads == model.num_heads and model.q_rows == model.hidden:
        return _gpt2_config(model)
    llama = (model.norm, model.positions, model.activation) == ("rmsnorm", "rope", "swiglu")
    biased = (model.qkv_bias, model.bias)
    if llama and model.dropout == 0 and (biased == (False, False) or (model.qkv_bias and not model.qk_norm)):
        return _llama_config(model)
    raise SpecError(f"{model.name} mixes choices that no known family has", instead=f"one of {', '.join(FAMILIES)}")


def _gpt2_config(model: ModelSpec) -> dict[str, Any]:
    keys = {key: getattr(model, field) for field, key in {**_GPT2_REQUIRED, **_GPT2_OPTIONAL}.items()}
    activation = {ours: theirs for theirs, ours in reversed(_GELUS.items())}[model.activation]
    dropouts = {"resid_pdrop": model.dropout, "embd_pdrop": model.dropout}
    head = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return {**head, **keys, **dropouts, "activation_function": activation}


def _llama_config(model: ModelSpec) -> dict[str, Any]:
    family = "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias and not model.bias else "llama"
    keys = {key: getattr(model, field) for field, key in {**_LLAMA_REQUIRED, **_LLAMA_OPTIONAL}.items()}
    keys |= {"hidden_act": "silu", "rope_theta": model.rope_theta}
    if family == "llama":
        keys |= {"attention_bias": model.qkv_bias, "mlp_bias": model.bias}
    else:
        keys["use_sliding_window"] = False
    scaling = model.rope_scaling
    if scaling is not None:
        names = _ROPE_LLAMA3 if scaling.kind == "llama3" else {"factor": "factor"}
        values = {name: getattr(scaling, field) for field, name in names.items()}
        keys["rope_scaling"] = {"rope_type": scaling.kind, **values}
    return {"architectures": [FAMILIES[family]], "model_type": family, **keys}
