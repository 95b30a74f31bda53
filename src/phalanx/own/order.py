"""Order: which units a forward runs, which under ZeRO 3 must be the same on all ranks that gather together."""

from __future__ import annotations

from types import TracebackType

import torch

from phalanx.errors import InputError
from phalanx.plan.comm import Comm

_END = -1


class Order:
    """Watches forwards (`with order: …`). In the first one, ranks tell each other at each unit which it is, before they
    gather it: what would be an endless wait is an error on all of them. Later ones must run the same units."""

    def __init__(self, comm: Comm, device: torch.device, *, watches: bool) -> None:
        """`watches`: whether there is anything to agree on."""
        self._comm, self._device, self._watches = comm, device, watches
        self._known: tuple[int, ...] | None = None
        self._seen: list[int] | None = None

    def __enter__(self) -> None:
        self._seen = [] if self._watches else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._seen is not None:
            self.note(_END, "the end")
            self._known = tuple(self._seen)
        self._seen = None

    def note(self, index: int, name: str) -> None:
        """Unit number `index` runs next. Raises InputError if it is another one elsewhere, or before."""
        if self._seen is None:
            return
        if self._known is None:
            widest = torch.tensor([index, -index], device=self._device)
            self._comm.all_reduce(widest, purpose="order of units", op="max")
            agree = bool(widest[0] == -widest[1])
        else:
            agree = len(self._seen) < len(self._known) and self._known[len(self._seen)] == index
        self._seen.append(index)
        if not agree:
            what = f"under ZeRO 3 all ranks must run the same parts of a module in the same order; {name} comes here"
            raise InputError(
                f"{what}, another part elsewhere or before", where="layout.zero", instead="zero = 2 or less"
            )
