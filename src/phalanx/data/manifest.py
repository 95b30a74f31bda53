"""Manifest: what token files were built from, kept beside them. As long as that has not changed they are used as they
are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.data.inputs import InputFile
from phalanx.data.records import Keys
from phalanx.errors import DataError

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for: which inputs, where their text stands, and a tokenizer, by name or to be trained with
    `vocab` entries; and the token that ends a document, where the tokenizer does not tell."""

    inputs: tuple[str, ...]
    text_key: str = "text"
    prompt_key: str | None = None
    tokenizer: str | None = None
    vocab: int | None = None
    end_token: str | None = None

    @property
    def keys(self) -> Keys:
        """Where records hold their text."""
        return Keys(text=self.text_key, prompt=self.prompt_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A wish and what it came to: `files` is a digest of all paths, sizes and times of change, `tokenizer_file` one of
    the tokenizer's file."""

    wish: Wish
    num_files: int
    num_bytes: int
    files: str
    tokenizer_file: str | None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """As `manifest.json` in `folder`."""
        (folder / "manifest.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def manifest(wish: Wish, files: Sequence[InputFile], tokenizer: Path | None) -> Manifest:
    """The manifest of what would be built now."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0".encode(errors="surrogateescape"))
    return Manifest(
        wish=wish,
        num_files=len(files),
        num_bytes=sum(file.num_bytes for file in files),
        files=digest.hexdigest(),
        tokenizer_file=_digest_of(tokenizer) if tokenizer else None,
    )


def read_manifest(folder: Path) -> Manifest | None:
    """What a folder was built from, None where it does not say. Raises DataError for what is no manifest."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if read["format"] != FORMAT:  # only that is known of it
            read = {"num_files": 0, "num_bytes": 0, "files": "", "tokenizer_file": None, "format": read["format"]}
        wish = read.pop("wish", {"inputs": []})
        return Manifest(wish=Wish(inputs=tuple(wish.pop("inputs")), **wish), **read)
    except (ValueError, TypeError, KeyError) as error:
        advice = f"delete the folder {folder}; it is built again"
        raise DataError(f"is not a manifest ({error})", where=str(path), instead=advice) from error


def change(old: Manifest, new: Manifest) -> str:
    """What differs between two manifests, in words."""
    if old.format != new.format:
        return f"format {old.format} → {new.format}"
    before, after = asdict(old.wish), asdict(new.wish)
    words = [f"{key} {before[key]} → {after[key]}" for key in after if before[key] != after[key]]
    numbers = (("files", old.num_files, new.num_files), ("bytes", old.num_bytes, new.num_bytes))
    words += [f"{name} {first:,} → {second:,}" for name, first, second in numbers if first != second]
    words += ["the tokenizer's file"] if old.tokenizer_file != new.tokenizer_file else []
    return ", ".join(words) or "contents or times of files"


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
