"""Cuts: a table that says how the layers of a module are cut over the tensor axis, and the layers put in their place.

The table leads from patterns of names ("*.self_attn.q_proj"; * stands for anything) to what is done:

    column          a linear layer whose output features are cut
    column of 3     the same of three layers in one, side by side (q, k, v)
    row             a linear layer whose input features are cut, and whose outputs are summed
    vocabulary      an embedding cut by its rows, or an output layer cut by them, whose logits are joined again
    heads           parameters that all ranks hold, and each uses for its own heads: gradients are summed
    divided         a number that counts what a rank has of something: an attribute, as "*.attn.num_heads"
    sequence        the list of blocks between which, under sequence parallelism, each rank holds its tokens
    tokens          a module inside of blocks that needs all tokens, as attention and feed-forward halves: they are
                    gathered, and gradients summed, once for all "column" layers inside
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phalanx.errors import InputError
from phalanx.nn.cut import ParameterCut
from phalanx.nn.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
    features,
    is_transposed,
)
from phalanx.nn.mappings import Mappings
from phalanx.own.families import table_of
from phalanx.plan.comm import Comm
from phalanx.spec.schema import nearest

KINDS = ("column", "row", "vocabulary", "heads", "divided", "sequence", "tokens")
_LINEAR = (ColumnParallelLinear, RowParallelLinear)
_WIDTHS_OF_HEADS = ("head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a table, applied to one thing: the module of this name, or its number `attribute`."""

    name: str
    kind: str
    parts: int = 1
    attribute: str = ""


def entries(module: nn.Module, table: Mapping[str, str]) -> list[Entry]:
    """What a table says of a module. Raises InputError for a pattern that fits nothing or a kind that there is not."""
    named = dict(module.named_modules())
    found: dict[tuple[str, str], Entry] = {}
    for pattern, text in table.items():
        kind, parts = _kind(pattern, text)
        names = _matching(named, pattern, kind)
        if not names:
            near = nearest(pattern.rsplit(".", 1)[-1], sorted({name.rsplit(".", 1)[-1] for name in named if name}))
            what = f"{type(module).__name__} has nothing that {pattern} fits"
            raise InputError(what, where="cuts", instead=f'"*.{near}"' if near else "a name of named_modules()")
        for name, attribute in names:
            found[name, attribute] = Entry(name=name, kind=kind, parts=parts, attribute=attribute)
    return list(found.values())


def _kind(pattern: str, text: str) -> tuple[str, int]:
    read = re.fullmatch(r"(\w+)(?: of (\d+))?", text)
    if not read or read[1] not in KINDS or (read[2] and (read[1] != "column" or not int(read[2]))):
        raise InputError(f'{pattern}: there is no "{text}"', where="cuts", instead=f"{', '.join(KINDS)}, column of 3")
    return read[1], int(read[2] or 1)


def _matching(named: Mapping[str, nn.Module], pattern: str, kind: str) -> list[tuple[str, str]]:
    if kind != "divided":
        found = [name for name in named if name and fnmatch.fnmatchcase(name, pattern)]
        lists = (nn.ModuleList, nn.Sequential)
        return [(name, "") for name in found if kind != "sequence" or isinstance(named[name], lists)]
    pattern, _, attribute = pattern.rpartition(".")
    found = [name for name, part in named.items() if isinstance(getattr(part, attribute, None), int)]
    return [(name, attribute) for name in found if fnmatch.fnmatchcase(name, pattern)]


def check(module: nn.Module, cuts: Mapping[str, str] | str, tensor: int) -> dict[str, str]:
    """The table that `cuts` stands for. Raises InputError if it cannot cut this module over `tensor` ranks."""
    table = table_of(module) if isinstance(cuts, str) else dict(cuts)
    for entry in entries(module, table):
        part = module.get_submodule(entry.name)
        for what, size in _sizes(entry, part, _width_of_heads(module, entry)):
            if size % tensor:
                raise InputError(f"{entry.name}{what} of {size} does not divide among tensor {tensor}", where="cuts")
    return table


