"""`phalanx plan`: the table, everything as JSON, one layout in full, a page, a plan; and clear answers to bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.plan.plan import Plan

RUN = """
[model]
name = "llama-3-8b"
[cluster]
name = "dgx-h100"
num_nodes = 2
[job]
global_batch = 64
seq_len = 4096
num_steps = 1000
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_the_table_says_why(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--top", "3"]) == 0
    text = capsys.readouterr().out
    for word in ("likely", "MFU", "comm.", "bubble", "device-h", "device-hours", "does not fit into memory, e.g. "):
        assert word in text
    assert text.startswith("llama-3-8b, 8.03B parameters, on 2 nodes of 8 × H100-SXM5-80GB: 64 sequences of")
    scan = [line.split() for line in text.splitlines() if line.startswith("  tensor ")]
    assert [row[1] for row in scan if row[1].isdigit()] == ["1", "2", "4", "8", "16"]
    assert "a tensor group of 16 does not stay inside a node of 8 devices" in " ".join(text.split())
    for shape in ("data alone  ", "data alone, ZeRO 3", "pipeline and data", "tensor and data", "all three"):
        assert f"\n  {shape}" in text


def test_json_holds_what_its_document_says(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key is documented, and every documented key is there."""
    assert main(["plan", str(run_file), "--json", "--top", "2"]) == 0
    value = json.loads(capsys.readouterr().out)
    section = (Path(__file__).parents[3] / "docs" / "planning.md").read_text().split("## Keys of --json")[1]
    rows = [row.split("|")[1:3] for row in section.split("\n## ")[0].splitlines() if row.startswith("| `")]
    documented = {
        key: set(re.findall(r"`(\w+)`", meaning)) for keys, meaning in rows for key in re.findall(r"`(\w+)`", keys)
    }
    assert set(documented) == set(value)
    for key in ("plans", "messages", "rejected", "shapes"):
        assert documented[key] >= set(value[key][0]), key
    assert documented["model"] == {inner for key in ("model", "cluster", "job") for inner in value[key]}
    assert set(value["front"][0]) <= set(value["plans"][0])
    assert {*documented["scan"], "slower", "because", "plan"} == set(value["scan"][0])
    best = value["plans"][0]
    assert best["low_s"] < best["step_s"] < best["high_s"] and best["layout"]["tensor"] >= 1
    assert all(message["seconds"] >= 0 and message["link"] for message in value["messages"])
    assert best["sent_bytes"] == sum(message["payload_bytes"] for message in value["messages"]) > 0


def test_explain_page_and_plan(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["plan", str(run_file), "--explain", "--html", str(page), "-o", str(plan)]) == 0
    said = capsys.readouterr()
    assert "Messages of one step" in said.out
    assert [line.partition(":")[0] for line in said.err.splitlines()] == [f"wrote {page}", f"wrote {plan}"]
    assert page.read_text().startswith("<!doctype html>")
    assert Plan.read(plan).prediction is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.tensor=3"], ["tensor 3 does not divide 32 query heads", "tensor = 1"]),
        (["layout.data=3"], ["--set layout.data=3: ", "job.global_batch = 63 or 66, or data = 2 or 4"]),
        (["layout.micro_batch=7"], ["does not divide global batch 64", "micro_batch = "]),
        (["cluster.num_nodes=1", "job.seq_len=1048576"], ["GiB of", "activations", "num_nodes = "]),
        (
            ["layout.tensor=3", 'cluster.device.memory_bytes="2 GiB"'],  # both at once
            [
                "tensor 3 does not divide 32 query heads",
                "no layout fits into memory; of the smallest",
                "GiB of 2 GiB: ",
            ],
        ),
        (["layout.tensor=3", "layout.micro_batch=7"], ["tensor 3 does not", "micro-batch 7 × data 5 = 35 does not"]),
        # keys that the planner chooses are as these need them, and no mistakes of their own
        (["layout.context=2"], ["phalanx: --set layout.context=2: the trainer does not cut along the context axis"]),
        (
            ["layout.schedule=zb-v", "layout.zero=3"],
            ["phalanx: --set layout.zero=3: gradients that are cut after every"],
        ),
        (
            ["layout.stage_layers=[9,9]"],
            ["phalanx: --set layout.stage_layers=[9,9]: stage_layers sum to 18, the model"],
        ),
        (["job.global_batch=-4"], ["global_batch"]),
        (["cluster.device.memory_bytes=0"], ["memory_bytes"]),
        (["model.num_experts=8", "model.experts_per_token=2"], ["has experts", "--engine"]),
    ],
)
def test_bad_input_gets_one_clear_answer(
    run_file: Path, overrides: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for text in overrides for part in ("--set", text)]
    assert main(["plan", str(run_file), *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    for word in words:
        assert word in said.err


def test_what_would_fail_after_the_search_fails_before_it(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_file.parent
    options = ["--top", "0", "--html", str(folder / "none" / "a.html"), "-o", str(folder)]
    assert main(["plan", str(run_file), *options]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("phalanx: 3 problems\n--top: 0 layouts\n    → 1 or more\n--html: ")
    assert f"make the folder {folder / 'none'} first" in said.err and f"cannot write {folder}: it is a fold" in said.err
    assert main(["plan", str(run_file), "--json", "--explain"]) == 2
    assert "--explain: not allowed with argument --json" in capsys.readouterr().err
    assert main(["plan", str(run_file), "other.toml"]) == 2
    assert "unknown argument other.toml\n    → phalanx plan --help" in capsys.readouterr().err


def test_a_batch_that_divides_over_no_data_axis_is_said(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--top", "1", "--set", "job.global_batch=61"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "a global batch of 61 leaves no way to a data axis: 64 would divide over all 16 devices" in words
    assert "micro-batch × data does not divide the global batch, e.g. micro-batch 1 × data 16 = 16 does not" in words


def test_a_reader_that_has_seen_enough_is_no_failure(run_file: Path) -> None:
    """`phalanx plan run.toml | head -1`: as of a program that SIGPIPE ended."""
    code = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, "plan", str(run_file), "--top", "1"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_cluster_without_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    device = 'device = { memory_bytes_per_s = "1 TB/s", flops_per_s = { bf16 = "100 TFLOP/s" } }'
    link = 'intra_node = { latency_s = "2 us", bytes_per_s = "100 GB/s" }'
    path.write_text(RUN.replace('name = "dgx-h100"\nnum_nodes = 2', f"devices_per_node = 8\n{device}\n{link}"))
    assert main(["plan", str(path)]) == 2
    assert "memory_bytes" in capsys.readouterr().err


def test_an_unknown_engine_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--engine", "megatron"]) == 2
    assert "megatron-core-2024" in capsys.readouterr().err


def test_planning_loads_no_torch(run_file: Path) -> None:
    """Nor what is slow to load and not needed: masked arrays, checkpoints, the metadata of packages."""
    slow = ("torch", "numpy.ma", "importlib.metadata", "phalanx.checkpoint", "phalanx.launch", "phalanx.data")
    code = "import sys; from phalanx.cli.main import main; main(sys.argv[2:]); "
    code += "print([name for name in sys.argv[1].split(',') if name in sys.modules], file=sys.stderr)"
    html = run_file.with_suffix(".html")
    command = [sys.executable, "-c", code, ",".join(slow), "plan", str(run_file), "--html", str(html)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert done.stderr.splitlines() == [f"wrote {html}", "[]"]
