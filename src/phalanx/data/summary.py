"""Summary: what a pair of token files holds, after reading all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.tokenizer import load_tokenizer, num_ids
from phalanx.data.tokens import Integers, TokenFile, check_mask, read_mask
from phalanx.units import format_bytes

CHUNK_TOKENS = 16 << 20
SAMPLE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sizes of a pair of token files. Lengths are tokens per document; `num_supervised` counts the tokens that the mask
    beside them lets a model learn (all where there is none). `vocab` counts the ids of the tokenizer that lies beside
    the files and `sample` is how the first document begins, both None where there is no tokenizer."""

    path: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_sequences: int
    num_bytes: int
    num_supervised: int
    min_length: int
    max_length: int
    min_id: int
    max_id: int
    vocab: int | None
    sample: str | None


def summarize(prefix: Path) -> Summary:
    """Read the pair `prefix` from end to end. Raises `DataError` where it is missing or damaged."""
    file = TokenFile(prefix)
    file.check()
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in _chunks(file)]
    ends = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])  # of sequences, in tokens
    lengths = np.diff(ends[file.documents])
    tokenizer_path = prefix.with_name("tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path.is_file() else None
    first = file.read(0, min(SAMPLE_TOKENS, file.num_tokens)).tolist()
    known = tokenizer is not None and all(0 <= token < num_ids(tokenizer) for token in first)
    return Summary(
        path=str(prefix),
        dtype=file.dtype.name,
        num_tokens=file.num_tokens,
        num_documents=file.num_documents,
        num_sequences=file.num_sequences,
        num_bytes=file.bin_path.stat().st_size + file.idx_path.stat().st_size,
        num_supervised=_num_supervised(file),
        min_length=int(lengths.min(initial=file.num_tokens)),
        max_length=int(lengths.max(initial=0)),
        min_id=min((low for low, _ in ranges), default=0),
        max_id=max((high for _, high in ranges), default=0),
        vocab=num_ids(tokenizer) if tokenizer else None,
        sample=tokenizer.decode(first, skip_special_tokens=False) if tokenizer and known else None,
    )


def told(summary: Summary, vocab: int | None) -> str:
    """A summary in words. `vocab` is the model's, if there is one to hold the ids against."""
    lines = [
        f"{summary.path}: {format_bytes(summary.num_bytes)}, {summary.dtype}",
        f"{summary.num_tokens:,} tokens with ids {summary.min_id:,} to {summary.max_id:,}",
        f"{summary.num_documents:,} documents of {summary.min_length:,} to {summary.max_length:,} tokens",
    ]
    if summary.num_supervised < summary.num_tokens:
        lines.append(f"{summary.num_supervised:,} tokens are learned, the others are prompts")
    if vocab is not None and summary.min_id >= 0 and summary.max_id < vocab:
        lines.append(f"every id is one of the model's {vocab:,}")
    if summary.vocab is not None and summary.max_id >= summary.vocab:
        lines.append(f"the tokenizer beside them has only {summary.vocab:,} ids: it is another's")
    elif summary.vocab is not None:
        lines += [f"tokenizer of {summary.vocab:,} ids; the text begins:", "", summary.sample or ""]
    return "\n".join(lines) + "\n"


def outside(prefix: Path, vocab: int) -> str:
    """The first token whose id is none of a vocabulary's, and how many there are, in words; "" if there is none."""
    file, first, num_wrong = TokenFile(prefix), None, 0
    for number, chunk in enumerate(_chunks(file)):
        wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab))
        num_wrong += len(wrong)
        if first is None and len(wrong):
            first = number * CHUNK_TOKENS + int(wrong[0]), int(chunk[wrong[0]])
    if first is None:
        return ""
    position, token = first
    many = f"{num_wrong:,} of {file.num_tokens:,} tokens have ids outside the model's vocabulary of {vocab:,}"
    return f"{file.bin_path}: {many}; the first is id {token:,} at token {position:,}"


def _chunks(file: TokenFile) -> list[Integers]:
    starts = range(0, file.num_tokens, CHUNK_TOKENS)
    return [file.read(start, min(CHUNK_TOKENS, file.num_tokens - start)) for start in starts]


def _num_supervised(file: TokenFile) -> int:
    """Tokens that the mask lets a model learn. Raises DataError for a mask of another size, or of other bytes."""
    mask = read_mask(file)
    if mask is None:
        return file.num_tokens
    number = 0
    for start in range(0, file.num_tokens, CHUNK_TOKENS):
        chunk = mask[start : start + CHUNK_TOKENS]
        check_mask(file, chunk, start)
        number += int(np.count_nonzero(chunk))
    return number
