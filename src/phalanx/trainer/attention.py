"""Attention, and the rotary positions that it turns queries and keys by."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.spec.model import ModelSpec
from phalanx.trainer import dropout, kernels
from phalanx.trainer.micro_batch import Documents, MicroBatch
from phalanx.trainer.segments import EAGER, Segments


class Attention:
    """Causal self-attention on this rank's heads, within each sequence or within each document.

    `split` makes queries, keys and values of their features, calling makes of those [sequences, heads, positions,
    width]; where documents stand alone, all of the micro-batch counts as one sequence.
    """

    def __init__(
        self,
        model: ModelSpec,
        heads: range,
        num_kv_heads: int,
        rotation: tuple[Tensor, Tensor] | None,
        segments: Segments = EAGER,
    ) -> None:
        self.heads, self.num_kv_heads, self.rotation = heads, num_kv_heads, rotation
        self.dropout, self.segments = model.attention_dropout, segments

    def split(self, batch: MicroBatch) -> kernels.SplitHeads:
        """The link that splits [tokens, features of q, k and v] by head, and turns them by their positions (in the
        document or, where documents are joined, in the sequence)."""
        shape, rotation, documents = batch.tokens.shape, self.rotation, batch.documents
        positions = None if documents is None else documents.positions
        if positions is not None and not self._drops(batch):
            shape, positions = (1, shape[0] * shape[1]), positions.flatten()
        if rotation is not None and positions is None:
            rotation = rotation[0][: shape[1]], rotation[1][: shape[1]]
        return kernels.SplitHeads(shape, len(self.heads), self.num_kv_heads, rotation, positions, self.segments)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, layer: int) -> Tensor:
        """Attend."""
        if self._drops(batch):
            return self._with_dropout(q, k, v, batch, layer)
        return self._attend(q, k, v) if batch.documents is None else self._within(batch.documents, q, k, v)

    def _drops(self, batch: MicroBatch) -> bool:
        return bool(self.dropout) and not batch.validates

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = self.num_kv_heads != len(self.heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

    def _within(self, documents: Documents, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call per document: no score between two documents is computed, as it would be under a mask, and fused
        kernels can be used, on GPUs too. The result lies in memory as [tokens, heads, width]."""
        pieces = zip(*(tensor.split(documents.lengths, 2) for tensor in (q, k, v)), strict=True)
        return torch.cat([self._attend(*piece).transpose(1, 2) for piece in pieces], 1).transpose(1, 2)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, layer: int) -> Tensor:
        """Attention written out, since fused kernels draw masks of their own, which would depend on the layout."""
        k, v = (tensor.repeat_interleave(len(self.heads) // self.num_kv_heads, 1) for tensor in (k, v))
        scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        place = torch.arange(q.shape[2], device=q.device)
        hidden = place > place.unsqueeze(1)
        if batch.documents is not None:
            first = (place - batch.documents.positions).unsqueeze(1)  # where the document of each token begins
            hidden = hidden | (place < first.unsqueeze(3))
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        head = torch.arange(self.heads.start, self.heads.stop, device=q.device)
        key = dropout.site_key(batch.seed, batch.step, layer, "attention")
        sequences = batch.sequences.view(-1, 1, 1, 1)
        keep = dropout.keep_mask(key, self.dropout, sequences, head.view(-1, 1, 1), place.unsqueeze(1), place)
        return dropout.apply(weights, keep, self.dropout) @ v


def rotation_table(
    model: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [seq_len, head_dim / 2] of rotary positions, computed in float64; None for learned ones."""
    if model.positions != "rope":
        return None
    frequencies = torch.tensor(model.rope_inverse_frequencies(), dtype=torch.float64, device=device)
    angles = torch.arange(seq_len, dtype=torch.float64, device=device).unsqueeze(1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
