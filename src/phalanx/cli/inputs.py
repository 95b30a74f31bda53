"""What several commands take: a run file or a plan, with overrides; and the Plan that they come to."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, DataError, InputError, LayoutError, Problem
from phalanx.plan.layout import AXES, Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import SCHEDULES
from phalanx.rundir import RunDir
from phalanx.spec.job import DataSpec
from phalanx.spec.load import RunSpec, load

if TYPE_CHECKING:
    from phalanx.data.source import Source
    from phalanx.launch.environment import Launched
    from phalanx.planner.search import Search


def add_run(parser: argparse.ArgumentParser, *, plans: bool = False) -> None:
    """The run file (or a plan.json) and `--set`."""
    what = "a run file (TOML)" + (" or a plan (JSON)" if plans else "")
    parser.add_argument("run", type=Path, metavar="RUN_OR_PLAN" if plans else "RUN", help=what)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`--set`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a key of the run file; may be repeated",
    )


def count_of(noun: str) -> Callable[[str], int]:
    """The type of an argument that says how many `noun` there are to be, 1 or more."""

    def count(text: str) -> int:
        number = int(text)
        if number < 1:
            raise argparse.ArgumentTypeError(f"{number} {noun}, not 1 or more")
        return number

    return count


def remark(line: str) -> None:
    """Tell a person something that is no part of the output."""
    sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """What is written in here goes to `path`, which `option` named: if that fails, it is wrong input."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: "/", or a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write {path}: {reason}", where=option) from error


def plan_of(path: Path, overrides: Sequence[str], launched: Launched | None = None) -> Plan:
    """The Plan to carry out: read from a plan.json, or made from a run file, whose layout keys are kept.

    `launched` says how many processes there are, if somebody else started them. Raises InputError for anything that
    cannot work, with all mistakes at once where possible.
    """
    if path.suffix == ".json":
        return _read(path, overrides, launched)
    return _made(load(path, overrides), launched)


def with_data(plan: Plan, *, quiet: bool = False) -> Plan:
    """`plan` with its data built, on first use, under the name that workers read it by.

    Raises DataError for data that is missing or damaged, that does not fit the model, or that is less than one batch:
    of several sets and the one to validate on, all that are missing at once.
    """
    from rich.console import Console

    from phalanx.data.build import ensure

    missing: list[Problem] = []

    def there(data: DataSpec) -> str:
        try:
            return str(ensure(data, plan.model.vocab, Path("data"), Console(stderr=True, quiet=quiet)).absolute())
        except DataError as error:
            missing.extend(error.problems)
            return ""

    data = plan.job.data
    if data.sets:
        data = replace(data, sets=tuple(replace(entry, path=there(DataSpec(path=entry.path))) for entry in data.sets))
    else:
        data = replace(data, path=there(data), text=None)
    if data.validation_path is not None:
        data = replace(data, validation_path=there(DataSpec(path=data.validation_path)))
    if missing:
        raise DataError(missing)
    plan = replace(plan, job=replace(plan.job, data=data))
    source_of(plan)
    return plan


def source_of(plan: Plan) -> Source:
    """The data of a plan that `with_data` returned. Raises DataError as that does."""
    from phalanx.data.source import Source

    return Source.of(plan.job, plan.model.vocab)


def resumed(plan: Plan, wish: str | None) -> Plan:
    """`plan`, going on as `--resume` says, if it was given. Raises InputError for a folder that does not exist."""
    if wish is None:
        return plan
    if wish not in ("auto", "never"):
        if not Path(wish).is_dir():
            instead = "auto, never, or the folder of a checkpoint"
            raise InputError(f"there is no checkpoint {wish}", where="--resume", instead=instead)
        if (Path(wish) / "checkpoints").is_dir():
            instead = f"one of {Path(wish) / 'checkpoints'}, or --run-dir {wish} to go on there from the newest"
            raise InputError(f"{wish} is the folder of a run", where="--resume", instead=instead)
        wish = str(Path(wish).absolute())
    return replace(plan, job=replace(plan.job, checkpoint=replace(plan.job.checkpoint, resume=wish)))


def check_start(plan: Plan, path: Path, overrides: Sequence[str], run_dir: RunDir | None) -> None:
    """See that the checkpoint that a run shall go on from is whole, or that one with nothing to go on from in `run_dir`
    (None: a new folder) can start with the weights it names. Raises CheckpointError, with the line of the run file at
    `path`, if not; and InputError where blocks shall be compiled and there is nothing to compile with."""
    from phalanx.checkpoint.folder import find, whole

    _check_compiler(plan, path, overrides)
    start, resume = plan.job.checkpoint.init_from, plan.job.checkpoint.resume
    try:
        if resume not in ("auto", "never"):
            key = "checkpoint.resume"
            whole(Path(resume))
        elif start is not None and not (resume == "auto" and run_dir and find(run_dir.checkpoints)):
            from phalanx.checkpoint.weights import open_weights  # with torch, which only such a run needs here

            key = "checkpoint.init_from"
            open_weights(Path(start), plan.model)
    except InputError as error:
        where = _where(path, overrides, key, f"job.{key}")
        found = [replace(each, what=f"{key}: {each.where}: {each.what}", where=where) for each in error.problems]
        raise CheckpointError(found) from error


