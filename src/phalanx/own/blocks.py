"""Blocks: a module that says which of its lists holds its blocks can be cut into stages, and its blocks run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.errors import InputError
from phalanx.own.nest import Nest
from phalanx.own.stage import model_input
from phalanx.own.units import Share, shares
from phalanx.plan.groups import embedding_holders
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.schedule import placement


def apply_block(block: nn.Module, nest: Nest) -> Nest:
    """The usual way: a block is called with what came before it."""
    return block(nest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where a module's list of blocks is (`path`, as "model.layers"), and how a micro-batch passes it.

    `before(module, micro_batch)` returns what the first block takes, any nest of tensors; `block(block, nest)` what the
    next one takes, calling the block, not what is inside; `after(module, nest, micro_batch)` the module's output, for
    the loss. Without them, the modules registered before the list are called one after another, each with what the one
    before it returned, then the blocks, then the modules registered after it.

    Parameters registered before the list belong to the first stage, those registered after it to the last.
    """

    path: str
    before: Callable[[nn.Module, Nest], Nest] | None = None
    block: Callable[[nn.Module, Nest], Nest] = apply_block
    after: Callable[[nn.Module, Nest, Nest], Nest] | None = None

    def listed(self, module: nn.Module) -> list[nn.Module]:
        """The blocks. Raises InputError if `path` leads to no list of modules."""
        try:
            found = module.get_submodule(self.path)
        except AttributeError:
            found = None
        if not isinstance(found, (nn.ModuleList, nn.Sequential)) or not len(found):
            lists = [name for name, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
            what = f"{type(module).__name__} has no list of modules named {self.path}"
            raise InputError(what, where="blocks", instead=f"one of: {', '.join(lists)}" if lists else "")
        return list(found)

    def enter(self, module: nn.Module, batch: Nest) -> Nest:
        """What the first block takes."""
        if self.before:
            return self.before(module, batch)
        nest = model_input(batch)
        for container, name in self._steps(module):
            for child_name, child in container.named_children():
                if child_name == name:
                    break
                nest = child(nest)
        return nest

    def leave(self, module: nn.Module, nest: Nest, batch: Nest) -> Nest:
        """The module's output, of what the last block returned."""
        if self.after:
            return self.after(module, nest, batch)
        for container, name in reversed(self._steps(module)):
            behind = False
            for child_name, child in container.named_children():
                nest = child(nest) if behind else nest
                behind = behind or child_name == name
        return nest

    def _steps(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """The modules on the way to the list, each with the name of the next one."""
        steps = []
        for name in self.path.split("."):
            steps.append((module, name))
            module = module.get_submodule(name)
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One stage's part of the blocks: those of numbers `layers`, what comes before them if `first`, after if `last`."""

    layers: range
    first: bool
    last: bool


def sections(num_blocks: int, layout: Layout) -> list[Section]:
    """The stages: equally many blocks each, as nearly as may be, or as many as `layout.stage_layers` says."""
    count = layout.num_stages
    if layout.stage_layers:
        bounds = [sum(layout.stage_layers[:stage]) for stage in range(count + 1)]
    else:
        bounds = [stage * num_blocks // count for stage in range(count + 1)]
    return [
        Section(layers=range(start, stop), first=stage == 0, last=stage == count - 1)
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def held_stages(layout: Layout, coord: Coord) -> list[int]:
    """The numbers of the stages that the rank at `coord` holds, by chunk."""
    places = placement(layout.schedule, layout.pipeline, layout.virtual_stages)
    mine = [(chunk, stage) for stage, (pipeline, chunk) in enumerate(places) if pipeline == coord.pipeline]
    return [stage for _, stage in sorted(mine)]


def names_before(module: nn.Module, path: str) -> set[str]:
    """Names of the parameters and buffers registered before the list at `path`."""
    found: set[str] = set()
    for name, part in module.named_modules(remove_duplicate=False):
        if name == path:
            break
        found |= {f"{name}.{key}" if name else key for key in (*part._parameters, *part._buffers)}
    return found


class Cut:
    """Which of a module's tensors each stage holds, by their names: a tensor of a block is that of the block's stage,
    others are the first stage's or the last's."""

    def __init__(self, module: nn.Module, blocks: Blocks, layout: Layout) -> None:
        """Raises InputError if stages would share a parameter in a way that they cannot.

        `tied` leads from names on the last stage to those of the same parameters on the first one: each has a copy.
        """
        self.module, self.blocks, self._layout = module, blocks, layout
        self.tied: dict[str, str] = {}
        self.listed = blocks.listed(module)
        self.sections = sections(len(self.listed), layout)
        self._prefix = f"{blocks.path}."
        self._layers = {name: layer for layer, (name, _) in enumerate(self._list().named_children())}
        self._stages = {layer: stage for stage, part in enumerate(self.sections) for layer in part.layers}
        self._before = names_before(module, blocks.path)
        self._check_ties()

    def _list(self) -> nn.Module:
        return self.module.get_submodule(self.blocks.path)

    def stage_of(self, name: str) -> int:
        """The stage that holds the tensor of this name."""
        if name.startswith(self._prefix):
            return self._stages[self._layers[name.removeprefix(self._prefix).split(".")[0]]]
        return 0 if name in self._before else len(self.sections) - 1

    def _check_ties(self) -> None:
        names: dict[Tensor, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            known = names.setdefault(parameter, name)
            here, there = self.stage_of(known), self.stage_of(name)
            if here == there:
                continue
            if not self._may_be_tied(known, name):
                what = f"{known} of stage {here} and {name} of stage {there} are one parameter"
                instead = "pipeline = 1, or untie them: give each a parameter of its own"
                raise InputError(what, where="layout.pipeline", instead=instead)
            self.tied[name] = known

    def _may_be_tied(self, one: str, other: str) -> bool:
        """Both ends may hold a copy, as of an embedding that is the head as well, on different ranks and whole."""
        first, last = embedding_holders(self._layout)
        ends = {self.stage_of(one), self.stage_of(other)} == {0, len(self.sections) - 1}
        inside = one.startswith(self._prefix) or other.startswith(self._prefix)
        return ends and not inside and first != last and self._layout.tensor == 1

    def shares(self, stage: int) -> list[Share]:
        """The units of a stage: its blocks, and the rest last."""
        inside = {
            f"{self._prefix}{name}": self.listed[layer]
            for name, layer in self._layers.items()
            if self._stages[layer] == stage
        }
        return shares(self.module, inside, lambda name: self.stage_of(name) == stage, self.tied)

    @torch.no_grad()
    def let_go(self, stages: set[int]) -> None:
        """Keep nothing but the shape of parameters that other stages hold, and of other blocks' buffers."""
        hollow: dict[Tensor, nn.Parameter] = {}
        for name, part in self.module.named_modules():
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                full = f"{name}.{key}" if name else key
                if tensor is None or self.stage_of(full) in stages:
                    continue
                if key in part._buffers:
                    if full.startswith(self._prefix):
                        part._buffers[key] = torch.empty_like(tensor, device="meta")
                    continue
                if tensor not in hollow:
                    empty = torch.empty_like(tensor, device="meta")
                    hollow[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                part._parameters[key] = hollow[tensor]
