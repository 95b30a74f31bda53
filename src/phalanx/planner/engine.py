"""Engine: what differs between training systems on the same machine. Read from profiles.toml, each with its source."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from phalanx.errors import SpecError
from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems
from phalanx.plan.operations import Kernels
from phalanx.plan.schedule import SCHEDULES
from phalanx.planner.candidates import RECOMPUTES, Space
from phalanx.spec.cluster import Device
from phalanx.spec.job import JobSpec, Precision
from phalanx.spec.schema import suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 2**30

OURS = "phalanx"
"""The engine of this repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes per parameter held: the parameter in compute precision, its gradient, and what the optimizer keeps;
    `transient` gradients that exist only while backward adds them to others; `bucket` a second copy of them for the
    messages of the data axis, where ZeRO is off."""

    parameter: float
    gradient: float
    optimizer: float
    transient: float = 0.0
    bucket: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One training system.

    Time: `factor` multiplies the whole step (the one number that may be fitted to an engine's published runs).
    `matmul_factor` scales the device's matrix efficiency, `attention_factor` that of its attention kernel, which under
    `portable_attention` is one for all devices (FlashAttention-2 and what came before it);
    `elementwise_passes` is how often memory-bound work passes over memory, relative to fully fused kernels;
    `compiled_passes` the same under `job.compile`, which fuses the loss as well; 0 where that changes nothing.
    `host_layer_s` is what the host needs to issue one layer's forward (backward takes `host_backward` times that),
    `host_micro_batch_s` and `host_step_s` what it needs per micro-batch and step besides.

    Messages: `tensor_overlap` is the share of tensor-axis messages hidden behind compute, `async_gradients` whether
    sums of input gradients run beside the weight gradients; `blocking_transfers` the share of transfers between stages
    that compute waits for, `scatter_boundary` whether only 1 / tensor of an activation is sent and gathered again
    inside the node; `data_overlap` the share of the last backward in which the all-reduce of gradients may hide,
    `scatter_overlap` that for the scatters of ZeRO 1 and 2, `gather_overlap` that of the first forward for new
    parameters; `reduce_bytes` per gradient element sent; `shard_messages` per layer in which ZeRO 1 and 2 move
    gradients and parameters (0: buckets of the layout's size); `tied_shards`: whether both holders of a tied embedding
    add only the shards that they update, not the whole table; `optimizer_bytes` per parameter read and written by the
    optimizer with norm, clipping and casts.

    Memory: `states` by precision; `whole_gradients` the blocks whose gradients are whole at once on their way to the
    shards of ZeRO 2 and 3; `loss_bytes` bytes per logit at the peak (`sharded_loss_bytes` where the vocabulary is cut);
    `whole_gather`: whether ZeRO 1 and 2 gather all new parameters at once, as a second copy of them. Where the tensor
    axis cuts the sequence: `whole_buffers` activations of the whole sequence in buffers that stay, and `run_ahead` of
    them that wait for their collective while the host, ahead of the device, issues later layers; a caching allocator
    gives them to nobody else until it has run. `context_bytes` outside the allocator, where they are more than those of
    any process on the device (`on`); `fragmentation` the ratio of reserved to allocated.

    Two layouts of one model closer than `tie` cannot be told apart (from the residuals of
    benchmarks/planner_accuracy.py; see planner.certainty for single times).
    """

    name: str
    source: str
    kernels: Kernels = field(default_factory=Kernels)
    space: Space = field(default_factory=Space)
    balance: Literal["cost", "layers", "blocks", "thresholds"] = "layers"
    factor: float = 1.0
    matmul_factor: float = 1.0
    attention_factor: float = 1.0
    portable_attention: bool = False
    elementwise_passes: float = 1.0
    compiled_passes: float = 0.0
    host_layer_s: float = 0.0
    host_backward: float = 1.0
    host_micro_batch_s: float = 0.0
    host_step_s: float = 0.0
    tensor_overlap: float = 0.0
    async_gradients: bool = True
    blocking_transfers: float = 0.0
    scatter_boundary: bool = False
    data_overlap: float = 0.0
    scatter_overlap: float = 0.0
    gather_overlap: float = 0.0
    reduce_bytes: float = 4.0
    shard_messages: int = 0
    tied_shards: bool = False
    optimizer_bytes: float = 40.0
    states: dict[str, States] = field(default_factory=dict)
    whole_gradients: int = 0
    loss_bytes: float = 8.0
    sharded_loss_bytes: float = 8.0
    whole_gather: bool = False
    whole_buffers: int = 0
    run_ahead: float = 0.0
    context_bytes: int = 0
    tie: float = 0.08
    fragmentation: float = 1.0

    def on(self, device: Device) -> Engine:
        """This engine with at least the context that every process on `device` has."""
        return replace(self, context_bytes=max(self.context_bytes, device.context_bytes))

    def states_for(self, precision: str) -> States:
        """The recipe for `precision`; raises SpecError where the engine has none."""
        if precision not in self.states:
            what = f"engine {self.name} has no recipe for precision {precision}"
            raise SpecError(what, instead=f"job.precision, one of {_writable(self.states)}")
        return self.states[precision]


