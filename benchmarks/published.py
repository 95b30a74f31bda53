"""Published runs: rows of the published format into specs that the planner takes, and the measured values beside them.

A row that cannot be read is skipped with its reason; what a row leaves out and is filled in is named in `filled`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from published_machines import FALLBACK, cluster_of, engine_of

from phalanx.errors import InputError
from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

GIB = 2**30

# Models whose sharing of the embedding is not printed but told by the printed MFU, which counts each stored parameter:
# one table for one stage, two for more.
TIED = {("playbook", "Llama-1B"), ("playbook", "Llama-3B")}

UNREPEATED = ("vtrain_single",)
"""Sources whose file assumes full recompute, and whose times say that there is none: of runs with one tensor rank,
layers and head fit to 4 % without it; with it, products would have to exceed the device's peak."""

MOST = 2**27
"""No size of a model, batch or cluster is larger; so products stay within 63 bits."""

LEAST = 1e-15
"""No number of a run is smaller, and none larger than its inverse; so quotients stay finite."""

WITHOUT_LAYERS = "more stages than layers"
CRASHED_WITHOUT_LAYERS = f"crashed with {WITHOUT_LAYERS}"
"""Why rows are skipped that no memory is needed to refuse."""

PRECISIONS = ("fp8", "bf16", "fp16", "fp32", "fp64")


class Skip(Exception):
    """A row that cannot be used; the message is the reason that is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run, readable: specs, layouts that it may have been (several where options were not printed), what
    was measured; `filled`: what it does not say and this reader put in."""

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
    filled: tuple[str, ...] = field(default=())


def read(paths: list[Path]) -> tuple[list[Row], dict[str, int]]:
    """All readable rows, and how many were skipped for which reason. Raises InputError for a file that is none."""
    rows, skipped = [], {}
    for path in paths:
        for raw in _raw(path):
            try:
                rows.append(_row(raw, path.stem))
            except Skip as reason:
                skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    return rows, skipped


def _raw(path: Path) -> list[Any]:
    """The rows of a file: a list, or a table with a list under "rows"."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: lists in lists
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    rows = table.get("rows") if isinstance(table, dict) else table
    if not isinstance(rows, list):
        raise InputError(f"{path} holds no list of rows")
    return rows


def _number(value: Any, key: str) -> float:
    """A number that may be written as text; raises Skip for what is none, or not above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Skip(f"{key} is no number") from None
    if not (math.isfinite(number) and number > 0):
        raise Skip(f"{key} is not above 0")
    if not LEAST < number < 1 / LEAST:
        raise Skip(f"{key} is beyond what a run may print")
    return number


def _need(raw: dict[str, Any], key: str) -> int:
    if raw.get(key) in (None, ""):
        raise Skip(f"no {key}")
    return _whole(raw, key, 0)


def _whole(raw: dict[str, Any], key: str, otherwise: int) -> int:
    """A whole number above 0, or `otherwise` where the row does not say."""
    if raw.get(key) in (None, ""):
        return otherwise
    number = _number(raw[key], key)
    if number != int(number) or number > MOST:
        raise Skip(f"{key} is no whole number below {MOST:,}")
    return int(number)


def _row(raw: Any, file: str) -> Row:
    if not isinstance(raw, dict):
        raise Skip("not a table")
    source, framework = str(raw.get("source_id") or file), str(raw.get("framework") or "")
    if source.startswith("sc21") and "ZeRO-3" in framework:
        source += ", ZeRO 3 of 2021"
    if "lora" in str(raw.get("task")).lower():
        raise Skip("trains a part of the parameters only")
    filled: list[str] = []
    measured = _measured(raw)
    gpu, num_devices = str(raw.get("gpu") or ""), _need(raw, "n_gpus")
    model = _model(raw, filled)
    precision = _precision(raw.get("precision"), gpu, filled)
    engine = engine_of(framework, source, precision, raw)
    if engine == FALLBACK:
        filled.append(f"engine {FALLBACK} for {framework or 'no framework'}")
    cluster = _cluster(raw, gpu, num_devices, source)
    timed = any(measured.get(key) for key in TIMES)
    job = JobSpec(
        global_batch=_global_batch(raw, num_devices, timed, filled),
        seq_len=_need(raw, "seq_len"),
        num_steps=1,
        precision=precision,  # type: ignore[arg-type]
    )
    layouts = _legal(model, job, cluster, tuple(_layouts(raw, model, job, num_devices)))
    memory = measured.get("memory_gib")
    return Row(
        id=str(raw.get("id") or f"{file}-{str(raw.get('source'))[:40]}"),
        source=source,
        quality=str(raw.get("quality") or "ok"),
        engine=engine,
        model=model,
        job=job,
        cluster=cluster,
        layouts=layouts,
        step_s=_step_s(raw, measured, model, job, num_devices),
        memory_bytes=_number(memory, "memory_gib") * GIB if memory else None,
        fits=_ran(raw),
        certain=bool(raw.get("certain", True)),
        cell=(source, str(raw.get("model")), gpu, cluster.devices_per_node, num_devices, job.global_batch, job.seq_len),
        filled=tuple(filled),
    )


