"""TOML documents that remember where each key stands, so that every complaint can name file and line.

The standard parser gives values without places. `_Scanner` walks the same text once more for the places alone; it runs
only on text that the parser has accepted, so it need not judge syntax.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Key = tuple[str, ...]

_BLANK = r"(?:\s|#[^\n]*)*"
_STRINGS = (r'"""(?:\\.|[^\\])*?"""(?:"{0,2})', r"'''.*?'''(?:'{0,2})", r'"(?:\\.|[^"\\])*"', r"'[^']*'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something is written, in words ("run.toml:12"), and the folder that relative paths there start from."""

    text: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A table and the places of its keys; the empty key stands for the document itself."""

    table: dict[str, Any]
    places: Mapping[Key, Place]

    def place(self, key: Key) -> Place:
        """The place of `key`, or of the nearest table that would hold it."""
        while key not in self.places:
            key = key[:-1]
        return self.places[key]

    def where(self, key: Key) -> str:
        """The place of `key` in words."""
        return self.place(key).text

    def over(self, base: Document) -> Document:
        """`base`, with the keys of this document laid over it."""
        return Document(table=_merge(base.table, self.table), places={**base.places, **self.places})

    def below(self, name: str) -> Document:
        """This document as table `name` of a larger one, which keeps its own place."""
        places = {(name, *key): place for key, place in self.places.items() if key}
        return Document(table={name: self.table}, places=places)

    def path(self, key: Key, value: str) -> Path:
        """The absolute path that `value`, written at `key`, means."""
        return Path(os.path.abspath(self.place(key).folder / os.path.expanduser(value)))


def parse(text: str) -> dict[str, Any]:
    """The table that TOML `text` describes, without places: for files of our own."""
    return tomllib.loads(text)


def read_text(path: Path, *, asked_at: str = "") -> str:
    """The text of a file, which the user named at the place `asked_at` if another file did. Raises SpecError when it is
    missing, a folder, unreadable or not UTF-8, and for pipes and devices, which may never end."""
    where, name = (asked_at, f"{path} ") if asked_at else (str(path), "")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise SpecError(f"{name}is no plain file", where=where, instead="write it to a file first")
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise SpecError(f"{name}does not exist", where=where, instead=_neighbours(path)) from None
    except IsADirectoryError:
        raise SpecError(f"{name}is a folder, not a file", where=where, instead=_inside(path, path.suffix)) from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise SpecError(f"{name}is not UTF-8 text ({byte})", where=where, instead="save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise SpecError(f"{name}cannot be read: {error}", where=where) from None


def read(path: Path, *, asked_at: str = "") -> Document:
    """Parse the TOML file at `path`, which the user named at `asked_at`. Raises SpecError as `read_text` does, and when
    it is not TOML."""
    name, text = str(path), read_text(path, asked_at=asked_at)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(_syntax_problem(name, text, str(error))) from None
    except RecursionError:
        raise SpecError("is nested too deeply", where=name) from None
    places = {key: Place(text=f"{name}:{line}", folder=path.parent) for key, line in _Scanner(text).scan().items()}
    return Document(table=table, places={(): Place(text=name, folder=path.parent), **places})


def override(document: Document, settings: Sequence[str]) -> tuple[Document, list[Problem]]:
    """`document` with `settings` ("layout.tensor=2") laid over it, and the mistakes in them.

    A value is read as TOML; what is not TOML is taken as text, so that `job.precision=bf16` needs no quotes. Relative
    paths start from the current folder.
    """
    table, places, problems = copy.deepcopy(document.table), dict(document.places), []
    for setting in settings:
        where = f"--set {setting}"
        match = re.fullmatch(r"\s*([\w-]+(?:\.[\w-]+)*)\s*=\s*(\S.*?)\s*", setting, re.DOTALL)
        if match is None:
            problems.append(Problem(what="is not table.key=value", where=where, instead="--set layout.tensor=2"))
            continue
        key = tuple(match[1].split("."))
        holder = table
        for depth, part in enumerate(key[:-1], start=1):
            holder = holder.setdefault(part, {})
            places.setdefault(key[:depth], Place(text=where, folder=Path()))
            if not isinstance(holder, dict):
                what = f"{'.'.join(key[:depth])} is {holder!r} in {document.where(key[:depth])}, not a table"
                instead = f"--set {'.'.join(key[:depth])}=…, which replaces all of it"
                problems.append(Problem(what=what, where=where, instead=instead))
                break
        else:
            holder[key[-1]] = _setting_value(match[2])
            places[key] = Place(text=where, folder=Path())
    return Document(table=table, places=places), problems


def _setting_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _merge(base: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _syntax_problem(name: str, text: str, message: str) -> Problem:
    """The parser's complaint, with the line that it stopped at."""
    lines = text.splitlines() or [""]
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL)
    reason, number = (match[1], int(match[2] or len(lines))) if match else (message, len(lines))
    number = min(number, len(lines))
    line = lines[number - 1].strip()
    line = line if len(line) <= 100 else f"{line[:97]}..."
    instead = ""
    if re.fullmatch(r"[\w.-]+\s*=\s*[A-Za-z][\w./ -]*(#.*)?", line):
        instead = 'text needs quotes: key = "text" (true and false are written small)'
    if reason.startswith(("Cannot overwrite", "Cannot declare")):
        instead = "it stands above already: keep one of the two"
    if text.lstrip().startswith("{"):
        instead = "this looks like JSON: a plan.json goes to train, verify and schedule show, a run file is TOML"
    return Problem(what=f"is not TOML: {reason}: {line}", where=f"{name}:{number}", instead=instead)


