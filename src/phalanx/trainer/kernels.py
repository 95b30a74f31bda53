"""The operations inside a block that are neither matrix products nor communication, written so that they keep little
for backward and add weight gradients straight into flat buffers.

In bf16, norms compute in fp32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.trainer.flat import Weight, accumulation_dtype


def rms_norm(inputs: Tensor, weight: Weight, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) × weight over the last dim of [tokens, hidden] (Zhang and Sennrich 2019)."""
    return _result(_RMSNorm.apply(inputs, weight, eps))


def layer_norm(inputs: Tensor, weight: Weight, bias: Weight, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) × weight + bias over the last dim of [tokens, hidden] (Ba et al. 2016)."""
    return _result(_LayerNorm.apply(inputs, weight, bias, eps))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) × up; `gate_up` [tokens, 2 × ffn] holds both side by side (Shazeer 2020). Keeps its input only."""
    return _result(_SwiGLU.apply(gate_up))


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """[sequences, positions, (heads + 2 kv heads) × width] → [sequences, heads + 2 kv heads, positions, width].

    `rotation`: cosines and sines [positions, width / 2] that turn queries and keys; halves of a head are the pairs, as
    Hugging Face's Llama has them (RoFormer, eq. 34). None leaves them as they are.
    """
    return _result(_SplitHeads.apply(qkv, num_heads, num_kv_heads, rotation))


def add_positions(inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
    """Add learned positions: `inputs` [tokens, hidden], `positions` [tokens] (int64 rows of `weight`)."""
    return _result(_AddPositions.apply(inputs, weight, positions))


def _result(tensor: Any) -> Tensor:
    assert isinstance(tensor, Tensor)
    return tensor


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, eps: float) -> Tensor:
        wide = inputs.to(accumulation_dtype(inputs.dtype))
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(wide.shape[-1]).add_(eps)).unsqueeze(-1)
        ctx.save_for_backward(inputs, scale)
        ctx.weight = weight
        return (wide * scale).mul_(weight.value).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        inputs, scale = ctx.saved_tensors
        value = ctx.weight.value.to(scale.dtype)
        normed = inputs * scale
        products = output_grad * normed
        ctx.weight.grad.add_(products.sum(0))
        mean = torch.mv(products, value).div_(inputs.shape[-1]).unsqueeze(-1)
        input_grad = (output_grad * value).addcmul_(normed, mean, value=-1).mul_(scale)
        return input_grad.to(inputs.dtype), None, None


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
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        gate_grad, up_grad = grad.chunk(2, -1)
        torch.mul(output_grad, F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(output_grad * up, gate, grad_input=gate_grad)
        return grad


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, num_heads: int, num_kv_heads: int, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        sequences, positions, features = qkv.shape
        total = num_heads + 2 * num_kv_heads
        heads = qkv.view(sequences, positions, total, features // total).transpose(1, 2)
        ctx.num_turned, ctx.rotation = num_heads + num_kv_heads, rotation
        if rotation is None:
            return heads.contiguous()
        out = torch.empty(heads.shape, dtype=qkv.dtype, device=qkv.device)
        _rotate(heads, out, ctx.num_turned, *rotation, sign=1)
        return out

    @staticmethod
    def backward(ctx: Any, heads_grad: Tensor) -> tuple[Any, ...]:
        sequences, total, positions, width = heads_grad.shape
        out = heads_grad.new_empty(sequences, positions, total, width)
        if ctx.rotation is None:
            out.copy_(heads_grad.transpose(1, 2))
        else:
            _rotate(heads_grad, out.transpose(1, 2), ctx.num_turned, *ctx.rotation, sign=-1)
        return out.view(sequences, positions, total * width), None, None, None


def _rotate(heads: Tensor, out: Tensor, num_turned: int, cosines: Tensor, sines: Tensor, *, sign: int) -> None:
    """Turn the first `num_turned` heads by the angles (`sign` -1: back), copy the rest."""
    out[:, num_turned:] = heads[:, num_turned:]
    first, second = heads[:, :num_turned].chunk(2, -1)
    out_first, out_second = out[:, :num_turned].chunk(2, -1)
    torch.mul(first, cosines, out=out_first).addcmul_(second, sines, value=-sign)
    torch.mul(second, cosines, out=out_second).addcmul_(first, sines, value=sign)


class _AddPositions(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
        ctx.weight, ctx.positions = weight, positions
        return inputs + weight.value[positions]

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        ctx.weight.grad.index_add_(0, ctx.positions, output_grad.to(ctx.weight.grad.dtype))
        return output_grad, None, None
