"""Speed of reading batches: `python benchmarks/data_source.py [FOLDER]`.

Writes 96 million random tokens in documents of 600 on average below FOLDER, then reads the share of one data rank of
large global batches, once by itself (tokens/s of one thread) and once behind a step that computes for STEP_S (seconds
that the step waits for its batch: what training notices). Files are in the page cache: the disk is not measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from phalanx.data.prefetch import Prefetch
from phalanx.data.source import Source
from phalanx.data.tokens import TokenWriter, mask_path
from phalanx.spec.job import DataSet, DataSpec

NUM_TOKENS = 32_000_000
VOCAB = 50_000
WEIGHTS = (0.5, 0.25, 0.15, 0.1)
BATCHES = ((512, 512, 512), (4096, 512, 64), (4096, 1024, 8))
"""Sequence length, sequences of the global batch, and of one data rank."""
NUM_STEPS = 8
STEP_S = 0.1


def write(prefix: Path, num_tokens: int, *, with_mask: bool, random: np.random.Generator) -> None:
    ends = np.cumsum(random.exponential(600, num_tokens // 300).astype(np.int64) + 1)
    with TokenWriter(prefix, np.uint16) as writer:
        for document in np.split(random.integers(0, VOCAB, num_tokens), ends[ends < num_tokens]):
            writer.add(document)
            writer.end_document()
    if with_mask:
        mask_path(prefix).write_bytes((random.random(num_tokens) < 0.5).astype(np.uint8).tobytes())


def kinds(folder: Path) -> dict[str, DataSpec]:
    random = np.random.default_rng(0)
    write(folder / "plain", NUM_TOKENS, with_mask=False, random=random)
    write(folder / "masked", NUM_TOKENS, with_mask=True, random=random)
    paths = [folder / f"set-{index}" for index in range(len(WEIGHTS))]
    for index, path in enumerate(paths):
        write(path, NUM_TOKENS // len(WEIGHTS), with_mask=index == 0, random=random)
    sets = tuple(DataSet(path=str(path), weight=weight) for path, weight in zip(paths, WEIGHTS, strict=True))
    plain, masked = str(folder / "plain"), str(folder / "masked")
    return {
        "joined": DataSpec(path=plain),
        "separate": DataSpec(path=plain, documents="separate"),
        "joined, masked": DataSpec(path=masked),
        "separate, masked": DataSpec(path=masked, documents="separate"),
        "joined, 4 sets": DataSpec(sets=sets),
        "separate, 4 sets": DataSpec(sets=sets, documents="separate"),
    }


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def computing() -> None:
    """As a step does it, outside of Python."""
    ended, matrix = time.perf_counter() + STEP_S, np.ones((512, 512), np.float32)
    while time.perf_counter() < ended:
        matrix @ matrix


def measure(data: DataSpec, seq_len: int, global_batch: int, share: int) -> tuple[float, float]:
    """Median seconds to read a batch, and median seconds that a step waits for it."""
    source = Source(data, seq_len=seq_len, seed=1, global_batch=global_batch, vocab=VOCAB)
    alone = [seconds(lambda number=number: source.batch(number, range(share))) for number in range(NUM_STEPS)]
    waits = []
    with Prefetch(source, NUM_STEPS) as ahead:
        for number in range(NUM_STEPS):
            waits.append(seconds(lambda number=number: ahead.batch(number, range(share))))
            computing()
    return float(np.median(alone[1:])), float(np.median(waits[1:]))


def main() -> None:
    with TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        specs = kinds(Path(folder))
        print(f"{'':18}{'seq_len':>8}{'batch':>7}{'rank':>6}{'read':>11}{'M tokens/s':>12}{'step waits':>13}")
        for seq_len, global_batch, share in BATCHES:
            for name, data in specs.items():
                alone, wait = measure(data, seq_len, global_batch, share)
                rate = share * seq_len / alone / 1e6
                sizes = f"{seq_len:>8,}{global_batch:>7,}{share:>6}"
                print(f"{name:18}{sizes}{alone * 1e3:>8.1f} ms{rate:>12.1f}{wait * 1e3:>10.2f} ms")


if __name__ == "__main__":
    main()
