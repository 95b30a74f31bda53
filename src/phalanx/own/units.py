"""Units: the parameters of a module that are reduced together and, under ZeRO 3, gathered together.

The elements of the outermost ModuleLists and Sequentials (with Blocks: the blocks) are units, and all other parameters
are one more, "rest".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from phalanx.own.cuts import Cutting
from phalanx.plan.groups import embedding_holders
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.module import ModuleTensor
from phalanx.plan.shards import Buffer, Copies, Draft, Parameter, Rectangle, place
from phalanx.trainer.flat import FlatBuffer, Weight

REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What is to become a unit: the trained parameters of `module`, by name; None stands for those of no element."""

    name: str
    module: nn.Module | None
    parameters: dict[str, nn.Parameter]


def shares(
    module: nn.Module,
    elements: Mapping[str, nn.Module],
    held: Callable[[str], bool] = lambda name: True,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> list[Share]:
    """The units of `module`: its `elements` by name, then the rest; those without trained parameters are left out.

    `held` says of a parameter's name whether this stage holds it; `tied` leads from names to those that stand for them.
    What is used outside of its element as well belongs to the rest, which exists whenever any part of the module runs.
    """
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = next((element for element in elements if name.startswith(f"{element}.")), REST)
        owners.setdefault(parameter, set()).add(owner)
    members: dict[str, dict[str, nn.Parameter]] = {name: {} for name in (*elements, REST)}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and held(name):
            owner, *others = owners[parameter]
            members[REST if others else owner][tied.get(name, name)] = parameter
    return [Share(name=name, module=elements.get(name), parameters=found) for name, found in members.items() if found]


def outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost lists, by name."""
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        if listed:
            yield prefix + name, child
        else:
            yield from outermost(child, f"{prefix}{name}.")


def named_tensors(module: nn.Module) -> list[ModuleTensor]:
    """All tensors of a module that last: its parameters, each once, and its persistent buffers."""
    found = [
        ModuleTensor(name=name, shape=tuple(tensor.shape), role="trained" if tensor.requires_grad else "frozen")
        for name, tensor in module.named_parameters()
    ]
    return found + [
        ModuleTensor(name=name, shape=tuple(tensor.shape), role="buffer") for name, tensor in buffers(module).items()
    ]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of a module, by name."""
    lasting = set(module.state_dict(keep_vars=True))
    return {name: tensor for name, tensor in module.named_buffers() if name in lasting}


def flat_layout(
    share: Share, layout: Layout, coord: Coord, cutting: Cutting | None = None, tied: Collection[str] = ()
) -> Buffer:
    """How the parameters of a unit lie in its flat buffer. `tied`: those of which both ends of the pipeline hold a
    copy; that of the first stage counts."""
    drafts = []
    for name, tensor in share.parameters.items():
        parameter, boxes = placed(name, tensor, cutting)
        copies: Copies = "none"
        if cutting and (name not in cutting.cuts or cutting.cuts[name].copied):
            copies = "heads" if name in cutting.summed else "tensor"
        if name in tied:
            copies = "tied"
        for box in boxes:
            drafts.append(Draft(leaf=name, parameter=parameter, rectangle=box, shape=box.shape, copies=copies))
    first = coord.pipeline == embedding_holders(layout)[0]
    return place(share.name, drafts, layout, coord, counts_tied=first)


def placed(name: str, tensor: Tensor, cutting: Cutting | None) -> tuple[Parameter, tuple[Rectangle, ...]]:
    """The whole parameter or buffer of this name, and which boxes of it `tensor` holds, one below the other."""
    cut = cutting.cuts.get(name) if cutting else None
    parameter = ModuleTensor(name=name, shape=cut.shape if cut else tuple(tensor.shape)).parameter
    return parameter, cut.boxes if cut else (Rectangle.of(parameter.shape),)


@dataclass(slots=True)
class Held:
    """A parameter, and where its value and its gradient lie in the flat buffer, in its own shape."""

    name: str
    parameter: nn.Parameter
    weight: Weight

    @property
    def gradient(self) -> Tensor:
        """The view that gradients are accumulated in."""
        return self.weight.grad.view(self.parameter.shape)


class Unit:
    """A unit on this rank: a link of a stage, as data parallelism sees it (trainer.model.Block)."""

    backward_within_forward = False

    def __init__(self, share: Share, layout: Buffer, compute: torch.dtype, device: torch.device) -> None:
        self.name, self.module = share.name, share.module
        self.buffer = FlatBuffer(layout, compute, device)
        self.reads = self.reads_in_backward = (self.buffer,)
        self.held = tuple(
            Held(name, parameter, self.buffer.weights[name]) for name, parameter in share.parameters.items()
        )

    @torch.no_grad()
    def adopt(self) -> None:
        """Move the parameters into the flat buffer. They stay the same objects, with a version counter of their own:
        when ZeRO 3 gathers values, what autograd has saved of them stays valid."""
        for held in self.held:
            view = held.weight.value.view(held.parameter.shape)
            view.copy_(held.parameter)
            held.parameter.data = view
