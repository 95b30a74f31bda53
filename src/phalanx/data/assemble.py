"""Assemble: the steps of one build, each of which can be taken up where a build that was killed has left it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tokenizers import Tokenizer

from phalanx.data.crew import tokenize
from phalanx.data.inputs import InputFile, find
from phalanx.data.manifest import Manifest, Wish, change, manifest, read_manifest
from phalanx.data.merge import merge
from phalanx.data.parts import Part, parts
from phalanx.data.records import Keys, pieces
from phalanx.data.tokenize import Counts, Recipe, prefix_of, read_counts
from phalanx.data.tokenizer import (
    END_OF_DOCUMENT,
    end_token,
    load_tokenizer,
    num_ids,
    read_tokenizer,
    train_tokenizer,
)
from phalanx.errors import DataError
from phalanx.units import format_seconds

TRAINING_BYTES = 32 << 20  # a tokenizer learns no more from more text
TELL_EVERY_S = 30.0


def assemble(
    wanted: Manifest,
    files: Sequence[InputFile],
    tokenizer_file: Path | None,
    folder: Path,
    console: Console,
    num_workers: int,
) -> None:
    """Build `wanted` in a folder aside, then give it the name `folder`. Raises DataError, OSError and RunError."""
    aside, wish = folder.with_name(f".{folder.name}.partial"), wanted.wish
    _take_up(aside, wanted, console)
    work = parts(files)
    with _progress(console) as progress:
        tokenizer = _tokenizer(wish, work, tokenizer_file, aside / "tokenizer.json", progress)
        end = END_OF_DOCUMENT if wish.tokenizer is None else end_token(tokenizer, tokenizer_file, wish.end_token)
        recipe = Recipe(
            tokenizer=aside / "tokenizer.json",
            is_bytes=wish.tokenizer is not None and tokenizer_file is None,
            specials_are_text=wish.tokenizer is None,
            keys=wish.keys,
            end_id=tokenizer.get_vocab()[end],
        )
        counts, bytes_per_s = _tokenize(work, recipe, aside / "parts", num_workers, console, progress)
    if not sum(each.num_documents for each in counts):
        raise DataError(f"{files_of(wanted)} without any text", where=", ".join(wish.inputs))
    if manifest(wish, find(wish.inputs), tokenizer_file) != wanted:
        raise DataError("files have changed while they were read", where=", ".join(wish.inputs), instead="build again")
    prefixes = [prefix_of(aside / "parts", part) for part in work]
    merge(prefixes, [each.ends for each in counts], aside / "tokens", with_mask=wish.keys.prompt is not None)
    wanted.write(aside)
    _rename(aside, folder)
    _report(wanted, counts, end, tokenizer, bytes_per_s, folder, console)


def _take_up(aside: Path, wanted: Manifest, console: Console) -> None:
    """The folder aside, with what a build that did not end has left there, as far as it serves."""
    if aside.is_dir():
        left = _left(aside)
        if left is None or not _serves(left, wanted):
            if left:
                say(console, f"data: starting anew, not from the parts in {aside} ({change(left, wanted)})")
            shutil.rmtree(aside)
    (aside / "parts").mkdir(parents=True, exist_ok=True)
    for leftover in (aside / "parts").glob(".*.partial"):
        leftover.unlink()
    wanted.write(aside)


def _serves(left: Manifest, wanted: Manifest) -> bool:
    """Whether parts of one build can be parts of another. A tokenizer that is trained changes with every file; with one
    that is given, parts are told apart by the files that they are of."""
    if wanted.wish.tokenizer is None:
        return left == wanted
    return (left.format, left.wish, left.tokenizer_file) == (wanted.format, wanted.wish, wanted.tokenizer_file)


def _left(aside: Path) -> Manifest | None:
    """What a build that did not end was to build."""
    try:
        return read_manifest(aside)
    except DataError:  # killed while it wrote that
        return None


def _tokenizer(wish: Wish, work: Sequence[Part], source: Path | None, path: Path, progress: Progress) -> Tokenizer:
    """The tokenizer of the wish: trained or read, and saved as `path`."""
    if not path.is_file():
        if wish.tokenizer is None:
            assert wish.vocab is not None
            task = progress.add_task("data: training the tokenizer", total=None)
            num_bytes = sum(part.num_bytes for part in work)
            tokenizer = train_tokenizer(_sample(work, wish.keys), wish.vocab, num_bytes)
            progress.remove_task(task)
        else:
            tokenizer = read_tokenizer(source)
        partial = path.with_name(f".{path.name}.partial")
        tokenizer.save(str(partial))
        partial.rename(path)
    return load_tokenizer(path)


def _sample(work: Sequence[Part], keys: Keys) -> Iterator[str]:
    """Texts of parts that are spread evenly over the input, up to `TRAINING_BYTES` in all."""
    num_bytes, num_chars = sum(part.num_bytes for part in work), 0
    for part in work[:: math.ceil(num_bytes / TRAINING_BYTES)]:
        for span in part.spans:
            for piece in pieces(span, keys):
                yield piece.text
                num_chars += len(piece.text)
                if num_chars >= TRAINING_BYTES:
                    return


def _tokenize(
    work: Sequence[Part], recipe: Recipe, folder: Path, num_workers: int, console: Console, progress: Progress
) -> tuple[list[Counts], float]:
    """Tokenize the parts that are not finished. Returns what came of all of them, and the bytes/s of those done now."""
    todo = [part for part in work if read_counts(folder, part) is None]
    if len(todo) < len(work):
        say(console, f"data: {len(work) - len(todo):,} of {len(work):,} parts were finished before; going on")
    num_bytes = sum(part.num_bytes for part in todo)
    began = time.monotonic()
    if todo:
        tokenize(todo, recipe, folder, num_workers, _teller(num_bytes, console, progress))
    bytes_per_s = num_bytes / (time.monotonic() - began) if todo else 0.0
    return [found for part in work if (found := read_counts(folder, part))], bytes_per_s


def _teller(num_bytes: int, console: Console, progress: Progress) -> Callable[[float], None]:
    """Moves the bar on by the bytes it is told; where there is none, says now and then how far the work has come."""
    task = progress.add_task("data: tokenizing", total=num_bytes)
    began = last = time.monotonic()
    so_far = 0.0

    def tell(read: float) -> None:
        nonlocal last, so_far
        so_far += read
        progress.advance(task, read)
        now = time.monotonic()
        if so_far and not console.is_terminal and now - last > TELL_EVERY_S:
            last, speed = now, so_far / (now - began)
            left_s = (num_bytes - so_far) / speed
            done = f"{so_far / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB"
            say(console, f"data: {done}, {speed / 1e6:.1f} MB/s, {format_seconds(left_s)} left")

    return tell


def _rename(aside: Path, folder: Path) -> None:
    """Give the folder aside its name. What stands there goes last, so that no moment has neither."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder / "parts")


