"""Hugging Face folders, out and in.

    export           weights, wherever they are → config.json, safetensors, tokenizer
    to_checkpoint    weights, wherever they are → a checkpoint of step 0 that holds nothing else

Both go tensor by tensor, so that a model larger than memory passes, and write aside: what has its name is whole.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.hf_folder import CONFIG, INDEX, SINGLE, Folder
from phalanx.checkpoint.hf_names import places, shapes, whole
from phalanx.checkpoint.hf_settings import carry, generation_config, token_ids, write_json
from phalanx.checkpoint.manifest import ITEM_BYTES
from phalanx.checkpoint.match import check_model, parameters
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.tensor_file import DTYPES, bytes_of, header
from phalanx.checkpoint.weights import Weights
from phalanx.errors import CheckpointError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Parameter, Rectangle
from phalanx.spec import clusters, hf
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.spec.models import from_config

SHARD_BYTES = 5 * 10**9
"""Largest file of an export, unless one tensor alone is larger."""

PART_BYTES = 2**28
"""An imported checkpoint is written in files of about this size, each held in memory once."""

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """All of one parameter, as a view of some tensor."""

    parameter: Parameter
    tensor: Tensor
    kind: str = "weight"
    owned: bool = True

    @property
    def rectangle(self) -> Rectangle:
        return whole(self.parameter.shape)


def export(weights: Weights, target: Path, *, dtype: str = "F32", shard_bytes: int = SHARD_BYTES) -> int:
    """Write a folder that transformers loads; returns the bytes of its tensors.

    `dtype` is the safetensors format's name ("F32", "BF16"). Tied weights are written once, nothing is padded. The
    folder is read back and held against its own config.json before it gets its name.

    Raises CheckpointError if `target` exists, SpecError for a model that no known family has, OSError.
    """
    config = hf.config(weights.model)
    tensors = shapes(weights.model)
    with _aside(target) as aside:
        settings = token_ids(generation_config(weights.folders))
        write_json(aside / CONFIG, {**config, **settings, "torch_dtype": _NAMES[dtype]})
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


def to_checkpoint(weights: Weights, target: Path) -> int:
    """Write a checkpoint of step 0 with the weights in fp32, and no state of an optimizer; returns the bytes of its
    tensors. The tokenizer's files go with it.

    Raises CheckpointError if `target` exists, OSError.
    """
    model = weights.model
    job = JobSpec(global_batch=1, seq_len=model.max_seq_len, num_steps=1, precision="fp32")
    plan = Plan(model=model, cluster=clusters.named(clusters.LOCAL), job=job, layout=Layout())
    with _aside(target) as aside:
        parts = list(_batches(parameters(model).values()))
        for index, members in enumerate(parts):
            views = [_View(parameter=parameter, tensor=torch.empty(parameter.shape)) for parameter in members]
            weights.fill(views)
            write_part(aside, index, 0, views)
        carry(weights.folders, aside, model.max_seq_len)
        manifest = publish(aside, target, plan, 0, {"num_samples": 0, "optimizer_steps": 0}, len(parts))
    return manifest.num_bytes


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder to write in, beside `target`; nothing is left of it after an error."""
    if target.exists():
        raise CheckpointError("exists already", where=str(target), instead="the name of a new folder")
    aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        if aside.exists():
            shutil.rmtree(aside)


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
            views = []
            for ours, place in where.items():
                if place.tensor == name:
                    box = place.rectangle(whole(known[ours].shape))
                    part = tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
                    views.append(_View(parameter=known[ours], tensor=part.t() if place.transposed else part))
            weights.fill(views)
            file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def _batches(every: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters that together have about PART_BYTES in fp32."""
    batch: list[Parameter] = []
    size = 0
    for parameter in every:
        batch.append(parameter)
        size += _num_bytes(parameter.shape, "F32")
        if size >= PART_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check(folder: Path, model: ModelSpec) -> None:
    """Hold what was written against its own config.json, and that against the model."""
    back = from_config(folder)
    check_model(back, model, str(folder))
    written = Folder(folder)
    written.check(back)
    num_elements = sum(math.prod(shape) for shape in written.shapes().values())
    assert num_elements == model.num_parameters, f"{num_elements} of {model.num_parameters} elements"
