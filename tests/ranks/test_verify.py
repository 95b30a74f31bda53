"""`phalanx verify`: it passes what is right and finds every planted mistake, by the check that is meant to.

The ranks are forked from the test, so that what is planted here reaches them; two runs go through the agent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from helpers import run_worlds
from tiny import tiny_model, tiny_plan

from phalanx.cli.main import main
from phalanx.data.tokens import TokenWriter
from phalanx.launch import environment
from phalanx.launch.local import Result
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import rank_buffers
from phalanx.rundir import RunDir
from phalanx.spec.job import DataSpec
from phalanx.spec.model import ModelSpec
from phalanx.studies import runs, verify
from phalanx.trainer.record import record_in

TESTS = Path(__file__).resolve().parent.parent

SMALL = {"num_layers": 2, "hidden": 32, "head_dim": 8, "ffn": 48, "max_seq_len": 16}
SEQUENCE = Layout(tensor=2, sequence_parallel=True)
ZERO = Layout(data=2, zero=1)
STAGES = Layout(pipeline=2)

LLAMA, TIED = tiny_model(**SMALL), tiny_model(**SMALL, tied=True)
GPT2 = tiny_model("gpt2", **SMALL)
DROPOUT = tiny_model(**SMALL, dropout=0.1, attention_dropout=0.1)

# What is planted, where, and the checks of which each must notice.
PLANTS = {
    "missing_norm_gradient_sum": (SEQUENCE, LLAMA, {"gradients", "gradient norm", "copies of weights"}),
    "norm_counted_twice": (SEQUENCE, LLAMA, {"gradient norm"}),
    "tied_copy_not_summed": (STAGES, TIED, {"gradients", "gradient norm", "copies of weights"}),
    "gradients_times_micro_batches": (ZERO, LLAMA, {"gradients", "gradient norm"}),
    "swapped_kv_copies": (Layout(tensor=4), LLAMA, {"loss", "gradients", "gradient norm"}),
    "stale_zero_gather": (ZERO, LLAMA, {"loss", "copies of weights"}),
    "decay_on_norms": (ZERO, LLAMA, {"weight decay"}),
    "average_instead_of_sum": (ZERO, LLAMA, {"gradients", "gradient norm"}),
    "one_micro_batch_dropped": (ZERO, LLAMA, {"gradients", "gradient norm"}),
    "mask_drawn_per_rank": (Layout(tensor=2), DROPOUT, {"loss", "gradients", "gradient norm", "copies of weights"}),
    "wrong_token_count": (ZERO, LLAMA, {"loss", "gradients", "gradient norm"}),
    "unequal_initial_copies": (STAGES, TIED, {"initial weights"}),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenWriter(Path("tokens"), "uint16") as writer:
        for document in np.array_split(np.random.default_rng(1).integers(0, 250, 4000), 400):
            writer.add(document)
            writer.end_document()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Ranks are forked from this process instead of the agent; the environments that they were to have."""
    environments = []

    def start(plan_path: Path, run_dir: RunDir, entry: str, environ: Mapping[str, str]) -> Result:
        assert entry == verify.WORKER
        environments.append(environ)
        plan = Plan.read(plan_path)
        run_worlds(plan.layout, record_in, plan, run_dir, model=plan.model)
        return Result(exit_code=0)

    monkeypatch.setattr(runs.local, "start", start)
    return environments


