"""The accuracy harness: reads the published format, counts what it cannot use, prints stable keys."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
from published_case import BENCHMARKS, ROW

from phalanx.planner.candidates import of
from phalanx.planner.engine import profiles
from phalanx.planner.estimate import estimate

SHALLOW = ROW | {"framework": "nanotron", "source_id": "playbook", "arch": "llama", "tp": 2, "pp": 4, "dp": 1}
SHALLOW |= {"vpp": 1, "recompute": "none", "precision": "bf16", "micro_batch": 32, "measured": {}, "ok": False}
"""Two micro-batches on four stages, which nanotron's 1F1B refuses."""


def rows() -> list[dict[str, Any]]:
    """One good row per micro-batch, and one of each kind that cannot be used."""
    good = [
        ROW | {"id": f"b{b}", "micro_batch": b, "measured": {"step_time_s": 2.0 - b / 10}} for b in (1, 2, 4, 8, 16)
    ]
    return [
        ROW,
        *good,
        {key: value for key, value in ROW.items() if key != "tp"},
        ROW | {"gpu": "Abacus-1"},
        ROW | {"dp": 3},
        ROW | {"precision": "fp32", "framework": "DeepSpeed", "gpu": "B200"},
        ROW | {"measured": {}, "ok": False, "micro_batch": 16, "recompute": "none", "seq_len": 16384},
        ROW | {"quality": "slow_outlier", "measured": {"tokens_per_s_per_gpu": 1000.0}},
        SHALLOW,
        SHALLOW | {"pp": 8, "tp": 1, "dp": 1, "layers": 4},  # stages without layers
        SHALLOW | {"pp": 8, "tp": 1, "dp": 1, "layers": 4, "ok": True},
        *({**SHALLOW, "ok": True, "measured": {"memory_gib": gib}} for gib in (30.0, 60.0)),
    ]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("published") / "rows.json"
    path.write_text(json.dumps(rows()))
    command = [sys.executable, str(BENCHMARKS / "planner_accuracy.py"), str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_overall_has_its_keys(result: dict[str, Any]) -> None:
    assert {"num_rows", "median_abs_error", "p90_abs_error", "bias"} <= set(result["overall"])
    assert result["overall"]["num_rows"] == 7
    assert set(result["sources"]) == {"somewhere"}
    assert {"overall", "sources", "ranking", "memory", "did_not_fit"} <= set(result)


def test_what_cannot_be_used_is_counted(result: dict[str, Any]) -> None:
    assert result["skipped"] == {
        "no tp": 1,
        "no figures for device Abacus-1": 1,
        "axis sizes do not give the number of devices": 1,
        "more stages than layers": 1,
        "crashed with more stages than layers": 1,
    }


def test_other_qualities_are_scored_apart(result: dict[str, Any]) -> None:
    assert result["not_scored"]["somewhere:slow_outlier"]["num_rows"] == 1


def test_layouts_that_did_not_fit_are_caught(result: dict[str, Any]) -> None:
    assert (result["did_not_fit"]["num_failed"], result["did_not_fit"]["caught"]) == (2, 0.5)


def test_layouts_that_break_a_rule_are_counted_apart(result: dict[str, Any]) -> None:
    """They crashed, and no memory is needed to know it; of those that ran, two have too few micro-batches here and one
    has more stages than layers."""
    told = result["did_not_fit"]
    assert told["refused"] == {"more stages than layers": 1, "too few micro-batches": 1}
    assert (told["refused_that_ran"], told["caught_or_refused"]) == (3, 1.0)
    assert {point["limit"] for point in told["curve"]} >= {0.7, 0.95, 1.0, 1.5}


def test_memory_that_rank_0_printed_is_held_against_the_first_stage(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planner_accuracy
    import published

    row = published._row(SHALLOW | {"vocab": 512000, "ok": True, "measured": {"memory_gib": 30.0}}, "playbook")
    engine = profiles()["nanotron"]
    (group,) = estimate(row.model, row.job, row.cluster, engine, of(list(row.layouts)))
    first, *_, last = group.memory_bytes[0]
    assert last > first
    (scored,) = planner_accuracy.score([row])
    assert scored.memory_error == pytest.approx((first - engine.context_bytes) / (30 * 2**30) - 1)
    assert result["memory"]["playbook"]["num_rows"] == 2


def test_layouts_of_one_model_are_ranked(result: dict[str, Any]) -> None:
    assert result["ranking"]["somewhere"]["spearman"] > 0.9


def test_calibration_rows_are_frozen() -> None:
    """At most four rows per engine, from more than one source, fixed by hash; no other profile has a factor."""
    table = json.loads((BENCHMARKS / "planner_calibration.json").read_text())
    chosen = {name: entry["rows"] for name, entry in table["engines"].items()}
    assert hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest() == table["sha256"]
    assert all(len(ids) <= 4 and len(table["engines"][name]["sources"]) > 1 for name, ids in chosen.items())
    for name, engine in profiles().items():
        inherits = name in ("bigscience", "bigscience-bf16")
        expected = table["engines"]["deepspeed-pipeline"]["factor"] if inherits or name in chosen else 1.0
        assert engine.factor == expected, name
