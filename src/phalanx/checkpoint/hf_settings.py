"""The small files beside the weights in a Hugging Face folder: the tokenizer's, and how to generate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.checkpoint.hf_folder import CONFIG
from phalanx.errors import CheckpointError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"

_CARRIED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
_FORMS = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json")
_END_OF_DOCUMENT = "<|endoftext|>"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_folder(folders: Sequence[Path]) -> Path | None:
    """The first of `folders` that has a tokenizer, in whichever form."""
    return next((folder for folder in folders if any((folder / name).is_file() for name in _FORMS)), None)


def check_tokenizers(data: Path, folders: Sequence[Path]) -> None:
    """Raises CheckpointError if the tokenizer in the folder `data` has a token that the one in `folders` does not have,
    or has under another id: text tokenized by one is noise to a model trained with the other.

    Nothing is compared where either has no tokenizer.json.
    """
    known_in = tokenizer_folder(folders)
    if known_in is None or not all((folder / TOKENIZER).is_file() for folder in (known_in, data)):
        return
    known = _vocabulary(known_in)
    for token, number in _vocabulary(data).items():
        if known.get(token) != number:
            there = f"id {known[token]}" if token in known else "no id"
            what = f"{json.dumps(token)} is id {number} in the data and has {there} in {known_in / TOKENIZER}"
            instead = f"phalanx data build … --tokenizer {known_in / TOKENIZER}, and data.path for what it builds"
            raise CheckpointError(what, where=str(data / TOKENIZER), instead=instead)


def carry(folders: Sequence[Path], target: Path, max_seq_len: int) -> None:
    """Copy the tokenizer's files from where they are into the folder `target`, and write its generation_config.json.

    A tokenizer trained here has no tokenizer_config.json; it gets one, so that transformers reads it as it is. Raises
    CheckpointError for a file that is not JSON, OSError.
    """
    source = tokenizer_folder(folders)
    if source is not None:
        for name in _CARRIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        if (source / TOKENIZER).is_file() and not (target / TOKENIZER_CONFIG).exists():
            write_json(target / TOKENIZER_CONFIG, _tokenizer_config(source, max_seq_len))
    write_json(target / GENERATION_CONFIG, generation_config(folders))


def generation_config(folders: Sequence[Path]) -> dict[str, Any]:
    """How to generate: what a generation_config.json among `folders` says; else the token ids of a config.json, or
    those of the tokenizer. Raises CheckpointError for a file that is not what its name says."""
    for folder in folders:
        if (folder / GENERATION_CONFIG).is_file():
            return _read_json(folder / GENERATION_CONFIG)
        if (folder / CONFIG).is_file():
            return {name: value for name, value in token_ids(_read_json(folder / CONFIG)).items() if value is not None}
    source = tokenizer_folder(folders)
    end = _end_of_document(source) if source else None
    return {} if end is None else {"eos_token_id": end}


def end_tokens(folders: Sequence[Path]) -> list[int]:
    """The ids after which a text is over."""
    end = generation_config(folders).get("eos_token_id")
    return end if isinstance(end, list) else [] if end is None else [end]


def token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens, null where there is none: transformers' own defaults would be another tokenizer's."""
    return {name: config.get(name) for name in _TOKEN_IDS}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write as people like to read it. Raises OSError."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer_config(source: Path, max_seq_len: int) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    return config if _end_of_document(source) is None else {**config, "eos_token": _END_OF_DOCUMENT}


def _vocabulary(folder: Path) -> dict[str, int]:
    """Every token's id."""
    vocab, added = _tokens(folder / TOKENIZER)
    return vocab | added


def _end_of_document(folder: Path) -> int | None:
    """What a tokenizer that was trained here calls so."""
    if not (folder / TOKENIZER).is_file():
        return None
    _, added = _tokens(folder / TOKENIZER)
    return added.get(_END_OF_DOCUMENT)


def _tokens(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of a tokenizer's vocabulary and of the tokens added to it. Raises CheckpointError if it has none."""
    content = _read_json(path)
    try:
        vocab = content["model"]["vocab"]
        ids = {entry[0]: number for number, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        return ids, {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}
    except (IndexError, KeyError, TypeError, ValueError) as error:
        what = f"is no tokenizer: its vocabulary or added tokens are not there ({type(error).__name__}: {error})"
        raise CheckpointError(what, where=str(path), instead="the file that the tokenizers library saves") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"is not JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise CheckpointError("is not a table of keys", where=str(path))
    return content
