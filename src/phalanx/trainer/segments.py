"""The element-wise stretches of a block between its matrix products and messages, as pure functions of tensors: written
by hand for eager PyTorch, or plainly for `torch.compile`, which fuses each into one or two kernels. (Layer norm and
GELU are not among them: torch has one kernel for each.)

What a rank sends, and what it writes into flat buffers, stays outside of them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import InputError
from phalanx.trainer.flat import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """One way to compute them.

    `rms_norm(inputs, weight, eps)`: output, and the scale of each row in accumulation precision.
    `rms_norm_backward(inputs, scale, output_grad, weight)`: gradients of inputs and weight, the latter in accumulation
    precision. `swiglu(gate_up)`: silu(gate) × up. `swiglu_backward(gate_up, output_grad)`: gradient of `gate_up`.
    `rotate(heads, cosines, sines, sign)`: turn the halves of the last dim of `heads` by the angles (sign -1: back), in
    place.

    `exponentials(scores)` of logits [tokens, ids]: exp(scores - row maximum), log-sum-exp and maximum of each row; the
    scores are lost. `loss_gradient(exponentials, factor, label, here, kept, shared)`: each row times its factor, minus
    `kept` at its label where that is `here`, minus `shared`; the exponentials are lost.
    """

    rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, int], None]
    exponentials: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    loss_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]


def _rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = inputs.to(accumulation_dtype(inputs.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(inputs.dtype), scale


def _rms_norm_backward(inputs: Tensor, scale: Tensor, output_grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With r the scale of a row and g the output's gradient: r w g - r³ x mean(w g x), and Σ r g x for w."""
    wide, wide_grad, value = inputs.to(scale.dtype), output_grad.to(scale.dtype), weight.to(scale.dtype)
    products = wide_grad * wide
    weight_grad = torch.mv(products.t(), scale.squeeze(1))
    mean = torch.mv(products, value).div_(-wide.shape[-1]).unsqueeze(1)
    input_grad = torch.mul(wide_grad, value, out=products).mul_(scale).addcmul_(wide, mean.mul_(scale.pow(3)))
    return input_grad.to(inputs.dtype), weight_grad


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(gate_up: Tensor, output_grad: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    grad = torch.empty_like(gate_up)
    gate_grad, up_grad = grad.chunk(2, -1)
    torch.mul(output_grad, F.silu(gate), out=up_grad)
    torch.mul(output_grad, up, out=gate_grad)
    torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
    return grad


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> None:
    first, second = heads.chunk(2, -1)
    from_first = first * sines
    first.mul_(cosines).addcmul_(second, sines, value=-sign)
    second.mul_(cosines).add_(from_first, alpha=sign)


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place and pass by pass: several times faster on CPU than torch.softmax, which allocates."""
    highest = scores.amax(1)
    exponentials = scores.sub_(highest.unsqueeze(1)).exp_()
    return exponentials, exponentials.sum(1).log_().add_(highest), highest


def _loss_gradient(
    exponentials: Tensor, factor: Tensor, label: Tensor, here: Tensor, kept: float, shared: float
) -> Tensor:
    gradient = exponentials.mul_(factor.unsqueeze(1))
    gradient.scatter_add_(1, label.unsqueeze(1), here.to(gradient.dtype).mul_(-kept).unsqueeze(1))
    return gradient.sub_(shared) if shared else gradient


EAGER = Segments(
    rms_norm=_rms_norm,
    rms_norm_backward=_rms_norm_backward,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    rotate=_rotate,
    exponentials=_exponentials,
    loss_gradient=_loss_gradient,
)


def _plain_rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = inputs.to(accumulation_dtype(inputs.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(inputs.dtype), scale


def _plain_rms_norm_backward(
    inputs: Tensor, scale: Tensor, output_grad: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    normed, grad = inputs.to(scale.dtype) * scale, output_grad.to(scale.dtype)
    through = grad * weight
    input_grad = scale * (through - normed * (through * normed).mean(-1, keepdim=True))
    return input_grad.to(inputs.dtype), (grad * normed).sum(0)


def _plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _plain_swiglu_backward(gate_up: Tensor, output_grad: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    gate_grad = output_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([gate_grad, output_grad * gate * sigmoid], -1)


def _plain_rotate(heads: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> None:
    first, second = heads.chunk(2, -1)
    turned = first * cosines - sign * second * sines, second * cosines + sign * first * sines
    heads.copy_(torch.cat(turned, -1))


def _plain_exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    highest = scores.amax(1)
    exponentials = torch.exp(scores - highest.unsqueeze(1))
    return exponentials, exponentials.sum(1).log() + highest, highest


def _plain_loss_gradient(
    exponentials: Tensor, factor: Tensor, label: Tensor, here: Tensor, kept: float, shared: float
) -> Tensor:
    ids = torch.arange(exponentials.shape[1], device=exponentials.device)
    target = (ids == label.unsqueeze(1)) & here.unsqueeze(1)
    return exponentials * factor.unsqueeze(1) - target.to(exponentials.dtype) * kept - shared


@functools.cache
def compiled(backend: str = "inductor") -> Segments:
    """The segments as `torch.compile` makes them, at their first call: some seconds each, once per machine and shape.

    Raises InputError where there is nothing to compile with.
    """
    if backend == "inductor":
        check_compiler()
        from torch._inductor import config

        config.compile_threads = 1  # a rank forks nothing, and the ranks of a node share its cores

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        fused = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

        def call(*arguments: Any) -> Any:
            # Of a tensor inside a graph, the tracer would ask for the gradient.
            return fused(*(each.detach() if isinstance(each, Tensor) else each for each in arguments))

        return call

    return Segments(
        rms_norm=fuse(_plain_rms_norm),
        rms_norm_backward=fuse(_plain_rms_norm_backward),
        swiglu=fuse(_plain_swiglu),
        swiglu_backward=fuse(_plain_swiglu_backward),
        rotate=fuse(_plain_rotate),
        exponentials=fuse(_plain_exponentials),
        loss_gradient=fuse(_plain_loss_gradient),
    )


def check_compiler() -> None:
    """Raise InputError if this machine has nothing that `compiled` could make code with."""
    instead = "compile = false"
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            what = "torch.compile makes kernels for this GPU with Triton, which is not installed"
            raise InputError(what, where="job.compile", instead=f"pip install triton, or {instead}")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        what = f"torch.compile makes code for this processor with a C++ compiler, and there is no {compiler}"
        raise InputError(what, where="job.compile", instead=f"install g++, name another in CXX, or {instead}")
