"""Inputs: what `data build` is given → the files to read, in a fixed order, and how each is to be read."""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.errors import DataError
from phalanx.spec.job import PYTHON_STDLIB

Kind = Literal["text", "json lines", "parquet", "arrow"]
Compression = Literal["", "gzip", "zstd"]

KINDS: dict[str, Kind] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

# Of the standard library: tests, tables of character codes, and what is not part of it. (Nor are the settings that
# this Python was compiled with, `_sysconfigdata*.py`, text.)
NOT_TEXT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}

# Files in a data set's folder that describe it.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SPLITS = ("train", "validation", "valid", "dev", "test")  # what the parts of a data set are called on the hub


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file, and how it is to be read: by its suffix. What no suffix tells of is text, one document per file.
    `changed_ns` is the time of its last change."""

    path: Path
    kind: Kind
    compression: Compression
    num_bytes: int
    changed_ns: int

    def __str__(self) -> str:
        """Path, size and time of change: what tells that it is still the same."""
        return f"{self.path.absolute()}\0{self.num_bytes}\0{self.changed_ns}"


def find(inputs: Sequence[str]) -> list[InputFile]:
    """The files that `inputs` name, in a fixed order: files, globs (`**` for any depth), folders of data sets, or
    `python-stdlib`. A file that is named twice, or that links lead to by several paths, is taken once, by the first.
    Raises DataError for what names no file, and for what is no data."""
    once: dict[Path, Path] = {}
    for name in inputs:
        for path in _paths(name):
            once.setdefault(path.resolve(), path)
    return [_input_file(path) for path in once.values()]


def _paths(name: str) -> list[Path]:
    """The files that one input names, sorted."""
    if name == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        sources = (path for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata"))
        found = [path for path in sources if not NOT_TEXT.intersection(path.relative_to(root).parts)]
        return _sorted(found)
    if name and Path(name).is_dir():
        return _folder(Path(name))
    matches = (
        [name] if name and Path(name).exists() else glob.glob(name, recursive=True)
    )  # a file's own name may hold brackets
    found = [path for path in map(Path, matches) if path.is_file()]
    if not found:
        advice = (
            f'a file, a folder, a glob such as "books/**/*.txt", or "{PYTHON_STDLIB}" for the sources of this Python'
        )
        what = "is no plain file" if matches and not glob.has_magic(name) else "matches no file"
        raise DataError(what if name else f'"" {what}', where=str(Path(name).absolute()), instead=advice)
    return _sorted(found)


def _sorted(found: list[Path]) -> list[Path]:
    return sorted(found, key=lambda path: path.as_posix())


def _suffixes(path: Path) -> tuple[str, Compression]:
    """The suffix that tells the kind, and how the file is compressed."""
    compression = COMPRESSIONS.get(path.suffix.lower(), "")
    return (Path(path.stem).suffix if compression else path.suffix).lower(), compression


def _input_file(path: Path) -> InputFile:
    suffix, compression = _suffixes(path)
    kind = KINDS.get(suffix, "text")
    if compression and kind in ("parquet", "arrow"):
        advice = "unpack it: only text and JSON lines may be packed"
        raise DataError(f"is a compressed {suffix} file", where=str(path), instead=advice)
    found = path.stat()
    return InputFile(
        path=path, kind=kind, compression=compression, num_bytes=found.st_size, changed_ns=found.st_mtime_ns
    )


def _folder(folder: Path) -> list[Path]:
    """The data files of a folder, as `datasets.save_to_disk` writes it or as data sets lie on the hub: all of one kind
    and one split."""
    below = ((path, path.relative_to(folder)) for path in folder.rglob("*"))
    files = _sorted(
        [path for path, inner in below if path.is_file() and not any(n.startswith(".") for n in inner.parts)]
    )
    if (folder / "state.json").is_file():
        return _saved(folder)
    kinds: dict[str, list[Path]] = {}
    for path in files:
        suffix, _ = _suffixes(path)
        if path.name not in NOT_DATA and (suffix in KINDS or suffix == ".txt"):
            kinds.setdefault(KINDS.get(suffix, "text"), []).append(path)
    if len(kinds) != 1:
        what = f"holds files of several kinds: {', '.join(sorted(kinds))}" if kinds else "holds no data files"
        endings = ", ".join([".txt", *KINDS])
        advice = f'a folder of files that end in one of {endings} (and .gz or .zst), or a glob such as "{folder}/*.txt"'
        raise DataError(what, where=str(folder), instead=advice)
    ((_, chosen),) = kinds.items()
    splits = {split for path in chosen if (split := _split(path.relative_to(folder)))}
    if len(splits) > 1:
        names = [f"{folder}/{split}" if (folder / split).is_dir() else f'"{folder}/**/{split}*"' for split in splits]
        what = f"holds the splits {', '.join(sorted(splits))}, which are not one set"
        raise DataError(what, where=str(folder), instead=f"one of {', '.join(sorted(names))}")
    return chosen


def _saved(folder: Path) -> list[Path]:
    """The files that a folder of `save_to_disk` lists; what else lies there are caches of `datasets`."""
    state = folder / "state.json"
    try:
        files = [folder / file["filename"] for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"does not list the files of a data set: {error!r}", where=str(state)) from None
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(f"lists files that are not there: {', '.join(missing)}", where=str(state))
    return files


def _split(path: Path) -> str:
    """The split that a file of a data set belongs to, as folders and names on the hub say it
    (`data/train-00000-of-00002.parquet`, `test/a.jsonl`); "" where they say nothing."""
    words = [*path.parts[:-1], path.name.replace("_", "-").replace(".", "-").split("-")[0]]
    return next((word for word in words if word in SPLITS), "")