def run(plan: Plan, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """The exit code of `phalanx verify`, and its JSON."""
    plan.write(Path("plan.json"))
    code = main(["verify", "plan.json", "--json"])
    return code, json.loads(capsys.readouterr().out)


def small_plan(layout: Layout, model: ModelSpec, **job: Any) -> Plan:
    return tiny_plan(layout, model, **{"seq_len": 16, "precision": "fp32", "data": DataSpec(path="tokens"), **job})


def failed(answer: dict) -> set[str]:
    return {finding["check"] for finding in answer["findings"] if not finding["ok"]}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("plant", PLANTS)
def test_every_planted_mistake_is_found(
    plant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, model, checks = PLANTS[plant]
    getattr(planted, plant)(monkeypatch.setattr)
    code, answer = run(small_plan(layout, model), capsys)
    assert code == 1
    assert not answer["ok"]
    assert checks <= failed(answer), [finding for finding in answer["findings"] if not finding["ok"]]


SOUND = {
    "fp32": (SEQUENCE, LLAMA, "fp32"),
    "fp64": (ZERO, LLAMA, "fp64"),
    "bf16": (Layout(tensor=2, pipeline=2, sequence_parallel=True), TIED, "bf16"),
    "kv copies": (Layout(tensor=4), LLAMA, "fp32"),
    "dropout": (Layout(tensor=2), DROPOUT, "fp32"),
    "gradients that are zero, fp32": (Layout(tensor=2, data=2, zero=1), GPT2, "fp32"),
    "gradients that are zero, bf16": (STAGES, GPT2, "bf16"),
    "one process": (Layout(), LLAMA, "fp32"),
    "shards only": (Layout(data=2, zero=3), LLAMA, "fp32"),
    "separate documents": (Layout(data=2), LLAMA, "fp32"),
    "rounded sums": (Layout(data=2, zero=3, reduce="fp16"), GPT2, "fp32"),
    "largest elements": (Layout(data=2, reduce="top-k"), LLAMA, "fp32"),
    "factors": (Layout(data=2, zero=1, reduce="powersgd"), LLAMA, "fp32"),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_right_passes(case: str, forked: list[Mapping[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    layout, model, precision = SOUND[case]
    data = DataSpec(path="tokens", documents="separate" if case == "separate documents" else "joined")
    code, answer = run(small_plan(layout, model, precision=precision, data=data), capsys)
    assert (code, failed(answer)) == (0, set()), [f for f in answer["findings"] if not f["ok"]]
    compared = {finding["name"].split(" ")[0] for finding in answer["findings"] if finding["check"] == "gradients"}
    assert compared == {piece.parameter.name for b in rank_buffers(model, Layout(), Coord(), 16) for piece in b.pieces}
    assert len(answer["losses"]) == 3
    assert forked == [{}, {}]


def test_a_run_file_is_verified_by_processes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(
        '[model]\nname = "tiny"\nvocab = 300\n[job]\nglobal_batch = 4\nseq_len = 16\nnum_steps = 9\n'
        'precision = "fp32"\n[data]\npath = "afar"\n[layout]\ntensor = 1\npipeline = 2\ndata = 1\nmicro_batch = 1\n'
    )
    Path("here.txt").write_text("".join(f"{number} of many lines\n" for number in range(400)))
    assert main(["verify", "run.toml", "--text", "*.txt", "--steps", "2", "--set", "job.precision=fp64"]) == 0
    output = capsys.readouterr().out
    assert "pipeline 2" in output
    assert "fp64: all" in output
    assert "differ" not in output.replace("difference", "")
    nearest = re.findall(r"^ *\d\.\de[-+]\d\d  \d\.\de[-+]\d\d\b", output, re.MULTILINE)
    assert len(nearest) == 3  # to what is allowed, though all agree


def test_where_gpus_are_fewer_than_ranks_the_cpu_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, forked: list[Mapping[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "num_gpus", lambda: 1)
    small_plan(Layout(data=2), LLAMA).write(Path("plan.json"))
    assert main(["verify", "plan.json"]) == 0
    assert "on the CPU, as there are fewer GPUs (1) than ranks (2)" in capsys.readouterr().out
    assert forked == [environment.NO_GPUS] * 2  # the one process too: both on the same kind of device


def test_gpus_are_counted_where_the_system_has_some(tmp_path: Path) -> None:
    assert environment.num_gpus(tmp_path) == 0
    (tmp_path / "nvidia0").touch()
    assert environment.num_gpus(tmp_path) == torch.cuda.device_count()


def test_a_mistake_in_processes_of_its_own_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(verify, "WORKER", "planted:record_with_a_bug")
    code, answer = run(small_plan(SEQUENCE, LLAMA), capsys)
    assert (code, failed(answer)) == (1, {"gradient norm"})


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    small_plan(ZERO, LLAMA).write(Path("plan.json"))
    assert main(["verify", "plan.json", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err
