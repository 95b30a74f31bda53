"""A run file, with `--set` overrides, into specs: the one door for TOML. Every mistake is reported at once.

Relative paths in a run file (those of `data`, `checkpoint.resume`, `checkpoint.init_from`, `model.hf`,
`cluster.file`) start from the run file's folder, those in an override from the current folder. They leave here
absolute, so that a plan can be run from anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from phalanx.errors import SpecError
from phalanx.spec import clusters, document, models
from phalanx.spec.cluster import ClusterSpec, Device
from phalanx.spec.document import Document
from phalanx.spec.job import PYTHON_STDLIB, Batch, CheckpointSpec, DataSpec, JobSpec, OptimizerSpec
from phalanx.spec.model import Layers, ModelSpec
from phalanx.spec.schema import Checker, Count, Fraction, Hints, Whole, hints, required, shown, suggest


class LayoutKeys(TypedDict, total=False):
    """Keys of [layout]: the fields of `plan.layout.Layout`, each of which may be left to the planner."""

    tensor: Count
    context: Count
    data: Count
    pipeline: Count
    micro_batch: Batch
    schedule: str
    virtual_stages: Count
    stage_layers: tuple[Whole, ...]
    zero: Literal[0, 1, 2, 3]
    zero_group: Whole
    expert_group: Whole
    sequence_parallel: bool
    recompute: Literal["none", "selective", "full"]
    recompute_every: Layers
    recompute_layers: tuple[Whole, ...]
    bucket_bytes: Count
    reduce: Literal["fp32", "bf16", "fp16", "powersgd", "top-k"]
    reduce_rank: Count
    reduce_fraction: Fraction
    overlap: bool
    tensor_overlap_chunks: Count
    outermost: Literal["pipeline", "data"]


AXES = ("tensor", "context", "data", "pipeline")
LAUNCH = ("comm", "comm_timeout_s")
"""Fields of JobSpec that [launch] holds, since they say how a job runs and not what it computes."""

_JOB_TABLES = {"optimizer": OptimizerSpec, "data": DataSpec, "checkpoint": CheckpointSpec}


def _schema() -> dict[str, Hints]:
    """The tables of a run file, each with its keys and their types."""
    job = {name: hint for name, hint in hints(JobSpec).items() if name not in _JOB_TABLES}
    return {
        "model": {**hints(ModelSpec), "hf": str, "style": models.Style},
        "cluster": {**hints(ClusterSpec), "device": str | Device, "file": str},
        "job": {name: hint for name, hint in job.items() if name not in LAUNCH},
        **{name: hints(cls) for name, cls in _JOB_TABLES.items()},
        "layout": hints(LayoutKeys),
        "launch": {name: job[name] for name in LAUNCH},
    }


TABLES = _schema()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a run file says: the three specs, and the keys given under [layout], which the planner must keep."""

    path: Path
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Mapping[str, Any]
    document: Document

    def where(self, key: str) -> str:
        """Where `key` ("layout.tensor") is written, as "run.toml:12" or "--set layout.tensor=2"; for a key that is not
        there, the place of its table or the file."""
        return self.document.where(tuple(key.split(".")))