def _check_compiler(plan: Plan, path: Path, overrides: Sequence[str]) -> None:
    if not plan.job.compile:
        return
    from phalanx.trainer.segments import check_compiler  # with torch, which knows of a GPU

    try:
        check_compiler()
    except InputError as error:
        where = _where(path, overrides, "job.compile", "job.compile")
        raise InputError([replace(each, where=where) for each in error.problems]) from error


def _where(path: Path, overrides: Sequence[str], key: str, key_of_plan: str) -> str:
    """Where a key is written, in the run file at `path` or in a plan.json."""
    return f"{path}: {key_of_plan}" if path.suffix == ".json" else load(path, overrides).where(key)


def _read(path: Path, overrides: Sequence[str], launched: Launched | None) -> Plan:
    """A plan.json as it stands: nothing in it is chosen anew."""
    if overrides:
        what = f"--set {overrides[0]} cannot change a plan"
        raise InputError(what, where=str(path), instead="plan anew: phalanx plan RUN --set …")
    plan = Plan.read(path)
    found = [*problems(plan.model, plan.job, plan.cluster, plan.layout), *engine_problems(plan.layout)]
    if found:
        raise LayoutError([replace(problem, where=f"{path}: {problem.where}") for problem in found])
    if launched:
        launched.check_num_ranks(plan.layout.num_ranks)
    return plan


def _made(run: RunSpec, launched: Launched | None) -> Plan:
    """The best plan for the devices of the run's cluster, or for the processes that there are."""
    unsupported = engine_problems(_wanted(run))
    if unsupported:
        raise LayoutError(located(unsupported, run))
    if launched:
        launched.check_multiple(_num_ranks(run.layout))
        per_node = launched.num_ranks // launched.num_nodes
        cluster = replace(run.cluster, num_nodes=launched.num_nodes, devices_per_node=per_node)
        run = replace(run, cluster=cluster)
    plan = ranked(run, top=1).plans[0]
    if launched:
        launched.check_num_ranks(plan.layout.num_ranks)
    return plan


def ranked(run: RunSpec, *, top: int, engine: str = "phalanx") -> Search:
    """The `top` best layouts that keep what the run file says. Raises LayoutError, with the lines of the run file."""
    from phalanx.planner.engine import OURS
    from phalanx.planner.search import search

    try:
        return search(run.model, run.job, run.cluster, run.layout, engine_name=engine, top=top)
    except LayoutError as error:
        # The search speaks of all layouts it looked at; where the keys given are wrong by themselves, that is clearer.
        wanted = _wanted(run)
        found = problems(run.model, run.job, run.cluster, wanted) or (engine_problems(wanted) if engine == OURS else [])
        if not {"data", "micro_batch"} & set(run.layout):  # what data comes to beside wrong keys is no mistake
            found = [each for each in found if each.where != "layout.data"] or found
        found = [*found, *_besides(run, engine, found)] if found else list(error.problems)
        raise LayoutError(located(found, run)) from error


def _besides(run: RunSpec, engine: str, found: Iterable[Problem]) -> tuple[Problem, ...]:
    """What stays wrong once the keys of [layout] that `found` is about are left out: that nothing fits, say."""
    from phalanx.planner.search import search

    wrong = {problem.where for problem in found}
    rest = {key: value for key, value in run.layout.items() if f"layout.{key}" not in wrong}
    if len(rest) == len(run.layout):
        return ()
    try:
        search(run.model, run.job, run.cluster, rest, engine_name=engine, top=1)
    except LayoutError as error:
        return tuple(problem for problem in error.problems if problem.where == run.cluster.name)
    return ()


def _wanted(run: RunSpec) -> Layout:
    """The layout that the run file asks for, if nothing were chosen but the data axis and, as the schedule and
    stage_layers have it, stages."""
    given = dict(run.layout)
    if given.get("schedule") in SCHEDULES:
        given.setdefault("virtual_stages", SCHEDULES[given["schedule"]].virtual_stages[0])
    if given.get("stage_layers"):
        given.setdefault("pipeline", max(1, len(given["stage_layers"]) // given.get("virtual_stages", 1)))
    return Layout(**{"data": max(1, run.cluster.num_devices // _num_ranks(given)), **given})


def _num_ranks(given: Mapping[str, Any]) -> int:
    """Product of the axis sizes that the user gave."""
    return math.prod(given.get(axis, 1) for axis in AXES)


def located(found: Iterable[Problem], run: RunSpec) -> list[Problem]:
    """`found`, with the line of the run file instead of the key that each is about."""

    def place(key: str) -> str:
        if key.startswith("--"):
            return key  # an option of the command line
        return run.where(key) if key.split(".")[0] in ("layout", "job", "model", "cluster") else str(run.path)

    return [replace(problem, where=place(problem.where)) for problem in found]
