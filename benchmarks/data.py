"""Building token files against `tokenizers` by itself: `python benchmarks/data.py`.

The texts are source files of this Python, cut to documents of some thousand characters. Each round takes all of them in
turn, on one core: read from JSON lines, tokenized and written by `phalanx data build`; by `encode_batch` alone, from
memory to memory; and by one `encode` per document, as the preprocessing script of Megatron-LM has it. Compared are CPU
seconds of each way's quickest round, which other programs disturbed least; the exit code is 1 if the aim is missed by
more than 5 %.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from phalanx.data.inputs import find
from phalanx.data.parts import parts
from phalanx.data.records import Keys
from phalanx.data.tokenize import PartWriter, Recipe
from phalanx.data.tokenizer import END_OF_DOCUMENT, byte_tokenizer, train_tokenizer
from phalanx.spec.job import PYTHON_STDLIB

DOCUMENT_CHARS = 4000
VOCAB = 8192
AIM = 1 / 0.9  # of the CPU seconds of encode_batch

BUILD, BATCH, SINGLE, BYTES = "data build", "encode_batch", "encode, one by one", "data build, bytes"


def texts(num_bytes: int) -> list[str]:
    """Documents of about `num_bytes` in all."""
    found, left = list[str](), num_bytes
    for file in find([PYTHON_STDLIB]):
        text = file.path.read_text(encoding="utf-8", errors="replace")
        documents = [text[at : at + DOCUMENT_CHARS] for at in range(0, len(text), DOCUMENT_CHARS)]
        found += documents
        left -= len(text)
        if left <= 0:
            break
    return found


def seconds(act: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    began = time.process_time()
    act()
    return time.process_time() - began


def building(folder: Path, tokenizer: Tokenizer, *, is_bytes: bool) -> Callable[[], object]:
    """Writes the documents of `folder / a.jsonl` once more."""
    name = folder / f"tokenizer-{is_bytes}.json"
    tokenizer.save(str(name))
    end_id = tokenizer.get_vocab()[END_OF_DOCUMENT]
    recipe = Recipe(tokenizer=name, is_bytes=is_bytes, specials_are_text=True, keys=Keys(), end_id=end_id)

    writer = PartWriter(recipe, folder / "parts")  # as a worker has it: from the first part to the last

    def build() -> None:
        (folder / "parts").mkdir()
        for part in parts(find([str(folder / "a.jsonl")])):
            writer.write(part, lambda _: None)
        shutil.rmtree(folder / "parts")

    return build


def rounds(num_rounds: int, num_bytes: int, folder: Path, console: Console) -> dict[str, list[float]]:
    """CPU seconds of each way, one after another in each round."""
    documents = texts(num_bytes)
    tokenizer = train_tokenizer(documents, VOCAB, num_bytes)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    ways: dict[str, Callable[[], object]] = {
        BUILD: building(folder, tokenizer, is_bytes=False),
        BATCH: lambda: tokenizer.encode_batch(documents),
        SINGLE: lambda: [tokenizer.encode(text) for text in documents],
        BYTES: building(folder, byte_tokenizer(), is_bytes=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds + 1):
        for name, way in ways.items():
            spent = seconds(way)
            if number:  # the first warms up
                taken[name].append(spent)
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    table = Table("", "MB / CPU s", "CPU s / encode_batch", "aim", title=f"{megabytes:.1f} MB of text")
    for name, spent in taken.items():
        aim = f"{AIM:.2f}" if name == BUILD else ""
        ratios = [each / batch for each, batch in zip(spent, taken[BATCH], strict=True)]
        over = f"{min(spent) / min(taken[BATCH]):.2f} ({min(ratios):.2f} to {max(ratios):.2f} within a round)"
        table.add_row(name, f"{megabytes / min(spent):.2f}", over, aim)
    console.print(table)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=4.0)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        taken = rounds(given.rounds, int(given.megabytes * 1e6), Path(folder), Console())
    return int(min(taken[BUILD]) / min(taken[BATCH]) > 1.05 * AIM)


if __name__ == "__main__":
    sys.exit(main())
