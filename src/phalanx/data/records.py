"""Records: the documents of input files, as pieces of text. What is wrong with one is said with its file and line."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from phalanx.data.inputs import InputFile
from phalanx.data.parts import Span
from phalanx.data.tables import arrow_rows, column_names, parquet_rows, pyarrow
from phalanx.errors import DataError
from phalanx.spec.schema import nearest

PIECE_CHARS = 1 << 18  # a longer text is tokenized in pieces, cut at line ends
BLOCK_BYTES = 1 << 20


class Piece(NamedTuple):
    """Some text of a document: whether that begins with it, ends with it, and whether a model is to learn it. A
    document without text is one empty piece. `done` is the share of the span that has been read."""

    text: str
    begins: bool
    ends: bool
    supervised: bool
    done: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where a record holds its text, and perhaps the prompt before it, which is not supervised."""

    text: str = "text"
    prompt: str | None = None

    @property
    def names(self) -> list[str]:
        """All keys, in the order of the text."""
        return [self.text] if self.prompt is None else [self.prompt, self.text]


@dataclass(slots=True)
class _Place:
    """Where we are in a span: a line of its file, or a row, both from 1."""

    span: Span
    number: int = 1
    unit: str = "line"

    def __str__(self) -> str:
        if self.unit == "line":
            return f"{self.span.file.path}:{self.number + _num_lines_before(self.span)}"
        return f"{self.span.file.path}: {self.unit} {self.number}"

    def error(self, what: str, instead: str) -> DataError:
        return DataError(what, where=str(self), instead=instead)


def pieces(span: Span, keys: Keys) -> Iterator[Piece]:
    """The documents of a span, in order. Raises DataError."""
    if span.file.kind == "text":
        yield from _text(span)
        return
    for texts, done in _json_lines(span, keys) if span.file.kind == "json lines" else _rows(span, keys):
        cut = [(piece, supervised) for text, supervised in texts for piece in _cut(text)] or [("", True)]
        for index, (piece, supervised) in enumerate(cut):
            yield Piece(piece, index == 0, index == len(cut) - 1, supervised, done)


def check_keys(files: Sequence[InputFile], keys: Keys) -> None:
    """Look into the head of every file with records, so that a wrong key is refused before any work. Raises
    DataError."""
    for file in files:
        span = Span(file=file, num_bytes=file.num_bytes)
        if file.kind == "json lines":
            next(_json_lines(span, keys), None)
        elif file.kind == "text" and keys.prompt is not None:
            advice = "JSON lines, Parquet or Arrow, whose records hold both"
            raise DataError("is a text, which has no prompt (--prompt-key)", where=str(file.path), instead=advice)
        elif file.kind != "text":
            names = column_names(file.path)
            for key in keys.names:
                if key not in names:
                    raise _missing(key, names, str(file.path))


def _text(span: Span) -> Iterator[Piece]:
    """One document. A mark of the byte order at its beginning is no part of it."""
    place, text, begins = _Place(span), "", span.start == 0
    decoder = codecs.getincrementaldecoder("utf-8-sig" if begins else "utf-8")()
    with _opened(place) as (stream, done):
        while True:
            block = stream.read(BLOCK_BYTES)
            try:
                text += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(place, error) from None
            place.number += block.count(b"\n")
            if not block:
                break
            while len(text) > PIECE_CHARS:
                end = _end(text, 0)
                yield Piece(text[:end], begins, False, True, done())
                text, begins = text[end:], False
    yield Piece(text, begins, span.ends, True, 1.0)


def _json_lines(span: Span, keys: Keys) -> Iterator[tuple[list[tuple[str, bool]], float]]:
    """Of each line the texts, whether each is supervised, and the share of the span that has been read."""
    place = _Place(span)
    with _opened(place) as (stream, done):
        for line in iter(stream.readline, b""):
            if place.number == 1 and span.start == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield _texts(_parsed(line, place), keys, place), done()
            place.number += 1


