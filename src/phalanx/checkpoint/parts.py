"""The two halves of writing a checkpoint: each rank writes its part aside, then one of them publishes the whole."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.manifest import MANIFEST, PLAN, Manifest, Stored, StoredFile
from phalanx.checkpoint.match import expected_tensors
from phalanx.checkpoint.tensor_file import NUM_THREADS, StatePiece, write_tensors
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan


def write_part(aside: Path, rank: int, step: int, pieces: Iterable[StatePiece]) -> None:
    """Write the pieces that `rank` owns into the folder `aside`: a tensor file per kind, and the manifest of these
    files. All of it is on the disk afterwards. Raises OSError."""
    by_kind: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        if piece.owned:
            by_kind.setdefault(piece.kind, []).append(piece)
    paths = [aside / f"{kind}-{rank:05d}.safetensors" for kind in by_kind]
    with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
        written = list(pool.map(write_tensors, paths, by_kind.values()))
    files = {path.name: file for path, (file, _) in zip(paths, written, strict=True)}
    _manifest(step, {}, files, [entry for _, stored in written for entry in stored]).write(aside / _part(rank))


def publish(
    aside: Path, target: Path, plan: Plan | ModulePlan, step: int, extra: Mapping[str, Any], num_ranks: int
) -> Manifest:
    """Make a checkpoint of the parts that all ranks have written: join their manifests, then rename `aside` to
    `target`, which must not exist. Raises OSError or CheckpointError, and then nothing is called a checkpoint."""
    parts = [Manifest.read(aside / _part(rank)) for rank in range(num_ranks)]
    plan.write(aside / PLAN)
    data = (aside / PLAN).read_bytes()
    files = {PLAN: StoredFile(num_bytes=len(data), head_bytes=len(data), head_crc32=zlib.crc32(data))}
    for part in parts:
        files |= part.files
    manifest = _manifest(step, extra, files, [entry for part in parts for entry in part.tensors])
    _assert_complete(manifest.tensors, plan)
    manifest.write(aside / MANIFEST)
    for rank in range(num_ranks):
        (aside / _part(rank)).unlink()
    sync_folder(aside)
    aside.rename(target)
    sync_folder(target.parent)
    return manifest


def _assert_complete(tensors: Sequence[Stored], plan: Plan | ModulePlan) -> None:
    """Each element of each tensor has one owner: anything else is our mistake, and must not become a checkpoint."""
    counts: dict[tuple[str, str], int] = {}
    for entry in tensors:
        counts[entry.kind, entry.name] = counts.get((entry.kind, entry.name), 0) + entry.rectangle.num_elements
    for kind, expected in expected_tensors(plan, dict.fromkeys(entry.kind for entry in tensors)).items():
        for name, parameter in expected.items():
            have, need = counts.get((kind, name), 0), math.prod(parameter.shape)
            assert have == need, f"{have} of {need} elements of {kind} of {name} have an owner"


def _manifest(
    step: int, extra: Mapping[str, Any], files: Mapping[str, StoredFile], tensors: Iterable[Stored]
) -> Manifest:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Manifest(step=step, written_at=now, extra=extra, files=files, tensors=tuple(tensors))


def _part(rank: int) -> str:
    return f"part-{rank:05d}.json"
