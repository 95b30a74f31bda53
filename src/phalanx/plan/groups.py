"""Groups: who shares an axis with whom, and the derived groups, in the one order in which every rank creates them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.comm import Group
from phalanx.plan.layout import Layout, lines
from phalanx.plan.schedule import placement
from phalanx.spec.model import ModelSpec


def kv_copies(model: ModelSpec, tensor: int) -> int:
    """How many tensor ranks hold the same kv head: above 1 when there are more tensor ranks than kv heads."""
    return max(1, tensor // model.num_kv_heads)


def embedding_holders(layout: Layout) -> tuple[int, int]:
    """Pipeline coordinates of the first and of the last stage."""
    places = placement(layout.schedule, layout.pipeline, layout.virtual_stages)
    return places[0][0], places[-1][0]


def head_copies_embedding(model: ModelSpec, layout: Layout) -> bool:
    """Whether the output head is a second copy of a tied embedding, kept on another pipeline coordinate.

    Both copies start equal and get the sum of both gradients, so they stay equal to the last bit.
    """
    first, last = embedding_holders(layout)
    return model.tied and first != last


AXIS_OF = {"kv": "tensor", "tied": "pipeline", "shards": "data", "replicas": "data"}
"""The axis along which a derived group talks."""


def data_groups(layout: Layout) -> tuple[str, str]:
    """Names of two groups of a data rank: those whose shards make up one whole, and those that hold the same shard.

    One of them may be the whole data axis; the other has one member then.
    """
    if layout.num_shards == 1:
        return "shards", "data"
    return ("data", "replicas") if layout.num_shards == layout.data else ("shards", "replicas")


def groups(model: ModelSpec, layout: Layout) -> tuple[Group, ...]:
    """Every group of more than one rank, each rank at most once per name.

    Those of `axis_groups`, and "kv": ranks that hold copies of one kv head; "tied": the two ranks that hold the copies
    of a tied embedding.
    """
    named: list[tuple[str, list[tuple[int, ...]]]] = []
    copies = kv_copies(model, layout.tensor)
    if copies > 1:
        named.append(
            ("kv", [line[i : i + copies] for line in lines(layout, "tensor") for i in range(0, layout.tensor, copies)])
        )
    tied = tied_groups(layout) if head_copies_embedding(model, layout) else ()
    return axis_groups(layout) + _listed(named) + tied


def tied_groups(layout: Layout) -> tuple[Group, ...]:
    """ "tied": the two ranks that hold the ends of the pipeline, for what both of them hold a copy of."""
    first, last = embedding_holders(layout)
    return _listed([("tied", [(line[first], line[last]) for line in lines(layout, "pipeline")])])


def axis_groups(layout: Layout) -> tuple[Group, ...]:
    """The groups that there are whatever the model.

    "world": control messages (loss, norm, votes). "tensor", "data", "pipeline": the axes. "shards": neighbours on the
    data axis among whom ZeRO cuts, where that is not all of it. "replicas": the ranks that hold the same shard then.
    """
    named: list[tuple[str, list[tuple[int, ...]]]] = [("world", [tuple(range(layout.num_ranks))])]
    named += [(axis, lines(layout, axis)) for axis in ("tensor", "data", "pipeline")]
    if data_groups(layout) == ("shards", "replicas"):
        size, axis = layout.num_shards, lines(layout, "data")
        named.append(("shards", [line[i : i + size] for line in axis for i in range(0, layout.data, size)]))
        named.append(("replicas", [line[i::size] for line in axis for i in range(size)]))
    return _listed(named)


def _listed(named: Sequence[tuple[str, Sequence[tuple[int, ...]]]]) -> tuple[Group, ...]:
    return tuple(Group(name=name, ranks=ranks) for name, lists in named for ranks in lists if len(ranks) > 1)
