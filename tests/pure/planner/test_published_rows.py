"""Rows of the published format as others may write them: parts left out, other machines and engines, nonsense."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from published_case import BENCHMARKS, ROW

LLAMA = ROW | {
    "model": "Llama-8B",
    "arch": "llama",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "vpp": 2,
    "recompute": "none",
    "precision": "bf16",
    "measured": {"tokens_per_s_per_gpu": 5000.0},
}
MIXTURE = LLAMA | {"model": "Mixtral", "num_experts": 8, "top_k": 2, "tp": 4, "pp": 1, "zero": "1"}
SHARDED = LLAMA | {"framework": "torchtitan", "tp": 1, "pp": 1, "dp": 8, "zero": "fsdp-full", "precision": "fp8"}
MACHINES = (
    *("V100-16G", "V100-32G", "T4-16G", "A100-SXM-40GB", "A100-PCIe-80GB", "A800", "H100-80G-SXM", "H100-PCIe-80GB"),
    *("NVIDIA H100 80GB HBM3", "H800", "H200-SXM", "B200-SXM", "GB200", "AMD Instinct MI300X", "L40S", "RTX 4090"),
    *("RTX3090", "Ascend-910B", "GH200 96GB", "TPU v4", None),
)
ENGINES = (
    *("Megatron-LM", "Megatron-Core r0.12", "NeMo 25.04", "nanotron", "torchtitan", "PyTorch FSDP", "DeepSpeed"),
    *("DeepSpeed ZeRO-3", "llm-foundry/Composer FSDP", "Colossal-AI", "MaxText", None),
)
NONSENSE = (None, 0, -1, 3, 64, 1.5, 1e30, "x", "", "8", True, [], {}, "full", "none", "2,048", "nan", "fsdp")


def mutilated(draw: random.Random) -> dict[str, Any]:
    """A row with some keys dropped, or given to another machine, or spoilt."""
    row = json.loads(json.dumps(draw.choice([ROW, LLAMA, MIXTURE, SHARDED])))
    row |= {"gpu": draw.choice(MACHINES), "framework": draw.choice(ENGINES)}
    for _ in range(draw.choice([0, 1, 2, 4])):
        key = draw.choice([*sorted(row), "assumed"])
        if draw.random() < 0.5:
            row.pop(key, None)
        else:
            row[key] = draw.choice(NONSENSE)
    return row


def accuracy(path: Path, rows: list[Any], *options: str) -> dict[str, Any]:
    path.write_text(json.dumps(rows))
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "planner_accuracy.py"), str(path), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    value: dict[str, Any] = json.loads(done.stdout, parse_constant=refuse)
    return value


def test_mutilated_rows_are_scored_or_counted(tmp_path: Path) -> None:
    draw = random.Random(7)
    rows = [*(mutilated(draw) for _ in range(300)), "no row", 3, None]
    result = accuracy(tmp_path / "rows.json", rows)
    apart = sum(line["num_rows"] for line in result["not_scored"].values())
    scored = result["overall"]["num_rows"] + apart + result["num_without_time"]
    assert scored + sum(result["skipped"].values()) == len(rows)
    assert scored > 100
    assert {"engine generic for Colossal-AI", "engine generic for MaxText"} <= set(result["filled"])


def test_every_machine_and_engine_has_figures(tmp_path: Path) -> None:
    """Only precisions that a device does not have, and devices that nobody here knows, are refused."""
    rows = [LLAMA | {"gpu": gpu, "framework": name, "precision": "fp16"} for gpu in MACHINES for name in ENGINES]
    result = accuracy(tmp_path / "rows.json", rows)
    assert result["skipped"] == {"no figures for device TPU v4": len(ENGINES), "no gpu": len(ENGINES)}


def test_machines_are_told_apart(tmp_path: Path) -> None:
    """The same layout of one source on two machines: two predictions, two groups."""
    sweep = [LLAMA | {"micro_batch": b, "gpu": gpu} for b in (1, 2, 4) for gpu in ("A100-80G-SXM", "H100-80G-SXM")]
    result = accuracy(tmp_path / "rows.json", sweep)
    assert result["ranking"] == {}
    assert result["overall"]["num_rows"] == len(sweep)


def test_memory_and_nodes_are_read_from_the_row(tmp_path: Path) -> None:
    """A layout that runs in 32 GB and not in 16; four devices to a node make a tensor group of eight slow."""
    small = ROW | {"gpu": "V100-16G", "ok": False, "measured": {}, "recompute": "none", "micro_batch": 2, "tp": 1}
    small |= {"dp": 8}
    large = small | {"gpu": "V100-32G", "ok": True}
    result = accuracy(tmp_path / "rows.json", [small, large])
    assert (result["did_not_fit"]["caught"], result["did_not_fit"]["false_alarms"]) == (1.0, 0.0)
    wide = ROW | {"tp": 8, "dp": 1}
    bias = [
        accuracy(tmp_path / "rows.json", [wide | {"gpus_per_node": number}])["overall"]["bias"] for number in (8, 4)
    ]
    assert bias[1] > bias[0] + 0.05


def test_the_number_of_parameters_tells_whether_the_embedding_is_tied(tmp_path: Path) -> None:
    """Stages at either end add the gradient of a table that they share: told in words or by the count, the same."""
    layers, table = 12 * 12 * 2048**2, 51200 * 2048
    told = {
        "yes": {"tied_embeddings": True},
        "no": {"tied_embeddings": "false"},
        "counted once": {"params": str(layers + table)},
        "counted twice": {"params": layers + 2 * table},
        "another model's": {"params": 7e9},
    }
    rows = [ROW | {"pp": 2, "dp": 2, "source_id": name} | more for name, more in told.items()]
    bias = {name: line["bias"] for name, line in accuracy(tmp_path / "rows.json", rows)["sources"].items()}
    assert bias["yes"] == bias["counted once"] == bias["another model's"] > bias["no"] == bias["counted twice"]


def test_only_one_source_ran_the_first_zero_3(tmp_path: Path) -> None:
    third = SHARDED | {"framework": "DeepSpeed ZeRO-3", "precision": "bf16"}
    rows = [third | {"source_id": name} for name in ("sc21_t2", "elsewhere")]
    sources = accuracy(tmp_path / "rows.json", rows)["sources"]
    assert list(sources) == ["sc21_t2, ZeRO 3 of 2021", "elsewhere"]
    assert sources["elsewhere"]["bias"] < sources["sc21_t2, ZeRO 3 of 2021"]["bias"]


def test_what_a_row_names_dates_its_megatron(tmp_path: Path) -> None:
    """On H100, and with a context axis, attention is fused, which stored scores are slower than."""
    whole = ROW | {
        "seq_len": 4096,
        "sequence_parallel": False,
        "recompute": "none",
        "global_batch": 16,
        "micro_batch": 1,
    }
    told = {
        "2021": {},
        "2022": {"sequence_parallel": True},
        "context": {"cp": 2, "dp": 2},
        "Hopper": {"gpu": "H100-80G-SXM"},
        "by name": {"gpu": "H100-80G-SXM", "framework": "Megatron-Core r0.8"},
    }
    rows = [whole | {"source_id": name} | more for name, more in told.items()]
    result = accuracy(tmp_path / "rows.json", rows)
    assert {name.split(",")[0] for name in result["likely"]} == {
        "megatron-2021",
        "megatron-2022",
        "megatron-core-2024",
        "all engines",
    }
    assert result["likely"]["megatron-core-2024, one node"]["num_rows"] == 3
    assert result["sources"]["Hopper"]["bias"] == result["sources"]["by name"]["bias"]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text in ("{", "3", '{"other": []}', 100_000 * "["):
        path.write_text(text)
        command = [sys.executable, str(BENCHMARKS / "planner_accuracy.py"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "Traceback" not in done.stderr and str(path) in done.stderr


@pytest.mark.parametrize("rows", [[], [ROW | {"gpu": "Abacus-1"}], [SHARDED | {"gpu": "A100-SXM-80GB"}]])
def test_nothing_to_score_is_said(tmp_path: Path, rows: list[Any]) -> None:
    """Nor to fit to: no row, no such machine, and one without 8-bit products."""
    result = accuracy(tmp_path / "rows.json", rows, "--fit")
    assert result["overall"] == result["leave_one_out_overall"] == {"num_rows": 0}
    assert sum(result["skipped"].values()) == len(rows)


def test_numbers_that_no_run_prints_are_skipped(tmp_path: Path) -> None:
    """But for a long time, beside which nothing is left of the predicted one: their ratio still says something."""
    keys = ("step_time_s", "tokens_per_s_per_gpu", "memory_gib")
    tiny = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 64}
    rows = [ROW | {"measured": {key: value}} for key in keys for value in (1e300, 1e-300, 1e20)]
    result = accuracy(tmp_path / "rows.json", [*rows, ROW | tiny | {"measured": {"step_time_s": 9e14}}])
    assert result["skipped"] == {f"{key} is beyond what a run may print": 3 for key in keys}
    assert result["likely"]["all engines, one node"]["percentiles"][0] > 1e16
