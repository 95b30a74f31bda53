"""Generate text: in this process, or in several that share the model."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import LayoutError
from phalanx.launch import environment
from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec import clusters
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.studies.runs import run

if TYPE_CHECKING:
    from phalanx.checkpoint.weights import Weights
    from phalanx.trainer.text import Request

WORKER = "phalanx.trainer.text:work"


def generate(request: Request, weights: Weights, tensor: int, pipeline: int) -> None:
    """Print what `request` asks for; `weights` are those at its path.

    Raises InputError for a prompt that the model cannot take, LayoutError for a model that cannot be cut so,
    DamagedCheckpointError, RunError if one of several processes fails; their folder then stays.
    """
    from phalanx.trainer.generate import Generator, check_prompt
    from phalanx.trainer.text import answer, say

    check_prompt(request.prompt, weights.model)
    layout = Layout(tensor=tensor, pipeline=pipeline)
    if layout.num_ranks == 1:
        answer(request, Generator(weights), say)
        return
    plan = _plan(weights.model, layout)
    run_dir = RunDir(Path(tempfile.mkdtemp(prefix="phalanx-generate-")))
    request.write(run_dir.request)
    run(plan, run_dir, WORKER, environment.NO_GPUS if environment.num_gpus() < layout.num_ranks else {})
    shutil.rmtree(run_dir.path)


def _plan(model: ModelSpec, layout: Layout) -> Plan:
    """Cut the model over as many processes of this machine."""
    cluster = replace(clusters.named(clusters.LOCAL), devices_per_node=layout.num_ranks)
    job = JobSpec(global_batch=1, seq_len=model.max_seq_len, num_steps=1, precision="fp32")
    found = problems(model, job, cluster, layout)
    if found:
        options = {"layout.tensor": "--tensor", "layout.pipeline": "--pipeline"}
        raise LayoutError([replace(problem, where=options.get(problem.where, problem.where)) for problem in found])
    return Plan(model=model, cluster=cluster, job=job, layout=layout)
