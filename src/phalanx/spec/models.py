"""Models by name, and the sizes that follow from the ones given.

A model is written as a table of ModelSpec's fields (models.toml, or [model] of a run file); whatever a field of it
follows from the others is left out and derived here, so that `name = "llama-3-8b"` with `hidden = 1024` gets the head
width of the new sizes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import SpecError
from phalanx.spec import hf
from phalanx.spec.document import Document, Key, Place, parse
from phalanx.spec.model import ModelSpec
from phalanx.spec.schema import Checker, checked, suggest

Style = Literal["llama", "gpt2"]

STYLES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "tied": False},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "positions": "learned",
        "tied": True,
        "qkv_bias": True,
        "bias": True,
    },
}

SIZES = ("num_layers", "hidden", "num_heads", "vocab")
"""What a model that is described by its own sizes must give; the rest has a default."""


@functools.cache
def _named() -> dict[str, dict[str, Any]]:
    return parse((resources.files("phalanx.spec") / "models.toml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Names of all models that are known by name."""
    return tuple(_named())


def named(name: str) -> ModelSpec:
    """The model called `name`. Raises SpecError, with the nearest known name, if there is none."""
    if name not in _named():
        raise SpecError(f'unknown model "{name}"', instead=suggest(name, names()))
    place = Place(text=f"models.toml: {name}", folder=Path())
    return checked(Document(table=table(name), places={(): place}), build)


def table(name: str) -> dict[str, Any]:
    """The keys that models.toml gives for the known model `name`."""
    return {"name": name, **{key: value for key, value in _named()[name].items() if key != "source"}}


def with_base(run: Document) -> Document:
    """`run` with the sizes that its [model] names (a known model, or a config.json) laid under the keys given there.

    Raises SpecError for a model that is not known, or a config.json that cannot be used.
    """
    given = run.table.get("model", {})
    name, config = given.get("name"), given.get("hf")
    known = name in _named()
    if config:
        if known:
            what = f'model.name = "{name}" and model.hf = "{config}" both say which model'
            raise SpecError(what, where=run.where(("model", "hf")), instead="leave one of them out")
        return run.over(
            hf.document(run.path(("model", "hf"), config), asked_at=run.where(("model", "hf"))).below("model")
        )
    if known:
        if "style" in given:
            what = f'model.style beside model.name = "{name}", which has its style already'
            raise SpecError(what, where=run.where(("model", "style")), instead="leave it out")
        return run.over(Document(table=table(name), places={}).below("model"))
    if name and not all(size in given for size in SIZES):
        instead = f"{suggest(name, names())}; or give {', '.join(SIZES)}"
        raise SpecError(f'unknown model "{name}"', where=run.where(("model", "name")), instead=instead)
    return run


def from_config(path: Path) -> ModelSpec:
    """The model that a Hugging Face config.json (or its folder) describes. Raises SpecError as `hf.document` does."""
    return checked(hf.document(path), build)


def build(check: Checker, table: Mapping[str, Any], key: Key, seq_len: int | None = None) -> ModelSpec | None:
    """The ModelSpec that `table`, which stands at `key`, describes; None if something in it is wrong.

    `seq_len` is the longest sequence where the table does not say one.
    """
    before = len(check.problems)
    style = table.get("style", "llama")
    if not isinstance(style, str) or style not in STYLES:
        check.problem((*key, "style"), f"unknown style {json.dumps(style, default=str)}", suggest(str(style), STYLES))
        return None
    given = {name: value for name, value in table.items() if name not in ("style", "hf")}
    model = check.build(ModelSpec, _complete({**STYLES[style], **given}, seq_len), key)
    if model is None:
        return None
    _check_sizes(check, model, given, key)
    return model if len(check.problems) == before else None


def _complete(table: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """`table` with the fields that follow from others.

    A size that is missing or no whole number counts as 1 here: it is reported as itself, not through what follows.
    """
    hidden, num_heads = (
        value if type(value := table.get(name)) is int and value > 0 else 1 for name in ("hidden", "num_heads")
    )
    # Llama's code: two thirds of 4 h, rounded up to a multiple of 256, so that three matrices weigh as much as two.
    ffn = (8 * hidden // 3 + 255) // 256 * 256 if table["activation"] == "swiglu" else 4 * hidden
    derived: dict[str, Any] = {"num_kv_heads": num_heads, "head_dim": max(1, hidden // num_heads), "ffn": ffn}
    if seq_len:
        derived["max_seq_len"] = seq_len
    return {"name": "custom", **derived, **table}


def _check_sizes(check: Checker, model: ModelSpec, given: Mapping[str, Any], key: Key) -> None:
    """Note sizes that are legal alone and impossible together."""

    def one_of(*names: str) -> Key:
        """The first of these keys that the user wrote, so that the complaint has its line."""
        written = [name for name in names if (*key, name) in check.document.places]
        return (*key, (written or names)[0])

    if "head_dim" not in given and model.hidden % model.num_heads:
        what = f"hidden = {model.hidden} does not divide by num_heads = {model.num_heads}"
        check.problem(one_of("num_heads", "hidden"), what, "or give head_dim, the width of one head")
    if model.num_heads % model.num_kv_heads:
        what = f"num_heads = {model.num_heads} does not divide by num_kv_heads = {model.num_kv_heads}"
        check.problem(
            one_of("num_kv_heads", "num_heads"), what, "each key-value head serves the same number of query heads"
        )
    if model.positions == "rope" and model.head_dim % 2:
        what = f"head_dim = {model.head_dim} is odd, but rotary positions turn pairs"
        check.problem(
            one_of("head_dim", "num_heads", "hidden"),
            what,
            "choose hidden and num_heads so that hidden / num_heads is even",
        )
    scaling = model.rope_scaling
    if scaling and model.positions != "rope":
        check.problem((*key, "rope_scaling"), f"rope_scaling with {model.positions} positions", 'positions = "rope"')
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        what = f"high_freq_factor = {scaling.high_freq_factor:g} is not above low_freq_factor"
        check.problem((*key, "rope_scaling", "high_freq_factor"), what, f"above {scaling.low_freq_factor:g}")
