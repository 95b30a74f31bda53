"""prepare: from a module and a plan to its training."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from phalanx.errors import InputError, LayoutError
from phalanx.own.blocks import Blocks, Cut
from phalanx.own.cuts import check
from phalanx.own.engine import ModuleEngine
from phalanx.own.stage import Forward, call
from phalanx.own.step import Step, Unused
from phalanx.own.units import named_tensors
from phalanx.plan.comm import Comm
from phalanx.plan.legality import module_problems
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.world import Process, World, join

T = TypeVar("T")


def prepare(
    module: nn.Module,
    plan: ModulePlan,
    *,
    forward: Forward = call,
    blocks: Blocks | str | None = None,
    cuts: Mapping[str, str] | str | None = None,
    average_buffers: bool = True,
    unused: Unused = "error",
    run_dir: Path | str | None = None,
) -> Step:
    """Make `module` ready to be trained as `plan` says: join the other ranks, take over rank 0's values, and move the
    parameters into flat buffers. All ranks build the same module and call this.

    `forward(module, micro_batch)` calls the module; without it, a micro-batch that is a mapping becomes keywords, of a
    tuple or list the first entry is the input. `blocks`: where the module has its list of blocks ("model.layers"), and
    what comes before and after; this allows pipelines and recomputation, and takes the place of `forward`.
    `cuts`: how its layers are cut over the tensor axis, a table of patterns of names (see own.cuts), or "auto" for that
    of a model of `transformers`; this allows tensor and sequence parallelism.
    `average_buffers`: whether floating buffers, as batch norm's statistics, become the mean over replicas after each
    step, or stay each replica's own (a checkpoint keeps the first one's).
    `unused`: what a parameter without a gradient is, an error or a gradient of zero. With `run_dir`, the run goes on
    from the last checkpoint there, saves as `plan.job.checkpoint` says, and writes metrics.

    Raises LayoutError for a layout that cannot run, RunError if ranks have different modules or plans.
    """
    if isinstance(blocks, str):
        blocks = Blocks(path=blocks)
    table = None if cuts is None else _once(lambda: check(module, cuts, plan.layout.tensor))
    plan = _once(lambda: checked(module, plan, blocks, table))
    folder = None if run_dir is None else RunDir(Path(run_dir))
    if folder:
        folder.create()
    keep_freed_memory()
    world = join(plan, folder or _nameless())
    atexit.register(_leave, world)
    engine = prepared(world, module, plan, forward=forward, blocks=blocks, cuts=table, average_buffers=average_buffers)
    return Step(world, plan, engine, unused=unused, run_dir=folder)


def _once(check: Callable[[], T]) -> T:
    """What is wrong on all ranks is said once per node; the other ranks there end without a word. What the user sees of
    the traceback is the call, not how we came to refuse it."""
    try:
        return check()
    except InputError as error:
        process = Process.read()
        if process and process.local_rank:
            raise SystemExit(error.exit_code) from error
        raise error.with_traceback(None)  # noqa: B904 (it is the same error)


def checked(module: nn.Module, plan: ModulePlan, blocks: Blocks | None, cuts: Mapping[str, str] | None) -> ModulePlan:
    """The plan with the module's tensors, if it can run here. Raises InputError or LayoutError if not."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            instead = "make it a buffer, or split it into real parts"
            raise InputError(f"{name} is of type {parameter.dtype}", where="module", instead=instead)
    num_blocks, kinds = len(blocks.listed(module)) if blocks else None, None if cuts is None else set(cuts.values())
    found = module_problems(plan.job, plan.layout, num_blocks, kinds)
    if found:
        raise LayoutError(found)
    tied = blocks is not None and bool(Cut(module, blocks, plan.layout).tied)
    process, needed = Process.read(), plan.layout.num_ranks
    num_ranks = process.num_ranks if process else 1
    if num_ranks != needed:
        what = f"the layout ({plan.layout}) needs {needed} processes, got {num_ranks}"
        script = Path(sys.argv[0]).name or "script.py"
        raise LayoutError(what, instead=f"phalanx run --ranks {needed} {script}, or torchrun or srun with as many")
    return plan.of(named_tensors(module), tied=tied)


def prepared(
    world: World,
    module: nn.Module,
    plan: ModulePlan,
    *,
    forward: Forward = call,
    blocks: Blocks | None = None,
    cuts: Mapping[str, str] | None = None,
    average_buffers: bool = True,
) -> ModuleEngine:
    """The engine of `module` among ranks that have met."""
    module.to(world.device)
    _take_over(module, world.comm("world"))
    return ModuleEngine(
        plan,
        world.coord,
        world.comm,
        world.device,
        module,
        forward=forward,
        blocks=blocks,
        cuts=cuts,
        average_buffers=average_buffers,
        on_action=world.follow,
    )


@torch.no_grad()
def _take_over(module: nn.Module, comm: Comm) -> None:
    """Give all ranks the values of the first one."""
    if comm.size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()
        flat = values.view(-1).view(torch.uint8)
        comm.broadcast(flat, root=0, purpose="initial weights")
        if comm.index and not tensor.is_contiguous():
            tensor.copy_(flat.view(values.dtype).view(values.shape))


def _nameless() -> RunDir:
    """A name for this run's records of communication, the same on all its ranks and of no other run on this host."""
    started = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    name = "-".join(started) if any(started) else str(os.getpid())
    return RunDir(Path(tempfile.gettempdir()) / f"phalanx-{name}")


def _leave(world: World) -> None:
    """At the end of the program, if it is a good one: the others shall not take it for a death."""
    if not hasattr(sys, "last_value"):
        world.close()
