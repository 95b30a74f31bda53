"""Cut: one rank's share of one micro-batch, which `plan.operations` counts from.

Every size may be an int (one layout) or a numpy array with one entry per layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from phalanx.plan.shards import VOCAB_MULTIPLE
from phalanx.spec.model import ModelSpec

Size: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One rank's share of one micro-batch. `tokens` inside a half-block, `rows` between half-blocks (fewer under
    sequence parallelism); `kv_copied`: whether other ranks hold the same kv head; `element` bytes of the compute
    precision, `statistic` of norms and softmax; `eight_bit`: whether linear layers multiply in 8 bits.

    Experts lie spread over the data axis as far as they divide it, in `expert_groups` copies: `experts` on this rank,
    `expert_tokens` come to each, `routed_tokens` leave this rank (each token once per expert that it has).

    `opening`, `closing`: into how many pieces a product is cut that alternates with the collective which opens, or
    closes, a half-block.
    """

    micro_batch: Size
    queries: Size
    keys: Size
    tokens: Size
    rows: Size
    heads: Size
    kv_heads: Size
    kv_copied: Any
    ffn: Size
    vocab: Size
    hidden: int
    head_dim: int
    element: int
    statistic: int
    eight_bit: bool = False
    experts: Size = 0
    expert_tokens: Size = 0
    routed_tokens: Size = 0
    expert_groups: Size = 1
    opening: Size = 1
    closing: Size = 1

    @property
    def q(self) -> Size:
        """Rows of the query projection on this rank."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> Size:
        """Rows of the key projection, and of the value projection, on this rank."""
        return self.kv_heads * self.head_dim


def cut_of(
    model: ModelSpec,
    seq_len: int,
    layout: Any,
    element: int,
    *,
    eight_bit: bool = False,
    tensor_index: int | None = None,
) -> Cut:
    """One rank's share under `layout` (a Layout, or anything with arrays for its fields).

    The vocabulary is counted with its padding, or, for the rank at `tensor_index`, without.
    """
    tensor, queries = layout.tensor, seq_len // layout.context
    tokens = layout.micro_batch * queries
    divisor = np.where(layout.sequence_parallel, tensor, 1)
    rows = tokens // (divisor if np.ndim(divisor) else int(divisor))
    kv_heads = model.num_kv_heads // tensor
    vocab = -(-model.vocab // (VOCAB_MULTIPLE * tensor)) * VOCAB_MULTIPLE
    spread = expert_spread(model, layout)
    opening, closing = _pieces(tensor, divisor, layout.tensor_overlap_chunks)
    if tensor_index is not None:
        vocab = max(0, min(vocab, model.vocab - tensor_index * vocab))
    return Cut(
        micro_batch=layout.micro_batch,
        queries=queries,
        keys=seq_len,
        tokens=tokens,
        rows=rows,
        heads=model.num_heads // tensor,
        kv_heads=np.maximum(1, kv_heads) if np.ndim(kv_heads) else max(1, kv_heads),
        kv_copied=tensor > model.num_kv_heads,
        ffn=model.ffn // tensor,
        vocab=vocab,
        hidden=model.hidden,
        head_dim=model.head_dim,
        element=element,
        statistic=max(4, element),
        eight_bit=eight_bit,
        experts=model.num_experts // spread,
        expert_tokens=np.maximum(1, tokens * model.experts_per_token * spread // max(1, model.num_experts)),
        routed_tokens=tokens * model.experts_per_token,
        expert_groups=layout.data // spread,
        opening=opening,
        closing=closing,
    )


def expert_spread(model: ModelSpec, layout: Any) -> Size:
    """Neighbours on the data axis over which experts lie: `layout.expert_group`, or as many as divide both."""
    widest = np.gcd(max(1, model.num_experts), layout.data)
    return (
        np.where(layout.expert_group, layout.expert_group, widest) if np.ndim(widest) else layout.expert_group or widest
    )


def _pieces(tensor: Size, holders: Size, chunks: Size) -> tuple[Size, Size]:
    """`opening` and `closing` of a Cut: a chunk of tokens that `holders` ranks hold parts of is a piece for each."""
    if np.all(chunks == 1):
        return 1, 1
    closing = np.where((tensor > 1) & (chunks > 1), chunks * holders, 1)
    opening = np.where(holders > 1, closing, 1)
    return (opening, closing) if np.ndim(tensor) else (int(opening), int(closing))