def _parsed(line: bytes, place: _Place) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from None
    except (ValueError, RecursionError) as error:
        several = place.number == 1 and line.strip() in (b"[", b"{")
        advice = "one JSON object per line" + ("; this file holds one over several lines" if several else "")
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise place.error(f"no JSON: {reason}", advice) from None


def _rows(span: Span, keys: Keys) -> Iterator[tuple[list[tuple[str, bool]], float]]:
    """As `_json_lines`, of the rows of a Parquet or an Arrow file."""
    place, path = _Place(span, unit="row"), span.file.path
    if span.file.kind == "parquet":
        batches = parquet_rows(path, keys.names, span.start, span.stop)
    else:
        batches = arrow_rows(path, keys.names)
    for batch in batches:
        for place.number, record in enumerate(batch.records, batch.first):
            yield _texts(record, keys, place), batch.done


def _texts(record: Any, keys: Keys, place: _Place) -> list[tuple[str, bool]]:
    """The texts of a record in order, and whether each is supervised."""
    if not isinstance(record, Mapping):
        raise place.error(f"{_kind(record)}, not an object", 'one JSON object per line: {"text": "…"}')
    return [(_taken(record, key, place), key == keys.text) for key in keys.names]


def _taken(record: Mapping[str, Any], key: str, place: _Place) -> str:
    if key not in record:
        raise _missing(key, list(record), str(place))
    value = record[key]
    if not isinstance(value, str):
        raise place.error(f'"{key}" is {_kind(value)}, not a text', "leave the record out, or name another key")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise place.error(f'"{key}" holds {half}, one half of a character', "write both, or none") from None
    return value


def _missing(key: str, known: Sequence[str], where: str) -> DataError:
    near = nearest(key, known)
    advice = f'did you mean "{near}"? ' if near else ""
    return DataError(f'no key "{key}"', where=where, instead=f"{advice}there are: {', '.join(known) or 'none'}")


KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)


def _not_utf8(place: _Place, error: UnicodeDecodeError) -> DataError:
    place.number += error.object[: error.start].count(b"\n")
    what = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
    return place.error(what, "convert the file (iconv -f latin1 -t utf-8), or drop what is no text (iconv -c -t utf-8)")


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces of at most `PIECE_CHARS`; none of an empty one."""
    start = 0
    while start < len(text):
        end = _end(text, start)
        yield text[start:end]
        start = end


def _end(text: str, start: int) -> int:
    """Where a piece of `text` that begins at `start` ends: after a line, else before a space, else where it must."""
    end = start + PIECE_CHARS
    if end >= len(text):
        return len(text)
    line = text.rfind("\n", start, end) + 1
    return line or max(text.rfind(" ", start + 1, end), 0) or end


def _num_lines_before(span: Span) -> int:
    """Line ends before a span. (Counted only for an error.)"""
    num_lines, left = 0, span.start
    with span.file.path.open("rb") as file:
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            num_lines += block.count(b"\n")
            left -= len(block)
    return num_lines


class _Bounded(io.RawIOBase):
    """Bytes [start, stop) of an open file."""

    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self._file, self._left = file, stop - start
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._file.readinto(memoryview(buffer)[: self._left])  # type: ignore[attr-defined]  # it is a FileIO
        self._left -= num_bytes
        return int(num_bytes)


@contextmanager
def _opened(place: _Place) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The bytes of a span, unpacked, and a function that tells which share of it has been read. Reading that fails is
    said as DataError with the place."""
    span, path = place.span, place.span.file.path
    try:
        with path.open("rb", buffering=0) as raw:

            def done() -> float:
                return (raw.tell() - span.start) / max(1, span.num_bytes)

            if span.file.compression == "gzip":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK_BYTES), done
            elif span.file.compression == "zstd":
                yield io.BufferedReader(pyarrow(path).CompressedInputStream(raw, "zstd"), BLOCK_BYTES), done
            else:
                stop = span.file.num_bytes if span.stop is None else span.stop
                yield io.BufferedReader(_Bounded(raw, span.start, stop), BLOCK_BYTES), done
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise place.error(f"cannot be read on: {reason}", "the file is damaged or cut short: copy it again") from error
