"""Checkpoints made from weights or from other checkpoints, by one process, without any run:

    to_checkpoint    weights, wherever they are → a checkpoint of step 0 that holds nothing else
    average          the mean of the weights of several → the same
    reshard          one checkpoint → one that holds the same, each tensor whole in one file

All go tensor by tensor, so that a model larger than memory passes, and write aside: what has its name is whole.
"""

from __future__ import annotations

import functools
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.checkpoint.hf_settings import carry
from phalanx.checkpoint.manifest import MANIFEST, Manifest, Stored
from phalanx.checkpoint.match import parameters
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.store import opened
from phalanx.checkpoint.tensor_file import DTYPES, StatePiece
from phalanx.checkpoint.weights import Weights, open_weights
from phalanx.errors import CheckpointError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Parameter
from phalanx.spec import clusters
from phalanx.spec.job import JobSpec

PART_BYTES = 2**28
"""Files are of about this size, each held in memory once."""


def to_checkpoint(weights: Weights, target: Path) -> int:
    """Write a checkpoint of step 0 with the weights in fp32, and no state of an optimizer; returns the bytes of its
    tensors. The tokenizer's files go with it.

    Raises CheckpointError if `target` exists or cannot be written.
    """
    model = weights.model
    job = JobSpec(global_batch=1, seq_len=model.max_seq_len, num_steps=1, precision="fp32")
    plan = Plan(model=model, cluster=clusters.named(clusters.LOCAL), job=job, layout=Layout())
    pieces = (StatePiece.whole(parameter, torch.empty(parameter.shape)) for parameter in parameters(model).values())
    with written_aside(target) as aside:
        num_parts = _write_parts(aside, 0, pieces, weights.fill)
        carry(weights.folders, aside, model.max_seq_len)
        manifest = publish(aside, target, plan, 0, {"num_samples": 0, "optimizer_steps": 0}, num_parts)
    return manifest.num_bytes


def average(paths: Sequence[Path], target: Path, say: Callable[[str], None]) -> int:
    """`to_checkpoint` of the mean, added up in float64, of the weights at `paths`; the tokenizer is the first one's.
    `say` as for `open_weights`.

    Raises CheckpointError if they are not all of one model, with the first difference, or if `target` exists.
    """
    first = open_weights(paths[0], say=say)
    every = [first, *(open_weights(path, first.model, say) for path in paths[1:])]

    def fill(pieces: Iterable[StatePiece]) -> None:
        for piece in pieces:
            part = StatePiece.whole(piece.parameter, torch.empty_like(piece.tensor))
            total = torch.zeros(piece.tensor.shape, dtype=torch.float64)
            for weights in every:
                weights.fill([part])
                total += part.tensor
            piece.tensor.copy_(total / len(every))

    return to_checkpoint(replace(first, fill=fill), target)


def reshard(path: Path, target: Path) -> int:
    """Write the checkpoint at `path` once more, with all its state, each tensor whole and under its plain name, in
    files of about PART_BYTES; returns the bytes of its tensors. Checksums are compared on the way.

    Raises DamagedCheckpointError, CheckpointError if `target` exists or cannot be written.
    """
    manifest, plan = opened(path)
    tensors = {(entry.kind, entry.name): entry for entry in manifest.tensors}

    def piece(entry: Stored) -> StatePiece:
        parameter = Parameter(name=entry.name, shape=entry.shape)
        return StatePiece.whole(parameter, torch.empty(entry.shape, dtype=DTYPES[entry.dtype]), kind=entry.kind)

    pieces = (piece(entry) for _, entry in sorted(tensors.items(), key=lambda item: item[0]))
    with written_aside(target) as aside:
        num_parts = _write_parts(aside, manifest.step, pieces, functools.partial(read_pieces, path, manifest))
        _copy_others(path, manifest, aside)
        return publish(aside, target, plan, manifest.step, manifest.extra, num_parts).num_bytes


def _copy_others(path: Path, manifest: Manifest, aside: Path) -> None:
    """What lies in a checkpoint beside its own files: a tokenizer, settings."""
    for file in path.iterdir():
        if file.is_file() and file.name not in {*manifest.files, MANIFEST}:
            shutil.copyfile(file, aside / file.name)


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to write in, beside `target`; nothing is left of it after an error. Raises CheckpointError if `target`
    exists, or for what cannot be written (a full disk) or read meanwhile."""
    if target.exists():
        raise CheckpointError("exists already", where=str(target), instead="the name of a new folder")
    aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        yield aside
    except OSError as error:
        of = f"{error.filename}: " if error.filename else ""
        what = f"cannot be written: {of}{error.strerror or error}"
        raise CheckpointError(what, where=str(target), instead="a new folder where there is room to write") from error
    finally:
        if aside.exists():
            shutil.rmtree(aside)


def _write_parts(
    aside: Path, step: int, pieces: Iterable[StatePiece], fill: Callable[[Iterable[StatePiece]], None]
) -> int:
    """Write the pieces, filled by `fill`, in parts of about PART_BYTES. Returns the number of parts."""
    num_parts = 0
    for num_parts, members in enumerate(_batches(pieces), start=1):
        fill(members)
        write_part(aside, num_parts - 1, step, members)
    return num_parts


def _batches(pieces: Iterable[StatePiece]) -> Iterator[list[StatePiece]]:
    """Pieces that together have about PART_BYTES; each is made when its turn has come."""
    batch: list[StatePiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.tensor.nbytes
        if size >= PART_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
