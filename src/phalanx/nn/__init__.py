"""Layers cut over a process group of torch.distributed, for scripts that keep their own loop (docs/own-models.md)."""

from phalanx.nn.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_tokens,
    share_parameters,
    split_tokens,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "gather_tokens",
    "share_parameters",
    "split_tokens",
]