def _sizes(entry: Entry, part: nn.Module, head: int) -> Iterator[tuple[str, int]]:
    """What the tensor axis must divide."""
    if entry.kind == "divided":
        yield f".{entry.attribute}", getattr(part, entry.attribute)
    elif entry.kind in ("column", "row", "vocabulary"):
        linear = type(part) is nn.Linear or is_transposed(part)
        if not linear and not (entry.kind == "vocabulary" and type(part) is nn.Embedding):
            what = f'{entry.name} is a {type(part).__name__}, which cannot be cut as "{entry.kind}"'
            raise InputError(what, where="cuts", instead="a linear layer; for a vocabulary, also an embedding")
        if entry.kind == "vocabulary":
            return
        width = features(part)[entry.kind == "column"]
        if width % entry.parts:
            raise InputError(f"{entry.name}.weight of {width} does not consist of {entry.parts} parts", where="cuts")
        width //= entry.parts
        yield (".weight", width) if width % head else (f".weight, heads of {head} features,", width // head)


def _width_of_heads(module: nn.Module, entry: Entry) -> int:
    """Where the module around a layer knows a width of heads, these must stay whole."""
    around = module.get_submodule(entry.name.rpartition(".")[0])
    widths = [getattr(around, name, 1) for name in _WIDTHS_OF_HEADS]
    return next((width for width in widths if isinstance(width, int) and width > 1), 1)


class Cutting:
    """What a table has made of a module: `cuts` of its parameters by name, and the names of those whose gradients are
    to be `summed` over the tensor axis."""

    def __init__(self, module: nn.Module, table: Mapping[str, str], comm: Comm, *, sequence_parallel: bool) -> None:
        """Puts the layers in their places. The module is whole, and the same on all ranks."""
        self._module, self._comm, self._cuts_tokens = module, comm, sequence_parallel and comm.size > 1
        self._known: dict[nn.Parameter, tuple[str, nn.Parameter, ParameterCut]] = {}
        self.cuts: dict[str, ParameterCut] = {}
        self.summed: set[str] = set()
        found = entries(module, table)
        self._whole = {entry.name for entry in found if entry.kind == "tokens"}
        for entry in found:
            self._apply(entry)
        self._refuse_half_tied()
        for name, part in module.named_modules():
            if type(part) is nn.Linear or is_transposed(part) or isinstance(part, _LINEAR):
                part.register_forward_pre_hook(functools.partial(_check_width, name))

    def _apply(self, entry: Entry) -> None:
        part = self._module.get_submodule(entry.name)
        if entry.kind == "divided":
            setattr(part, entry.attribute, getattr(part, entry.attribute) // self._comm.size)
        elif entry.kind == "heads":
            self.summed |= {f"{entry.name}.{name}" for name, _ in part.named_parameters()}
        elif entry.kind == "sequence":
            if self._cuts_tokens:
                self._cut_tokens(entry.name, part)
        elif entry.kind == "tokens":
            mappings = Mappings(self._comm, self._cuts_tokens)
            part.register_forward_pre_hook(functools.partial(_on_first, mappings.enter), with_kwargs=True)
        else:
            self._replace(entry, part)

    def _replace(self, entry: Entry, layer: nn.Module) -> None:
        new = self._layer(entry, layer).train(layer.training)
        for key, cut in new.cuts.items():
            name, whole = f"{entry.name}.{key}", layer._parameters[key]
            known = self._known.setdefault(whole, (name, new._parameters[key], cut))
            if known[2] != cut:
                what = f"{known[0]} and {name} are one parameter, and cut in two ways"
                raise InputError(what, where="cuts", instead="one way for both")
            new._parameters[key] = known[1]
            self.cuts[name] = cut
        around, _, key = entry.name.rpartition(".")
        self._module.get_submodule(around)._modules[key] = new

    def _layer(self, entry: Entry, layer: nn.Module) -> ParallelLayer:
        if entry.kind == "row":
            return RowParallelLinear.of(layer, group=self._comm, sequence_parallel=self._cuts_tokens)
        if entry.kind == "vocabulary":
            if isinstance(layer, nn.Embedding):
                return VocabParallelEmbedding.of(layer, group=self._comm)
            return ColumnParallelLinear.of(layer, group=self._comm, gather_output=True)
        new = ColumnParallelLinear.of(layer, group=self._comm, parts=entry.parts)
        if any(entry.name.startswith(f"{name}.") for name in self._whole):
            new.enters = False  # the module around it does
        return new

    def _cut_tokens(self, name: str, listed: nn.Module) -> None:
        """Between the blocks of a list, each rank holds its tokens."""
        blocks, mappings = list(listed.children()), Mappings(self._comm)
        blocks[0].register_forward_pre_hook(functools.partial(_on_first, mappings.split), with_kwargs=True)
        blocks[-1].register_forward_hook(functools.partial(_on_result, mappings.gather))
        inside = [f"{name}.{key}" for key, _ in listed.named_parameters()]
        self.summed |= {key for key in inside if not any(key.startswith(f"{whole}.") for whole in self._whole)}

    def _refuse_half_tied(self) -> None:
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if parameter in self._known:
                what = f"{self._known[parameter][0]} and {name} are one parameter, of which one is cut"
                raise InputError(what, where="cuts", instead="the same for both")
        self.summed -= set(self.cuts)


def _on_first(act: Any, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Do `act` to the hidden states that a module is called with: its first argument, or the one of that name."""
    if arguments:
        return (act(arguments[0]), *arguments[1:]), keywords
    if "hidden_states" not in keywords:
        what = f"{type(module).__name__} gets {', '.join(keywords) or 'nothing'}, which may not be the hidden states"
        raise InputError(what, where="cuts", instead="call it with them as its first argument, or as hidden_states=")
    return arguments, {**keywords, "hidden_states": act(keywords["hidden_states"])}


def _on_result(act: Any, module: nn.Module, arguments: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return act(output)
    return (act(output[0]), *output[1:])


def _check_width(name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    """A layer that is cut in one way only shows where its neighbour is."""
    expected = layer.in_features if isinstance(layer, _LINEAR) else features(layer)[0]
    if isinstance(layer, RowParallelLinear):
        expected //= layer.comm.size
    if arguments and arguments[0].shape[-1] != expected:
        what = f"{name}.weight takes {expected} features here, and gets {arguments[0].shape[-1]}"
        raise InputError(what, where="cuts", instead='"row" after "column", and neither without the other')
