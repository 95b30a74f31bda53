"""Frameworks: what others call what, and which values they have a counterpart for. Read from frameworks.toml."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

from phalanx.errors import InputError
from phalanx.plan.plan import Plan
from phalanx.spec.schema import suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Settings: TypeAlias = dict[str, Any]
"""Values by the key that a framework knows them by, in the order in which they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework: its name in words, the version that names were `read` from, the profiles of planner.engine that
    price it, for some keys the `only` values that have a counterpart, settings that are `copied` from a value of the
    plan, and its own spellings."""

    name: str
    title: str
    read: str
    engines: Sequence[str]
    only: Mapping[str, Sequence[Any]]
    copied: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    schedules: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)

    def copies(self, plan: Plan) -> Settings:
        """The settings that are a value of `plan` as it stands."""
        return {key: operator.attrgetter(path)(plan) for key, path in self.copied.items()}


@cache
def frameworks() -> dict[str, Framework]:
    """All of frameworks.toml, by name."""
    table = tomllib.loads(resources.files("phalanx.planner").joinpath("frameworks.toml").read_text())
    return {name: Framework(name=name, **entry) for name, entry in table.items()}


def framework(name: str) -> Framework:
    """One framework by name; raises InputError with the known ones."""
    if name not in frameworks():
        raise InputError(f'unknown framework "{name}"', where="--emit", instead=suggest(name, frameworks()))
    return frameworks()[name]
