"""A Plan as the settings of frameworks around PyTorch's own parallelism: torchtitan, DeepSpeed, Accelerate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.errors import Problem
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.frameworks import Settings, framework


def deepspeed_conflicts(plan: Plan) -> Iterator[Problem]:
    """What DeepSpeed cannot express for the values of other keys."""
    layout = plan.layout
    if layout.pipeline > 1 and layout.zero > 1:
        yield Problem(what=f"ZeRO {layout.zero} beside a pipeline", where="layout.zero", instead="zero = 0 or 1")
    if layout.pipeline > 1 and layout.tensor > 1:
        what = "pipeline of layers that are cut over a tensor axis"
        yield Problem(what=what, where="layout.pipeline", instead="pipeline = 1 or tensor = 1")
    if layout.zero_group and layout.zero < 3:
        what = f"zero_group = {layout.zero_group} below ZeRO 3"
        yield Problem(what=what, where="layout.zero_group", instead="zero_group = 0 or zero = 3")


def accelerate_conflicts(plan: Plan) -> Iterator[Problem]:
    """What Accelerate cannot express for the values of other keys."""
    parts = [axis for axis in ("tensor", "context") if getattr(plan.layout, axis) > 1]
    if parts and plan.layout.data > 1 and not plan.layout.zero:
        yield Problem(
            what=f"data axis without ZeRO beside a {parts[0]} axis", where="layout.zero", instead="zero = 2 or 3"
        )


def torchtitan(plan: Plan, counts: Sequence[int]) -> tuple[str, list[str]]:
    """A Python module with one function, `planned`, which is what --config of torchtitan names."""
    layout, target, remarks = plan.layout, framework("torchtitan"), []
    found, base = _torchtitan_settings(plan, counts), _torchtitan_model(plan)
    policy = {"none": None, "selective": "SelectiveAC", "full": "FullAC"}[layout.recompute]
    imports, head = ["from torchtitan.trainer import Trainer"], "def planned(config: Trainer.Config) -> Trainer.Config:"
    if base:
        family, function = base.split(".")
        imports.insert(0, f"from torchtitan.models.{family}.config_registry import {function}")
        head = f"def planned() -> Trainer.Config:\n    config = {function}()"
    else:
        remarks.append(f"{target.title} brings no {plan.model.name}: hand `planned` the configuration of your model")
    if policy:
        imports.insert(0, f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if base and base.startswith("llama3.") and not plan.model.rope_scaling:
        remarks.append("its models scale rotary frequencies as Llama 3.1 does, the plan's model does not")
    if layout.tensor_overlap_chunks > 1:
        remarks.append("async tensor parallelism serves what tensor_overlap_chunks does by another method")
    body = [f"    config.{key} = {_literal(value)}" for key, value in found.items()]
    body.append(f"    config.activation_checkpoint = {f'{policy}.Config()' if policy else None}")
    return "\n".join([*imports, "", "", head, *body, "    return config"]), remarks


def _literal(value: Any) -> str:
    """As Python has it, a list with a line for each entry."""
    if isinstance(value, list):
        return "\n".join(["[", *(f"        {json.dumps(entry)}," for entry in value), "    ]"])
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _torchtitan_model(plan: Plan) -> str | None:
    model = plan.model
    sizes = (model.num_layers, model.hidden, model.num_heads, model.num_kv_heads, model.ffn, model.vocab)
    return framework("torchtitan").models.get(" ".join(map(str, sizes)))


def _torchtitan_settings(plan: Plan, counts: Sequence[int]) -> Settings:
    job, layout, target = plan.job, plan.layout, framework("torchtitan")
    found = target.copies(plan)
    found["training.num_tokens_per_microbatch_per_dp_rank"] = layout.micro_batch * job.seq_len
    found["training.mixed_precision_param"] = {"bf16": "bfloat16", "fp32": "float32"}[job.precision]
    found["training.disable_cuda_graphs"] = layout.pipeline > 1  # which do not run pipelines
    found["parallelism.data_parallel_replicate_degree"] = layout.data // layout.num_shards
    found["parallelism.data_parallel_shard_degree"] = layout.num_shards
    found["parallelism.fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
    found["compile.enable"] = True  # as the engine profile has it
    found["compile.enable_async_tensor_parallel"] = layout.tensor_overlap_chunks > 1
    if layout.pipeline > 1:
        found["parallelism.pipeline_parallel_schedule"] = target.schedules[layout.schedule]
        found["parallelism.num_pp_microbatches"] = layout.num_micro_batches(job.global_batch)
        found["parallelism.module_fqns_per_model_part"] = _modules(counts)
    return found


def _modules(counts: Sequence[int]) -> list[list[str]]:
    """The modules of each stage, in torchtitan's words."""
    stages = [[f"layers.{layer}" for layer in range(sum(counts[:i]), sum(counts[: i + 1]))] for i in range(len(counts))]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def deepspeed(plan: Plan, counts: Sequence[int]) -> tuple[str, list[str]]:
    """A configuration in JSON."""
    job, layout = plan.job, plan.layout
    zero: Settings = {"stage": layout.zero}
    if layout.zero:
        zero["overlap_comm"] = layout.overlap
    if layout.bucket_bytes != Layout().bucket_bytes:
        zero["reduce_bucket_size"] = layout.bucket_bytes // (4 if layout.reduce == "fp32" else 2)
    if layout.zero_group:
        zero["mics_shard_size"] = layout.zero_group
    found: Settings = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches(job.global_batch),
        "zero_optimization": zero,
        "communication_data_type": layout.reduce,
    }
    if job.precision != "fp32":
        found[job.precision] = {"enabled": True}
    if layout.tensor > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tensor, "tp_overlap_comm": layout.tensor_overlap_chunks > 1}
    return json.dumps(found, indent=2), list(_deepspeed_remarks(layout, counts))


