"""Names and shapes of the tensors in a Hugging Face folder, and where our parameters lie in them.

Our names are Llama's, so there is nothing to translate for its family. GPT-2 has names of its own; its linear layers
lie transposed ([inputs, outputs]), and q, k and v side by side in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.checkpoint.match import parameters
from phalanx.plan.shards import Rectangle
from phalanx.spec import hf
from phalanx.spec.model import ModelSpec

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

GPT2_PREFIX = "transformer."
"""GPT-2's own published folders leave it out."""

_GPT2_NAMES = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one of our parameters lies in the tensor `tensor` of a folder: from row `start` on, or, if it lies
    `transposed`, from column `start` on."""

    tensor: str
    transposed: bool = False
    start: int = 0

    def rectangle(self, ours: Rectangle) -> Rectangle:
        """The part of the folder's tensor that holds the part `ours` of our parameter."""
        start = (ours.start[0] + self.start, *ours.start[1:])
        stop = (ours.stop[0] + self.start, *ours.stop[1:])
        return Rectangle(start=start[::-1], stop=stop[::-1]) if self.transposed else Rectangle(start=start, stop=stop)


def places(model: ModelSpec) -> Mapping[str, Place]:
    """The place of each of our parameters, by its name. Raises SpecError for a model that no known family has."""
    gpt2 = hf.config(model)["model_type"] == "gpt2"
    return {name: _gpt2_place(name, model) if gpt2 else Place(tensor=name) for name in parameters(model)}


def shapes(model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tensor of the model's folder, by its name there."""
    found: dict[str, tuple[int, ...]] = {}
    where = places(model)
    for name, parameter in parameters(model).items():
        place = where[name]
        end = place.rectangle(Rectangle.of(parameter.shape)).stop
        found[place.tensor] = tuple(map(max, end, found.get(place.tensor, end)))
    return found


def _gpt2_place(name: str, model: ModelSpec) -> Place:
    if name == HEAD:
        return Place(tensor=name)
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        index, _, stem = stem.removeprefix("model.layers.").partition(".")
        layer = f"h.{index}."
    tensor = f"{GPT2_PREFIX}{layer}{_GPT2_NAMES[stem]}.{kind}"
    linear = stem.startswith(("self_attn.", "mlp."))
    start = {"self_attn.k_proj": model.q_rows, "self_attn.v_proj": model.q_rows + model.kv_rows}.get(stem, 0)
    return Place(tensor=tensor, transposed=linear and kind == "weight", start=start)
