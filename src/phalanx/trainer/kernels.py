"""The operations inside a block that are neither matrix products nor communication, written so that they keep little
for backward and add weight gradients straight into flat buffers.

In bf16, norms compute in fp32 and round once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.trainer.flat import Weight, accumulation_dtype
from phalanx.trainer.segments import EAGER, Segments


def rms_norm(inputs: Tensor, weight: Weight, eps: float, segments: Segments = EAGER) -> Tensor:
    """x / sqrt(mean(x²) + eps) × weight over the last dim of [tokens, hidden] (Zhang and Sennrich 2019)."""
    return _result(_RMSNorm.apply(inputs, weight, eps, segments))


def norm_heads(qkv: Tensor, norms: Sequence[tuple[Weight, int]], head_dim: int, eps: float) -> Tensor:
    """`rms_norm` over the width of heads. `qkv` [tokens, heads × width]: the first heads, as many as the first of
    `norms` says, are scaled by its weight [width], those behind by the next one's; the rest stays as it is (Qwen3:
    queries and keys, not values)."""
    return _result(_NormHeads.apply(qkv, norms, head_dim, eps))


def layer_norm(inputs: Tensor, weight: Weight, bias: Weight, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) × weight + bias over the last dim of [tokens, hidden] (Ba et al. 2016)."""
    return _result(_LayerNorm.apply(inputs, weight, bias, eps))


def swiglu(gate_up: Tensor, segments: Segments = EAGER) -> Tensor:
    """silu(gate) × up; `gate_up` [tokens, 2 × ffn] holds both side by side (Shazeer 2020). Keeps its input only."""
    return _result(_SwiGLU.apply(gate_up, segments))


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor | None = None,
    segments: Segments = EAGER,
) -> tuple[Tensor, Tensor, Tensor]:
    """[sequences, positions, (heads + 2 kv heads) × width] → q, k, v, each [sequences, its heads, positions, width].

    `rotation`: cosines and sines [positions, width / 2] that turn queries and keys; halves of a head are the pairs, as
    Hugging Face's Llama has them (RoFormer, eq. 34). None leaves them as they are. With `positions` [positions] or
    [sequences, positions] (int64), those are the rows of `rotation` to take. All three are views of `qkv`, which is
    overwritten: nothing is copied, and attention takes the strides as they are.
    """
    q, k, v = _SplitHeads.apply(qkv, num_heads, num_kv_heads, rotation, positions, segments)
    return q, k, v


def add_positions(inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
    """Add learned positions: `inputs` [tokens, hidden], `positions` [tokens] (int64 rows of `weight`)."""
    return _result(_AddPositions.apply(inputs, weight, positions))


def _result(tensor: Any) -> Tensor:
    assert isinstance(tensor, Tensor)
    return tensor


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, eps: float, segments: Segments) -> Tensor:
        output, scale = segments.rms_norm(inputs, weight.value, eps)
        ctx.save_for_backward(inputs, scale)
        ctx.weight, ctx.segments = weight, segments
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        inputs, scale = ctx.saved_tensors
        input_grad, weight_grad = ctx.segments.rms_norm_backward(inputs, scale, output_grad, ctx.weight.value)
        ctx.weight.grad.add_(weight_grad)
        return input_grad, None, None, None


class _NormHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, norms: Sequence[tuple[Weight, int]], head_dim: int, eps: float) -> Tensor:
        wide = accumulation_dtype(qkv.dtype)
        output, scales = torch.empty_like(qkv), []
        for (weight, _), given, result in _heads(norms, head_dim, qkv, output):
            heads = given.to(wide)
            norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
            scales.append(norm.square_().div_(head_dim).add_(eps).rsqrt_())
            result.copy_((heads * scales[-1]).mul_(weight.value))
        rest = sum(count for _, count in norms) * head_dim
        output[:, rest:] = qkv[:, rest:]
        ctx.save_for_backward(qkv, *scales)
        ctx.norms, ctx.head_dim = norms, head_dim
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        """As `_RMSNorm.backward`, for each head of each token."""
        qkv, *scales = ctx.saved_tensors
        input_grad = output_grad.clone()
        parts = _heads(ctx.norms, ctx.head_dim, qkv, output_grad, input_grad)
        for ((weight, _), given, grad, result), scale in zip(parts, scales, strict=True):
            heads, wide_grad, value = (tensor.to(scale.dtype) for tensor in (given, grad, weight.value))
            normed = heads * scale
            weight.grad.add_((wide_grad * normed).sum((0, 1)))
            through = wide_grad * value
            result.copy_(scale * (through - normed * (through * normed).mean(-1, keepdim=True)))
        return input_grad, None, None, None


def _heads(norms: Sequence[tuple[Weight, int]], head_dim: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each norm, and its part of each of the `tensors` as [tokens, heads, width]."""
    first = 0
    for norm in norms:
        last = first + norm[1] * head_dim
        yield norm, *(tensor[:, first:last].unflatten(1, (norm[1], head_dim)) for tensor in tensors)
        first = last


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, bias: Weight, eps: float) -> Tensor:
        wide = accumulation_dtype(inputs.dtype)
        output, mean, scale = torch.native_layer_norm(
            inputs.to(wide), inputs.shape[-1:], weight.value.to(wide), bias.value.to(wide), eps
        )
        ctx.save_for_backward(inputs, mean, scale)
        ctx.weight, ctx.bias = weight, bias
        return output.to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        inputs, mean, scale = ctx.saved_tensors
        wide = scale.dtype
        input_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            output_grad.to(wide),
            inputs.to(wide),
            inputs.shape[-1:],
            mean,
            scale,
            ctx.weight.value.to(wide),
            ctx.bias.value.to(wide),
            [True, True, True],
        )
        ctx.weight.grad.add_(weight_grad)
        ctx.bias.grad.add_(bias_grad)
        return input_grad.to(inputs.dtype), None, None, None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.segments = segments
        return segments.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        return ctx.segments.swiglu_backward(*ctx.saved_tensors, output_grad), None


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        rotation: tuple[Tensor, Tensor] | None,
        positions: Tensor | None,
        segments: Segments,
    ) -> tuple[Tensor, ...]:
        sequences, num_positions, features = qkv.shape
        total = num_heads + 2 * num_kv_heads
        heads = qkv.view(sequences, num_positions, total, features // total)
        ctx.num_turned, ctx.rotation, ctx.positions = num_heads + num_kv_heads, rotation, positions
        ctx.segments = segments
        if rotation is not None:
            segments.rotate(heads[:, :, : ctx.num_turned], *_angles(rotation, positions), 1)
        return heads.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        heads_grad = torch.cat([grad.transpose(1, 2) for grad in grads], 2)
        if ctx.rotation is not None:
            turned = heads_grad[:, :, : ctx.num_turned]
            ctx.segments.rotate(turned, *_angles(ctx.rotation, ctx.positions), -1)
        return heads_grad.flatten(2), *[None] * 5


def _angles(rotation: tuple[Tensor, Tensor], positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions, as they meet heads [sequences, positions, heads, width / 2]."""
    rows = rotation if positions is None else (rotation[0][positions], rotation[1][positions])
    return rows[0].unsqueeze(-2), rows[1].unsqueeze(-2)


class _AddPositions(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
        ctx.weight, ctx.positions = weight, positions
        return inputs + weight.value[positions]

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        ctx.weight.grad.index_add_(0, ctx.positions, output_grad.to(ctx.weight.grad.dtype))
        return output_grad, None, None
