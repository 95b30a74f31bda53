"""The benchmark's model as users write it with torch alone, and torch's own ways to spread it over processes.

Each method of Reference runs one rank's steps over a common batch; see `crew.Contender`.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from crew import Steps
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec
from phalanx.trainer.process import keep_freed_memory


def load() -> None:
    """Import what the references need: torch imports much of it only at first use."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    warnings.simplefilter("ignore")  # fully_shard warns of views that nobody here writes into


def rotation(model: ModelSpec, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq_len, head width]."""
    angles = torch.arange(seq_len).unsqueeze(1) * torch.tensor(model.rope_inverse_frequencies())
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions on [batch, heads, positions, width]."""
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat([-second, first], -1) * sines


class Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.width = model.head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(model.hidden, model.hidden, bias=False) for _ in range(4))
        self.rotation = rotation(model, seq_len)

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, positions, hidden] → the same."""
        batch, positions, _ = inputs.shape
        q, k, v = (
            layer(inputs).view(batch, positions, -1, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = (rotate(heads, *self.rotation) for heads in (q, k))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(output.transpose(1, 2).reshape(batch, positions, -1))


class FeedForward(nn.Module):
    """SwiGLU with separate projections."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, positions, hidden] → the same."""
        return self.down(F.silu(self.gate(inputs)) * self.up(inputs))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(model, seq_len), FeedForward(model)
        self.norm1, self.norm2 = (nn.RMSNorm(model.hidden, eps=model.norm_eps) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, positions, hidden] → the same."""
        middle = inputs + self.attention(self.norm1(inputs))
        return middle + self.feed_forward(self.norm2(middle))


class Transformer(nn.Module):
    """Blocks `layers` of the model, with the embedding before the first and norm and head after the last."""

    def __init__(self, model: ModelSpec, seq_len: int, layers: range) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden) if layers.start == 0 else None
        self.blocks = nn.ModuleList(Block(model, seq_len) for _ in layers)
        last = layers.stop == model.num_layers
        self.norm = nn.RMSNorm(model.hidden, eps=model.norm_eps) if last else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if last else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, positions], or activations from the stage before, → activations or logits."""
        activations = self.embedding(inputs) if self.embedding is not None else inputs
        for block in self.blocks:
            activations = block(activations)
        return self.head(self.norm(activations)) if self.head is not None else activations


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Reference:
    """The steps of all references, over one batch: `tokens`, `labels` [sequences, positions]."""

    def __init__(self, model: ModelSpec, tokens: Tensor, labels: Tensor, num_micro_batches: int) -> None:
        self.model, self.tokens, self.labels = model, tokens, labels
        self.seq_len, self.num_micro_batches = tokens.shape[1], num_micro_batches

    def plain(self, rank: int, folder: Path) -> Steps:
        """One process, one forward of the whole batch."""
        return self._whole(Transformer(self.model, self.seq_len, range(self.model.num_layers)), 0, 1)

    def plain_keeping_memory(self, rank: int, folder: Path) -> Steps:
        """The same, with our settings of the memory allocator."""
        keep_freed_memory()
        return self.plain(rank, folder)

    def plain_bf16(self, rank: int, folder: Path) -> Steps:
        """One process in mixed precision: matrix products in bf16, parameters in fp32."""
        steps = self.plain(rank, folder)
        while True:
            with torch.autocast("cpu", torch.bfloat16):
                blocked_s = next(steps)
            yield blocked_s

    def data_parallel(self, rank: int, folder: Path) -> Steps:
        """DistributedDataParallel over two processes."""
        join(rank, 2, folder)
        module = Transformer(self.model, self.seq_len, range(self.model.num_layers))
        return self._whole(nn.parallel.DistributedDataParallel(module), rank, 2)

    def fully_sharded(self, rank: int, folder: Path) -> Steps:
        """`fully_shard` over two processes, parameters kept whole from forward to backward (ZeRO 2)."""
        join(rank, 2, folder)
        return self._whole(self._part(mesh_of((1, 2, 1)), 0, 1), rank, 2)

    def fully_sharded_over_4(self, rank: int, folder: Path) -> Steps:
        """`fully_shard` over four processes, parameters freed after each use (ZeRO 3)."""
        join(rank, 4, folder)
        return self._whole(self._part(mesh_of((1, 4, 1)), 0, 1, free_after_use=True), rank, 4)

    def tensor_parallel(self, rank: int, folder: Path) -> Steps:
        """DTensor's `parallelize_module` over two processes, without sequence parallelism (with it, it is slower)."""
        join(rank, 2, folder)
        return self._whole(self._part(mesh_of((1, 1, 2)), 0, 1), 0, 1)

    def pipeline_parallel(self, rank: int, folder: Path) -> Steps:
        """`torch.distributed.pipelining` over two processes: 1F1B."""
        join(rank, 2, folder)
        return self._pipelined((2, 1, 1), (rank,))

    def interleaved(self, rank: int, folder: Path) -> Steps:
        """Interleaved 1F1B over two processes with two stages each."""
        join(rank, 2, folder)
        return self._pipelined((2, 1, 1), (rank, rank + 2), "Interleaved1F1B")

    def zero_bubble(self, rank: int, folder: Path) -> Steps:
        """Zero bubble with one stage for each of two processes: the order of ZB-H1."""
        join(rank, 2, folder)
        return self._pipelined((2, 1, 1), (rank,), "InterleavedZeroBubble")

    def zero_bubble_v(self, rank: int, folder: Path) -> Steps:
        """ZB-V over two processes."""
        join(rank, 2, folder)
        return self._pipelined((2, 1, 1), (rank, 3 - rank), "ZBVZeroBubble")

    def tensor_and_data_parallel(self, rank: int, folder: Path) -> Steps:
        """`fully_shard` over `parallelize_module`, 2 × 2."""
        join(rank, 4, folder)
        return self._whole(self._part(mesh_of((1, 2, 2)), 0, 1), rank // 2, 2)

    def tensor_and_pipeline_parallel(self, rank: int, folder: Path) -> Steps:
        """1F1B over `parallelize_module`, 2 × 2."""
        join(rank, 4, folder)
        return self._pipelined((2, 1, 2), (rank // 2,))

    def composed(self, rank: int, folder: Path) -> Steps:
        """1F1B over `fully_shard` over `parallelize_module`, 2 × 2 × 2."""
        join(rank, 8, folder)
        return self._pipelined((2, 2, 2), (rank // 4,))

    def _part(self, mesh: dist.DeviceMesh, index: int, num_parts: int, free_after_use: bool = False) -> nn.Module:
        """Part `index` of the layers, spread over the tensor and data axes of `mesh`."""
        from torch.distributed.fsdp import fully_shard

        share = self.model.num_layers // num_parts
        module = Transformer(self.model, self.seq_len, range(index * share, (index + 1) * share))
        if mesh["tensor"].size() > 1:
            _cut_over_tensor(module, mesh["tensor"])
        if mesh["data"].size() > 1:
            for part in (*module.blocks, module):
                fully_shard(part, mesh=mesh["data"], reshard_after_forward=free_after_use)
        return module

    def _whole(self, module: nn.Module, data_index: int, data_size: int) -> Steps:
        """One forward of all sequences of a data coordinate."""
        optimizer = optimizer_of(module)
        tokens, labels = (whole.chunk(data_size)[data_index] for whole in (self.tokens, self.labels))
        while True:
            loss_of(module(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield {}

    def _pipelined(
        self,
        sizes: tuple[int, int, int],
        stages: tuple[int, ...],
        schedule_name: str = "1F1B",
    ) -> Steps:
        """Steps of a pipeline of which this rank holds `stages`; `sizes` are those of the mesh."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        mesh = mesh_of(sizes)
        axis = mesh["pipeline"]
        num_stages = sizes[0] * len(stages)
        modules = [self._part(mesh, index, num_stages) for index in stages]
        optimizer = optimizer_of(nn.ModuleList(modules))
        held = [
            PipelineStage(module, index, num_stages, torch.device("cpu"), group=axis.get_group())
            for module, index in zip(modules, stages, strict=True)
        ]
        made = get_schedule_class(schedule_name)
        schedule = made(held[0] if schedule_name == "1F1B" else held, self.num_micro_batches, loss_fn=loss_of)
        data_index = mesh["data"].get_local_rank()
        tokens, labels = (whole.chunk(sizes[1])[data_index] for whole in (self.tokens, self.labels))
        while True:
            schedule.step(*([tokens] if 0 in stages else []), target=labels if num_stages - 1 in stages else None)
            optimizer.step()
            optimizer.zero_grad()
            yield {}


def mesh_of(sizes: tuple[int, int, int]) -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data", "tensor"))


def join(rank: int, num_ranks: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW, which cannot update plain and distributed tensors in one call."""
    from torch.distributed.tensor import DTensor

    parameters = list(module.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) == distributed] for distributed in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], fused=True)


def _cut_over_tensor(module: Transformer, mesh: dist.DeviceMesh) -> None:
    """Megatron's cuts in DTensor's words. The logits are gathered: `loss_parallel` does not compose with pipelining."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    columns = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
    rows = ("attention.o", "feed_forward.down")
    for block in module.blocks:
        cuts = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, cuts)
    if module.embedding is not None:
        parallelize_module(module.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if module.head is not None:
        parallelize_module(module.head, mesh, ColwiseParallel(output_layouts=Replicate()))
