"""SentencePiece models → tokenizers, without the package that wrote them.

A `.model` is a protocol buffer (sentencepiece_model.proto). Of its wire format only what the file uses is read:
varints, 32-bit floats and length-delimited fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.errors import DataError

SPACE = "\u2581"  # how SentencePiece writes a space

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2  # kinds of models

Fields = dict[int, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """What a .model says: pieces with their scores and kinds in the order of their ids, and how text is prepared."""

    pieces: list[tuple[str, float, int]]
    kind: int = UNIGRAM
    byte_fallback: bool = False
    character_map: bytes = b""
    add_prefix: bool = True
    remove_extra_spaces: bool = True


def read_sentencepiece(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece `.model` (unigram or byte-pair). Raises DataError for another kind of file, and
    for a model that cannot be had exactly."""
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error, AttributeError, TypeError) as error:
        raise DataError(f"is not a SentencePiece model: {error}", where=str(path)) from None
    convert = "convert it to a tokenizer.json with transformers' AutoTokenizer"
    if model.kind not in (UNIGRAM, BPE):
        raise DataError("is neither a unigram nor a byte-pair model", where=str(path), instead=convert)
    symbols = [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]
    awkward = [piece for piece in symbols if SPACE in piece or model.add_prefix or model.remove_extra_spaces]
    if awkward:  # `tokenizers` prepares the text on each side of a symbol by itself, SentencePiece all of it at once
        what = f'has symbols of its user ("{awkward[0]}") that cannot be told from here exactly'
        raise DataError(what, where=str(path), instead=convert)
    return _tokenizer(model)


def _tokenizer(model: SentencePieces) -> Tokenizer:
    kinds = [kind for *_, kind in model.pieces]
    unknown = kinds.index(UNKNOWN)
    tokenizer = Tokenizer(_unigram(model, unknown) if model.kind == UNIGRAM else _byte_pair(model, unknown))
    steps: list[Any] = [normalizers.Precompiled(model.character_map)] if model.character_map else []
    if model.remove_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if model.add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    inside = any(SPACE in piece.lstrip(SPACE) for piece, _, kind in model.pieces if kind == NORMAL)
    if not inside:  # no piece spans a space, so words are tokenized one by one: the same tokens, found faster
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}+[^{SPACE}]*"), "isolated")
    ends = [decoders.Strip(" ", 1, 0)] if model.add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    special = [piece for piece, _, kind in model.pieces if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    defined = [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in defined])
    return tokenizer


def _unigram(model: SentencePieces, unknown: int) -> Any:
    return models.Unigram([(piece, score) for piece, score, _ in model.pieces], unknown, model.byte_fallback)


def _byte_pair(model: SentencePieces, unknown: int) -> Any:
    """SentencePiece joins the pair whose result has the best score; a table of merges in that order does the same."""
    ids = {piece: index for index, (piece, *_) in enumerate(model.pieces)}
    merges = []
    for piece, score, kind in model.pieces:
        if kind == NORMAL:
            pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            known = [(left, right) for left, right in pairs if left in ids and right in ids]
            merges += [(score, pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: -merge[0])
    name = model.pieces[unknown][0]
    pairs = [pair for _, pair in merges]
    return models.BPE(ids, pairs, unk_token=name, fuse_unk=True, byte_fallback=model.byte_fallback)


def _parse(data: bytes) -> SentencePieces:
    """Field numbers are those of sentencepiece_model.proto, defaults too."""
    fields = _fields(data)
    if 1 not in fields:
        raise ValueError("it has no pieces")
    trainer, normalizer = _fields(fields.get(2, [b""])[-1]), _fields(fields.get(3, [b""])[-1])
    pieces = []
    for piece in map(_fields, fields[1]):
        pieces.append((piece[1][-1].decode(), _float(piece.get(2, [0])[-1]), piece.get(3, [NORMAL])[-1]))
    if UNKNOWN not in [kind for *_, kind in pieces]:
        raise ValueError("it has no piece for what is unknown")
    return SentencePieces(
        pieces=pieces,
        kind=trainer.get(3, [UNIGRAM])[-1],
        byte_fallback=bool(trainer.get(35, [0])[-1]),
        character_map=normalizer.get(2, [b""])[-1],
        add_prefix=bool(normalizer.get(3, [1])[-1]),
        remove_extra_spaces=bool(normalizer.get(4, [1])[-1]),
    )


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _fields(data: bytes) -> Fields:
    """The fields of a message: number → its values in order."""
    found: Fields = {}
    for number, value in _walk(data):
        found.setdefault(number, []).append(value)
    return found


def _walk(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"byte {at} begins no field")
        if at + size > len(data):
            raise ValueError("it is cut short")
        chunk = data[at : at + size]
        yield tag >> 3, chunk if wire == 2 else int.from_bytes(chunk, "little")
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
