"""Layers whose forward is replaced from outside, the module's class and file untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.nn.layers import ColumnParallelLinear, ParallelLayer, RowParallelLinear
from phalanx.own.nest import cast_floats
from phalanx.trainer.flat import Weight, add_product


class Target(NamedTuple):
    """Where the gradient of a parameter belongs, and what must be called before it goes there."""

    weight: Weight
    open: Callable[[], None]


class _Product(Function):
    """A linear layer whose weight gradient goes straight into the flat buffer, or is put off there. Autograd sees the
    weight all the same, so that its node tells when the gradient is there."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.target = target
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        rows = output_grad.reshape(-1, output_grad.shape[-1])
        input_grad = (rows @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        ctx.target.open()
        add_product(ctx.target.weight, rows, inputs.reshape(-1, inputs.shape[-1]))
        return input_grad, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def write_products(module: nn.Module, targets: Mapping[nn.Parameter, Target]) -> None:
    """Let every plain linear layer of `module` write the gradient of its weight to where `targets` says, and so those
    cut over the tensor axis. Subclasses, which may do something else, and parametrized layers stay as they are."""
    for layer in module.modules():
        cut = isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and not layer.transposed
        if cut and layer.weight in targets:
            layer.multiply = functools.partial(_multiply, layer, layer.weight, targets[layer.weight])
        plain = type(layer) is nn.Linear and "forward" not in layer.__dict__ and "weight" in layer._parameters
        if plain and layer.weight in targets:
            layer.forward = functools.partial(_linear, layer, layer.weight, targets[layer.weight])


def _linear(layer: nn.Linear, weight: nn.Parameter, target: Target, inputs: Tensor) -> Tensor:
    return _product(inputs, layer.weight, layer.bias, weight, target)


def _multiply(layer: nn.Module, weight: nn.Parameter, target: Target, inputs: Tensor) -> Tensor:
    return _product(inputs, layer.weight, None, weight, target)


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None, known: nn.Parameter, target: Target) -> Tensor:
    inputs = inputs.to(weight.dtype)
    if weight is not known or not torch.is_grad_enabled():
        return F.linear(inputs, weight, bias)
    product: Tensor = _Product.apply(inputs, weight, bias, target)
    return product


def fit_types(module: nn.Module) -> None:
    """Let torch's layers take their inputs in the type of their weights, where a buffer or an input of another type
    has widened them on the way; and batch norms compute in fp32, in which their statistics are kept."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = functools.partial(_batch_norm, layer)
        elif _is_torchs(layer) and any(_weights(layer)) and not any(layer.children()):
            layer.register_forward_pre_hook(_cast_inputs)


def _is_torchs(layer: nn.Module) -> bool:
    """Whether it is a layer of torch, or one in its place."""
    return type(layer).__module__.startswith("torch.nn.") or isinstance(layer, ParallelLayer)


def _weights(layer: nn.Module) -> Iterator[torch.dtype]:
    return (parameter.dtype for parameter in layer.parameters(recurse=False) if parameter.is_floating_point())


def _cast_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return cast_floats(inputs, next(_weights(layer)))


def _batch_norm(layer: _BatchNorm, inputs: Tensor) -> Tensor:
    wide = {name: value.float() for name, value in layer.named_parameters(recurse=False)}
    with torch.nn.utils.stateless._reparametrize_module(layer, wide):
        return type(layer).forward(layer, inputs.float()).to(inputs.dtype)
