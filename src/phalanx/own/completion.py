"""Completion: which units' gradients are complete while backward runs, told to data parallelism in one order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.own.layers import Target
from phalanx.own.units import Held, Unit
from phalanx.trainer.data_parallel import DataParallel


class Completion:
    """Follows the backward passes of one stage by hooks on the nodes in which autograd accumulates gradients.

    Units are told complete from the last one to the first, whatever order backward takes on this rank: so all data
    ranks reduce the same units in the same order, even where data decides which parts of a module run. `used` collects
    the names of parameters that took part in a backward since `forget`.
    """

    def __init__(self, units: Sequence[Unit], data: DataParallel) -> None:
        self._units, self._data = tuple(reversed(units)), data
        self._left = [0] * len(units)
        self._opened = [False] * len(units)
        self._index = {unit: index for index, unit in enumerate(self._units)}
        self._told = len(units)
        self._last = self.running = False
        self.used: set[str] = set()
        # A node lives as long as somebody holds it.
        self._nodes = [self._watch(index, held) for index, unit in enumerate(self._units) for held in unit.held]

    def targets(self) -> dict[nn.Parameter, Target]:
        """Where products may write the gradients of matrices."""
        return {
            held.parameter: Target(held.weight, partial(self._open, index))
            for index, unit in enumerate(self._units)
            for held in unit.held
        }

    def _watch(self, index: int, held: Held) -> Any:
        with torch.enable_grad():
            node = held.parameter.view_as(held.parameter).grad_fn.next_functions[0][0]
        if self._data.zero >= 2:
            node.register_prehook(partial(self._about_to_add, index))
        node.register_hook(partial(self._added, index, held))
        return node

    def begin(self, *, last: bool) -> None:
        """A backward of the stage begins; with `last`, it is the last one of the step."""
        self._left = [len(unit.held) for unit in self._units]
        self._opened = [False] * len(self._units)
        self._told, self._last, self.running = 0, last, True
        for unit in self._units:
            for held in unit.held:
                narrow = held.parameter.dtype != held.weight.grad.dtype
                held.parameter.grad = None if narrow else held.gradient

    def open(self, unit: Unit) -> None:
        """The backward of `unit` begins, or has begun: its parameters and gradients must be there."""
        self._open(self._index[unit])

    def _open(self, index: int) -> None:
        if self.running and not self._opened[index]:
            self._opened[index] = True
            following = self._units[index + 1] if index + 1 < len(self._units) else None
            closed = following is None or following.module is None or self._opened[index + 1]
            self._data.before_backward(self._units[index], None if closed else following)

    def _about_to_add(self, index: int, gradients: Any) -> None:
        self._open(index)

    def _added(self, index: int, held: Held, inputs: Any, outputs: Any) -> None:
        if not self.running:
            return
        gradient = held.parameter.grad
        if gradient is not None and gradient.dtype != held.weight.grad.dtype:
            held.gradient.add_(gradient)
            held.parameter.grad = None
        self.used.add(held.name)
        self._left[index] -= 1
        self._tell()

    def _tell(self) -> None:
        while self._told < len(self._units) and not self._left[self._told]:
            self._open(self._told)
            self._data.after_backward(self._units[self._told], last=self._last)
            self._told += 1

    def end(self) -> None:
        """The backward is over: units that did not take part, or not with all their parameters, are complete too."""
        self._left = [0] * len(self._units)
        self._tell()
        self.running = False

    def unused(self) -> list[str]:
        """Trained parameters that took part in no backward since `forget`."""
        return [held.name for unit in reversed(self._units) for held in unit.held if held.name not in self.used]

    def forget(self) -> None:
        """Before a step."""
        self.used.clear()
