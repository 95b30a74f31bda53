"""ModelSpec: the sizes of a transformer, and what follows from them alone.

Two styles cover the families we train. GPT-2 style: LayerNorm, GELU, learned positions, biases, tied embeddings.
Llama style: RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases, usually untied. Every choice is a
field of its own, so that mixtures (Qwen2: Llama with biases on q, k, v; Qwen3: with norms of q and k) need no style of
their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.schema import Below1, Count, Count31, Positive, Range, Whole

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Positions = Literal["learned", "rope"]

Layers = Annotated[int, Range(at_least=1, at_most=100_000)]  # more is a slip, and would keep the planner busy
Width = Annotated[int, Range(at_least=1, at_most=2**24)]  # so that the planner's products stay within 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts (Hugging Face's `rope_scaling`).

    `kind` "linear" divides all of them by `factor`; "llama3" only the slow ones, blending between `low_freq_factor` and
    `high_freq_factor` wavelengths of `original_max_seq_len` (Llama 3.1 model card).
    """

    kind: Literal["linear", "llama3"]
    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_seq_len: Count = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, globally: sizes before any axis cuts them, vocabulary before padding.

    `qkv_bias` puts biases on the q, k and v projections, `bias` on every other linear layer of a block (attention
    output, feed-forward). LayerNorm always has a bias, RMSNorm never. `qk_norm` puts an RMSNorm over the width of each
    query and each key head before rotary positions turn it, one weight for all query heads and one for all key heads of
    a layer. `dropout` acts after the embedding and after each half-block, `attention_dropout` on attention
    probabilities.

    With `num_experts` above 0 every feed-forward is a mixture: a router sends each token to `experts_per_token` of
    them, each `ffn` wide. Such models can be planned; the trainer does not run them.
    """

    name: str
    num_layers: Layers
    hidden: Width
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    ffn: Width
    vocab: Count31
    max_seq_len: Count31
    norm: Norm
    activation: Activation
    positions: Positions
    tied: bool
    qkv_bias: bool = False
    bias: bool = False
    qk_norm: bool = False
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    init_std: Positive = 0.02
    dropout: Below1 = 0.0
    attention_dropout: Below1 = 0.0
    num_experts: Whole = 0
    experts_per_token: Whole = 0

    @property
    def gated(self) -> bool:
        """Whether the feed-forward multiplies a gate with an up projection (three matrices instead of two)."""
        return self.activation == "swiglu"

    @property
    def q_rows(self) -> int:
        """Rows of the query projection: heads × head width (need not equal `hidden`)."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one transformer block (docs/equations.md, 1; SC21 eq. 2 for GPT)."""
        matrices = 2 * self.hidden * (self.q_rows + self.kv_rows)
        matrices += (3 if self.gated else 2) * self.hidden * self.ffn * max(1, self.num_experts)
        matrices += self.hidden * self.num_experts
        biases = (self.q_rows + 2 * self.kv_rows) if self.qkv_bias else 0
        if self.bias:
            biases += self.hidden + (2 if self.gated else 1) * self.ffn + self.hidden
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return matrices + biases + head_norms + 2 * self.num_norm_parameters

    @property
    def num_norm_parameters(self) -> int:
        """Parameters of one norm: a scale, and a shift under LayerNorm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def num_embedding_parameters(self) -> int:
        """Token embedding, and learned positions where there are any."""
        positions = self.max_seq_len * self.hidden if self.positions == "learned" else 0
        return self.vocab * self.hidden + positions

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied embedding counted once, padding of the vocabulary not at all."""
        head = 0 if self.tied else self.vocab * self.hidden
        layers = self.num_layers * self.num_layer_parameters
        return self.num_embedding_parameters + layers + self.num_norm_parameters + head

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Model FLOPs of one token, forward and backward: 3 × forward, a multiply-add being 2 (docs/equations.md, 3).

        Matrix products of the layers and the head, plus the attention core: `4 s a d` per layer in full, or its causal
        average `2 (s + 1) a d`. Published MFU figures mostly count the full core.
        """
        matrices = 2 * self.hidden * (self.q_rows + self.kv_rows) + self.hidden * self.num_experts
        matrices += (3 if self.gated else 2) * self.hidden * self.ffn * max(1, self.experts_per_token)
        core = (2 * (seq_len + 1) if causal else 4 * seq_len) * self.q_rows
        return 3.0 * (self.num_layers * (2 * matrices + core) + 2 * self.hidden * self.vocab)

    def rope_inverse_frequencies(self) -> tuple[float, ...]:
        """The `head_dim / 2` rotary frequencies in radians per position, scaling applied (RoFormer eq. 15)."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        scaling = self.rope_scaling
        if scaling is None:
            return tuple(plain)
        if scaling.kind == "linear":
            return tuple(frequency / scaling.factor for frequency in plain)
        return tuple(_llama3_frequency(frequency, scaling) for frequency in plain)


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """One frequency under Llama 3.1's rule: fast ones kept, slow ones divided, a linear blend between."""
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
