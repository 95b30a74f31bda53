"""Checks tables against types: what a dataclass says about its fields is the only schema there is.

A field's type says what is legal ("a whole number, at least 1" is `Annotated[int, Range(at_least=1)]`), its default
whether the key may be left out, the end of its name (`_bytes`, `_s`, `flops_per_s`, `_bytes_per_s`) which units a text
such as "80 GiB" may carry; a bare number is in the base unit. Used for run files, named models and clusters, and plans.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx import units
from phalanx.errors import Problem, SpecError
from phalanx.spec.document import Document, Key

T = TypeVar("T")
Hints: TypeAlias = Mapping[str, Any]

_PARSERS: Mapping[str, Callable[[str], float]] = {
    "bytes_per_s": units.parse_bytes_per_s,
    "flops_per_s": units.parse_flops_per_s,
    "bytes": units.parse_bytes,
    "s": units.parse_seconds,
}
_EXAMPLES = {"bytes_per_s": "25 GB/s", "flops_per_s": "312 TFLOP/s", "bytes": "80 GiB", "s": "30 s"}


class _Wrong:
    """Stands for a value that could not be taken; its mistake is noted already."""


WRONG = _Wrong()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `at_least` or `above` to `at_most` or `below`."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        bounds = {name.replace("_", " "): getattr(self, name) for name in self.__slots__}
        return " and ".join(f"{name} {bound:,.12g}" for name, bound in bounds.items() if math.isfinite(bound))


Count = Annotated[int, Range(at_least=1)]
Count31 = Annotated[int, Range(at_least=1, at_most=2**31 - 1)]  # what token files hold of ids, and of lengths
Whole = Annotated[int, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(above=0, at_most=1)]
Below1 = Annotated[float, Range(at_least=0, below=1)]


def hints(cls: type) -> dict[str, Any]:
    """Field names and types of a dataclass or a TypedDict, bounds included."""
    return get_type_hints(cls, include_extras=True)


SHORT_AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context"}
"""How other frameworks begin the names of axis sizes, as in tp_size."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` begins with (tensor for tensor_parallel and for tp), or is most like; "" if there
    is none, or several are alike (fp16 is as near to fp64 as to bf16)."""
    word = word.lower()
    lower = {name.lower(): name for name in known}
    axis = SHORT_AXES.get(word.split("_")[0])
    if axis in lower:
        return lower[axis]
    begins = [name for name in lower if word.startswith(f"{name}_")]
    if begins:
        return lower[max(begins, key=len)]
    matches = difflib.get_close_matches(word, lower, n=2, cutoff=0.5)
    scores = {difflib.SequenceMatcher(a=name, b=word).ratio() for name in matches}
    return lower[matches[0]] if matches and len(scores) == len(matches) else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """What to write instead of the unknown `word`: the nearest known name, or those that begin with it (A100 for
    A100-SXM4-80GB), and all of them."""
    names = list(known)
    near = nearest(word, names) or " or ".join(name for name in names if name.lower().startswith(f"{word.lower()}-"))
    return (f"did you mean {near}? " if near else "") + f"known: {', '.join(names)}"


def unit_of(name: str) -> str:
    """The unit that a field's name ends in, or ""."""
    return next((unit for unit in _PARSERS if name == unit or name.endswith(f"_{unit}")), "")


