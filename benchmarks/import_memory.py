"""Memory of reading a Hugging Face folder straight into a layout: `python benchmarks/import_memory.py FOLDER`.

Writes a model of 1 GB (random, bf16) below FOLDER, then lets the 4 ranks of tensor 2 × pipeline 2 read it at once,
each its own slices. Beyond the slices themselves a rank should need no more than one slice of one tensor; pages of the
file that the system keeps mapped are told apart, since it takes them back when memory is short.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from phalanx.checkpoint.hf import export
from phalanx.checkpoint.weights import Weights, open_weights
from phalanx.plan.layout import Layout
from phalanx.plan.shards import Parameter, Rectangle, rank_buffers
from phalanx.spec.models import named

LAYOUT = Layout(tensor=2, pipeline=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    parameter: Parameter
    rectangle: Rectangle
    tensor: Tensor
    kind: str = "weight"
    owned: bool = True


def resident(kind: str) -> int:
    """Bytes of this process in memory: "RssAnon" its own, "RssFile" pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def read(rank: int, folder: str) -> dict[str, float]:
    """One rank reads its slices, while a thread watches its memory."""
    torch.set_num_threads(1)
    peaks, done = {"RssAnon": 0, "RssFile": 0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for kind in peaks:
                peaks[kind] = max(peaks[kind], resident(kind))

    weights = open_weights(Path(folder))
    buffers = rank_buffers(weights.model, LAYOUT, LAYOUT.coord(rank), 1)
    pieces = [
        Slice(parameter=piece.parameter, rectangle=piece.rectangle, tensor=torch.zeros(piece.rectangle.shape))
        for buffer in buffers
        for piece in buffer.pieces
    ]
    for piece in pieces:
        piece.tensor.fill_(1.0)  # in memory before the measurement, as in an engine
    before = {kind: resident(kind) for kind in peaks}
    thread = threading.Thread(target=watch)
    thread.start()
    since_s = time.perf_counter()
    weights.fill(pieces)
    seconds = time.perf_counter() - since_s
    done.set()
    thread.join()
    return {
        "rank": rank,
        "slices_bytes": sum(piece.tensor.nbytes for piece in pieces),
        "largest_slice_bytes": max(piece.tensor.nbytes for piece in pieces),
        "own_peak_beyond_bytes": peaks["RssAnon"] - before["RssAnon"],
        "file_pages_peak_bytes": peaks["RssFile"] - before["RssFile"],
        "seconds": round(seconds, 2),
    }


def draw(pieces: Iterable[Slice]) -> None:
    for piece in pieces:
        piece.tensor.normal_()


def main() -> int:
    model = named("qwen2.5-0.5b")
    with TemporaryDirectory(dir=sys.argv[1]) as folder:
        source = Weights(path=Path(folder), model=model, folders=(), fill=draw)
        num_bytes = export(source, Path(folder) / "model", dtype="BF16")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(LAYOUT.num_ranks, mp_context=context) as pool:
            ranks = list(pool.map(read, range(LAYOUT.num_ranks), [f"{folder}/model"] * LAYOUT.num_ranks))
    result = {"model": model.name, "folder_bytes": num_bytes, "layout": str(LAYOUT), "ranks": ranks}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
