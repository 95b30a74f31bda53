"""Reading the folders of torch.distributed.checkpoint ("DCP"), as FSDP and its kin save models of transformers.

    .metadata        a pickle: shape, type and chunks of each tensor, and where each chunk lies
    __3_0.distcp     what rank 3 wrote: chunks, each an archive of torch.save, one after another

The pickle may build torch's own descriptions and nothing else, so that reading it runs no code of whoever wrote it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.tensor_file import DTYPE_NAMES
from phalanx.errors import CheckpointError, DamagedCheckpointError
from phalanx.plan.shards import Rectangle

METADATA = ".metadata"

_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
_ROOTS = ("model.", "transformer.", "lm_head.")

_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part `rectangle` of a tensor: an archive of `num_bytes` in `file` from `offset` on."""

    rectangle: Rectangle
    file: Path
    offset: int
    num_bytes: int

    def load(self) -> Tensor:
        """Raises DamagedCheckpointError."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                tensor: Tensor = torch.load(
                    io.BytesIO(file.read(self.num_bytes)), map_location="cpu", weights_only=True
                )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            span = f"bytes {self.offset:,} to {self.offset + self.num_bytes:,}"
            raise DamagedCheckpointError(f"{span}: cannot be read: {error}", where=str(self.file)) from error
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTensor:
    """One tensor, with the manners of a slice of safetensors: `tensor[0:2, 1:3]` reads the chunks it needs, one at a
    time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def get_shape(self) -> list[int]:
        """Extent on each dim."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Type, by the safetensors format's name where that has one."""
        return DTYPE_NAMES.get(self.dtype, str(self.dtype))

    def __getitem__(self, spans: tuple[slice, ...]) -> Tensor:
        wanted = Rectangle(start=tuple(span.start for span in spans), stop=tuple(span.stop for span in spans))
        values = torch.empty(wanted.shape, dtype=self.dtype)
        missing = wanted.num_elements
        for chunk in self.chunks:
            common = chunk.rectangle.intersect(wanted)
            if common:
                values[common.within(wanted)] = chunk.load()[common.within(chunk.rectangle)]
                missing -= common.num_elements
        if missing:
            what = f"{missing} elements of a tensor of shape {list(self.shape)} are not there exactly once"
            raise DamagedCheckpointError(what, where=str(self.chunks[0].file.parent))
        return values


def tensors(folder: Path) -> dict[str, ChunkedTensor]:
    """The weights in `folder` by their names in transformers; what stands before these ("model.", "app.model.") is left
    out, and so is everything else: optimizer, step, ….

    Raises DamagedCheckpointError, and CheckpointError for a folder whose names are not those of transformers.
    """
    every = _described(folder)
    found = [name for name in every if name.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        some = ", ".join(found or list(every)[:4])
        what = f"one tensor should be called …{' or …'.join(_EMBEDDINGS)}; there are {some}"
        raise CheckpointError(what, where=str(folder), instead="a checkpoint of a model of transformers")
    prefix = found[0].removesuffix(_EMBEDDINGS[0]).removesuffix(_EMBEDDINGS[1])
    inside = {name.removeprefix(prefix): tensor for name, tensor in every.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in inside.items() if name.startswith(_ROOTS)}


def _described(folder: Path) -> Mapping[str, ChunkedTensor]:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            described = _Unpickler(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in described.storage_data.items()}
        return {
            name: ChunkedTensor(
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                chunks=tuple(_chunk(folder, name, chunk, places) for chunk in entry.chunks),
            )
            for name, entry in described.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"is not a description of tensors: {error}", where=str(path)) from error


def _chunk(folder: Path, name: str, chunk: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    start = tuple(chunk.offsets)
    stop = tuple(first + size for first, size in zip(start, chunk.sizes, strict=True))
    place = places[name, start]
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{place.relative_path} is compressed")
    file = folder / place.relative_path
    box = Rectangle(start=start, stop=stop)
    return Chunk(rectangle=box, file=file, offset=place.offset, num_bytes=place.length)