def _ran(raw: dict[str, Any]) -> bool:
    """Whether it ran; False: it crashed, or did not fit."""
    told = raw.get("ok") if raw.get("ok") is not None else raw.get("fits")
    return True if told is None else bool(told)


def _measured(raw: dict[str, Any]) -> dict[str, Any]:
    """Printed values, and those computed from them where none was printed."""
    tables = [raw.get(name) for name in ("derived", "measured")]
    return {
        key: value
        for table in tables
        if isinstance(table, dict)
        for key, value in table.items()
        if isinstance(value, int | float | str) and value not in ("", 0)
    }


def _cluster(raw: dict[str, Any], gpu: str, num_devices: int, source: str) -> ClusterSpec:
    if not gpu:
        raise Skip("no gpu")
    if gpu.startswith("mixed"):
        raise Skip("mixed devices")
    per_node = _whole(raw, "gpus_per_node", 0) or None
    cluster = cluster_of(gpu, per_node, num_devices, source, str(raw.get("inter_bw") or ""))
    if cluster is None:
        raise Skip(f"no figures for device {gpu}")
    return cluster


def _global_batch(raw: dict[str, Any], num_devices: int, timed: bool, filled: list[str]) -> int:
    """As printed; of a run without a time, of which only memory matters, one micro-batch per stage and replica."""
    if raw.get("global_batch") is not None or timed or None in (raw.get("tp"), raw.get("pp")):
        return _need(raw, "global_batch")
    filled.append("global_batch")
    pipeline = _need(raw, "pp")
    copies = max(1, num_devices // (_need(raw, "tp") * pipeline * _whole(raw, "cp", 1)))
    return _whole(raw, "micro_batch", 1) * _whole(raw, "dp", copies) * pipeline


def _model(raw: dict[str, Any], filled: list[str]) -> ModelSpec:
    experts = _whole(raw, "num_experts", 0) or _whole(raw, "experts", 0)
    chosen = next((_whole(raw, key, 0) for key in ("experts_per_token", "top_k", "topk") if raw.get(key)), 0)
    if experts and not chosen:
        raise Skip("no experts per token")
    if chosen > max(1, experts):
        raise Skip("more experts per token than experts")
    hidden, heads = _need(raw, "hidden"), _need(raw, "heads")
    if hidden < heads:
        raise Skip("more heads than hidden")
    arch = str(raw.get("arch") or "gpt").lower()
    llama = any(name in arch for name in LLAMA)
    plain = "no bias" in arch
    if not raw.get("vocab"):
        filled.append("vocab")
    told = _flag(raw.get("tied_embeddings"))
    model = ModelSpec(
        name=str(raw.get("model") or "published"),
        num_layers=_need(raw, "layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_whole(raw, "kv_heads", heads),
        head_dim=_whole(raw, "head_dim", hidden // heads),
        ffn=(_whole(raw, "expert_ffn", 0) if experts else 0) or _ffn(raw, hidden, llama, filled),
        num_experts=experts,
        experts_per_token=chosen if experts else 0,
        vocab=_whole(raw, "vocab", 51200),
        max_seq_len=_need(raw, "seq_len"),
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu_tanh",
        positions="rope" if llama or plain else "learned",
        tied=(told if told is not None else not llama) or (str(raw.get("source_id")), str(raw.get("model"))) in TIED,
        qkv_bias=not (llama or plain),
        bias=not (llama or plain),
        dropout=0.0 if llama or plain else 0.1,
        attention_dropout=0.0 if llama or plain else 0.1,
    )
    return model if told is not None or not raw.get("params") else _as_counted(model, _number(raw["params"], "params"))


def _flag(value: Any) -> bool | None:
    """Yes or no in any writing; None where neither is told."""
    return None if value in (None, "") else str(value).lower() not in ("false", "no", "off", "0", "none")


def _as_counted(model: ModelSpec, num_parameters: float) -> ModelSpec:
    """With a head of its own or the embedding's, as the printed number of parameters tells if it is that of either."""
    both = [replace(model, tied=tied) for tied in (True, False)]
    off = [abs(each.num_parameters / num_parameters - 1.0) for each in both]
    return both[off.index(min(off))] if min(off) < 0.05 and max(off) > 2 * min(off) else model


LLAMA = ("llama", "qwen", "mistral", "mixtral", "moe", "swiglu", "deepseek", "olmo", "gemma", "yi-", "internlm")


def _ffn(raw: dict[str, Any], hidden: int, llama: bool, filled: list[str]) -> int:
    """As printed, or as such models have it: 4 × hidden, two thirds of that where it is gated (arXiv 2002.05202)."""
    if raw.get("ffn"):
        return _whole(raw, "ffn", 0)
    filled.append("ffn")
    return -(-8 * hidden // 3 // 256) * 256 if llama else 4 * hidden


def _precision(text: Any, gpu: str, filled: list[str]) -> str:
    """The precision of matrix products, or bf16, and fp16 on devices without it, where none is told."""
    found = next((name for name in PRECISIONS if name in str(text or "").lower()), None)
    if found:
        return found
    if text:
        raise Skip(f"precision {text}")
    filled.append("precision")
    return "fp16" if any(name in gpu for name in ("V100", "T4")) else "bf16"


def _legal(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Those layouts that the model can be cut into; raises Skip with the first reason where there is none. Published
    tensor groups may leave a node."""
    one = replace(cluster, num_nodes=1, devices_per_node=cluster.num_devices)
    wrong = [problems(model, job, one, layout) for layout in layouts]
    if layouts and all(wrong):
        what = re.sub(r"[\d,.]+", "…", wrong[0][0].what)
        raise Skip(f"no legal layout: {what}")
    return tuple(layout for layout, reasons in zip(layouts, wrong, strict=True) if not reasons)


def _layouts(raw: dict[str, Any], model: ModelSpec, job: JobSpec, num_devices: int) -> Iterator[Layout]:
    """All layouts that the row may mean: options that it does not print are open."""
    sharded = _zero(raw) >= 2
    tensor, pipeline = (_whole(raw, key, 1) if sharded else _need(raw, key) for key in ("tp", "pp"))
    context = _whole(raw, "cp", 1)
    if model.num_heads % tensor:
        raise Skip("tensor does not divide heads")
    data = _whole(raw, "dp", num_devices // (tensor * pipeline * context))
    if tensor * pipeline * context * data != num_devices:
        raise Skip("axis sizes do not give the number of devices")
    if job.global_batch % data:
        raise Skip("data does not divide the global batch")
    per_rank = job.global_batch // data
    printed = _whole(raw, "micro_batch", 0)
    micro_batches = [printed] if printed else [b for b in (1, 2, 4, 8) if per_rank % b == 0]
    chunks = [_whole(raw, "vpp", 1)] if raw.get("vpp") else _chunks(model, pipeline)
    recomputes = [_recompute(raw["recompute"])] if raw.get("recompute") is not None else RECOMPUTES
    if raw.get("source_id") in UNREPEATED and "recompute" in str(raw.get("assumed")):
        recomputes = ["none"]
    told = _flag(raw.get("sequence_parallel"))
    for micro_batch in micro_batches:
        if per_rank % micro_batch:
            raise Skip("micro-batch × data does not divide the global batch")
        for v in chunks:
            if pipeline * v > model.num_layers:
                raise Skip(WITHOUT_LAYERS if _ran(raw) else CRASHED_WITHOUT_LAYERS)
            for recompute in recomputes:
                yield Layout(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    data=data,
                    virtual_stages=v if pipeline > 1 else 1,
                    micro_batch=micro_batch,
                    schedule="interleaved-1f1b" if v > 1 and pipeline > 1 else "1f1b",
                    zero=_zero(raw),
                    sequence_parallel=tensor > 1 if told is None else told,
                    recompute=recompute,  # type: ignore[arg-type]
                )


RECOMPUTES = ["none", "selective", "full"]


def _recompute(printed: Any) -> str:
    """The kind of recompute in words of any framework."""
    text = str(printed).lower()
    if text in ("true", "1") or any(name in text for name in ("block", "uniform", "every layer")):
        return "full"
    return next((kind for kind in ("selective", "full") if kind in text), "none")


SHARDING = ("nemo launcher",)
"""Frameworks whose configurations name a distributed optimizer, where a row names no ZeRO stage
(launcher_scripts/conf/training/gpt3: distributed_fused_adam)."""


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
    return int("overlap-param-gather" in str(raw.get("overlap")) or framework.startswith(SHARDING))


def _chunks(model: ModelSpec, pipeline: int) -> list[int]:
    """Chunks per rank that a run which did not print them may have used."""
    if pipeline == 1:
        return [1]
    return [1, *(v for v in range(2, model.num_layers // pipeline + 1) if model.num_layers % (pipeline * v) == 0)]


TIMES = ("step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu")


def _step_s(
    raw: dict[str, Any], measured: dict[str, Any], model: ModelSpec, job: JobSpec, num_devices: int
) -> float | None:
    """Seconds of a step from the first of TIMES that was printed; None where nothing of the kind was."""
    name = next((key for key in TIMES if measured.get(key)), None)
    if name is None:
        return None
    value = _number(measured[name], name)
    if name == "step_time_s":
        return value
    if name == "samples_per_s":
        return job.global_batch / value
    if name == "tokens_per_s_per_gpu":
        return job.tokens_per_step / (value * num_devices)
    if not str(raw.get("flop_convention") or "").startswith("model"):
        return None
    return model.flops_per_token(job.seq_len) * job.tokens_per_step / (value * 1e12 * num_devices)
