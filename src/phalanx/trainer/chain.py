"""Chains: operations one after another, each with a backward of its own, that are a single node to autograd.

A node costs what ten small operations do, in Python and in autograd, whatever it computes; and what happens inside
of one needs no bookkeeping. There is none, either: unlike that of saved tensors, a change in place of what a link keeps
goes unnoticed, so whoever overwrites a tensor must know that no link before keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function


@dataclass(slots=True)
class Kept:
    """What a chain keeps for backward: one item of each link, the last one's on top. `residual`: what is to be added
    to the output of the last link, known during forward only."""

    residual: Tensor | None = None
    items: list[Any] = field(default_factory=list)


class Link(Protocol):
    """One operation of a chain. Weight gradients are added straight into flat buffers."""

    def forward(self, inputs: Tensor, kept: Kept) -> Any:
        """The output, a tensor (or several, of the last link). Puts one item on top of what is kept."""

    def backward(self, output_grad: Any, kept: Kept) -> Tensor:
        """The gradient of the inputs. Takes the link's item off again."""


class Repeatable(Link, Protocol):
    """A link that is cheap to run a second time, so that whoever comes behind need not keep its output."""

    def again(self, item: Any) -> Tensor:
        """The output, from the item that `forward` kept."""


def chain(links: Sequence[Link], inputs: Tensor, residual: Tensor | None = None) -> Any:
    """What the last of `links` makes of `inputs`; that last one adds `residual`, if there is any."""
    return _Chain.apply(inputs, residual, links)


class _Chain(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, residual: Tensor | None, links: Sequence[Link]) -> Any:
        kept = Kept(residual)
        for link in links:
            inputs = link.forward(inputs, kept)
        kept.residual = None
        ctx.links, ctx.kept, ctx.adds = links, kept, residual is not None
        return inputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        gradient: Any = output_grads if len(output_grads) > 1 else output_grads[0]
        assert ctx.kept.items, "backward ran twice"
        for link in reversed(ctx.links):
            gradient = link.backward(gradient, ctx.kept)
        return gradient, output_grads[0] if ctx.adds else None, None
