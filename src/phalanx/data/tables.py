"""Tables: Parquet and Arrow files, and zstd, through pyarrow, which is loaded only where a file needs it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from phalanx.errors import DataError

BATCH_ROWS = 256


class Rows(NamedTuple):
    """Some rows, the number of the first (from 1), and which share of what is to be read they end."""

    records: list[dict[str, Any]]
    first: int
    done: float


def pyarrow(path: Path) -> Any:
    """The package, to read `path` with. Raises DataError where it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        what = f"{path.suffix} files are read with pyarrow, which is not installed"
        raise DataError(what, where=str(path), instead="pip install 'phalanx[data]'") from error


def row_groups(path: Path) -> list[int]:
    """The size of each row group of a Parquet file, in bytes. Raises DataError."""
    with readable(path), _parquet(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        return [sum(group.column(c).total_compressed_size for c in range(group.num_columns)) for group in groups]


def column_names(path: Path) -> list[str]:
    """The columns of a Parquet or an Arrow file. Raises DataError."""
    with readable(path):
        if path.suffix.lower() == ".parquet":
            with _parquet(path) as file:
                return list(file.schema_arrow.names)
        with path.open("rb") as raw:
            return list(_arrow(raw, path)[0].names)


def parquet_rows(path: Path, columns: Sequence[str], start: int, stop: int | None) -> Iterator[Rows]:
    """The rows of row groups [start, stop) of a Parquet file, in order. Raises DataError."""
    with readable(path), _parquet(path) as file:
        sizes = [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]
        first, num_rows, num_read = sum(sizes[:start]) + 1, sum(sizes[start:stop]), 0
        groups = list(range(len(sizes)))[start:stop]
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(columns), use_threads=False):
            before, num_read = num_read, num_read + batch.num_rows
            yield Rows(_records(batch, path, first + before), first + before, num_read / num_rows)


def arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of an Arrow file, in order: a stream, as `datasets.save_to_disk` writes it, or one with a footer."""
    num_bytes, first = path.stat().st_size, 1
    with readable(path), path.open("rb") as raw:
        _, batches = _arrow(raw, path)
        for batch in batches:
            chosen = batch.select(list(columns))
            for start in range(0, batch.num_rows, BATCH_ROWS):
                records = _records(chosen.slice(start, BATCH_ROWS), path, first + start)
                yield Rows(records, first + start, raw.tell() / num_bytes)
            first += batch.num_rows


def _parquet(path: Path) -> Any:
    pyarrow(path)
    return importlib.import_module("pyarrow.parquet").ParquetFile(path)


def _arrow(raw: IO[bytes], path: Path) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches of an open Arrow file."""
    ipc = pyarrow(path).ipc
    has_footer = raw.read(6) == b"ARROW1"
    raw.seek(0)
    if not has_footer:
        stream = ipc.open_stream(raw)
        return stream.schema, iter(stream)
    file = ipc.open_file(raw)
    return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))


def _records(batch: Any, path: Path, first: int) -> list[dict[str, Any]]:
    """The rows of a batch, the first of which has this number. Raises DataError for what is no text, or damaged."""
    try:
        batch.validate(full=True)
    except pyarrow(path).ArrowInvalid as error:
        where = f"{path}: rows {first:,} to {first + batch.num_rows - 1:,}"
        reason = " ".join(str(error).split())
        raise DataError(f"cannot be read: {reason}", where=where, instead="write the file again, in UTF-8") from error
    records: list[dict[str, Any]] = batch.to_pylist()
    return records


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say what cannot be read in here as DataError."""
    errors = (OSError, pyarrow(path).ArrowException)
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())
        advice = "the file is damaged, cut short or of another kind: copy it again"
        raise DataError(f"cannot be read: {reason}", where=str(path), instead=advice) from error
