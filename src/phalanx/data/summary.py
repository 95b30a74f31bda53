"""Summary: what a pair of token files holds, after reading all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.detokenize import load_tokenizer
from phalanx.data.tokens import TokenFile

CHUNK_TOKENS = 16 << 20
SAMPLE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sizes of a pair of token files. Lengths are tokens per document; `vocab` counts the ids of the tokenizer that
    lies beside the files and `sample` is how the first document begins, both None where there is no tokenizer."""

    path: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_sequences: int
    num_bytes: int
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
    starts = range(0, file.num_tokens, CHUNK_TOKENS)
    chunks = [file.read(start, min(CHUNK_TOKENS, file.num_tokens - start)) for start in starts]
    ends = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])  # of sequences, in tokens
    lengths = np.diff(ends[file.documents])
    tokenizer_path = prefix.with_name("tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path.is_file() else None
    first = file.read(0, min(SAMPLE_TOKENS, file.num_tokens)).tolist()
    return Summary(
        path=str(prefix),
        dtype=file.dtype.name,
        num_tokens=file.num_tokens,
        num_documents=file.num_documents,
        num_sequences=file.num_sequences,
        num_bytes=file.bin_path.stat().st_size + file.idx_path.stat().st_size,
        min_length=int(lengths.min(initial=file.num_tokens)),
        max_length=int(lengths.max(initial=0)),
        min_id=min((int(chunk.min()) for chunk in chunks), default=0),
        max_id=max((int(chunk.max()) for chunk in chunks), default=0),
        vocab=tokenizer.get_vocab_size() if tokenizer else None,
        sample=tokenizer.decode(first) if tokenizer else None,
    )
