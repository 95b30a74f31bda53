"""ModulePlan: what is to be done with a module of the user's own, of which nothing is known but its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from phalanx.plan import plan as plans
from phalanx.plan.comm import Group
from phalanx.plan.groups import axis_groups, tied_groups
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import Parameter
from phalanx.spec.job import JobSpec

Role = Literal["trained", "frozen", "buffer"]

STATE_KINDS: Mapping[Role, tuple[str, ...]] = {
    "trained": ("weight", "exp_avg", "exp_avg_sq"),
    "frozen": ("frozen",),
    "buffer": ("buffer",),
}
"""What a checkpoint holds of a tensor: optimizer state of trained parameters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensor:
    """One tensor of a module, under the module's own name for it. `role`: a parameter that is trained or frozen, or a
    buffer, as the statistics of a batch norm are."""

    name: str
    shape: tuple[int, ...]
    role: Role = "trained"

    @property
    def parameter(self) -> Parameter:
        """The same as flat buffers and checkpoints hold it, row-major: all dims but the first as columns, and a scalar
        as a vector of one."""
        first, *rest = self.shape or (1,)
        return Parameter(name=self.name, shape=(first, math.prod(rest)) if rest else (first,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """How to train a module: the job, of which it needs no `data`, and the layout. `job.seq_len` counts the tokens
    of one sample, or is 1 where samples have none; it touches nothing but the speed that is shown.

    `tensors` are the module's, whole and in its own order, and `tied` says whether both ends of the pipeline hold a
    copy of some; `phalanx.prepare` fills them in, so that ranks notice if they build different modules, and checkpoints
    know what they hold.
    """

    job: JobSpec
    layout: Layout
    tensors: tuple[ModuleTensor, ...] = ()
    tied: bool = False

    def of(self, tensors: Iterable[ModuleTensor], *, tied: bool = False) -> ModulePlan:
        """The same plan for a module with these tensors."""
        return replace(self, tensors=tuple(tensors), tied=tied)

    def kinds(self) -> dict[str, dict[str, Parameter]]:
        """What a checkpoint holds: global tensors by kind and name."""
        held: dict[str, dict[str, Parameter]] = {}
        for tensor in self.tensors:
            for kind in STATE_KINDS[tensor.role]:
                held.setdefault(kind, {})[tensor.name] = tensor.parameter
        return held

    def groups(self) -> tuple[Group, ...]:
        """Every group of more than one rank."""
        return axis_groups(self.layout) + (tied_groups(self.layout) if self.tied else ())

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        plans.write(self, path)

    @classmethod
    def read(cls, path: Path) -> ModulePlan:
        """Read what `write` wrote. Raises SpecError as `Plan.read` does."""
        return plans.built(cls, plans.read_table(path), path)

    def digest(self) -> str:
        """A hash of all that ranks must agree on."""
        return plans.digest(self.agreed())

    def differences(self, other: plans.Agreeing) -> list[str]:
        """The keys that differ, as "job.seed: 1 here, 2 there"."""
        return plans.differences(self.agreed(), other.agreed())

    def agreed(self) -> dict[str, Any]:
        """What ranks must agree on, as JSON has it."""
        tensors = {tensor.name: f"{tensor.role} {list(tensor.shape)}" for tensor in self.tensors}
        return {"module": tensors, "job": plans.plain(self.job), "layout": plans.plain(self.layout)}


def read_plan(path: Path) -> Plan | ModulePlan:
    """The plan at `path`, whichever it is. Raises SpecError as `Plan.read` does."""
    return ModulePlan.read(path) if "tensors" in plans.read_table(path) else Plan.read(path)
