"""Layers of which each rank of a group holds its part: ordinary modules, whose parameters are this rank's slices.

Whole weights are drawn as torch's own layers draw them, by the first rank of the group, so that a group of any size
starts from the same ones; `of` cuts a layer that there is already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import InputError
from phalanx.nn.cut import ParameterCut, copied, evenly, from_first, rows
from phalanx.nn.group import comm_of
from phalanx.nn.mappings import Mappings
from phalanx.plan.comm import Comm

if TYPE_CHECKING:
    from typing_extensions import Self


class ParallelLayer(nn.Module):
    """What they have in common. `cuts` says by name which part of its parameters this rank holds."""

    cuts: dict[str, ParameterCut]

    def __init__(self, comm: Comm, sequence_parallel: bool) -> None:
        super().__init__()
        self.comm, self.mappings, self.cuts = comm, Mappings(comm, sequence_parallel), {}

    def _hold(self, name: str, whole: Tensor, cut: ParameterCut, *, drawn: bool) -> None:
        """Make this rank's part of `whole` a parameter; where it was `drawn`, of the first rank's."""
        self.cuts[name] = cut
        part = cut.take(from_first(whole, self.comm) if drawn else whole.detach())
        self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight lies as [in, out], as in the linear layers of GPT-2 (Conv1D of transformers)."""
    return type(layer).__name__ == "Conv1D"


def features(layer: nn.Module) -> tuple[int, int]:
    """The widths of input and output of a linear layer."""
    first, second = layer.weight.shape
    return (first, second) if is_transposed(layer) else (second, first)


