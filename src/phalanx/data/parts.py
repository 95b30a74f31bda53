"""Parts: the input files, cut into pieces of work that are done, and kept, one by one.

How they are cut depends on the files alone, never on the number of workers, so that any number of them writes the same
bytes and takes up what others have left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phalanx.data.inputs import InputFile
from phalanx.data.tables import row_groups

PART_BYTES = 16 << 20  # some seconds of work: what is lost when a build is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one part reads of one file: bytes [start, stop), or these row groups of a Parquet file. `stop` None is the
    end of a file that cannot be cut. `ends` is False for a text that goes on in the next part."""

    file: InputFile
    num_bytes: int
    start: int = 0
    stop: int | None = None
    ends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Spans that are tokenized together."""

    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        """The same as long as the files are: a part that is finished is found again by it."""
        words = "\0".join(f"{span.file}\0{span.start}\0{span.stop}" for span in self.spans)
        return hashlib.sha256(words.encode(errors="surrogateescape")).hexdigest()[:24]

    @property
    def num_bytes(self) -> int:
        """Bytes of the input files."""
        return sum(span.num_bytes for span in self.spans)


def parts(files: Iterable[InputFile]) -> list[Part]:
    """All work, in order: parts of about `PART_BYTES`. Raises DataError for a Parquet file that cannot be read."""
    found, spans, num_bytes = list[Part](), list[Span](), 0
    for file in files:
        for span in _spans(file):
            spans.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= PART_BYTES:
                found.append(Part(spans=tuple(spans)))
                spans, num_bytes = [], 0
    return [*found, Part(spans=tuple(spans))] if spans else found


def _spans(file: InputFile) -> Iterator[Span]:
    """`file` in spans of at least `PART_BYTES`, as far as it can be cut: plain files at line ends, Parquet files
    between row groups."""
    if file.kind == "parquet":
        yield from _of_row_groups(file)
    elif file.compression or file.kind == "arrow":
        yield Span(file=file, num_bytes=file.num_bytes)
    else:
        start = 0
        while start < file.num_bytes:
            stop = _line_end(file, start + PART_BYTES)
            ends = file.kind != "text" or stop == file.num_bytes
            yield Span(file=file, num_bytes=stop - start, start=start, stop=stop, ends=ends)
            start = stop


def _of_row_groups(file: InputFile) -> Iterator[Span]:
    start, num_bytes, sizes = 0, 0, row_groups(file.path)
    for group, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= PART_BYTES or group == len(sizes) - 1:
            yield Span(file=file, num_bytes=num_bytes, start=start, stop=group + 1)
            start, num_bytes = group + 1, 0


def _line_end(file: InputFile, position: int) -> int:
    """Where the line ends that holds the byte before `position`."""
    if position >= file.num_bytes:
        return file.num_bytes
    with file.path.open("rb") as lines:
        position -= 1
        lines.seek(position)
        while block := lines.read(1 << 20):
            if (end := block.find(b"\n")) >= 0:
                return position + end + 1
            position += len(block)
    return file.num_bytes
