"""What went wrong on any rank becomes known to all of them, so that all do the same next."""

from __future__ import annotations

import torch

from phalanx.plan.comm import Comm

PURPOSE = "checkpoint"
_TEXT_BYTES = 4096


def agree(comm: Comm, problem: str, device: torch.device) -> list[str]:
    """Every rank's problem ("" for none), known to every rank: as `rank 3: …`, `all ranks: …`, or nothing at all.

    All members of `comm` call it. One small message when all is well.
    """
    if not highest(comm, int(bool(problem)), device):
        return []
    text = problem.encode()[:_TEXT_BYTES]
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    every = torch.empty(comm.size * _TEXT_BYTES, dtype=torch.uint8, device=device)
    comm.all_gather(mine, out=every, purpose=PURPOSE)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, row in zip(comm.group.ranks, every.cpu().view(comm.size, -1), strict=True):
        said = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
        if said:
            ranks_by_text.setdefault(said, []).append(rank)
    return [f"{_ranks(ranks, comm.size)}{said}" for said, ranks in ranks_by_text.items()]


def highest(comm: Comm, value: int, device: torch.device) -> int:
    """The largest of all ranks' values, on all ranks."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    comm.all_reduce(tensor, op="max", purpose=PURPOSE)
    return int(tensor.item())


def _ranks(ranks: list[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
