"""Text files → token files, once: a byte-level BPE tokenizer trained on the text, then the text tokenized with it.

What is built is a folder `where/<name of the text>-<vocabulary>` that holds `tokens.bin`, `tokens.idx`,
`tokenizer.json` and `manifest.json`. The manifest tells what it was built from: as long as that has not changed, the
folder is used as it is. It appears whole or not at all; of two builds at once, the second waits for the first.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import math
import re
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.data.detokenize import REPLACEMENT, load_tokenizer
from phalanx.data.tokens import TokenFile, TokenWriter, dtype_for
from phalanx.errors import DataError
from phalanx.spec.job import PYTHON_STDLIB, DataSpec

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB = 257  # 256 bytes and the end of a document
FORMAT = 1

TRAINING_BYTES = 32 << 20  # a tokenizer learns no more from more text
PIECE_BYTES = 1 << 20  # a long document is tokenized in pieces, cut at line ends
BATCH_BYTES = 4 << 20  # text tokenized at once, on all cores

# Of the standard library: tests, tables of character codes, and what is not part of it. (Nor are the settings that
# this Python was compiled with, `_sysconfigdata*.py`, text.)
NOT_TEXT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a token file was built from. `inputs` is a digest of all paths, sizes and times of change."""

    text: str
    vocab: int
    num_files: int
    num_bytes: int
    inputs: str
    format: int = FORMAT


def ensure(data: DataSpec, vocab: int, where: Path, console: Console | None = None) -> Path:
    """The prefix of the token files that `data` names; `data.text` is built in the folder `where` on first use.

    `vocab` is the model's vocabulary, which the tokenizer fills as far as the text allows. Progress goes to `console`
    (stderr by default). Raises `DataError` for data that is missing, or that the vocabulary cannot hold.
    """
    console = console or Console(stderr=True)
    if (data.path is None) == (data.text is None):
        what = "no data" if data.path is None else "both data.path and data.text"
        advice = f'one of data.path = "PREFIX" and data.text = "GLOB" (or "{PYTHON_STDLIB}")'
        raise DataError(what, where="[data]", instead=advice)
    if data.path is not None:
        prefix = Path(data.path)
        TokenFile(prefix)
        _check_tokenizer(prefix.with_name("tokenizer.json"), vocab, console)
        return prefix
    assert data.text is not None
    if vocab < MIN_VOCAB:
        what = f"a vocabulary of {vocab} cannot hold the 256 bytes and the end of a document"
        raise DataError(what, where="model.vocab", instead=f"at least {MIN_VOCAB}")
    files = text_files(data.text)
    wanted = _manifest(data.text, vocab, files)
    folder = where / f"{_slug(data.text)}-{vocab}"
    try:
        where.mkdir(parents=True, exist_ok=True)
        with _locked(where / f".{folder.name}.lock", console):
            found = _read_manifest(folder)
            if found != wanted:
                if found is not None:
                    _say(console, f"data: {data.text} has changed since {folder} was built ({_change(found, wanted)})")
                _build(files, wanted, folder, console)
    except OSError as error:
        what = f"token files cannot be built: {error.strerror}"
        raise DataError(what, where=str(error.filename or folder), instead="a folder with room to write in") from error
    return folder / "tokens"


