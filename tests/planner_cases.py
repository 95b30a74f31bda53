"""For the planner's tests: a toy machine, a job, two models whose sizes divide by few numbers, GPTs of papers."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.cluster import ClusterSpec, Device, Link
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

LINK = Link(name="link", latency_s=2e-6, bytes_per_s=100e9)
DEVICE = Device(name="toy", memory_bytes=16 * 2**30, memory_bytes_per_s=1e12, flops_per_s={"bf16": 100e12})
CLUSTER = ClusterSpec(
    name="toy", num_nodes=4, devices_per_node=8, device=DEVICE, intra_node=LINK, inter_node=replace(LINK, name="net")
)
JOB = JobSpec(global_batch=48, seq_len=96, num_steps=1)
LLAMA = ModelSpec(
    name="llama",
    num_layers=7,
    hidden=96,
    num_heads=12,
    num_kv_heads=4,
    head_dim=8,
    ffn=240,
    vocab=1000,
    max_seq_len=96,
    norm="rmsnorm",
    activation="swiglu",
    positions="rope",
    tied=False,
)
GPT = replace(
    LLAMA,
    name="gpt",
    num_kv_heads=12,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    tied=True,
    qkv_bias=True,
    bias=True,
)


def megatron_gpt(hidden: int, layers: int, heads: int, seq_len: int = 2048, vocab: int = 51200) -> ModelSpec:
    """A GPT as the Megatron papers write it: f = 4 h, dropout."""
    return ModelSpec(
        name="gpt",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_seq_len=seq_len,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        tied=True,
        qkv_bias=True,
        bias=True,
        dropout=0.1,
        attention_dropout=0.1,
    )
