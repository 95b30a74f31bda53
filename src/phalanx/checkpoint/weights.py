"""Weights at rest, wherever they are: a checkpoint of any layout, the newest of a run, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.dcp import METADATA
from phalanx.checkpoint.hf_folder import CONFIG, Folder
from phalanx.checkpoint.hf_settings import check_tokenizers
from phalanx.checkpoint.manifest import MANIFEST, Stored
from phalanx.checkpoint.match import check_model
from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.store import opened, together
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.errors import CheckpointError
from phalanx.plan.comm import Comm
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.model import ModelSpec
from phalanx.spec.models import from_config

_KNOWN = "the folder of a checkpoint, of a run that has one, or of a Hugging Face model"
_MEGATRON = ("common.pt", "latest_checkpointed_iteration.txt")
"""Files in the folder of a `torch_dist` checkpoint, and beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of `model`. `fill` reads those among some pieces, and only what they ask for, cast to their types.

    `folders`: where the tokenizer that belongs to them may lie, the likeliest first.
    """

    path: Path
    model: ModelSpec
    folders: tuple[Path, ...]
    fill: Callable[[Iterable[StatePiece]], None]


def open_weights(path: Path, like: ModelSpec | None = None, say: Callable[[str], None] = lambda line: None) -> Weights:
    """Find the weights at `path` and see that they are whole; checksums are compared when they are read. `say` is told
    which newer checkpoints of a run are passed over, and why.

    With `like`, the weights must be of that model. It is free in how it is called and regularized, how long sequences
    with rotary positions may be, and, where the weights are a Hugging Face folder, whether the head is tied.

    Raises CheckpointError, SpecError for a config.json that is not built here, DamagedCheckpointError.
    """
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path, like)
    if (path / CONFIG).is_file():
        return _of_folder(path, like)
    found = folders.find(RunDir(path).checkpoints)
    if found is None:
        what, instead = _why_none(path)
        raise CheckpointError(what, where=str(path), instead=instead)
    for newer in found.passed_over:
        say(f"passed over, for it is not whole: {newer}")
    return _of_checkpoint(found.path, like)


def initialize(
    path: Path,
    plan: Plan,
    pieces: Iterable[StatePiece],
    comm: Comm,
    *,
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> Weights:
    """Fill the live weights among this rank's `pieces` from `path`; all ranks of `comm` call it, and each reads what
    its own pieces need. Everything else of the state stays as it is. `say` as for `open_weights`.

    Raises CheckpointError on all ranks alike if that fails on any, or if the data have another tokenizer.
    """
    device = device or torch.device("cpu")

    def fitting() -> Weights:
        weights, data = open_weights(path, plan.model, say), plan.job.data.mixed
        if data and comm.index == 0:
            check_tokenizers(Path(data[0].path).parent, weights.folders)
        return weights

    weights = together(comm, device, CheckpointError, fitting)
    together(comm, device, CheckpointError, lambda: weights.fill(pieces))
    return weights


def _why_none(path: Path) -> tuple[str, str]:
    """What is wrong with a place without weights that can be read, and what to give instead."""
    if not path.exists():
        return "there is no such folder", _KNOWN
    if any((path / name).is_file() for name in _MEGATRON):
        what = "is a checkpoint of Megatron-LM, whose own code alone knows which rows of which tensor are what"
        return what, "a Hugging Face folder, which Megatron-LM's converters make of it"
    if (path / METADATA).is_file() or any(path.glob("*.safetensors")):
        return f"holds tensors, but no {CONFIG} to say of what model", f"put the model's {CONFIG} there"
    return "there are no weights", _KNOWN


def _of_folder(path: Path, like: ModelSpec | None) -> Weights:
    there = from_config(path)
    model = replace(there, tied=like.tied) if like else there
    _check_like(model, like, path)
    tensors = Folder(path)
    tensors.check(model)
    return Weights(path=path, model=model, folders=(path,), fill=lambda pieces: tensors.fill(model, pieces))


def _of_checkpoint(path: Path, like: ModelSpec | None) -> Weights:
    manifest, plan = opened(path)
    if isinstance(plan, ModulePlan):
        instead = "phalanx.module_weights(folder) reads them by the module's own names"
        raise CheckpointError("holds the weights of a module of Python", where=str(path), instead=instead)
    _check_like(plan.model, like, path)
    by_name: dict[str, list[Stored]] = {}
    for entry in manifest.tensors:
        if entry.kind == "weight":
            by_name.setdefault(entry.name, []).append(entry)

    def fill(pieces: Iterable[StatePiece]) -> None:
        wanted = [piece for piece in pieces if piece.kind == "weight"]
        names = dict.fromkeys(piece.parameter.name for piece in wanted)
        stored = tuple(entry for name in names for entry in by_name.get(name, ()))
        read_pieces(path, replace(manifest, tensors=stored), wanted)

    return Weights(path=path, model=plan.model, folders=(path, *_tokenizer_folders(plan)), fill=fill)


def _check_like(there: ModelSpec, like: ModelSpec | None, path: Path) -> None:
    if like:
        rotary = there.positions == "rope"
        check_model(replace(there, max_seq_len=like.max_seq_len) if rotary else there, like, str(path))


def _tokenizer_folders(plan: Plan) -> Iterable[Path]:
    data, start = plan.job.data.mixed[:1], plan.job.checkpoint.init_from
    return [*(Path(entry.path).parent for entry in data), *([Path(start)] if start else [])]
