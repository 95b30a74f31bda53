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
    said = texts(comm, problem, device, num_bytes=_TEXT_BYTES, purpose=PURPOSE)
    return [f"{_ranks(ranks, comm.size)}{text}" for text, ranks in said.items()]


def texts(comm: Comm, mine: str, device: torch.device, *, num_bytes: int, purpose: str) -> dict[str, list[int]]:
    """Every rank's text, cut to `num_bytes`, known to every rank: each that is not "", and the ranks that say it."""
    coded = mine.encode()[:num_bytes].ljust(num_bytes, b"\0")
    sent = torch.frombuffer(bytearray(coded), dtype=torch.uint8).to(device).unsqueeze(0)
    every = torch.empty(comm.size, num_bytes, dtype=torch.uint8, device=device)
    comm.all_gather(sent, out=every, purpose=purpose)
    by_text: dict[str, list[int]] = {}
    for rank, row in zip(comm.group.ranks, every.cpu(), strict=True):
        text = bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")  # a character may be cut
        if text:
            by_text.setdefault(text, []).append(rank)
    return by_text


def highest(comm: Comm, value: int, device: torch.device) -> int:
    """The largest of all ranks' values, on all ranks."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    comm.all_reduce(tensor, op="max", purpose=PURPOSE)
    return int(tensor.item())


def _ranks(ranks: list[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