def load(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read the run file at `path`, lay `overrides` ("layout.tensor=2") over it, check and complete it.

    Raises SpecError with all mistakes, each with its place, the value, what is legal and the nearest known name.
    """
    run, problems = document.override(document.read(path), overrides)
    lost: set[str] = set()
    for table, sources, with_base in (
        ("model", ("name", "hf"), models.with_base),
        ("cluster", ("name", "file"), _with_cluster),
    ):
        given = run.table.get(table, {})
        try:
            if isinstance(given, dict) and all(isinstance(given.get(source, ""), str) for source in sources):
                run = with_base(run)
            else:
                lost.add(table)
        except SpecError as error:
            problems += error.problems
            lost.add(table)
    check = Checker(run, _homes())
    check.problems += problems
    tables = _known_keys(check)
    job = _job(check, tables)
    layout = check.fields(hints(LayoutKeys), tables["layout"], ("layout",))
    model = cluster = None
    for table in lost:  # nothing to complete it from, but what is given can be checked
        known = len(check.problems)
        check.fields(TABLES[table], tables[table], (table,))
        check.problems[known:] = (each for each in check.problems[known:] if not each.what.startswith("missing key"))
    if "model" in run.table and "model" not in lost:
        # A wrong sequence length is reported as itself, not as a missing model.max_seq_len.
        model = models.build(check, tables["model"], ("model",), seq_len=job.seq_len if job else 1)
    if "cluster" not in lost:
        cluster = clusters.build(check, tables["cluster"], ("cluster",))
    _check_together(check, model, job)
    check.finish()
    assert model and cluster and job
    return RunSpec(
        path=path, model=model, cluster=cluster, job=job, layout=MappingProxyType(layout), document=check.document
    )


def _homes() -> dict[str, str]:
    """The table of each key that only one table has."""
    places = [(name, table) for table, known in TABLES.items() for name in known]
    counts = Counter(name for name, _ in places)
    return {name: table for name, table in places if counts[name] == 1}


def _with_cluster(run: Document) -> Document:
    """The cluster's base; this machine has as many devices as the layout asks for, or else as it has cores."""
    table = run.table.get("layout", {})
    sizes = [table.get(axis) for axis in AXES] if isinstance(table, Mapping) else []
    given = math.prod(size for size in sizes if type(size) is int and size > 0)
    if isinstance(table, Mapping) and "data" not in table:
        given *= max(1, clusters.num_cores() // given)
    largest = max(AXES, key=lambda axis: table.get(axis, 0) if type(table.get(axis)) is int else 0) if sizes else ""
    return clusters.with_base(run, given, ("layout", largest))


def _known_keys(check: Checker) -> dict[str, dict[str, Any]]:
    """The known keys of each known table; everything else is noted."""
    known: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for table, value in check.document.table.items():
        if table not in TABLES:
            home = check.homes.get(table)
            instead = f"{table} belongs in [{home}]" if home else suggest(table, TABLES)
            check.problem((table,), f"unknown {'table' if isinstance(value, dict) else 'key'} {table}", instead)
        elif not isinstance(value, dict):
            check.problem(
                (table,), f"{table} = {shown(value)}: expected a table", f"write [{table}] on a line of its own"
            )
        else:
            for name in value:
                if name in TABLES[table]:
                    known[table][name] = value[name]
                else:
                    check.unknown((table, name), TABLES[table])
    if "model" not in check.document.table:
        check.problem((), "missing table [model]", 'write name = "llama-3-8b" in [model], or hf, or the sizes')
    return known


def _job(check: Checker, tables: Mapping[str, dict[str, Any]]) -> JobSpec | None:
    """The JobSpec that [job], [launch] and the tables of its parts describe; None if something in them is wrong."""
    before = len(check.problems)
    values = check.fields(TABLES["job"], tables["job"], ("job",))
    values |= check.fields(TABLES["launch"], tables["launch"], ("launch",))
    check.require(required(JobSpec), JobSpec, tables["job"], ("job",))
    optimizer = check.build(OptimizerSpec, tables["optimizer"], ("optimizer",))
    data = check.build(DataSpec, tables["data"], ("data",))
    checkpoint = check.build(CheckpointSpec, tables["checkpoint"], ("checkpoint",))
    if len(check.problems) > before or not (optimizer and data and checkpoint):
        return None

    def absolute(*key: str, words: Container[str] = ()) -> dict[str, Any]:
        """The path at `key` as a field to replace; nothing for one of `words`, or if no path is given."""
        value = tables[key[0]].get(key[1])
        return {} if value is None or value in words else {key[1]: str(check.document.path(key, value))}

    sets = (replace(entry, path=str(check.document.path(("data", "sets"), entry.path))) for entry in data.sets)
    data = replace(data, **absolute("data", "path"), **absolute("data", "text", words=[PYTHON_STDLIB]))
    data = replace(data, sets=tuple(sets), **absolute("data", "validation_path"))
    resume = absolute("checkpoint", "resume", words=["auto", "never"])
    checkpoint = replace(checkpoint, **resume, **absolute("checkpoint", "init_from"))
    return JobSpec(**values, optimizer=optimizer, data=data, checkpoint=checkpoint)


def _check_together(check: Checker, model: ModelSpec | None, job: JobSpec | None) -> None:
    """Note values that are legal alone and not together."""
    if job and job.optimizer.min_lr > job.optimizer.lr:
        what = f"optimizer.min_lr = {job.optimizer.min_lr:g} is above lr = {job.optimizer.lr:g}"
        check.problem(("optimizer", "min_lr"), what, "the curve falls from lr to min_lr")
    if job:
        _check_data(check, job.data)
    if job and model and model.positions == "learned" and job.seq_len > model.max_seq_len:
        what = f"job.seq_len = {job.seq_len} is longer than the model's {model.max_seq_len} learned positions"
        check.problem(("job", "seq_len"), what, f"at most {model.max_seq_len}, or model.max_seq_len = {job.seq_len}")


def _check_data(check: Checker, data: DataSpec) -> None:
    if data.sets and (data.path is not None or data.text is not None):
        what = f"data.{'path' if data.path is not None else 'text'} beside data.sets"
        check.problem(("data", "sets"), what, "path = one more of the sets, or the one set without sets")
    if data.validation_path is not None and data.validation_fraction:
        what = "both data.validation_path and data.validation_fraction"
        check.problem(("data", "validation_fraction"), what, "one of them")
    if data.validate_every_steps and not data.validates:
        what = f"data.validate_every_steps = {data.validate_every_steps} with nothing to validate on"
        instead = "validation_path = a set of its own, or validation_fraction = 0.01 of this one"
        check.problem(("data", "validate_every_steps"), what, instead)
