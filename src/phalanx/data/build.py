"""Build: text in any form → token files, once.

What is built is a folder that holds `tokens.bin`, `tokens.idx` (with prompts, `tokens.mask.bin`), `tokenizer.json` and
`manifest.json`. It appears whole or not at all, and is used as it is as long as its manifest holds; of two builds at
once, the second waits for the first. The work is cut into parts that are kept as they finish, in a folder aside: a
build that is killed, or runs out of disk, goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from phalanx.data.assemble import assemble, files_of, names_of, say
from phalanx.data.inputs import find
from phalanx.data.manifest import Manifest, Wish, change, manifest, read_manifest
from phalanx.data.records import check_keys
from phalanx.data.tokenizer import BYTES, MIN_VOCAB, end_token, find_tokenizer, load_tokenizer, num_ids, read_tokenizer
from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError
from phalanx.spec.clusters import num_cores
from phalanx.spec.job import PYTHON_STDLIB, DataSpec


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
        raise _too_small(vocab, "model.vocab")
    wish = Wish(inputs=(data.text,), vocab=vocab)
    return build(wish, where / default_name(wish), console)


def build(wish: Wish, folder: Path, console: Console | None = None, num_workers: int | None = None) -> Path:
    """Build `wish` as `folder`, unless it stands there already, and return the prefix of its token files. `num_workers`
    is the number of processes, by default the cores that we may use.

    Raises DataError for input that is wrong, with its file and line, and for a folder that cannot be written to or that
    holds something else; RunError if a worker is killed.
    """
    console = console or Console(stderr=True)
    if folder.name in ("", ".."):
        raise DataError(f'"{folder}" names no folder to build', where="--out", instead="the name of a new folder")
    if wish.text_key == wish.prompt_key:
        raise DataError(f'both are "{wish.text_key}"', where="--text-key and --prompt-key", instead="two keys")
    tokenizer = _tokenizer_file(wish)
    files = find(wish.inputs)
    check_keys(files, wish.keys)
    wanted = manifest(wish, files, tokenizer)
    if not wanted.num_bytes:
        raise DataError(f"{files_of(wanted)} {'are' if len(files) > 1 else 'is'} empty", where=", ".join(wish.inputs))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), console):
            if not _is_built(folder, wanted, console):
                assemble(wanted, files, tokenizer, folder, console, num_workers or num_cores())
    except OSError as error:
        what = f"token files cannot be built: {error.strerror or error}"
        advice = "a folder with room to write in; parts that are finished are kept, the same command goes on from there"
        raise DataError(what, where=str(error.filename or folder), instead=advice) from error
    return folder / "tokens"


def default_name(wish: Wish) -> str:
    """A name for the folder of a wish: different for different inputs, and for what tokenizes them."""
    names = [_slug(name) for name in wish.inputs[:3]]
    names += [hashlib.sha256("\0".join(wish.inputs).encode()).hexdigest()[:8]] if len(wish.inputs) > 3 else []
    how = wish.vocab if wish.tokenizer is None else _slug(wish.tokenizer) if wish.tokenizer != BYTES else BYTES
    return "-".join([*names, str(how)])


def _is_built(folder: Path, wanted: Manifest, console: Console) -> bool:
    """Whether `folder` holds what is wanted. Raises DataError if it holds something that must not be replaced."""
    found = read_manifest(folder)
    if found is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = "is there already, and was not built by phalanx data build"
            raise DataError(what, where=str(folder), instead="a folder that is new or empty")
        return False
    if found == wanted:
        shutil.rmtree(folder / "parts", ignore_errors=True)  # of a build that was killed at its very end
        return True
    if found.format == wanted.format and found.wish != wanted.wish:
        what = f"holds tokens that were built otherwise ({change(found, wanted)})"
        raise DataError(what, where=str(folder), instead="another folder, or delete this one")
    say(console, f"data: {names_of(wanted)} has changed since {folder} was built ({change(found, wanted)})")
    return False


def _tokenizer_file(wish: Wish) -> Path | None:
    """The file of the wish's tokenizer, after checking what can be checked before any work."""
    if wish.tokenizer is None:
        assert wish.vocab is not None
        if wish.vocab < MIN_VOCAB:
            raise _too_small(wish.vocab, "--vocab")
        return None
    file = find_tokenizer(wish.tokenizer)
    end_token(read_tokenizer(file), file, wish.end_token)
    return file


def _too_small(vocab: int, where: str) -> DataError:
    what = f"a vocabulary of {vocab} cannot hold the 256 bytes and the end of a document"
    return DataError(what, where=where, instead=f"at least {MIN_VOCAB}")


def _check_tokenizer(path: Path, vocab: int, console: Console) -> None:
    """Hold the tokenizer beside a token file, if there is one, against the model's vocabulary."""
    if not path.is_file():
        return
    found = num_ids(load_tokenizer(path))
    if found > vocab:
        what = f"the tokenizer has ids up to {found - 1:,}; the model's vocabulary is {vocab:,} ids"
        raise DataError(what, where=str(path), instead=f"model.vocab = {found} or more")
    if found < vocab:
        say(console, f"data: the tokenizer has {found:,} of the model's {vocab:,} ids; the others stay unused")


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock, which the system releases if we die."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(console, f"data: waiting for another process that builds here ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _slug(name: str) -> str:
    """A part of a folder's name for `name`, different for different ones."""
    if name == PYTHON_STDLIB:
        return name
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:]
    return f"{words}-{hashlib.sha256(str(Path(name).absolute()).encode()).hexdigest()[:8]}"
