"""The operations inside a block that are neither matrix products nor communication, as links of chains, written so that
they keep little for backward and add weight gradients straight into flat buffers.

In bf16, norms compute in fp32 and round once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.trainer.chain import Kept
from phalanx.trainer.flat import Weight, accumulation_dtype
from phalanx.trainer.segments import EAGER, Segments


class RMSNorm:
    """x / sqrt(mean(x²) + eps) × weight over the last dim of [tokens, hidden] (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Weight, eps: float, segments: Segments = EAGER) -> None:
        self.weight, self.eps, self.segments = weight, eps, segments

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        output, scale = self.segments.rms_norm(inputs, self.weight.value, self.eps)
        kept.items.append((inputs, scale))
        return output

    def again(self, item: Any) -> Tensor:
        """See `Repeatable.again`."""
        return self.segments.rms_norm(item[0], self.weight.value, self.eps)[0]

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        inputs, scale = kept.items.pop()
        input_grad, weight_grad = self.segments.rms_norm_backward(inputs, scale, output_grad, self.weight.value)
        self.weight.grad.add_(weight_grad)
        return input_grad


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) × weight + bias over the last dim of [tokens, hidden] (Ba et al. 2016)."""

    def __init__(self, weight: Weight, bias: Weight, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        output, mean, scale = self._normed(inputs)
        kept.items.append((inputs, mean, scale))
        return output.to(inputs.dtype)

    def again(self, item: Any) -> Tensor:
        """See `Repeatable.again`."""
        return self._normed(item[0])[0].to(item[0].dtype)

    def _normed(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulation_dtype(inputs.dtype)
        weight, bias = self.weight.value.to(wide), self.bias.value.to(wide)
        return torch.native_layer_norm(inputs.to(wide), inputs.shape[-1:], weight, bias, self.eps)

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        inputs, mean, scale = kept.items.pop()
        wide = scale.dtype
        input_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            output_grad.to(wide),
            inputs.to(wide),
            inputs.shape[-1:],
            mean,
            scale,
            self.weight.value.to(wide),
            self.bias.value.to(wide),
            [True, True, True],
        )
        self.weight.grad.add_(weight_grad)
        self.bias.grad.add_(bias_grad)
        return input_grad.to(inputs.dtype)


Norm = RMSNorm | LayerNorm


class NormHeads:
    """`RMSNorm` over the width of heads. Of [tokens, heads × width] the first heads, as many as the first of `norms`
    says, are scaled by its weight [width], those behind by the next one's; the rest stays as it is (Qwen3: queries and
    keys, not values)."""

    def __init__(self, norms: Sequence[tuple[Weight, int]], head_dim: int, eps: float) -> None:
        self.norms, self.head_dim, self.eps = norms, head_dim, eps

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        wide = accumulation_dtype(inputs.dtype)
        output, scales = torch.empty_like(inputs), []
        for (weight, _), given, result in self._heads(inputs, output):
            heads = given.to(wide)
            norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
            scales.append(norm.square_().div_(self.head_dim).add_(self.eps).rsqrt_())
            result.copy_((heads * scales[-1]).mul_(weight.value))
        rest = sum(count for _, count in self.norms) * self.head_dim
        output[:, rest:] = inputs[:, rest:]
        kept.items.append((inputs, scales))
        return output

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """As `RMSNorm.backward`, for each head of each token."""
        inputs, scales = kept.items.pop()
        input_grad = output_grad.clone()
        parts = self._heads(inputs, output_grad, input_grad)
        for ((weight, _), given, grad, result), scale in zip(parts, scales, strict=True):
            heads, wide_grad, value = (tensor.to(scale.dtype) for tensor in (given, grad, weight.value))
            normed = heads * scale
            weight.grad.add_((wide_grad * normed).sum((0, 1)))
            through = wide_grad * value
            result.copy_(scale * (through - normed * (through * normed).mean(-1, keepdim=True)))
        return input_grad

    def _heads(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Each norm, and its part of each of the `tensors` as [tokens, heads, width]."""
        first = 0
        for norm in self.norms:
            last = first + norm[1] * self.head_dim
            yield norm, *(tensor[:, first:last].unflatten(1, (norm[1], self.head_dim)) for tensor in tensors)
            first = last


