"""Comms between threads of one process: what each call means, written down as plainly as can be. Other transports are
held against it; logic tests use it where processes would be too slow. (Threads share torch's random generators.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from phalanx.errors import CommError
from phalanx.plan.comm import Group
from phalanx.trainer.comm import Call, GroupComm
from phalanx.trainer.recorder import Recorder


class Board:
    """Where the members of one group leave copies of what they send: one sheet per call."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.changed = threading.Condition()
        self.sheets: dict[Any, dict[int, tuple[torch.Tensor, ...]]] = {}


class ThreadTransport:
    """A Transport over a Board."""

    def __init__(self, board: Board, index: int) -> None:
        self.board, self.index, self.size = board, index, board.group.size

    def start(self, call: Call) -> Any:
        shape = call.shape
        if shape.operation in ("send", "recv"):
            ends = (self.index, shape.peer) if shape.operation == "send" else (shape.peer, self.index)
            sheet, writers = ("message", *ends, shape.channel, call.sequence), (ends[0],)
        else:
            sheet, writers = ("collective", call.sequence), tuple(range(self.size))
        if self.index in writers:
            with self.board.changed:
                copies = tuple(tensor.clone() for tensor in call.tensors)
                self.board.sheets.setdefault(sheet, {})[self.index] = copies
                self.board.changed.notify_all()
        return None if shape.operation == "send" else _Pending(self, call, sheet, writers)

    def close(self) -> None:
        """Nothing is held."""


class _Pending:
    def __init__(self, transport: ThreadTransport, call: Call, sheet: Any, writers: tuple[int, ...]) -> None:
        self.transport, self.call, self.sheet, self.writers = transport, call, sheet, writers

    def ready(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        board = self.transport.board
        with board.changed:
            if not board.changed.wait_for(
                lambda: len(board.sheets.get(self.sheet, {})) == len(self.writers), timeout_s
            ):
                raise CommError(f"the time limit of {timeout_s:g} s is over")
        sent = board.sheets[self.sheet]
        index, size = self.transport.index, self.transport.size
        for number, result in enumerate(self.call.out or self.call.tensors):
            terms = [sent[writer][number] for writer in self.writers]
            result.view(-1).copy_(meaning(self.call, terms, index, size).view(-1))


def meaning(call: Call, terms: list[torch.Tensor], index: int, size: int) -> torch.Tensor:
    """What member `index` gets, given what all of them sent."""
    match call.shape.operation:
        case "all_reduce":
            return combined(terms, call.shape.op)
        case "reduce_scatter":
            return combined(terms, "sum").view(size, -1)[index]
        case "all_gather":
            return torch.cat([term.view(-1) for term in terms])
        case "all_to_all":
            return torch.cat([term.view(size, -1)[index] for term in terms])
        case "broadcast":
            return terms[call.shape.peer]
        case _:
            return terms[0]


def combined(terms: list[torch.Tensor], op: str) -> torch.Tensor:
    """Sum in rank order (16-bit floats in fp32, rounded once) or maximum."""
    wide = [term.float() if term.dtype in (torch.bfloat16, torch.float16) else term for term in terms]
    total = wide[0].clone()
    for term in wide[1:]:
        total = total + term if op == "sum" else torch.maximum(total, term)
    return total.to(terms[0].dtype)


def run_threads(size: int, function: Callable[[GroupComm], Any], timeout_s: float = 30.0) -> list[Any]:
    """Call `function(comm)` in `size` threads that form one group; returns their results in rank order."""
    group = Group(name="threads", ranks=tuple(range(size)))
    board = Board(group)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(index: int) -> None:
        comm = GroupComm(group, index, ThreadTransport(board, index), Recorder(), timeout_s=timeout_s)
        try:
            results[index] = function(comm)
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            errors.append(error)

    threads = [threading.Thread(target=main, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
