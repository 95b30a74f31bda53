"""What no table of measured runs tells and any planner must keep: on every known machine, under every engine, for small
and large models. Nothing runs faster than its matrix products can; nothing that gets better makes a step slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.plan.layout import Layout
from phalanx.planner.candidates import of
from phalanx.planner.engine import Engine, profiles
from phalanx.planner.estimate import estimate
from phalanx.spec import clusters, models
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

MACHINES = [name for name in clusters.names() if name not in ("laptop", clusters.LOCAL)]
MODELS = ("gpt2", "llama-3-8b", "mixtral-8x7b")
SWITCHED = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200")


def layouts(model: ModelSpec) -> list[Layout]:
    """One of each kind for 16 devices: tensor, pipeline, data, sharded, recomputed, all together."""
    shapes: list[dict[str, Any]] = [
        {"data": 16},
        {"data": 16, "zero": 3, "recompute": "full"},
        {"tensor": 4, "data": 4, "sequence_parallel": True, "zero": 1},
        {"tensor": 4, "data": 4, "recompute": "selective"},
        {"tensor": 2, "pipeline": 4, "data": 2},
        {"tensor": 4, "pipeline": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "data": 2},
        {"context": 4, "data": 4},
    ]
    return [Layout(**{"micro_batch": 2, **shape}) for shape in shapes]


def times(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, used: Engine, chosen: list[Layout]) -> Any:
    step_s = np.empty(len(chosen))
    for group in estimate(model, job, cluster, used, of(chosen)):
        step_s[group.rows] = group.step_s
        assert all((np.asarray(values) >= 0).all() for values in group.footprint.memory.values())
    assert np.isfinite(step_s).all() and (step_s > 0).all()
    return step_s


def case(machine: str, name: str, seq_len: int = 1024) -> tuple[ModelSpec, JobSpec, ClusterSpec]:
    cluster = clusters.named(machine)
    cluster = replace(cluster, num_nodes=-(-16 // cluster.devices_per_node))
    model = replace(models.named(name), max_seq_len=seq_len, num_layers=16)
    precision = "bf16" if "bf16" in cluster.device.flops_per_s else "fp16"
    job = JobSpec(global_batch=128, seq_len=seq_len, num_steps=1, precision=precision)  # type: ignore[arg-type]
    return model, job, cluster


KINDS = ("phalanx", "megatron-2021", "megatron-core-2024", "nanotron")


def engines(precision: str) -> list[Engine]:
    return [profiles()[name] for name in KINDS if precision in profiles()[name].states]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_no_step_beats_its_matrix_products(machine: str, name: str) -> None:
    """Matrix products alone, at what the device sustains, take less than any predicted step."""
    model, job, cluster = case(machine, name)
    flops = model.flops_per_token(1) * job.tokens_per_step
    rate = cluster.device.flops_per_s[job.precision] * cluster.device.matmul_efficiency
    for used in engines(job.precision):
        least_s = flops / (16 * rate * max(1.0, used.matmul_factor))
        assert (times(model, job, cluster, used, layouts(model)) >= used.factor * least_s).all(), used.name


def better(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    """The machine with one thing twice as good."""
    device, inside, across = cluster.device, cluster.intra_node, cluster.inter_node
    curve = tuple((size, 2 * rate) for size, rate in inside.busbw)
    switch = tuple((size, 2 * rate) for size, rate in inside.switch_busbw)
    faster = replace(inside, bytes_per_s=2 * inside.bytes_per_s, busbw=curve, switch_busbw=switch)
    peaks = {key: 2 * rate for key, rate in device.flops_per_s.items()}
    return {
        "memory bandwidth": replace(cluster, device=replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)),
        "peak": replace(cluster, device=replace(device, flops_per_s=peaks)),
        "link inside a node": replace(cluster, intra_node=faster),
        "link between nodes": replace(cluster, inter_node=replace(across, bytes_per_s=2 * across.bytes_per_s)),
        "latency": replace(cluster, inter_node=replace(across, latency_s=across.latency_s / 2)),
    }


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["llama-3-8b"])
def test_nothing_that_gets_better_makes_a_step_slower(machine: str, name: str) -> None:
    model, job, cluster = case(machine, name)
    for used in engines(job.precision):
        before = times(model, job, cluster, used, layouts(model))
        for what, other in better(cluster).items():
            after = times(model, job, other, used, layouts(model))
            assert (after <= before * (1 + 1e-9)).all(), (used.name, what, after / before)


@pytest.mark.parametrize("machine", SWITCHED)
def test_more_devices_never_take_longer_for_the_same_batch(machine: str) -> None:
    """Of a model that has work for them: 8 to 128 devices halve what each computes, messages grow less."""
    model, job, cluster = case(machine, "llama-3-8b", 4096)
    for used in engines(job.precision):
        steps = []
        for nodes in (1, 2, 4, 8, 16):
            many = replace(cluster, num_nodes=nodes)
            layout = Layout(tensor=4, data=2 * nodes, sequence_parallel=True, micro_batch=1, zero=1)
            steps.append(float(times(model, job, many, used, [layout])[0]))
        assert (np.diff(steps) < 0).all(), (used.name, steps)


@pytest.mark.parametrize("machine", MACHINES)
def test_extremes_are_priced(machine: str) -> None:
    """128k tokens, 3,072 devices, a narrow model on one device."""
    model, job, cluster = case(machine, "llama-3-8b", 131072)
    rings = [Layout(context=8, tensor=2, recompute="full")]
    many = replace(cluster, num_nodes=3072 // cluster.devices_per_node + 1)
    large = replace(models.named("megatron-1t"), num_layers=128)
    deep = [Layout(tensor=8, pipeline=64, data=6, zero=1)]
    narrow = replace(model, hidden=256, head_dim=8, ffn=512)
    for used in engines(job.precision):
        full, half = (times(model, replace(job, seq_len=size), cluster, used, rings) for size in (131072, 65536))
        assert 1.95 * half < full < 4 * half, used.name  # messages grow with the length, attention with its square
        assert times(large, replace(job, global_batch=3072, seq_len=2048), many, used, deep) > 1.0
        assert times(narrow, replace(job, global_batch=1, seq_len=128), cluster, used, [Layout()]) > 0


@pytest.mark.parametrize("machine", [name for name in MACHINES if "fp8" in clusters.named(name).device.flops_per_s])
def test_eight_bits_are_never_slower_for_large_products(machine: str) -> None:
    model, job, cluster = case(machine, "llama-3-70b", 2048)
    for used in engines("fp8"):
        wide = times(model, job, cluster, used, layouts(model))
        narrow = times(model, replace(job, precision="fp8"), cluster, used, layouts(model))  # type: ignore[arg-type]
        assert (narrow <= wide).all() and (narrow > wide / 2.1).all(), used.name