def _deepspeed_remarks(layout: Layout, counts: Sequence[int]) -> Iterator[str]:
    """What DeepSpeed reads from the script."""
    if layout.pipeline > 1:
        held = ", ".join(map(str, counts))
        yield f"in the script: PipelineModule(layers, num_stages={layout.pipeline}), whose stages hold {held} layers"
    if layout.zero_group:
        yield "in the script: deepspeed.zero.MiCS_Init around building the model, which mics_shard_size needs"
    if layout.recompute == "full":
        yield "in the script: recompute every layer (gradient_checkpointing_enable, or the like)"
    if layout.tensor_overlap_chunks > 1:
        yield "tp_overlap_comm serves what tensor_overlap_chunks does by another method"
    if not layout.zero and not layout.overlap:
        yield "no setting makes gradients wait for backward without ZeRO, as overlap = false does"


def accelerate(plan: Plan, _: Sequence[int]) -> tuple[str, list[str]]:
    """A configuration in YAML, for `accelerate launch --config_file`."""
    job, layout = plan.job, plan.layout
    shards, machines = layout.num_shards, -(-layout.num_ranks // plan.cluster.devices_per_node)
    sharded = layout.zero > 0 or layout.tensor > 1 or layout.context > 1
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU' if layout.data > 1 else json.dumps('NO')}",
        f"mixed_precision: {job.precision if job.precision != 'fp32' else json.dumps('no')}",
        f"num_machines: {machines}",
        f"num_processes: {layout.num_ranks}",
    ]
    if sharded:
        lines += ["fsdp_config:", "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"]
        lines.append(f"  fsdp_reshard_after_forward: {json.dumps(layout.zero != 2)}")
        lines.append(f"  fsdp_activation_checkpointing: {json.dumps(layout.recompute == 'full')}")
        sizes = {"dp_replicate": layout.data // shards, "dp_shard": shards, "tp": layout.tensor, "cp": layout.context}
        lines += ["parallelism_config:", *(f"  parallelism_config_{axis}_size: {n}" for axis, n in sizes.items())]
    return "\n".join(lines), list(_accelerate_remarks(plan, sharded, machines))


def _accelerate_remarks(plan: Plan, sharded: bool, machines: int) -> Iterator[str]:
    """What Accelerate reads from the script or the command line."""
    job, layout = plan.job, plan.layout
    steps = f"Accelerator(gradient_accumulation_steps={layout.num_micro_batches(job.global_batch)})"
    yield f"in the script: {steps}, and batches of {layout.micro_batch} × {job.seq_len} tokens for each data rank"
    if layout.recompute == "full" and not sharded:
        yield "in the script: recompute every layer (gradient_checkpointing_enable)"
    if sharded and layout.reduce != job.precision:
        yield f"FSDP sends gradients as {job.precision}, not as fp32, unless the script sets mixed_precision_policy"
    if machines > 1:
        yield "each machine is launched with its own --machine_rank, and all with one --main_process_ip"
