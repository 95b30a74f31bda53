"""Published runs: rows of the published format into specs that the planner takes, and the measured values beside them.

A row that cannot be read is skipped with its reason; nothing is guessed without being listed in `assumed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.spec import clusters
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

GIB = 2**30

# Sites whose network differs from the vendor's: bytes/s per device, cards per node, share reached, seconds per message.
SITES = {
    "bigscience": (6.25e9, 4, 0.9, 4e-6),  # Jean Zay: four 100 Gb/s Omni-Path links for 8 devices (BLOOM model card)
    "mt_nlg": (25e9, 8, 0.96, 4e-6),  # Selene: one HDR card per device (arXiv 2201.11990)
    "dgxc": (50e9, 8, 0.94, 4e-6),
    "playbook": (50e9, 8, 0.74, 14e-6),  # EFA (hardware.json: 0.74 of the wire; NCCL Simple hop)
}

GPUS = (
    ("H200", "dgx-h200"),
    ("GB200", "dgx-b200"),
    ("GB300", "dgx-b200"),
    ("B300", "dgx-b200"),
    ("B200", "dgx-b200"),
    ("H100", "dgx-h100"),
    ("A100-40", "dgx-a100-40"),
    ("A100-SXM4-40", "dgx-a100-40"),
    ("A100", "dgx-a100"),
    ("V100", "dgx-1-v100"),
    ("MI300", "mi300x"),
    ("L40S", "l40s-pcie"),
    ("4090", "rtx4090-workstation"),
    ("3090", "rtx3090-workstation"),
)

ENGINES = (
    ("deepspeed zero-3", "deepspeed-2021"),
    ("bigscience", "bigscience"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("nemo launcher 2023", "nemo-2023"),
    ("megatron-core", "megatron-core-2024"),
    ("nemo", "megatron-core-2024"),
    ("llm-foundry", "llm-foundry"),
    ("nanotron", "nanotron"),
    ("torchtitan", "torchtitan"),
    ("deepspeed", "deepspeed"),
    ("fsdp", "fsdp"),
    ("megatron", "megatron-2021"),
)
# Models whose sharing of the embedding is not printed but told by the printed MFU, which counts each stored parameter:
# one table for one stage, two for more.
TIED = {("playbook", "Llama-1B"), ("playbook", "Llama-3B")}

BY_SOURCE = {"seqsel_t5": "megatron-2022", "mt_nlg_530b": "deepspeed-pipeline"}


class Skip(Exception):
    """A row that cannot be used; the message is the reason that is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run, readable: specs, layouts that it may have been (several where options were not printed), what
    was measured."""

    id: str
    source: str
    quality: str
    engine: str
    model: ModelSpec
    job: JobSpec
    cluster: ClusterSpec
    layouts: tuple[Layout, ...]
    step_s: float | None
    memory_bytes: float | None
    fits: bool
    certain: bool
    cell: tuple[Any, ...]
    assumed: tuple[str, ...] = field(default=())


def read(paths: list[Path]) -> tuple[list[Row], dict[str, int]]:
    """All readable rows, and how many were skipped for which reason."""
    rows, skipped = [], {}
    for path in paths:
        for raw in json.loads(path.read_text(encoding="utf-8")):
            try:
                rows.append(_row(raw, path.stem))
            except Skip as reason:
                skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    return rows, skipped


def _need(raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise Skip(f"no {key}")
    return raw[key]


def _row(raw: dict[str, Any], file: str) -> Row:
    source = str(raw.get("source_id") or file)
    if "ZeRO-3" in str(raw.get("framework")):
        source += ", ZeRO 3 of 2021"
    model = _model(raw)
    num_devices = int(_need(raw, "n_gpus"))
    engine = BY_SOURCE.get(source) or next(
        (name for key, name in ENGINES if key in str(raw.get("framework", "")).lower()), "generic"
    )
    if "mixed_precision=DEFAULT" in str(raw.get("framework", "")):
        engine = "llm-foundry-amp"
    precision = _precision(raw.get("precision"))
    if engine == "bigscience" and precision == "bf16":
        engine = "bigscience-bf16"
    job = JobSpec(
        global_batch=int(_need(raw, "global_batch")),
        seq_len=int(_need(raw, "seq_len")),
        num_steps=1,
        precision=precision,  # type: ignore[arg-type]
    )
    layouts = tuple(_layouts(raw, model, job, num_devices))
    measured = {**raw.get("derived", {}), **{k: v for k, v in raw.get("measured", {}).items() if v is not None}}
    memory = measured.get("memory_gib")
    fits = bool(raw.get("ok", raw.get("fits", True)))
    return Row(
        id=str(raw.get("id", f"{file}-{raw.get('source', '')[:40]}")),
        source=source,
        quality=str(raw.get("quality", "ok")),
        engine=engine,
        model=model,
        job=job,
        cluster=_cluster(raw, source, num_devices),
        layouts=layouts,
        step_s=_step_s(raw, measured, model, job, num_devices),
        memory_bytes=memory * GIB if memory else None,
        fits=fits,
        certain=bool(raw.get("certain", True)),
        cell=(source, raw.get("model"), num_devices, job.global_batch, job.seq_len, precision),
        assumed=tuple(raw.get("assumed", ())),
    )


def _model(raw: dict[str, Any]) -> ModelSpec:
    experts = int(raw.get("num_experts") or raw.get("experts") or 0)
    chosen = raw.get("experts_per_token") or raw.get("top_k") or raw.get("topk")
    if experts and not chosen:
        raise Skip("no experts per token")
    hidden, heads = int(_need(raw, "hidden")), int(_need(raw, "heads"))
    arch = str(raw.get("arch", "gpt"))
    llama = any(name in arch for name in ("llama", "qwen", "mistral", "mixtral", "moe", "swiglu"))
    plain = "no bias" in arch
    vocab = int(raw.get("vocab") or 51200)
    return ModelSpec(
        name=str(raw.get("model", "published")),
        num_layers=int(_need(raw, "layers")),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(raw.get("kv_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        ffn=int((experts and raw.get("expert_ffn")) or raw.get("ffn") or 4 * hidden),
        num_experts=experts,
        experts_per_token=int(chosen or 0) if experts else 0,
        vocab=vocab,
        max_seq_len=int(_need(raw, "seq_len")),
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu_tanh",
        positions="rope" if llama or plain else "learned",
        tied=bool(raw.get("tied_embeddings", not llama)) or (raw.get("source_id"), raw.get("model")) in TIED,
        qkv_bias=not (llama or plain),
        bias=not (llama or plain),
        dropout=0.0 if llama or plain else 0.1,
        attention_dropout=0.0 if llama or plain else 0.1,
    )


def _precision(text: Any) -> str:
    text = str(text or "bf16").lower()
    return next((name for name in ("fp8", "bf16", "fp16", "fp32") if name in text), "bf16")


def _cluster(raw: dict[str, Any], source: str, num_devices: int) -> ClusterSpec:
    gpu = str(_need(raw, "gpu"))
    if gpu.startswith("mixed"):
        raise Skip("mixed devices")
    name = next((name for key, name in GPUS if key in gpu.replace(" ", "-")), None)
    if name is None:
        raise Skip(f"no figures for device {gpu}")
    per_node = int(raw.get("gpus_per_node") or 8)
    if "GB200" in gpu or "GB300" in gpu:
        per_node = 72  # one NVLink domain: all that a rank reaches without a network card
    cluster = replace(_named(name), num_nodes=-(-num_devices // per_node), devices_per_node=per_node)
    if "H100" in gpu and "96" in gpu:  # the 500 W version with HBM2e (pytorch/torchtitan, llama3_h100_202412)
        slower = replace(cluster.device, memory_bytes=95 * GIB, memory_bytes_per_s=2.4e12)
        cluster = replace(cluster, device=slower)
    site = next((value for key, value in SITES.items() if source.startswith(key)), None)
    printed = re.search(r"([\d.]+) *Gbps per node", str(raw.get("inter_bw") or ""))
    if site:
        rate, cards, efficiency, latency_s = site
        inter = replace(cluster.inter_node, bytes_per_s=rate, efficiency=efficiency, latency_s=latency_s)
        return replace(cluster, inter_node=inter, nics_per_node=cards)
    if printed:
        rate = float(printed.group(1)) * 1e9 / 8 / per_node
        return replace(cluster, inter_node=replace(cluster.inter_node, bytes_per_s=rate))
    return cluster


@cache
def _named(name: str) -> ClusterSpec:
    return clusters.named(name)


def _layouts(raw: dict[str, Any], model: ModelSpec, job: JobSpec, num_devices: int) -> Iterator[Layout]:
    tensor, pipeline = int(_need(raw, "tp")), int(_need(raw, "pp"))
    context = int(raw.get("cp") or 1)
    if model.num_heads % tensor:
        raise Skip("tensor does not divide heads")
    data = int(raw.get("dp") or num_devices // (tensor * pipeline * context))
    zero = _zero(raw)
    per_rank = max(1, job.global_batch // data)
    if tensor * pipeline * context * data != num_devices:
        raise Skip("axis sizes do not give the number of devices")
    if job.global_batch % data:
        raise Skip("data does not divide the global batch")
    printed = raw.get("micro_batch")
    micro_batches = [int(printed)] if printed else [b for b in (1, 2, 4, 8) if per_rank % b == 0]
    chunks = [int(raw["vpp"])] if raw.get("vpp") else _chunks(model, pipeline)
    recomputes = [raw["recompute"]] if raw.get("recompute") else ["none", "selective", "full"]
    parallel = [bool(raw["sequence_parallel"])] if raw.get("sequence_parallel") is not None else [tensor > 1]
    for micro_batch in micro_batches:
        if job.global_batch % (micro_batch * data):
            raise Skip("micro-batch × data does not divide the global batch")
        for v in chunks:
            if pipeline * v > model.num_layers:
                raise Skip("more stages than layers")
            for recompute in recomputes:
                yield Layout(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    data=data,
                    virtual_stages=v,
                    micro_batch=micro_batch,
                    schedule="interleaved-1f1b" if v > 1 else "1f1b",
                    zero=zero,
                    sequence_parallel=parallel[0],
                    recompute=next((kind for kind in ("selective", "full") if kind in str(recompute)), "none"),
                )


def _zero(raw: dict[str, Any]) -> int:
    """The ZeRO stage: printed as a number or as FSDP's strategy, or what the framework always does."""
    printed, framework = str(raw.get("zero", "")).lower(), str(raw.get("framework", "")).lower()
    if (
        "fsdp" in printed
        or "hsdp" in printed
        or (printed in ("", "none") and ("fsdp" in framework or "titan" in framework))
    ):
        return 2 if "grad-op" in printed else 3
    digits = re.search(r"[0-3]", printed)
    if digits:
        return int(digits.group())
    return 1 if "overlap-param-gather" in str(raw.get("overlap")) else 0


def _chunks(model: ModelSpec, pipeline: int) -> list[int]:
    """Chunks per rank that a run which did not print them may have used."""
    if pipeline == 1:
        return [1]
    return [1, *(v for v in range(2, model.num_layers // pipeline + 1) if model.num_layers % (pipeline * v) == 0)]


def _step_s(
    raw: dict[str, Any], measured: dict[str, Any], model: ModelSpec, job: JobSpec, num_devices: int
) -> float | None:
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return job.tokens_per_step / (float(measured["tokens_per_s_per_gpu"]) * num_devices)
    if measured.get("samples_per_s"):
        return job.global_batch / float(measured["samples_per_s"])
    if measured.get("tflops_per_gpu") and str(raw.get("flop_convention", "")).startswith("model"):
        flops = model.flops_per_token(job.seq_len) * job.tokens_per_step
        return flops / (float(measured["tflops_per_gpu"]) * 1e12 * num_devices)
    return None
