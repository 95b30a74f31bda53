"""Layers of phalanx.nn in a script that has nothing else of ours: the outputs and gradients of torch's own layers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import RankFailed, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.errors import InputError
from phalanx.nn.layers import ParallelLayer

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 32, 8, 4, 48, 30  # no group of 4 cuts the vocabulary evenly


class Parallel(nn.Module):
    """A block between an embedding and a head, all of them cut over `group`."""

    def __init__(self, group: Any, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
        self.embedding = phalanx.nn.VocabParallelEmbedding(VOCAB, HIDDEN, **options)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        if sequence_parallel:
            phalanx.nn.share_parameters(self.norm, group)
        self.attention = phalanx.nn.ParallelAttention(HIDDEN, HEADS, num_kv_heads=KV_HEADS, **options)
        self.mlp = phalanx.nn.ParallelMLP(HIDDEN, FFN, activation="silu", gated=True, **options)
        self.head = phalanx.nn.ColumnParallelLinear(HIDDEN, VOCAB, gather_output=True, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(self.norm(hidden))
        return self.head(hidden + self.mlp(self.norm(hidden)))


class Alone(nn.Module):
    """The same of torch's layers; drawn in the same order, so from the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        kv, options = HIDDEN // HEADS * KV_HEADS, {"dtype": torch.float64}
        self.embedding = nn.Embedding(VOCAB, HIDDEN, **options)
        self.norm = nn.LayerNorm(HIDDEN, **options)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(HIDDEN, HIDDEN + 2 * kv, **options), "out": nn.Linear(HIDDEN, HIDDEN, **options)}
        )
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(HIDDEN, 2 * FFN, **options), "down": nn.Linear(FFN, HIDDEN, **options)}
        )
        self.head = nn.Linear(HIDDEN, VOCAB, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, width = self.embedding(tokens), HIDDEN // HEADS
        qkv = self.attention["qkv"](self.norm(hidden)).split([HIDDEN, KV_HEADS * width, KV_HEADS * width], -1)
        q, k, v = (piece.unflatten(-1, (-1, width)).transpose(1, 2) for piece in qkv)
        k, v = (piece.repeat_interleave(HEADS // KV_HEADS, 1) for piece in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.attention["out"](attended)
        gate, up = self.mlp["up"](self.norm(hidden)).chunk(2, -1)
        return self.head(hidden + self.mlp["down"](F.silu(gate) * up))


def tokens() -> Tensor:
    return torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(5))


def loss_of(logits: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.flatten())


def joined(rank: int, size: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def cuts(module: nn.Module) -> dict[str, Any]:
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, ParallelLayer)]
    return {f"{name}.{key}": cut for name, layer in layers for key, cut in layer.cuts.items()}


def one_step(rank: int, size: int, folder: str, sequence_parallel: bool) -> tuple[Any, ...]:
    joined(rank, size, folder)
    torch.manual_seed(7 + rank)  # the first rank's draws count
    module = Parallel(None, sequence_parallel)
    logits = module(tokens())
    loss_of(logits, tokens()).backward()
    dist.destroy_process_group()
    return logits.detach(), gradients(module), cuts(module)


def hold(found: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(7)
    module = Alone()
    logits = module(tokens())
    loss_of(logits, tokens()).backward()
    for theirs, held, boxes in found:
        torch.testing.assert_close(theirs, logits.detach(), rtol=1e-10, atol=1e-12)
        assert held.keys() == gradients(module).keys()
        for name, gradient in gradients(module).items():
            expected = boxes[name].take(gradient) if name in boxes else gradient
            assert held[name] is not None, name
            torch.testing.assert_close(held[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_compute_what_those_of_torch_do(size: int, sequence_parallel: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hold(run_ranks(size, one_step, size, folder, sequence_parallel))


def test_without_a_process_group_they_are_plain_layers() -> None:
    torch.manual_seed(7)
    module = Parallel(None, sequence_parallel=True)
    logits = module(tokens())
    loss_of(logits, tokens()).backward()
    hold([(logits.detach(), gradients(module), {})])


def in_a_grid(rank: int, folder: str) -> tuple[Any, ...]:
    """Tensor 2 × data 2: pairs of neighbours hold one copy, DistributedDataParallel joins the copies."""
    joined(rank, 4, folder)
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(7)
    module = Parallel(tensor_groups[rank // 2], sequence_parallel=True)
    replica = DistributedDataParallel(module, process_group=data_groups[rank % 2])
    mine = tokens().chunk(2)[rank // 2]
    logits = replica(mine)
    loss_of(logits, mine).backward()
    every = [torch.empty_like(logits) for _ in range(2)]
    dist.all_gather(every, logits.detach(), group=data_groups[rank % 2])
    dist.destroy_process_group()
    return torch.cat(every), gradients(module), cuts(module)


def test_distributed_data_parallel_of_torch_wraps_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hold(run_ranks(4, in_a_grid, folder))


def uneven(rank: int, folder: str, make: Any) -> None:
    joined(rank, 2, folder)
    make()


def narrow() -> None:
    phalanx.nn.RowParallelLinear(8, 8)(torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: phalanx.nn.ParallelMLP(8, 7), "output features of weight of 7 do not divide among 2 ranks"),
        (lambda: phalanx.nn.ParallelAttention(9, 3), "3 heads and 3 of keys do not divide among 2 ranks"),
        (lambda: phalanx.nn.VocabParallelEmbedding(1, 8), "1 rows leave none for the last of 2 ranks"),
        (narrow, "a row-parallel layer got 8 features, its part takes 4 of 8"),
        (lambda: phalanx.nn.split_tokens(torch.zeros(3, 8)), "3 tokens do not divide among 2 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Any, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RankFailed, match=text) as caught:
        run_ranks(2, uneven, folder, make)
    assert isinstance(caught.value.cause, InputError)
