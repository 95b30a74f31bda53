"""Small models, clusters and plans for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.spec.cluster import ClusterSpec, Device, Link
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.spec.model import ModelSpec
from phalanx.spec.models import STYLES


def tiny_model(style: str = "llama", **changes: Any) -> ModelSpec:
    """The small decoder of the field cases: 36,992 parameters per layer in llama style."""
    sizes: dict[str, Any] = {
        "name": f"tiny-{style}",
        "num_layers": 4,
        "hidden": 64,
        "num_heads": 4,
        "num_kv_heads": 2 if style == "llama" else 4,
        "head_dim": 16,
        "ffn": 128,
        "vocab": 250,
        "max_seq_len": 64,
    }
    return ModelSpec(**(sizes | STYLES[style] | changes))


def toy_cluster(num_devices: int = 8) -> ClusterSpec:
    """One node of slow devices."""
    device = Device(name="toy", memory_bytes=2**30, memory_bytes_per_s=1e10, flops_per_s={"fp32": 1e11})
    link = Link(name="toy", latency_s=1e-5, bytes_per_s=1e9)
    return ClusterSpec(
        name="toy", num_nodes=1, devices_per_node=num_devices, device=device, intra_node=link, inter_node=link
    )


def tiny_job(**changes: Any) -> JobSpec:
    """Global batch 8, sequences of 32 tokens, float64, no clipping."""
    values: dict[str, Any] = {
        "global_batch": 8,
        "seq_len": 32,
        "num_steps": 20,
        "precision": "fp64",
        "optimizer": OptimizerSpec(lr=1e-2, clip_norm=0.0),
    }
    return JobSpec(**(values | changes))


def tiny_plan(layout: Layout, model: ModelSpec | None = None, **job: Any) -> Plan:
    """A plan of the tiny model and job."""
    cluster = toy_cluster(layout.num_ranks)
    return Plan(model=model or tiny_model(), cluster=cluster, job=tiny_job(**job), layout=layout)


RUN_FILE = """\
[model]
num_layers = 2
hidden = 32
num_heads = 4
num_kv_heads = 2
ffn = 64
vocab = 300
[job]
global_batch = 4
seq_len = 32
num_steps = {num_steps}
precision = "fp32"
[data]
text = "*.txt"
[layout]
tensor = {layout.tensor}
pipeline = {layout.pipeline}
data = {layout.data}
micro_batch = {layout.micro_batch}
zero = {layout.zero}
"""


def write_run_file(folder: Path, layout: Layout, num_steps: int, more: str = "") -> str:
    """run.toml in `folder`, for commands, of a tiny model on a text beside it; `more` follows. Returns what it says."""
    text = RUN_FILE.format(layout=layout, num_steps=num_steps) + more
    (folder / "run.toml").write_text(text)
    (folder / "text.txt").write_text("the ranks of a phalanx hold each other's shields; " * 100)
    return text
