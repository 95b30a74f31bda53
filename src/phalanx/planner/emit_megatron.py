"""A Plan as the settings of both frameworks around Megatron-Core: flags of Megatron-LM, overrides of a NeMo recipe."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.errors import Problem
from phalanx.plan.cut import expert_spread
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.frameworks import Settings, framework

NAMES = ("megatron-lm", "nemo")

INVERTED = ("--no-", "--disable-", "--untie-")
"""How flags begin that switch something off."""

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def conflicts(plan: Plan) -> Iterator[Problem]:
    """What Megatron-Core cannot express for the values of other keys."""
    model, layout, scaling = plan.model, plan.layout, plan.model.rope_scaling
    if model.bias and not model.qkv_bias:
        yield Problem(
            what="switch for biases everywhere but on q, k, v", where="model.qkv_bias", instead="qkv_bias = true"
        )
    if layout.context > 1 and plan.job.seq_len % (2 * layout.context):
        what = f"way to cut {plan.job.seq_len} tokens into {2 * layout.context} parts, two for each context rank"
        yield Problem(what=what, where="job.seq_len", instead=f"a multiple of {2 * layout.context}")
    if layout.tensor_overlap_chunks > 1 and not layout.sequence_parallel:
        what = "tp_comm_overlap, for tensor_overlap_chunks, without sequence parallelism"
        yield Problem(what=what, where="layout.tensor_overlap_chunks", instead="sequence_parallel = true")
    if model.rope_theta % 1:
        yield Problem(
            what=f"counterpart of rope_theta = {model.rope_theta}", where="model.rope_theta", instead="a whole number"
        )
    if scaling and scaling.kind == "llama3":
        fixed = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len)
        if fixed != (1.0, 4.0, 8192):
            instead = "low_freq_factor = 1, high_freq_factor = 4, original_max_seq_len = 8192"
            yield Problem(what=f"rotary frequencies scaled with {fixed}", where="model.rope_scaling", instead=instead)
    elif scaling and scaling.factor % 1:
        yield Problem(
            what=f"rotary positions divided by {scaling.factor}", where="model.rope_scaling", instead="a whole number"
        )


def megatron(plan: Plan, counts: Sequence[int]) -> tuple[str, list[str]]:
    """Flags of Megatron-LM, one to a line, quoted as a shell reads them."""
    model, job, layout = plan.model, plan.job, plan.layout
    flags = framework("megatron-lm").flags
    found: Settings = {flags[key]: value for key, value in _core(plan, counts).items()}
    found["--max-position-embeddings"] = max(model.max_seq_len, job.seq_len)
    if model.rope_scaling and model.rope_scaling.kind == "llama3":
        found |= {"--use-rope-scaling": True, "--rope-scaling-factor": model.rope_scaling.factor}
    if job.precision != "fp32":
        found[f"--{job.precision}"] = True
    found["--accumulate-allreduce-grads-in-fp32"] = job.precision == "fp16" and layout.reduce == "fp32"
    found["--grad-reduce-in-bf16"] = layout.reduce == "bf16"
    found["--tp-comm-overlap"] = layout.tensor_overlap_chunks > 1
    remarks = list(_remarks(plan))
    if layout.zero > 1:
        found |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": SHARDING[layout.zero]}
        found["--ckpt-format"] = "fsdp_dtensor"
        remarks.append("CUDA_DEVICE_MAX_CONNECTIONS must not be 1, which its FSDP refuses")
    elif layout.tensor > 1 or layout.context > 1:
        remarks.append("before Blackwell, CUDA_DEVICE_MAX_CONNECTIONS=1 must be in the environment")
    return "\n".join(_flags(found)), remarks


def nemo(plan: Plan, counts: Sequence[int]) -> tuple[str, list[str]]:
    """Overrides of a recipe, one to a line, as `nemo llm pretrain --factory RECIPE` takes them."""
    layout, cluster, scaling = plan.layout, plan.cluster, plan.model.rope_scaling
    found = _core(plan, counts)
    found["model.config.seq_length"] = plan.job.seq_len
    found["trainer.num_nodes"] = -(-layout.num_ranks // cluster.devices_per_node)
    found["trainer.devices"] = min(layout.num_ranks, cluster.devices_per_node)
    found["trainer.plugins.grad_reduce_in_fp32"] = layout.reduce == "fp32"
    virtual = layout.virtual_stages if layout.virtual_stages > 1 else None  # a recipe may bring some of its own
    found["trainer.strategy.virtual_pipeline_model_parallel_size"] = virtual
    if found.get("model.config.overlap_p2p_comm"):
        found["model.config.batch_p2p_comm"] = False
    recipe = "llama3_8b" if plan.model.gated else "gpt3_175b"
    if scaling and scaling.kind == "llama3":
        recipe, found["model.config.scale_factor"] = "llama31_8b", scaling.factor
    remarks = [f"start from a recipe in bf16_mixed with the same activation, such as --factory {recipe}"]
    if layout.tensor_overlap_chunks > 1:
        remarks.append("add MegatronCommOverlapCallback(tp_comm_overlap=True) to the recipe's trainer.callbacks")
    return "\n".join(f"{key}={_word(value)}" for key, value in found.items()), [*remarks, *_remarks(plan)]


def _core(plan: Plan, counts: Sequence[int]) -> Settings:
    """What both share, by NeMo's keys, which frameworks.toml has as flags."""
    model, layout = plan.model, plan.layout
    config, strategy = "model.config", "trainer.strategy"
    found = framework("nemo").copies(plan)
    found[f"{config}.normalization"] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm]
    found[f"{config}.position_embedding_type"] = "rope" if model.positions == "rope" else "learned_absolute"
    found[f"{config}.add_qkv_bias"] = model.qkv_bias and not model.bias
    if model.positions == "rope":
        found[f"{config}.rotary_base"] = int(model.rope_theta)
    if model.rope_scaling and model.rope_scaling.kind == "linear":
        found[f"{config}.seq_len_interpolation_factor"] = int(model.rope_scaling.factor)
    if model.num_experts:
        found |= {f"{config}.num_moe_experts": model.num_experts, f"{config}.moe_router_topk": model.experts_per_token}
        found[f"{strategy}.expert_model_parallel_size"] = int(expert_spread(model, layout))
    if len(set(counts)) > 1:
        found[f"{strategy}.pipeline_model_parallel_layout"] = f"E{'|'.join(f't*{n}' if n else '' for n in counts)}L"
    elif layout.virtual_stages > 1:
        found[f"{strategy}.virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    if layout.virtual_stages > 1:
        found[f"{config}.overlap_p2p_comm"] = layout.overlap
    found[f"{strategy}.use_tp_pp_dp_mapping"] = layout.outermost == "data"
    found["optim.config.use_distributed_optimizer"] = layout.zero > 0
    found[f"{strategy}.ddp.overlap_grad_reduce"] = layout.overlap and layout.data * layout.context > 1
    found[f"{strategy}.ddp.overlap_param_gather"] = layout.overlap and layout.zero > 0
    if layout.zero_group:
        found[f"{strategy}.num_distributed_optimizer_instances"] = layout.data // layout.zero_group
    if layout.bucket_bytes != Layout().bucket_bytes:
        found[f"{strategy}.ddp.bucket_size"] = layout.bucket_bytes // (4 if layout.reduce == "fp32" else 2)
    if layout.recompute != "none":
        found[f"{config}.recompute_granularity"] = layout.recompute
    if layout.recompute == "full":
        some = layout.recompute_layers
        found[f"{config}.recompute_method"] = "uniform" if some is None else "block"
        found[f"{config}.recompute_num_layers"] = 1 if some is None else some[0]
    return found


def _remarks(plan: Plan) -> Iterator[str]:
    if plan.layout.tensor_overlap_chunks > 1:
        yield "tp_comm_overlap serves what tensor_overlap_chunks does by another method"
    if plan.model.activation == "gelu" and plan.model.bias:
        yield "the fused GELU is the tanh form; bias_activation_fusion=false, --no-bias-gelu-fusion, computes this one"


def _flags(found: Settings) -> Iterator[str]:
    for flag, value in found.items():
        if not isinstance(value, bool):
            yield f"{flag} {_word(value)}"
        elif value != flag.startswith(INVERTED):
            yield flag


def _word(value: Any) -> str:
    """As a shell reads it: numbers in full, whole ones without a point."""
    whole = isinstance(value, float) and value.is_integer()
    return shlex.quote(str(int(value) if whole else value))
