"""A bare engine on the toy machines of planner_cases, and what single layouts and messages take on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner_cases import CLUSTER, DEVICE, JOB, LINK, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner import network
from phalanx.planner.candidates import of
from phalanx.planner.engine import Engine, States
from phalanx.planner.estimate import Group, estimate
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.model import ModelSpec

BARE = Engine(
    name="bare", source="", async_gradients=False, states={"bf16": States(parameter=2, gradient=4, optimizer=12)}
)
FAR = replace(CLUSTER, inter_node=replace(LINK, name="net", latency_s=10e-6, bytes_per_s=10e9))
TILED = replace(DEVICE, matmul_tile=(128, 128), num_cores=4)
GPUS = replace(CLUSTER, device=TILED)
TOKENS = 2 * 96
WIDE = TOKENS * 96 * 2
"""Bytes of a micro-batch's activation: 2 sequences of 96 tokens, 96 wide, in bf16."""


def group(engine: Engine = BARE, cluster: ClusterSpec = CLUSTER, model: ModelSpec = LLAMA, **chosen: Any) -> Group:
    (found,) = estimate(model, JOB, cluster, engine, of([Layout(**{"micro_batch": 2, **chosen})]))
    return found


def collective(operation: str, payload: float, size: int, stride: int = 1, cluster: ClusterSpec = CLUSTER) -> float:
    return float(network.collective_s(cluster, operation, payload, network.placement(cluster, size, stride)))
