"""What a run must keep to go on: rectangles of named global tensors, whatever the layout that holds them."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.checkpoint.match import REDUCTION
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.plan.shards import Parameter
from phalanx.trainer.any_engine import AnyEngine
from phalanx.trainer.data_parallel import Slice


def state(engine: AnyEngine) -> Iterator[StatePiece]:
    """All pieces that this rank holds of weights and optimizer state, and what a reduction keeps; writing into their
    tensors restores them.

    After that, `engine.publish()` carries restored master weights to where forward reads them.
    """
    replicas = engine.data.replicas
    for part, tensors in zip(engine.data.slices, engine.optimizer.state(), strict=True):
        for first, last, mine in _shares(part, replicas.index, replicas.size):
            for piece in part.buffer.layout.pieces:
                for begin, box in piece.rectangles(first, last):
                    for kind, flat in tensors.items():
                        yield StatePiece(
                            kind=kind,
                            parameter=piece.parameter,
                            rectangle=box,
                            tensor=flat[begin - part.start :][: box.num_elements].view(box.shape),
                            owned=mine and part.part.counted,
                        )
    yield from _kept(engine)


def _kept(engine: AnyEngine) -> Iterator[StatePiece]:
    """What this rank did not send yet, under a lossy reduction."""
    rank = engine.plan.layout.rank(engine.coord)
    for name, tensor in engine.data.lossy.kept() if engine.data.lossy else ():
        parameter = Parameter(name=f"rank {rank}: {name}", shape=tuple(tensor.shape))
        yield StatePiece.whole(parameter, tensor, kind=REDUCTION)


def _shares(part: Slice, index: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """The elements of a slice that `size` ranks hold alike, cut evenly so that they share the work of writing: those
    before the share of the rank at `index`, its own, and those behind it."""
    share = (part.stop - part.start) // size  # parts are padded so that this divides
    first = part.start + index * share
    yield part.start, first, False
    yield first, first + share, True
    yield first + share, part.stop, False
