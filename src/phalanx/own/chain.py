"""Chain: one stage's blocks, run one after another between two boundaries."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from phalanx.errors import InputError
from phalanx.own.blocks import Blocks, Section
from phalanx.own.exchange import Boundary
from phalanx.own.nest import Nest
from phalanx.own.stage import drawing


class Chain:
    """Runs a section of a module's blocks (own.stage.Runner). `into` and `out` are its boundaries, None at the ends of
    the module; they are set before it runs.

    What a block draws depends on its number alone, not on the stage. With `recompute`, a block keeps its input only and
    runs again in backward.
    """

    def __init__(self, module: nn.Module, blocks: Blocks, section: Section, recompute: bool) -> None:
        self._module, self._blocks, self._section, self._recompute = module, blocks, section, recompute
        self._listed = blocks.listed(module)
        self.last = section.last
        self.into: Boundary | None = None
        self.out: Boundary | None = None

    def __call__(self, inputs: Tensor | None, values: Nest, seed: Sequence[int]) -> Nest:
        """Forward; see Runner."""
        section = self._section
        if not (section.first or section.last or section.layers):
            return inputs
        nest = self._enter(inputs, values, seed)
        for layer in section.layers:
            with drawing((*seed, layer)):
                nest = self._block(self._listed[layer], nest)
        if not section.last:
            assert self.out is not None
            return self.out.pack(nest)
        with drawing((*seed, len(self._listed))), _at_home("what comes after the blocks", "before"):
            return self._blocks.leave(self._module, nest, values)

    def _enter(self, inputs: Tensor | None, values: Nest, seed: Sequence[int]) -> Nest:
        if inputs is not None:
            assert self.into is not None
            return self.into.unpack(inputs)
        with drawing((*seed, -1)), _at_home("what comes before the blocks", "after"):
            return self._blocks.enter(self._module, values)

    def _block(self, block: nn.Module, nest: Nest) -> Nest:
        run = functools.partial(self._blocks.block, block)
        if not self._recompute or not torch.is_grad_enabled():
            return run(nest)
        with set_checkpoint_early_stop(False):  # the hooks of a block that begins must hear of its end
            return checkpoint(run, nest, use_reentrant=False)

    @property
    def detached(self) -> bool:
        """Whether no gradient flows back through the message from the stage before."""
        return self.into is not None and not self.into.differentiable


@contextmanager
def _at_home(what: str, other: str) -> Iterator[None]:
    """Say it in words where something reads a parameter that another stage holds, which has no data here."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise InputError(
            f"{what} reads a parameter that is registered {other} them, and so lies on another stage: {error}",
            where="blocks",
            instead="register modules in the order in which they run, or pipeline = 1",
        ) from error