class SwiGLU:
    """silu(gate) × up of [tokens, 2 × ffn], which holds both side by side (Shazeer 2020). Keeps its input only."""

    def __init__(self, segments: Segments = EAGER) -> None:
        self.segments = segments

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        kept.items.append(inputs)
        return self.segments.swiglu(inputs)

    def again(self, item: Any) -> Tensor:
        """See `Repeatable.again`."""
        return self.segments.swiglu(item)

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        return self.segments.swiglu_backward(kept.items.pop(), output_grad)


class GELU:
    """x Φ(x) of [tokens, ffn] (Hendrycks and Gimpel 2016); `approximate` is "none" or "tanh", their second form."""

    def __init__(self, approximate: str) -> None:
        self.approximate = approximate

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        kept.items.append(inputs)
        return self.again(inputs)

    def again(self, item: Any) -> Tensor:
        """See `Repeatable.again`."""
        return F.gelu(item, approximate=self.approximate)

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        return torch.ops.aten.gelu_backward(output_grad, kept.items.pop(), approximate=self.approximate)


class SplitHeads:
    """[tokens, (heads + 2 kv heads) × width] → q, k, v, each [sequences, its heads, positions, width].

    `shape`: sequences, and positions of each. `rotation`: cosines and sines [positions, width / 2] that turn queries
    and keys; halves of a head are the pairs, as Hugging Face's Llama has them (RoFormer, eq. 34). None leaves them as
    they are. With `positions` [positions] or [sequences, positions] (int64), those are the rows of `rotation` to take.
    All three are views of the input, which is overwritten: nothing is copied, and attention takes the strides as they
    are.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        num_heads: int,
        num_kv_heads: int,
        rotation: tuple[Tensor, Tensor] | None,
        positions: Tensor | None = None,
        segments: Segments = EAGER,
    ) -> None:
        self.shape, self.num_heads, self.num_kv_heads = shape, num_heads, num_kv_heads
        self.rotation, self.positions, self.segments = rotation, positions, segments

    def forward(self, inputs: Tensor, kept: Kept) -> tuple[Tensor, ...]:
        """See `Link.forward`."""
        kept.items.append(None)
        heads = inputs.view(*self.shape, self.num_heads + 2 * self.num_kv_heads, -1)
        self._turn(heads, 1)
        return heads.transpose(1, 2).split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)

    def backward(self, output_grads: Sequence[Tensor], kept: Kept) -> Tensor:
        """See `Link.backward`."""
        kept.items.pop()
        heads_grad = torch.cat([grad.transpose(1, 2) for grad in output_grads], 2)
        self._turn(heads_grad, -1)
        return heads_grad.view(self.shape[0] * self.shape[1], -1)

    def _turn(self, heads: Tensor, sign: int) -> None:
        if self.rotation is None:
            return
        cosines, sines = self.rotation
        if self.positions is not None:
            cosines, sines = cosines[self.positions], sines[self.positions]
        turned = heads[:, :, : self.num_heads + self.num_kv_heads]
        self.segments.rotate(turned, cosines.unsqueeze(-2), sines.unsqueeze(-2), sign)


class JoinHeads:
    """[sequences, heads, positions, width] → [tokens, heads × width]. With `keeps_input` it can do so `again`."""

    def __init__(self, *, keeps_input: bool) -> None:
        self.keeps_input = keeps_input

    def forward(self, inputs: Tensor, kept: Kept) -> Tensor:
        """See `Link.forward`."""
        kept.items.append(inputs if self.keeps_input else inputs.shape)
        return self.again(inputs)

    def again(self, item: Any) -> Tensor:
        """See `Repeatable.again`."""
        return item.transpose(1, 2).reshape(-1, item.shape[1] * item.shape[3])

    def backward(self, output_grad: Tensor, kept: Kept) -> Tensor:
        """See `Link.backward`."""
        item = kept.items.pop()
        sequences, heads, positions, width = item.shape if self.keeps_input else item
        return output_grad.view(sequences, positions, heads, width).transpose(1, 2)


def add_positions(inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
    """Add learned positions: `inputs` [tokens, hidden], `positions` [tokens] (int64 rows of `weight`)."""
    result: Tensor = _AddPositions.apply(inputs, weight, positions)
    return result


class _AddPositions(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Weight, positions: Tensor) -> Tensor:
        ctx.weight, ctx.positions = weight, positions
        return inputs + weight.value[positions]

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        ctx.weight.grad.index_add_(0, ctx.positions, output_grad.to(ctx.weight.grad.dtype))
        return output_grad, None, None
