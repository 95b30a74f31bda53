"""plan_for: layouts for a module that no ModelSpec describes, ranked by what was recorded of it (own.record)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from phalanx.errors import InputError, LayoutError, Problem
from phalanx.own.blocks import Blocks
from phalanx.own.cuts import check
from phalanx.own.nest import Nest
from phalanx.own.price import ModulePrediction, price
from phalanx.own.record import Recorded, record
from phalanx.own.stage import Forward, Loss, call
from phalanx.plan.layout import Layout
from phalanx.plan.legality import module_problems
from phalanx.planner.candidates import divisors
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.schema import suggest
from phalanx.trainer.flat import COMPUTE_DTYPES
from phalanx.units import format_bytes, format_seconds

LAYOUT_KEYS = tuple(field.name for field in fields(Layout))

ASSUMPTIONS = (
    "recorded: operations, kept bytes and messages of one forward and backward without data",
    "passes over memory one by one, as torch runs them; attention of torch as one kernel",
    "no message of the data axis hides under compute; one block more than a stage keeps is alive",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSearch:
    """Layouts that fit, the fastest first; `num_layouts` legal ones were looked at. `recorded` are the parts of the
    module whole, for one sample. `str()` is a table."""

    plans: tuple[ModulePrediction, ...]
    num_layouts: int
    num_fitting: int
    recorded: tuple[Recorded, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def __str__(self) -> str:
        rows = [
            f"{format_seconds(each.step_s):>9}  {format_bytes(sum(each.memory_bytes.values())):>9}  {each.layout}"
            for each in self.plans
        ]
        heading = f"{'step':>9}  {'memory':>9}  layout ({self.num_fitting} of {self.num_layouts} fit; recorded)"
        return "\n".join([heading, *rows])


def plan_for(
    module: nn.Module,
    job: JobSpec,
    cluster: ClusterSpec,
    batch: Nest,
    loss: Loss,
    *,
    forward: Forward = call,
    blocks: Blocks | str | None = None,
    cuts: Mapping[str, str] | str | None = None,
    given: Mapping[str, Any] | None = None,
    top: int = 10,
) -> ModuleSearch:
    """Rank the layouts over all devices of `cluster` in which `phalanx.prepare` can train `module`. `batch` is an
    example of what it gets, with samples along dim 0; `given` are keys of Layout that keep their value. The module may
    lie on the device "meta"; nothing is computed, and no process started.

    Raises LayoutError if no layout can run or fit, InputError if the module cannot be run without data.
    """
    given = given or {}
    for key in given:
        if key not in LAYOUT_KEYS:
            raise InputError(f"unknown key layout.{key}", where="given", instead=suggest(key, LAYOUT_KEYS))
    for key, only in (("schedule", "1f1b"), ("virtual_stages", 1)):
        if given.get(key, only) != only:
            raise InputError("recorded modules are priced under 1F1B", where=f"layout.{key}", instead=f"{key} = {only}")
    blocks = Blocks(path=blocks) if isinstance(blocks, str) else blocks
    table = None if cuts is None else check(module, cuts, 1)

    dtype = COMPUTE_DTYPES[job.precision]
    recording = functools.partial(record, module, batch, loss, forward=forward, blocks=blocks, cuts=table, dtype=dtype)

    @functools.cache
    def recorded(tensor: int, sequence_parallel: bool, micro_batch: int) -> list[Recorded] | None:
        try:
            if table is not None:
                check(module, table, tensor)
            return recording(tensor=tensor, sequence_parallel=sequence_parallel, micro_batch=micro_batch)
        except InputError:
            if tensor == 1:
                raise
            return None  # this many tensor ranks cannot share it

    num_blocks = len(blocks.listed(module)) if blocks else None
    found = []
    for layout in _layouts(job, cluster, num_blocks, None if table is None else set(table.values()), given):
        parts = recorded(layout.tensor, layout.sequence_parallel, layout.micro_batch)
        if parts is not None:
            found.append(price(layout, parts, job, cluster))
    fitting = _fitting(found, cluster)
    whole = recorded(1, False, 1)
    assert whole is not None
    return ModuleSearch(
        plans=tuple(fitting[:top]), num_layouts=len(found), num_fitting=len(fitting), recorded=tuple(whole)
    )


def _fitting(found: Sequence[ModulePrediction], cluster: ClusterSpec) -> list[ModulePrediction]:
    """Those that fit into a device's memory, fastest first. Raises LayoutError if there are none."""
    if not found:
        what = f"no layout over {cluster.num_devices} devices can train this module"
        raise LayoutError(what, instead="other devices, another job.global_batch, or fewer keys given")
    fitting = [each for each in found if sum(each.memory_bytes.values()) <= cluster.device.memory_bytes]
    if not fitting:
        least = min(found, key=lambda each: sum(each.memory_bytes.values()))
        needed = format_bytes(sum(least.memory_bytes.values()))
        what = f"{least.layout} needs {needed} of {format_bytes(cluster.device.memory_bytes)}, and others more"
        raise LayoutError(Problem(what=what, where=cluster.name, instead="more devices, or larger ones"))
    return sorted(fitting, key=lambda each: (each.step_s, sum(each.memory_bytes.values())))


def _layouts(
    job: JobSpec, cluster: ClusterSpec, num_blocks: int | None, cuts: set[str] | None, given: Mapping[str, Any]
) -> Iterator[Layout]:
    """All legal ways to use all devices, one forward, one backward."""
    devices = cluster.num_devices
    sizes = divisors(devices)
    inside = [size for size in sizes if cuts is not None and cluster.devices_per_node % size == 0] or [1]
    for tensor, pipeline in itertools.product(inside, sizes):
        if devices % (tensor * pipeline):
            continue
        data = devices // (tensor * pipeline)
        options = itertools.product(
            divisors(max(1, job.global_batch // data)),
            (0, 1, 2, 3) if data > 1 else (0,),
            ("none", "full") if num_blocks else ("none",),
            (False, True) if tensor > 1 else (False,),
        )
        for micro_batch, zero, recompute, sequence_parallel in options:
            keys = {
                "tensor": tensor,
                "pipeline": pipeline,
                "data": data,
                "micro_batch": micro_batch,
                "zero": zero,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
            }
            layout = Layout(**{**given, **keys})
            kept = all(getattr(layout, key) == value for key, value in given.items())
            if kept and not module_problems(job, layout, num_blocks, cuts):
                yield layout
