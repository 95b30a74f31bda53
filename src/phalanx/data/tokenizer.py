"""Tokenizers: read from what users have, or trained on their text. Each becomes a `tokenizers.Tokenizer`, saved as the
tokenizer.json beside the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.data.sentencepiece import read_sentencepiece
from phalanx.errors import DataError
from phalanx.spec.schema import nearest

BYTES = "bytes"  # the tokenizer whose ids are the bytes of UTF-8
END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB = 257  # 256 bytes and the end of a document

# What families of models call the end of a document. Where a tokenizer_config.json tells, that holds.
KNOWN_ENDS = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)
FORMS = "tokenizer.json, a SentencePiece .model, vocab.json beside merges.txt, a folder with one of them, or bytes"


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises DataError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
        raise DataError(f"is not a tokenizer: {error}", where=str(path)) from None


def find_tokenizer(name: str) -> Path | None:
    """The file that `name` means: itself, or what lies in the folder of that name; None for bytes. Raises DataError."""
    path = Path(name)
    if path.is_dir():
        for file in ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json"):
            if (path / file).is_file():
                return path / file
        raise DataError("holds no tokenizer", where=str(path), instead=FORMS)
    if path.is_file():
        return path.with_name("vocab.json") if path.name == "merges.txt" else path
    if name == BYTES:
        return None
    raise DataError("no such tokenizer", where=name, instead=FORMS)


def read_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer that `find_tokenizer` found. Raises DataError."""
    if path is None:
        return byte_tokenizer()
    if path.suffix == ".model":
        return read_sentencepiece(path)
    return _gpt2(path) if path.name.endswith("vocab.json") else load_tokenizer(path)


def byte_tokenizer() -> Tokenizer:
    """Id = byte of the UTF-8 text, and 256 for the end of a document."""
    tokenizer = Tokenizer(models.BPE({_visible(byte): byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab: int, num_bytes: int) -> Tokenizer:
    """A byte-level BPE tokenizer (as GPT-2's: any text has tokens, none is unknown) of at most `vocab` entries, trained
    on `texts` of about `num_bytes`. Text that spells out the end of a document is text to it."""
    vocab = min(vocab, MIN_VOCAB + num_bytes)  # room is made for all entries at once, and more than that never come
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def num_ids(tokenizer: Tokenizer) -> int:
    """How many ids a model needs for this tokenizer: one more than the largest, as there may be gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(tokenizer: Tokenizer, path: Path | None, wish: str | None) -> str:
    """The token that ends a document: `wish`, or what the tokenizer_config.json beside `path` calls the end of a
    sequence, or a well-known name. Raises DataError, with the candidates, where there is none."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    special = [str(token.content) for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    where = str(path or BYTES)
    if wish is not None:
        if wish not in vocab:
            near = nearest(wish, special) or nearest(wish, KNOWN_ENDS)
            advice = f"did you mean {near}?" if near in vocab else _candidates(special)
            raise DataError(f'the tokenizer has no token "{wish}" (--end-token)', where=where, instead=advice)
        return wish
    configured = _configured_end(path)
    found = next((token for token in (configured, *KNOWN_ENDS) if token in vocab), None)
    if found is None:
        what = "which token ends a document is not known"
        raise DataError(what, where=where, instead=f"name it: --end-token TOKEN; {_candidates(special)}")
    return found


def _candidates(special: list[str]) -> str:
    return f"special tokens: {', '.join(special[:20]) or 'none'}"


def _configured_end(path: Path | None) -> str | None:
    """`eos_token` of the tokenizer_config.json beside `path`."""
    config = path.with_name("tokenizer_config.json") if path else None
    if config is None or not config.is_file():
        return None
    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"no JSON: {error}", where=str(config)) from None
    token: Any = read.get("eos_token") if isinstance(read, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _gpt2(path: Path) -> Tokenizer:
    """The tokenizer of GPT-2's two files: `vocab.json` and, beside it, `merges.txt` (or gpt2-vocab.json and
    gpt2-merges.txt, as they are passed around for Megatron-LM)."""
    merges = path.with_name(path.name.removesuffix("vocab.json") + "merges.txt")
    if not merges.is_file():
        raise DataError("no such file", where=str(merges), instead=f"the merges that belong to {path}")
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(path), str(merges)))
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
        raise DataError(f"is not a vocabulary with merges: {error}", where=str(path)) from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def _visible(byte: int) -> str:
    """The letter that byte-level tokenizers write for a byte: itself if it can be seen, else the next from 256 on."""
    hidden = [value for value in range(256) if not (33 <= value <= 126 or 161 <= value <= 172 or value >= 174)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)
