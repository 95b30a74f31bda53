"""Hugging Face folders: weights, wherever they are → config.json, safetensors, tokenizer.

It goes tensor by tensor, so that a model larger than memory passes, and writes aside: what has its name is whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.hf_folder import CONFIG, INDEX, SINGLE, Folder
from phalanx.checkpoint.hf_names import places, shapes
from phalanx.checkpoint.hf_settings import carry, generation_config, token_ids, write_json
from phalanx.checkpoint.manifest import ITEM_BYTES
from phalanx.checkpoint.match import check_model, parameters
from phalanx.checkpoint.rewrite import written_aside
from phalanx.checkpoint.tensor_file import DTYPES, StatePiece, bytes_of, header
from phalanx.checkpoint.weights import Weights
from phalanx.plan.shards import Rectangle
from phalanx.spec import hf
from phalanx.spec.model import ModelSpec
from phalanx.spec.models import from_config

SHARD_BYTES = 5 * 10**9
"""Largest file of an export, unless one tensor alone is larger."""

Shapes = Mapping[str, tuple[int, ...]]


def export(weights: Weights, target: Path, *, dtype: str = "F32", shard_bytes: int = SHARD_BYTES) -> int:
    """Write a folder that transformers loads; returns the bytes of its tensors.

    `dtype` is the safetensors format's name ("F32", "BF16"). Tied weights are written once, nothing is padded. The
    folder is read back and held against its own config.json before it gets its name.

    Raises CheckpointError if `target` exists or cannot be written, SpecError for a model that no known family has.
    """
    config = hf.config(weights.model)
    tensors = shapes(weights.model)
    with written_aside(target) as aside:
        settings = token_ids(generation_config(weights.folders))
        write_json(aside / CONFIG, {**config, **settings, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")})
        carry(weights.folders, aside, weights.model.max_seq_len)
        files = _shards(tensors, dtype, shard_bytes)
        for name, members in files.items():
            _write_file(aside / name, members, dtype, weights)
        num_bytes = sum(_num_bytes(shape, dtype) for shape in tensors.values())
        if len(files) > 1:
            weight_map = {tensor: name for name, members in files.items() for tensor in members}
            write_json(aside / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
        _check(aside, weights.model)
        sync_folder(aside)
        aside.rename(target)
    return num_bytes


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def _shards(tensors: Shapes, dtype: str, shard_bytes: int) -> dict[str, Shapes]:
    """The tensors of each file."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = shard_bytes
    for name, shape in tensors.items():
        size = _num_bytes(shape, dtype)
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_file(path: Path, tensors: Shapes, dtype: str, weights: Weights) -> None:
    known, where = parameters(weights.model), places(weights.model)
    with path.open("xb") as file:
        file.write(header((name, dtype, shape) for name, shape in tensors.items()))
        for name, shape in tensors.items():
            tensor = torch.empty(shape, dtype=DTYPES[dtype])
            pieces = []
            for ours, place in where.items():
                if place.tensor == name:
                    box = place.rectangle(Rectangle.of(known[ours].shape))
                    part = tensor[box.index]
                    pieces.append(StatePiece.whole(known[ours], part.t() if place.transposed else part))
            weights.fill(pieces)
            file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def _check(folder: Path, model: ModelSpec) -> None:
    """Hold what was written against its own config.json, and that against the model."""
    back = from_config(folder)
    check_model(back, model, str(folder))
    written = Folder(folder)
    written.check(back)
    num_elements = sum(math.prod(shape) for shape in written.shapes().values())
    assert num_elements == model.num_parameters, f"{num_elements} of {model.num_parameters} elements"