def describe(hint: Any, unit: str = "") -> str:
    """What is legal for a type, in words."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(options[0], unit)}, {options[1]}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option, unit) for option in options if option is not types.NoneType)
    if origin is Literal:
        return f"one of {', '.join(shown(option) for option in options)}"
    if origin is tuple:
        if options[-1] is ...:
            return f"a list, each {describe(options[0], unit)}"
        return f"a list of {len(options)}, each {describe(options[0], unit)}"
    if origin is collections.abc.Mapping:
        return f"a table, each value {describe(options[1], unit)}"
    if dataclasses.is_dataclass(hint):
        needed = required(hint)  # type: ignore[arg-type]  # it is a class, not an instance
        others = [name for name in hints(hint) if name not in needed]  # type: ignore[arg-type]
        return f"a table with {', '.join(needed)}" + (f"; it may have {', '.join(others)}" if others else "")
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}[hint]
    return f'{words} or a text such as "{_EXAMPLES[unit]}"' if unit else words


def shown(value: Any) -> str:
    """A value as TOML would write it, cut to one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Checker:
    """Turns the tables of one document into values, and gathers every mistake instead of stopping at the first.

    `homes` names the table that a key belongs to, for keys that are found in the wrong one.
    """

    def __init__(self, document: Document, homes: Mapping[str, str] | None = None) -> None:
        self.document = document
        self.homes = homes or {}
        self.problems: list[Problem] = []

    def problem(self, key: Key, what: str, instead: str = "") -> _Wrong:
        """Note one mistake at `key`."""
        self.problems.append(Problem(what=what, where=self.document.where(key), instead=instead))
        return WRONG

    def finish(self) -> None:
        """Raise SpecError with all mistakes noted so far, if there are any, in the order of files and lines."""
        if self.problems:
            raise SpecError(sorted(self.problems, key=_by_line))

    def build(self, cls: type[T], table: Any, key: Key) -> T | None:
        """The dataclass `cls` from `table`, which stands at `key`; None, with the mistakes noted, if any is wrong."""
        if not isinstance(table, Mapping):
            self._refuse(key, table, cls)
            return None
        before = len(self.problems)
        values = self.fields(hints(cls), table, key)
        self.require(required(cls), cls, table, key)
        return cls(**values) if len(self.problems) == before else None

    def fields(self, known: Hints, table: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """The values in `table` that are right; unknown keys and wrong values are noted."""
        values = {}
        for name, raw in table.items():
            if name in known:
                values[name] = self.take(known[name], raw, (*key, name), unit_of(name))
            else:
                self.unknown((*key, name), known)
        return {name: value for name, value in values.items() if value is not WRONG}

    def unknown(self, key: Key, known: Iterable[str]) -> None:
        """Note an unknown key, and where it belongs or what it was meant to be."""
        home, known = self.homes.get(key[-1]), list(known)
        instead = f"{key[-1]} belongs in [{home}]" if home else suggest(key[-1], known)
        if home and len(key) > 1:
            instead += f"; [{'.'.join(key[:-1])}] has {', '.join(known)}"
        self.problem(key, f"unknown key {'.'.join(key)}", instead)

    def require(self, names: Iterable[str], cls: type, table: Mapping[str, Any], key: Key) -> None:
        """Note each of `names` that `table` lacks."""
        for name in names:
            if name not in table:
                instead = f"write {name} = … in [{'.'.join(key)}]: {describe(hints(cls)[name], unit_of(name))}"
                self.problem(key, f"missing key {'.'.join((*key, name))}", instead)

    def take(self, hint: Any, raw: Any, key: Key, unit: str = "", whole: Any = None) -> Any:
        """`raw` as a value of type `hint`, or WRONG. `whole` is the type to tell the user, if `hint` is part of it."""
        whole = whole or hint
        origin, options = get_origin(hint), get_args(hint)
        if origin is Annotated:
            value = self.take(options[0], raw, key, unit, whole)
            return value if value is WRONG or value in options[1] else self._refuse(key, raw, hint, unit)
        if origin in (Union, types.UnionType):
            if type(raw) in (types.NoneType, str) and type(raw) in options:  # a text may be a name for a table
                return raw
            *_, inner = (option for option in options if option is not types.NoneType)
            return self.take(inner, raw, key, unit, whole)
        if dataclasses.is_dataclass(hint):
            value = self.build(hint, raw, key)  # type: ignore[arg-type]  # it is a class, not an instance
            return WRONG if value is None else value
        if origin is Literal:
            if any(raw == option and type(raw) is type(option) for option in options):
                return raw
            if isinstance(raw, str) and raw in map(str, options):
                return self._refuse(key, raw, hint, instead=f"without quotes: {raw}")
            near = nearest(raw, map(str, options)) if isinstance(raw, str) else ""
            return self._refuse(key, raw, hint, instead=f"did you mean {shown(near)}?" if near else "")
        if origin is tuple:
            return self._tuple(hint, raw, key, unit)
        if origin is collections.abc.Mapping:
            if not isinstance(raw, Mapping):
                return self._refuse(key, raw, hint, unit)
            values = {name: self.take(options[1], value, (*key, name), unit) for name, value in raw.items()}
            return WRONG if WRONG in values.values() else values
        return self._scalar(hint, raw, key, unit, whole)

    def _tuple(self, hint: Any, raw: Any, key: Key, unit: str) -> Any:
        options = get_args(hint)
        if not isinstance(raw, list):
            return self._refuse(key, raw, hint, unit)
        if options[-1] is ...:
            options = options[:1] * len(raw)
        if len(raw) != len(options):
            return self._refuse(key, raw, hint, unit)
        values = tuple(self.take(option, value, key, unit) for option, value in zip(options, raw, strict=True))
        return WRONG if WRONG in values else values

    def _scalar(self, hint: type, raw: Any, key: Key, unit: str, whole: Any) -> Any:
        if unit and isinstance(raw, str):
            try:
                return hint(_PARSERS[unit](raw))
            except ValueError as error:
                return self.problem(key, f"{'.'.join(key)}: {error}", f'write a unit, as in "{_EXAMPLES[unit]}"')
        if _fits(hint, raw):
            return hint(raw)
        instead = ""
        if hint is int and type(raw) is int:
            instead = "a number of less than 64 bits"
        elif hint is int and isinstance(raw, float) and raw.is_integer():
            instead = f"write {int(raw)}"
        elif hint is not str and isinstance(raw, str):
            instead = f"{'true or false' if hint is bool else 'a number'}, without quotes"
        elif hint is str and not isinstance(raw, (dict, list)):
            instead = f'text needs quotes: "{raw}"'
        return self._refuse(key, raw, whole, unit, instead)

    def _refuse(self, key: Key, raw: Any, hint: Any, unit: str = "", instead: str = "") -> _Wrong:
        return self.problem(key, f"{'.'.join(key)} = {shown(raw)}: expected {describe(hint, unit)}", instead)


def checked(document: Document, build: Callable[[Checker, dict[str, Any], Key], T | None]) -> T:
    """What `build` makes of the table of `document`. Raises SpecError with all that is wrong with it."""
    check = Checker(document)
    made = build(check, document.table, ())
    check.finish()
    assert made is not None
    return made


def _by_line(problem: Problem) -> tuple[str, int]:
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (problem.where, 0)


def _fits(hint: type, raw: Any) -> bool:
    """Whether `raw` is a `hint`; a whole number will do for a float, and numbers must be of a size that both have."""
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return abs(raw) <= sys.float_info.max if hint is float else type(raw) is hint and abs(raw) < 2**63
    return type(raw) is hint


def required(cls: type) -> list[str]:
    """Names of the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [field.name for field in dataclasses.fields(cls) if field.default is missing is field.default_factory]
