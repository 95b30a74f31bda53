"""Reading a Hugging Face folder: what is in it, whether it is this model, and any part of any tensor.

Its tensors are safetensors; or, beside a config.json all the same, what torch.distributed.checkpoint wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.checkpoint import dcp
from phalanx.checkpoint.hf_names import EMBEDDING, GPT2_PREFIX, HEAD, places, shapes
from phalanx.checkpoint.tensor_file import FLOATS, StatePiece
from phalanx.errors import CheckpointError, DamagedCheckpointError, Problem
from phalanx.plan.shards import Rectangle
from phalanx.spec.model import ModelSpec

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of constants that old versions of transformers stored beside the weights."""

_COMPARED_ROWS = 4096


class Folder:
    """The tensors of one folder. Nothing is read but headers until `read` is called, and then only what it asks for.

    Raises CheckpointError for a folder without safetensors, DamagedCheckpointError for files missing or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        every = dcp.tensors(path) if (path / dcp.METADATA).is_file() else _safetensors(path)
        self._slices = {name: part for name, part in every.items() if not name.endswith(_BUFFERS)}

    def check(self, model: ModelSpec) -> None:
        """Raises CheckpointError, with all tensors that are missing, unexpected, of another shape, or of a type that is
        not built here, unless the folder holds exactly the weights of `model`.

        Where the head is tied to the embedding, a head in the folder must be equal to it.
        """
        expected = shapes(model)
        if model.positions == "learned":
            self._add_prefix()
        problems: list[tuple[str, str]] = []
        for name in sorted({*expected, *self._slices}):
            problems += self._problems(name, expected.get(name), model)
        if problems:
            raise CheckpointError([Problem(what=what, where=str(self.path), instead=why) for what, why in problems])
        embedding = places(model)[EMBEDDING].tensor
        if model.tied and HEAD in self._slices and not self._equal(HEAD, embedding):
            what = f"the head is said to be tied, but {HEAD} and {embedding} differ"
            raise CheckpointError(what, where=str(self.path), instead="model.tied = false keeps both")

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """A part of the tensor `name`."""
        part: Tensor = self._slices[name][rectangle.index]
        return part

    def fill(self, model: ModelSpec, pieces: Iterable[StatePiece]) -> None:
        """Fill the weights among `pieces` of a model that `check` has passed; values are cast to the pieces' types."""
        where = places(model)
        for piece in pieces:
            if piece.kind == "weight":
                place = where[piece.parameter.name]
                values = self.read(place.tensor, place.rectangle(piece.rectangle))
                piece.tensor.copy_(values.t() if place.transposed else values)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is, by name."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def _add_prefix(self) -> None:
        if not any(name.startswith(GPT2_PREFIX) for name in self._slices):
            self._slices = {name if name == HEAD else GPT2_PREFIX + name: part for name, part in self._slices.items()}

    def _problems(self, name: str, shape: tuple[int, ...] | None, model: ModelSpec) -> Iterable[tuple[str, str]]:
        """What is wrong with one tensor, and what to do."""
        if name not in self._slices:
            assert shape is not None
            instead = "model.tied = true, if the head is the embedding" if name == HEAD else ""
            yield f"missing: {name} {list(shape)}", instead
            return
        there, dtype = self._slices[name].get_shape(), self._slices[name].get_dtype()
        if shape is None:
            if not (model.tied and name == HEAD):
                yield f"unexpected: {name} {there}, which this model does not have", ""
        elif tuple(there) != shape:
            yield f"wrong shape: {name} is {there} in the folder and {list(shape)} in the model", ""
        if dtype not in FLOATS:
            yield f"{name} is of type {dtype}", f"weights that are not quantised: {', '.join(FLOATS)}"

    def _equal(self, one: str, other: str) -> bool:
        rows, columns = self._slices[other].get_shape()
        if self._slices[one].get_shape() != [rows, columns]:
            return False
        for first in range(0, rows, _COMPARED_ROWS):
            box = Rectangle(start=(first, 0), stop=(min(rows, first + _COMPARED_ROWS), columns))
            if not self.read(one, box).equal(self.read(other, box)):
                return False
        return True


def _safetensors(path: Path) -> Mapping[str, Any]:
    """Every tensor of the folder's files, unread."""
    opened = [_open(file) for file in _files(path)]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)


def _files(path: Path) -> list[Path]:
    """The folder's tensor files."""
    index = path / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DamagedCheckpointError("is not an index of tensor files", where=str(index)) from None
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    old = next(iter(sorted(path.glob("*.bin"))), None)
    what = f"has neither {SINGLE} nor {INDEX}" + (f", only {old.name}" if old else "")
    raise CheckpointError(what, where=str(path), instead="a folder saved as safetensors, transformers' default")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise DamagedCheckpointError("is missing, though the index names it", where=str(file)) from None
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(f"cannot be read: {error}", where=str(file)) from error