class _Linear(ParallelLayer):
    """A linear layer, its weight [out, in] or, `transposed`, [in, out]; `parts` are products side by side."""

    def __init__(self, in_features: int, out_features: int, comm: Comm, sequence_parallel: bool) -> None:
        super().__init__(comm, sequence_parallel)
        self.in_features, self.out_features = in_features, out_features
        self.transposed, self.num_parts = False, 1

    @classmethod
    def of(cls, layer: nn.Module, **options: Any) -> Self:
        """This rank's part of a linear layer that all ranks hold; `options` as in the constructor."""
        return cls(*features(layer), whole=layer, **options)  # type: ignore[call-arg]  # both kinds have it

    def _take(
        self,
        whole: nn.Module | None,
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        cut: Callable[[str, Tensor], ParameterCut],
    ) -> None:
        """Hold what `cut` leaves to this rank of the weight and the bias of `whole`, or of a layer that is drawn."""
        drawn = whole is None
        whole = nn.Linear(self.in_features, self.out_features, bias, device, dtype) if whole is None else whole
        self.transposed = is_transposed(whole)
        for name, tensor in (("weight", whole.weight), ("bias", whole.bias)):
            if tensor is None:
                self.register_parameter(name, None)
            else:
                self._hold(name, tensor, cut(name, tensor), drawn=drawn)

    def multiply(self, inputs: Tensor) -> Tensor:
        """The product with the weight, without the bias."""
        if not self.transposed:
            return F.linear(inputs, self.weight)
        products = [inputs @ weight for weight in self.weight.chunk(self.num_parts)]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, rank {self.comm.index} of {self.comm.size}"


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features are cut: [..., in] → [..., this rank's out], or with `gather_output` all of
    them, on all ranks.

    `parts`: how many layers of equal width it fuses, or their widths; each is cut by itself, so that this rank gets its
    heads of q, k and v. With `sequence_parallel`, the input holds this rank's tokens only. The group must divide the
    parts, except where the output is gathered.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        parts: int | Sequence[int] = 1,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        whole: nn.Module | None = None,
    ) -> None:
        """`whole`: a linear layer to take over instead of drawing weights. Raises InputError if it cannot be cut."""
        super().__init__(in_features, out_features, comm_of(group), sequence_parallel)
        self.gather_output = gather_output
        self.enters = True
        """Whether gradients of its input are summed here, and tokens gathered; not where a module around it does so."""
        widths = [out_features // parts] * parts if isinstance(parts, int) else list(parts)
        self.num_parts = len(widths)

        def cut(name: str, tensor: Tensor) -> ParameterCut:
            if gather_output and not self.transposed and self.num_parts == 1:
                return rows(tensor, self.comm)
            dim = 1 if self.transposed and name == "weight" else 0
            return evenly(tensor, dim, widths, self.comm, f"output features of {name}")

        self._take(whole, bias, device, dtype, cut)

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        output = self.multiply(self.mappings.enter(inputs) if self.enters else inputs)
        if self.bias is not None:
            output = output + self.bias
        return self.mappings.join(output, self.out_features) if self.gather_output else output


class RowParallelLinear(_Linear):
    """A linear layer whose input features are cut, as a ColumnParallelLinear leaves them: [..., this rank's in] →
    [..., out], summed over the group. With `sequence_parallel`, the output holds this rank's tokens only."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        whole: nn.Module | None = None,
    ) -> None:
        """`whole`: a linear layer to take over instead of drawing weights. Raises InputError if it cannot be cut."""
        super().__init__(in_features, out_features, comm_of(group), sequence_parallel)

        def cut(name: str, tensor: Tensor) -> ParameterCut:
            if name == "bias":
                return copied(tensor)
            dim = 0 if self.transposed else 1
            return evenly(tensor, dim, [in_features], self.comm, "input features of weight")

        self._take(whole, bias, device, dtype, cut)

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        local = self.in_features // self.comm.size
        if inputs.shape[-1] != local:
            what = f"a row-parallel layer got {inputs.shape[-1]} features, its part takes {local} of {self.in_features}"
            raise InputError(what, instead="a column-parallel layer before it")
        output = self.mappings.leave(self.multiply(inputs))
        if self.bias is None:
            return output
        return output + (self.mappings.shared(self.bias) if self.mappings.cuts_tokens else self.bias)


class VocabParallelEmbedding(ParallelLayer):
    """An embedding whose rows are cut: tokens [..., tokens] (int64), the same on all ranks, → [..., tokens, features],
    with `sequence_parallel` of this rank's tokens only. The last ranks may hold fewer rows."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        whole: nn.Embedding | None = None,
    ) -> None:
        """`whole`: an embedding to take over instead of drawing weights. Raises InputError if it cannot be cut."""
        super().__init__(comm_of(group), sequence_parallel)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        drawn = whole is None
        if whole is None:
            whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        unusual = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
        for name, usual in unusual.items():
            if getattr(whole, name) != usual:
                raise InputError(f"an embedding with {name} cannot be cut by its rows", instead=f"leave {name} out")
        cut = rows(whole.weight, self.comm)
        self.first_row = cut.boxes[0].start[0]
        self._hold("weight", whole.weight, cut, drawn=drawn)

    @classmethod
    def of(cls, layer: nn.Embedding, **options: Any) -> VocabParallelEmbedding:
        """This rank's part of an embedding that all ranks hold; `options` as in the constructor."""
        return cls(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, whole=layer, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return self.mappings.leave(embedded.masked_fill(elsewhere.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.comm.index} of {self.comm.size}"


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda values: F.gelu(values, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """The feed-forward half of a transformer block: [..., tokens, hidden] → the same, `activation` between a column-
    and a row-parallel layer. `gated`: down(activation(gate(x)) * up(x)), as in Llama."""

    def __init__(
        self, hidden: int, ffn: int, *, activation: str = "gelu", gated: bool = False, bias: bool = True, **options: Any
    ) -> None:
        """`options`: group, sequence_parallel, device, dtype of the layers. Raises InputError if `ffn` cannot be cut,
        or for an activation that there is not."""
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f'there is no activation "{activation}"', instead=f"one of {', '.join(ACTIVATIONS)}")
        self.activate, self.gated = ACTIVATIONS[activation], gated
        options["group"] = comm_of(options.get("group"))
        parts = 2 if gated else 1
        self.up = ColumnParallelLinear(hidden, parts * ffn, bias, parts=parts, **options)
        self.down = RowParallelLinear(ffn, hidden, bias, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """See the class."""
        up = self.up(inputs)
        if not self.gated:
            return self.down(self.activate(up))
        gate, up = up.chunk(2, -1)
        return self.down(self.activate(gate) * up)


class ParallelAttention(nn.Module):
    """Self-attention on this rank's heads: [batch, tokens, hidden] → the same.

    `num_kv_heads` below `num_heads` share keys and values among heads; the group must divide both.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = True,
        **options: Any,
    ) -> None:
        """`options`: group, sequence_parallel, device, dtype of the layers. Raises InputError if heads cannot be dealt
        out."""
        super().__init__()
        comm = options["group"] = comm_of(options.get("group"))
        num_kv_heads = num_kv_heads or num_heads
        if math.gcd(num_heads, num_kv_heads) % comm.size:
            what = f"{num_heads} heads and {num_kv_heads} of keys do not divide among {comm.size} ranks"
            raise InputError(what, instead="a group that divides both")
        self.head_dim, self.causal = head_dim or hidden // num_heads, causal
        widths = [heads * self.head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        self.widths = [width // comm.size for width in widths]
        self.qkv = ColumnParallelLinear(hidden, sum(widths), bias, parts=widths, **options)
        self.out = RowParallelLinear(widths[0], hidden, bias, **options)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, turn: Any = None) -> Tensor:
        """`mask` as scaled_dot_product_attention takes it, in place of the causal one; `turn`, as for rotary positions,
        is applied to queries and keys [batch, heads, tokens, head_dim]."""
        q, k, v = (
            piece.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for piece in self.qkv(inputs).split(self.widths, -1)
        )
        if turn is not None:
            q, k = turn(q), turn(k)
        causal = self.causal and mask is None
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=self.widths[0] != self.widths[1]
        )
        return self.out(attended.transpose(1, 2).flatten(2))


def split_tokens(inputs: Tensor, group: Any = None) -> Tensor:
    """[..., all tokens, features] → this rank's tokens: where sequence parallelism begins."""
    return Mappings(comm_of(group)).split(inputs)


def gather_tokens(inputs: Tensor, group: Any = None) -> Tensor:
    """[..., this rank's tokens, features] → all tokens: where sequence parallelism ends."""
    return Mappings(comm_of(group)).gather(inputs)


def share_parameters(module: nn.Module, group: Any = None) -> None:
    """Let the gradients of all parameters of `module`, which is no parallel layer, be summed over the group: as those
    of a norm between parallel layers need it, which under sequence parallelism sees this rank's tokens only."""
    mappings = Mappings(comm_of(group))
    for parameter in module.parameters():
        parameter.register_hook(mappings._summed)