def _neighbours(path: Path) -> str:
    """Files like the one that was looked for in vain."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    return _inside(path.parent, path.suffix)


def _inside(folder: Path, suffix: str) -> str:
    names = sorted(child.name for child in folder.glob(f"*{suffix or '.toml'}"))[:8]
    return f"{folder} has {', '.join(names)}" if names else f"{folder} has no {suffix or '.toml'} file"


class _Scanner:
    """Finds the line of every table header and key in valid TOML text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Key, int] = {}

    def scan(self) -> dict[Key, int]:
        """Key to line number, counted from 1."""
        table: Key = ()
        while self.skip(_BLANK) and self.at < len(self.text):
            if self.text[self.at] == "[":
                self.skip(r"\[\[?")
                table = self.note((), self.key())
                self.skip(r"\s*\]\]?")
            else:
                self.pair(table)
        return self.lines

    def skip(self, pattern: str) -> bool:
        """Move past `pattern`, where the text has it."""
        match = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match is not None

    def note(self, table: Key, key: Key) -> Key:
        """Remember this line for `key` inside `table` and for the tables that a dotted key implies."""
        line = self.text.count("\n", 0, self.at) + 1
        for depth in range(1, len(key) + 1):
            self.lines.setdefault(table + key[:depth], line)
        return table + key

    def key(self) -> Key:
        """A bare, quoted or dotted key."""
        parts: list[str] = []
        while True:
            self.skip(r"[ \t]*")
            start = self.at
            quoted = self.skip(r'"(?:\\.|[^"\\])*"') or self.skip(r"'[^']*'")
            if quoted:
                parts.append(tomllib.loads(f"key = {self.text[start : self.at]}")["key"])
            else:
                self.skip(r"[\w-]+")
                parts.append(self.text[start : self.at])
            self.skip(r"[ \t]*")
            if not self.skip(r"\."):
                return tuple(parts)

    def pair(self, table: Key) -> None:
        """One `key = value`."""
        key = self.note(table, self.key())
        self.skip(r"=[ \t]*")
        self.value(key)

    def value(self, key: Key) -> None:
        """Move past a value; keys of inline tables in it are noted."""
        if self.skip(r"\{"):
            while self.skip(_BLANK + r",?" + _BLANK) and not self.skip(r"\}"):
                self.pair(key)
        elif self.skip(r"\["):
            while self.skip(_BLANK + r",?" + _BLANK) and not self.skip(r"\]"):
                self.value(key)
        elif not any(self.skip(string) for string in _STRINGS):
            self.skip(r"[^,\]}\n#]*")
