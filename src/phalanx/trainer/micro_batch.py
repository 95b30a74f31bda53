"""MicroBatch: what one forward reads, and where its tokens stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.trainer.tensor_parallel import TensorParallel


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """What lies on the CPU, on `device`: there a copy that is on its way, for which this process does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of a micro-batch, where each stands alone. `positions` [sequences, positions] int64: how far each
    token stands from the beginning of its document; `lengths`: tokens of each, end to end over all sequences."""

    positions: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> Documents:
        """From `positions` on the CPU, so that no device is waited for: wherever one is 0, a document begins."""
        begins = (positions.flatten() == 0).nonzero().flatten().tolist()
        lengths = (end - begin for begin, end in zip(begins, [*begins[1:], positions.numel()], strict=True))
        return cls(positions=on_device(positions, device), lengths=tuple(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward reads. `tokens`, `labels` [sequences, positions] int64, labels negative where not supervised;
    `sequences` [sequences] int64: places in the global batch. `num_supervised` counts the whole global batch, so that
    the losses of all micro-batches of all ranks add up to its mean; gradients are those of `loss_scale` times the loss.
    `documents`: None where they are joined, so
    that tokens attend to all before them in the sequence. `step` and `seed` address dropout.

    With `validates` there is no dropout, nothing is kept for a backward, and the loss is the sum of the cross-entropy
    over supervised tokens."""

    tokens: Tensor
    labels: Tensor
    sequences: Tensor
    num_supervised: int
    loss_scale: float = 1.0
    documents: Documents | None = None
    step: int = 0
    seed: int = 0
    validates: bool = False


def held_places(batch: MicroBatch, parallel: TensorParallel) -> tuple[Tensor, Tensor]:
    """Global sequence and position [tokens] of each token that this rank holds between half-blocks."""
    num_positions = batch.tokens.shape[1]
    held = parallel.held_tokens(batch.tokens.numel())
    token = torch.arange(held.start, held.stop, device=batch.tokens.device)
    return batch.sequences[token // num_positions], token % num_positions


def held_positions(batch: MicroBatch, parallel: TensorParallel) -> Tensor:
    """The position [tokens] that counts for the model, of each token that this rank holds between half-blocks."""
    if batch.documents is None:
        return held_places(batch, parallel)[1]
    held = parallel.held_tokens(batch.tokens.numel())
    return batch.documents.positions.flatten()[held.start : held.stop]