def _writable(precisions: Collection[str]) -> str:
    """Those of `precisions` that a run file may name, as words."""
    return ", ".join(name for name in get_args(Precision) if name in precisions)


@cache
def profiles() -> dict[str, Engine]:
    """All engines of profiles.toml, by name."""
    text = resources.files("phalanx.planner").joinpath("profiles.toml").read_text()
    table = tomllib.loads(text)
    engines = {name: _engine(name, table) for name in table["engine"]}
    engines[OURS] = replace(engines[OURS], space=_runnable())
    return engines


def _runnable() -> Space:
    """What this trainer can run, asked of the one door that knows."""

    def runs(**options: Any) -> bool:
        return not engine_problems(Layout(**options))

    return Space(
        schedules=tuple(
            name for name, family in SCHEDULES.items() if runs(schedule=name, virtual_stages=family.virtual_stages[0])
        ),
        zero=tuple(stage for stage in range(4) if runs(zero=stage)),
        recompute=tuple(kind for kind in RECOMPUTES if runs(recompute=kind)),
        recompute_every=tuple(every for every in (1, 2) if runs(recompute="full", recompute_every=every)),
        zero_in_node=runs(data=4, zero=3, zero_group=2),
        max_context=2**20 if runs(context=2) else 1,
    )


def engine(name: str = OURS, job: JobSpec | None = None) -> Engine:
    """One engine by name, as it runs `job` if that is given; raises SpecError with the known ones."""
    known = profiles()
    if name not in known:
        raise SpecError(f'unknown engine "{name}"', instead=suggest(name, sorted(known)))
    found = known[name]
    if job and job.compile and found.compiled_passes:
        kernels = replace(found.kernels, fused_loss=True)
        found = replace(found, elementwise_passes=found.compiled_passes, kernels=kernels)
    return found


def _engine(name: str, table: dict[str, Any]) -> Engine:
    """One entry; `states = "megatron"` names a recipe, `like = "other"` starts from another engine."""
    merged: dict[str, Any] = {}
    for base in _ancestry(name, table["engine"]):
        merged |= {key: value for key, value in table["engine"][base].items() if key != "like"}
    recipes = table["states"][merged.pop("states")]
    space: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in merged.pop("space", {}).items()
    }
    return Engine(
        name=name,
        kernels=Kernels(**merged.pop("kernels", {})),
        space=Space(**space),
        states={precision: States(**recipe) for precision, recipe in recipes.items()},
        context_bytes=int(merged.pop("context_gib", 0.0) * GIB),
        **merged,
    )


def _ancestry(name: str, engines: dict[str, Any]) -> list[str]:
    """`name` and what it starts from, oldest first."""
    chain = [name]
    while "like" in engines[chain[0]]:
        chain.insert(0, engines[chain[0]]["like"])
    return chain
