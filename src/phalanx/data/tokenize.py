"""Tokenize: one part of the input → a token file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from phalanx.data.encode import Encoder
from phalanx.data.parts import Part
from phalanx.data.records import Keys, Piece, pieces
from phalanx.data.tokenizer import load_tokenizer, num_ids
from phalanx.data.tokens import TokenWriter, dtype_for
from phalanx.errors import DataError
from phalanx.rundir import write_whole

BATCH_CHARS = 1 << 20  # tokenized at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a worker needs to know: the tokenizer.json, whether it is the one of bytes, whether text that spells a
    special token is text (as it is to a tokenizer trained here), where records hold their text, and which id ends a
    document."""

    tokenizer: Path
    is_bytes: bool
    specials_are_text: bool
    keys: Keys
    end_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What came of a part: documents that end in it, tokens, documents without text (which are left out), and whether
    the last document has ended (a long text may go on in the next part)."""

    num_documents: int
    num_tokens: int
    num_empty: int
    ends: bool


class PartWriter:
    """Writes parts into `folder`, as token files that appear when they are whole, and then a note of what is in them.

    Where several workers, or a new build and the rest of one that was killed, write the same part, they write the same.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        tokenizer = load_tokenizer(recipe.tokenizer)
        tokenizer.encode_special_tokens = recipe.specials_are_text
        self._recipe, self._folder = recipe, folder
        self._encoder = Encoder(tokenizer, is_bytes=recipe.is_bytes)
        self._dtype = dtype_for(num_ids(tokenizer))

    def write(self, part: Part, done: Callable[[float], None]) -> Counts:
        """Tokenize `part` and return what came of it; `done` is told the bytes of input that it has got through.
        Raises DataError for input that is wrong, OSError for a folder that cannot be written to."""
        with_mask = self._recipe.keys.prompt is not None
        with TokenWriter(prefix_of(self._folder, part), self._dtype, with_mask=with_mask) as writer:
            documents = _Documents(writer, self._encoder.begin, self._recipe.end_id, with_mask=with_mask)
            for batch, num_bytes in _batches(part, self._recipe.keys):
                documents.add(batch, self._encoder.encode(batch))
                done(num_bytes)
            ends = documents.close()
        counts = Counts(
            num_documents=writer.num_documents - (not ends),
            num_tokens=writer.num_tokens,
            num_empty=documents.num_empty,
            ends=ends,
        )
        _write_counts(self._folder, part, counts)
        return counts


class _Documents:
    """Puts the tokens of pieces together to documents, some batches at a time."""

    def __init__(self, writer: TokenWriter, begin: list[int], end_id: int, *, with_mask: bool) -> None:
        self._writer, self._begin, self._end_id = writer, begin, end_id
        self._with_mask = with_mask
        self._open = 0  # tokens of the document that has not ended
        self.num_empty = 0

    def add(self, batch: list[Piece], tokens: list[list[int]]) -> None:
        """Write the tokens of a batch of pieces."""
        flat, lengths = list[int](), list[int]()
        supervised, counts = list[bool](), list[int]()
        ended = -self._open  # where in `flat` the last document ended
        for piece, ids in zip(batch, tokens, strict=True):
            before = len(flat)
            if piece.begins and piece.ends and not piece.text:
                self.num_empty += 1
                continue
            flat += self._begin if piece.begins else []
            flat += ids
            if piece.ends:
                flat.append(self._end_id)
                lengths.append(len(flat) - ended)
                ended = len(flat)
            supervised.append(piece.supervised)
            counts.append(len(flat) - before)
        self._open = len(flat) - ended
        mask = np.repeat(np.array(supervised, dtype=np.uint8), counts) if self._with_mask else None
        self._writer.write(np.array(flat, dtype=np.int64), mask)
        self._writer.end_documents(lengths)

    def close(self) -> bool:
        """Make a document of what goes on in the next part. Returns False if something does."""
        if self._open:
            self._writer.end_documents([self._open])
        return not self._open


def prefix_of(folder: Path, part: Part) -> Path:
    """The token file of a part."""
    return folder / part.name


def read_counts(folder: Path, part: Part) -> Counts | None:
    """What came of a part; None if it is not finished. Raises DataError for a note that is no such note."""
    path = folder / f"{part.name}.json"
    try:
        return Counts(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"is damaged: {error}", where=str(path), instead=f"delete the folder {folder.parent}") from None


def _write_counts(folder: Path, part: Part, counts: Counts) -> None:
    """Written last, whole or not at all: it says that the part is finished."""
    write_whole(folder / f"{part.name}.json", json.dumps(asdict(counts)))


def _batches(part: Part, keys: Keys) -> Iterator[tuple[list[Piece], float]]:
    """The pieces of a part, some `BATCH_CHARS` at a time, and how many bytes of input were read for them."""
    batch, num_chars, told, before = list[Piece](), 0, 0.0, 0.0
    for span in part.spans:
        for piece in pieces(span, keys):
            batch.append(piece)
            num_chars += len(piece.text)
            if num_chars >= BATCH_CHARS:
                now = before + piece.done * span.num_bytes
                yield batch, now - told
                batch, num_chars, told = [], 0, now
        before += span.num_bytes
    if batch:
        yield batch, before - told