def _report(
    wanted: Manifest,
    counts: Sequence[Counts],
    end: str,
    tokenizer: Tokenizer,
    bytes_per_s: float,
    folder: Path,
    console: Console,
) -> None:
    """What was built from what, how fast."""
    num_tokens, num_documents = sum(each.num_tokens for each in counts), sum(each.num_documents for each in counts)
    one_each = wanted.num_files == len(wanted.wish.inputs)
    what = names_of(wanted) if one_each else f"{files_of(wanted)} of {names_of(wanted)}"
    num_empty = sum(each.num_empty for each in counts)
    speed = f", {bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s else ""  # all parts may have been there
    say(
        console,
        f"data: {what}, {wanted.num_bytes / 1e6:,.2f} MB →"
        f" {num_documents:,} documents, {num_tokens:,} tokens in {folder}"
        f" ({wanted.num_bytes / num_tokens:.2f} bytes of input per token{speed})",
    )
    say(console, f"data: each document ends with {end}, id {tokenizer.get_vocab()[end]:,}")
    if num_empty:
        say(console, f"data: {num_empty:,} documents without text are left out")
    vocab, found = wanted.wish.vocab, num_ids(tokenizer)
    if vocab is not None and found < vocab:
        say(console, f"data: the text fills {found:,} of {vocab:,} ids; the last {vocab - found:,} stay unused")


def files_of(wanted: Manifest) -> str:
    """The number of files, in words."""
    return f"{wanted.num_files:,} file{'s' if wanted.num_files != 1 else ''}"


def names_of(wanted: Manifest) -> str:
    """The inputs, in few words."""
    names = wanted.wish.inputs
    others = f"{len(names) - 1:,} more input{'s' if len(names) > 2 else ''}"
    return names[0] if len(names) == 1 else f"{names[0]} and {others}"


def say(console: Console, line: str) -> None:
    """One line as it is: paths may hold brackets, and terminals wrap."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    """A bar with MB/s on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
