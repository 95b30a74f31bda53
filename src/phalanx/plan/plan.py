"""Plan: the one artefact between deciding and doing. A worker needs `plan.json` and its rank, nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from phalanx.errors import SpecError
from phalanx.plan.comm import Group
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.rundir import write_whole
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.document import Document, Place, read_text
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.spec.schema import checked, shown

FORMAT_VERSION = 1


class Agreeing(Protocol):
    """A plan of either kind, as far as ranks must agree on it."""

    def agreed(self) -> dict[str, Any]:
        """What ranks must agree on, as JSON has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner believes: bytes by kind for each pipeline stage, seconds of a step by kind, and the assumptions
    made."""

    memory_bytes: tuple[Mapping[str, int], ...]
    step_s: float
    step_s_by_kind: Mapping[str, float]
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        memory = tuple(MappingProxyType(dict(stage)) for stage in self.memory_bytes)
        object.__setattr__(self, "memory_bytes", memory)
        object.__setattr__(self, "step_s_by_kind", MappingProxyType(dict(self.step_s_by_kind)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The three specs, the layout, and what it is expected to cost (None if nobody asked)."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout
    prediction: Prediction | None = None

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all: into a file beside `path`, which then takes its place."""
        write(self, path)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read what `write` wrote. Raises SpecError for a file that is missing, not a plan, or of another version, and
        for keys that are missing, unknown or wrong; all of them are named."""
        return built(cls, read_table(path), path)

    def groups(self) -> tuple[Group, ...]:
        """Every group of more than one rank."""
        return groups(self.model, self.layout)

    def digest(self) -> str:
        """A hash of all that ranks must agree on: model, job and layout. Equal wherever and whenever it is taken."""
        return digest(self.agreed())

    def differences(self, other: Agreeing) -> list[str]:
        """The keys of model, job and layout that differ, as "job.seq_len: 64 here, 128 there"."""
        return differences(self.agreed(), other.agreed())

    def agreed(self) -> dict[str, Any]:
        """What ranks must agree on, as JSON has it."""
        return {name: plain(getattr(self, name)) for name in AGREED}


AGREED = ("model", "job", "layout")
"""The parts of a plan that decide what is computed."""

_REMEDY = "write it again with `phalanx plan RUN -o plan.json`"

_Plan = TypeVar("_Plan")


def write(plan: Any, path: Path) -> None:
    """Write a plan of either kind; see `Plan.write`."""
    text = json.dumps({"format_version": FORMAT_VERSION, **plain(plan)}, indent=2, allow_nan=False)
    write_whole(path, text + "\n", synced=True)


def read_table(path: Path) -> dict[str, Any]:
    """What stands in the plan at `path`, but for its version. Raises SpecError as `Plan.read` does."""
    try:
        table = json.loads(read_text(path))
    except RecursionError:
        raise SpecError("is not a plan: it is nested too deeply", where=str(path), instead=_REMEDY) from None
    except json.JSONDecodeError as error:
        raise SpecError(f"is not JSON: {error.msg}", where=f"{path}:{error.lineno}", instead=_REMEDY) from None
    if not isinstance(table, dict) or "format_version" not in table:
        raise SpecError("is not a plan: it has no format_version", where=str(path), instead=_REMEDY)
    version = table.pop("format_version")
    if version != FORMAT_VERSION:
        what = f"is a plan of format version {shown(version)}; this is version {FORMAT_VERSION}"
        raise SpecError(what, where=str(path), instead=_REMEDY)
    return table


def built(kind: type[_Plan], table: dict[str, Any], path: Path) -> _Plan:
    """A plan of this kind from what `read_table` read. Raises SpecError for keys that are missing, unknown or wrong."""
    document = Document(table=table, places={(): Place(text=str(path), folder=path.parent)})
    return checked(document, lambda check, table, key: check.build(kind, table, key))


def digest(agreed: Mapping[str, Any]) -> str:
    """A hash of what ranks must agree on."""
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def differences(agreed: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The dotted keys that differ, each with both values."""
    here, there = _leaves(agreed), _leaves(other)
    keys = sorted(key for key in {*here, *there} if here.get(key) != there.get(key))
    return [f"{key}: {shown(here.get(key))} here, {shown(there.get(key))} there" for key in keys]


def plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses and mappings as tables, tuples as lists.

    A whole float becomes an int, since 1 and 1.0 are equal and must have one digest; reading makes it a float again.
    """
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(agreed: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its dotted key."""
    leaves: dict[str, Any] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, entry in value.items():
                visit(f"{key}.{name}", entry)
        else:
            leaves[key] = value

    for name, value in agreed.items():
        visit(name, value)
    return leaves