def text_files(text: str) -> list[Path]:
    """The files that `data.text` names, in a fixed order: a glob (`**` for any depth), or `python-stdlib`. A file that
    links lead to by several paths is taken once, by the first."""
    if text == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        sources = (path for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata"))
        found = [path for path in sources if not NOT_TEXT.intersection(path.relative_to(root).parts)]
    else:
        found = [path for path in map(Path, glob.glob(text, recursive=True)) if path.is_file()]
    if not found:
        where = str(Path(text).absolute()) if text != PYTHON_STDLIB else str(root)
        advice = f'a glob such as "books/**/*.txt", or "{PYTHON_STDLIB}" for the source files of this Python'
        raise DataError(f'data.text = "{text}" matches no file', where=where, instead=advice)
    once = {path.resolve(): path for path in sorted(found, key=lambda path: path.as_posix(), reverse=True)}
    return sorted(once.values(), key=lambda path: path.as_posix())


def _manifest(text: str, vocab: int, files: list[Path]) -> Manifest:
    digest, num_bytes = hashlib.sha256(), 0
    for file in files:
        status = file.stat()
        digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        num_bytes += status.st_size
    return Manifest(text=text, vocab=vocab, num_files=len(files), num_bytes=num_bytes, inputs=digest.hexdigest())


def _read_manifest(folder: Path) -> Manifest | None:
    """What the folder was built from; None where there is no such folder yet."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        advice = f"delete the folder {folder}; it is built again"
        raise DataError(f"is not a manifest ({error})", where=str(path), instead=advice) from error


def _change(old: Manifest, new: Manifest) -> str:
    numbers = (("files", old.num_files, new.num_files), ("bytes", old.num_bytes, new.num_bytes))
    words = [f"{name} {before:,} → {after:,}" for name, before, after in numbers if before != after]
    words += [f"format {old.format} → {new.format}"] if old.format != new.format else []
    return ", ".join(words) or "contents or times of files"


def _slug(text: str) -> str:
    """A folder's name for `text`, different for different ones."""
    if text == PYTHON_STDLIB:
        return text
    words = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[-40:]
    return f"{words}-{hashlib.sha256(str(Path(text).absolute()).encode()).hexdigest()[:8]}"


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock, which the system releases if we die."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(console, f"data: waiting for another process that builds here ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_tokenizer(path: Path, vocab: int, console: Console) -> None:
    """Hold the tokenizer beside a token file, if there is one, against the model's vocabulary."""
    if not path.is_file():
        return
    largest = max(load_tokenizer(path).get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab:
        what = f"the tokenizer has ids up to {largest:,}; the model's vocabulary is {vocab:,} ids"
        raise DataError(what, where=str(path), instead=f"model.vocab = {largest + 1} or more")
    if largest + 1 < vocab:
        _say(console, f"data: the tokenizer has {largest + 1:,} of the model's {vocab:,} ids; the others stay unused")


def _build(files: list[Path], manifest: Manifest, folder: Path, console: Console) -> None:
    """Build in a folder aside, then give it its name. What a killed build left is deleted first."""
    began = time.monotonic()
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with _progress(console) as progress:
        task = progress.add_task("data: training the tokenizer", total=None)
        tokenizer = train_tokenizer(files, manifest.vocab)
        progress.update(task, description="data: tokenizing", total=manifest.num_bytes)
        with TokenWriter(aside / "tokens", dtype_for(manifest.vocab)) as writer:
            num_replaced = 0
            for text in _tokenize(files, tokenizer, writer):
                progress.advance(task, sum(len(piece.encode()) for piece in text))
                num_replaced += sum(piece.count(REPLACEMENT) for piece in text)
    tokenizer.save(str(aside / "tokenizer.json"))
    (aside / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _report(manifest, writer.num_tokens, tokenizer.get_vocab_size(), time.monotonic() - began, folder, console)
    if num_replaced:
        _say(console, f"data: {num_replaced:,} places of the text are not UTF-8; each was replaced by {REPLACEMENT}")


def _report(
    manifest: Manifest, num_tokens: int, num_entries: int, seconds: float, folder: Path, console: Console
) -> None:
    """What was built from what, how fast."""
    num_bytes = manifest.num_bytes
    files = f"{manifest.num_files:,} files of " if manifest.num_files > 1 else ""
    _say(
        console,
        f"data: {files}{manifest.text}, {num_bytes / 1e6:,.2f} MB → {num_tokens:,} tokens in"
        f" {folder} ({num_bytes / max(1, num_tokens):.2f} bytes per token, {num_bytes / 1e6 / seconds:.1f} MB/s)",
    )
    if num_entries < manifest.vocab:
        unused = manifest.vocab - num_entries
        _say(
            console, f"data: the text fills {num_entries:,} of {manifest.vocab:,} ids; the last {unused:,} stay unused"
        )


def _say(console: Console, line: str) -> None:
    """One line as it is: paths may hold brackets, and terminals wrap."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    """A bar with MB/s on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def train_tokenizer(files: list[Path], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer (as GPT-2's: any text has tokens, none is unknown) of at most `vocab` entries.

    It is trained on at most `TRAINING_BYTES`, taken from files spread evenly over the list.
    """
    num_bytes = sum(file.stat().st_size for file in files)
    stride = math.ceil(num_bytes / TRAINING_BYTES) or 1
    vocab = min(vocab, MIN_VOCAB + num_bytes)  # room is made for all entries at once, and more than that never come
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(files[::stride]), trainer)
    tokenizer.encode_special_tokens = True  # a document that spells out the end-of-document token does not end there
    return tokenizer


def _sample(files: list[Path]) -> Iterator[str]:
    """The pieces of `files`, up to `TRAINING_BYTES` in all."""
    num_chars = 0
    for file in files:
        for piece, _ in _pieces(file):
            yield piece
            num_chars += len(piece)
            if num_chars >= TRAINING_BYTES:
                return


def _pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """The text of `file` in pieces that end at line ends, and whether each is the last. Of an empty file: nothing."""
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        piece = "".join(lines.readlines(PIECE_BYTES))
        while piece:
            following = "".join(lines.readlines(PIECE_BYTES))
            yield piece, not following
            piece = following


def _batches(files: list[Path]) -> Iterator[list[tuple[str, bool]]]:
    """The pieces of all files, some `BATCH_BYTES` at a time."""
    batch: list[tuple[str, bool]] = []
    num_chars = 0
    for file in files:
        for piece in _pieces(file):
            batch.append(piece)
            num_chars += len(piece[0])
            if num_chars >= BATCH_BYTES:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def _tokenize(files: list[Path], tokenizer: Tokenizer, writer: TokenWriter) -> Iterator[list[str]]:
    """Write one document per file, a sequence per piece, and yield the text done. The end-of-document token is part of
    the data, as readers of packed documents expect."""
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    for batch in _batches(files):
        text = [piece for piece, _ in batch]
        for encoding, (_, last) in zip(tokenizer.encode_batch_fast(text), batch, strict=True):
            writer.add(np.array([*encoding.ids, end] if last else encoding.ids, dtype=np.int64))
            if last:
                writer.end_document()
        yield text
