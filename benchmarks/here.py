"""What benchmarks of the trainer's parts need: a plan for this machine, and Comms without a run around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.plan.comm import Comm, Group
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.spec.cluster import ClusterSpec, Device, Link
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import connect

LLAMA = ModelSpec(
    name="benchmark",
    num_layers=4,
    hidden=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    ffn=768,
    vocab=1024,
    max_seq_len=256,
    norm="rmsnorm",
    activation="swiglu",
    positions="rope",
    tied=False,
)


def plan_here(model: ModelSpec, job: JobSpec, layout: Layout, num_nodes: int = 1) -> Plan:
    """A plan whose cluster has as many devices as the layout ranks; nothing else that it says of them is true."""
    link = Link(name="unknown", latency_s=1e-5, bytes_per_s=1e9)
    device = Device(name="unknown", memory_bytes=2**36, memory_bytes_per_s=1e10, flops_per_s={job.precision: 1e11})
    cluster = ClusterSpec(
        name="here",
        num_nodes=num_nodes,
        devices_per_node=layout.num_ranks // num_nodes,
        device=device,
        intra_node=link,
        inter_node=link,
    )
    return Plan(model=model, cluster=cluster, job=job, layout=layout)


@contextmanager
def engine_of(plan: Plan, rank: int, folder: Path, recorder: Recorder, **options: Any) -> Iterator[Engine]:
    """The engine of one rank on the CPU, among ranks that meet in `folder`. `options` are those of `connect`."""
    keep_freed_memory()
    num_ranks = plan.layout.num_ranks
    store = dist.FileStore(str(folder / "store"), num_ranks)
    comms, neighbours = connect(
        groups(plan.model, plan.layout),
        rank=rank,
        num_ranks=num_ranks,
        store=store,
        recorder=recorder,
        timeout_s=120,
        **options,
    )

    def comm(name: str) -> Comm:
        return comms.get(name) or SoloComm(Group(name=name, ranks=(rank,)))

    try:
        yield Engine(plan, plan.layout.coord(rank), comm, torch.device("cpu"))
    finally:
        for left in (*comms.values(), *([neighbours] if neighbours else [])):
            left.close()
