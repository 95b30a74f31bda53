"""A Plan as the settings of another framework: Megatron-LM, NeMo, torchtitan, DeepSpeed, Accelerate.

What a framework cannot express is refused; what its settings do not hold, but a script or the environment does, comes
back as remarks: nothing is left out in silence. docs/migrate.md has the same names the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from phalanx.errors import LayoutError, Problem
from phalanx.plan.groups import kv_copies
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.reduction import NARROW
from phalanx.planner import emit_megatron, emit_torch
from phalanx.planner.candidates import of
from phalanx.planner.engine import Engine, engine
from phalanx.planner.estimate import stage_layers
from phalanx.planner.frameworks import Framework, framework


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What belongs into a file or on a command line of the framework, and what has to be said beside it."""

    text: str
    remarks: tuple[str, ...]


WRITERS: Mapping[str, Callable[[Plan, Sequence[int]], tuple[str, list[str]]]] = {
    "megatron-lm": emit_megatron.megatron,
    "nemo": emit_megatron.nemo,
    "torchtitan": emit_torch.torchtitan,
    "deepspeed": emit_torch.deepspeed,
    "accelerate": emit_torch.accelerate,
}

CONFLICTS: Mapping[str, Callable[[Plan], Iterator[Problem]]] = {
    "megatron-lm": emit_megatron.conflicts,
    "nemo": emit_megatron.conflicts,
    "deepspeed": emit_torch.deepspeed_conflicts,
    "accelerate": emit_torch.accelerate_conflicts,
}


def emit(plan: Plan, name: str, engine_name: str) -> Emitted:
    """`plan`, which was priced for the engine `engine_name`, as settings of the framework `name`.

    Raises InputError for an unknown framework, LayoutError with all that it cannot express.
    """
    target, runner = framework(name), engine(engine_name, plan.job)
    plan = replace(plan, layout=effective(plan.layout))
    found = [*_without_counterpart(plan, target), *_conflicts(plan, name)]
    if found:
        raise LayoutError([replace(problem, what=f"{target.title} has no {problem.what}") for problem in found])
    counts = stage_layers(plan.model, plan.job.seq_len, runner, of([plan.layout])).tolist()
    text, remarks = WRITERS[name](plan, counts)
    return Emitted(text=text, remarks=(*_about(plan, target, runner), *remarks))


def emit_first(plans: Sequence[Plan], name: str, engine_name: str) -> Emitted:
    """`emit` of the first of `plans`. Where that raises LayoutError, its last problem names the first of the others
    that the framework can express, and the keys of [layout] that lead there; where there is none, and the plans are
    another engine's, those to plan with."""
    try:
        return emit(plans[0], name, engine_name)
    except LayoutError as error:
        found = list(error.problems)
    for rank, plan in enumerate(plans[1:], start=2):
        try:
            emit(plan, name, engine_name)
        except LayoutError:
            continue
        values = {field.name: getattr(plan.layout, field.name) for field in fields(Layout)}
        differing = [key for key, value in values.items() if value != getattr(plans[0].layout, key)]
        what = f"number {rank} of {len(plans)} is the first that {framework(name).title} can express: {plan.layout}"
        instead = " ".join(f"--set layout.{key}={json.dumps(values[key])}" for key in differing)
        raise LayoutError([*found, Problem(what=what, where="--emit", instead=instead)])
    target = framework(name)
    if engine_name not in target.engines:
        what = f"{target.title} can express none of the {len(plans)} best layouts of engine {engine_name}"
        instead = f"--engine {' or --engine '.join(target.engines)}"
        found.append(Problem(what=what, where="--emit", instead=instead))
    raise LayoutError(found)


def effective(layout: Layout) -> Layout:
    """`layout` without what changes nothing at its sizes, so that nobody is refused for it."""
    if layout.pipeline == 1:
        layout = replace(layout, schedule="1f1b", virtual_stages=1, stage_layers=None)
    if layout.pipeline == 1 or layout.data == 1:
        layout = replace(layout, outermost="pipeline")
    if layout.tensor == 1:
        layout = replace(layout, sequence_parallel=False, tensor_overlap_chunks=1)
    if layout.data == 1:
        layout = replace(layout, zero=0, zero_group=0, reduce="fp32", bucket_bytes=Layout().bucket_bytes)
    if layout.num_ranks == 1:
        layout = replace(layout, overlap=True)
    return replace(layout, zero_group=0) if layout.zero_group == layout.data else layout


def _about(plan: Plan, target: Framework, runner: Engine) -> Iterator[str]:
    """What is worth knowing of any framework's settings."""
    layout = plan.layout
    yield f"{target.title} {target.read}; {layout.num_ranks} processes: {layout}"
    if runner.name not in target.engines:
        advised = " or ".join(f"--engine {name}" for name in target.engines)
        yield f"chosen and priced as engine {runner.name} runs it; {advised} does that for {target.title}"
    elif target.name != "accelerate" and runner.reduce_bytes < 4 and layout.reduce == "fp32" and layout.data > 1:
        yield f'engine {runner.name} prices gradients that travel in 16 bits, as under reduce = "bf16"; here in 32'
    if runner.name in target.engines and runner.tensor_overlap and layout.sequence_parallel:
        how = "--tp-comm-overlap, or in NeMo MegatronCommOverlapCallback(tp_comm_overlap=True)"
        yield f"engine {runner.name} prices messages of the tensor axis beside products: add {how}"
    if target.name in emit_megatron.NAMES and layout.recompute == "selective" and runner.kernels.selective != "core":
        yield "selective recompute is of the attention core there; the plan means all that is cheap to make again"
    if target.name in ("torchtitan", "accelerate") and layout.context > 1:
        yield "FSDP cuts parameters over the context axis as well there: less memory, more messages than planned"
    yield "not in it: what [optimizer], [data] and [checkpoint] say; docs/migrate.md has the names"


def _without_counterpart(plan: Plan, target: Framework) -> Iterator[Problem]:
    for key, known in target.only.items():
        table, name = key.split(".")
        value = getattr(getattr(plan, table), name)
        if value not in known:
            instead = f"{name} = {' or '.join(map(json.dumps, known))}"
            yield Problem(what=f"counterpart of {name} = {json.dumps(value)}", where=key, instead=instead)


def _conflicts(plan: Plan, name: str) -> Iterator[Problem]:
    """What is out of reach for the values of other keys."""
    model, layout = plan.model, plan.layout
    if name in ("megatron-lm", "accelerate") and layout.reduce in {*NARROW} - {plan.job.precision}:
        what = f"gradients that travel as {layout.reduce} beside {plan.job.precision}"
        yield Problem(what=what, where="layout.reduce", instead='reduce = "fp32"')
    if name != "megatron-lm" and kv_copies(model, layout.tensor) > 1:
        what = f"copies of kv heads, of which there are {model.num_kv_heads} for tensor = {layout.tensor}"
        yield Problem(what=what, where="layout.tensor", instead=f"tensor = {model.num_kv_heads} or less")
    some = layout.recompute_layers
    if some is not None and name not in emit_megatron.NAMES:
        yield Problem(what="recompute_layers", where="layout.recompute_layers", instead="leave it out")
    elif some is not None and (layout.recompute != "full" or len(set(some)) > 1):
        what, instead = f"{layout.recompute} recompute of {some} layers", 'recompute = "full" and one number for all'
        yield Problem(what=what, where="layout.recompute_layers", instead=instead)
    if name in CONFLICTS:
        yield from CONFLICTS[name](plan)
