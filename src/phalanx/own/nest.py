"""Nests of tensors: what modules take and return, lists, tuples, dicts and dataclasses of tensors, in any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Nest: TypeAlias = Any


def mapped(act: Callable[[Tensor], Tensor], nest: Nest) -> Nest:
    """The same nest with `act` done to each tensor; what is no tensor stays."""
    leaves, structure = pytree.tree_flatten(nest)
    return pytree.tree_unflatten([_mapped_leaf(act, leaf) for leaf in leaves], structure)


def _mapped_leaf(act: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return act(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        given = {field.name: mapped(act, getattr(leaf, field.name)) for field in dataclasses.fields(leaf) if field.init}
        return dataclasses.replace(leaf, **given)
    return leaf


def tensors(nest: Nest) -> list[Tensor]:
    """All tensors of a nest, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(note, nest)
    return found


def samples(nest: Nest, start: int, stop: int) -> Nest:
    """The samples `start` to `stop` of a nest that has them along dim 0; tensors without dims stay."""
    return mapped(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, nest)


def cast_floats(nest: Nest, dtype: torch.dtype) -> Nest:
    """The same nest with its floating tensors as `dtype`."""
    return mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nest)
