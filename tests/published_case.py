"""A row of the published format, and where the harness that reads it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

ROW: dict[str, Any] = {
    "id": "one",
    "source_id": "somewhere",
    "gpu": "A100-80G-SXM",
    "gpus_per_node": 8,
    "n_gpus": 8,
    "model": "GPT-1B",
    "arch": "gpt",
    "layers": 12,
    "hidden": 2048,
    "heads": 16,
    "ffn": 8192,
    "vocab": 51200,
    "seq_len": 2048,
    "tp": 2,
    "pp": 1,
    "dp": 4,
    "micro_batch": 4,
    "global_batch": 64,
    "zero": 0,
    "recompute": "full",
    "precision": "fp16",
    "framework": "Megatron-LM",
    "quality": "ok",
    "measured": {"step_time_s": 1.7, "memory_gib": 20.0},
}
