"""Executes any Schedule: the actions of one pipeline coordinate in the listed order, with the transfers they imply.

Nothing here knows a schedule by name. A send is under way until the next one on its channel; a receive is posted one
action ahead, so that the message travels while this rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.plan.comm import Comm, Work
from phalanx.plan.schedule import FORWARD_CHANNEL, Action, Schedule, Transfer
from phalanx.plan.walk import receive_points
from phalanx.trainer.flat import Products, add_product, postponing
from phalanx.trainer.micro_batch import MicroBatch
from phalanx.trainer.model import Stage

OnAction = Callable[[Action], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a forward leaves for its backward: the stage's input, and where its output entered autograd."""

    inputs: Tensor | None
    output: GradientEdge | None


@dataclass(slots=True)
class _Step:
    """State of one step: what is on its way in either direction, and what waits for its backward."""

    batches: Sequence[MicroBatch]
    loss: Tensor
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    receiving: dict[Transfer, tuple[Tensor, Work]] = field(default_factory=dict)
    sending: dict[tuple[int, int], tuple[Work, Tensor]] = field(default_factory=dict)
    local: dict[Transfer, Tensor] = field(default_factory=dict)
    postponed: dict[tuple[int, int], Products] = field(default_factory=dict)


class Pipeline:
    """One pipeline coordinate: its stages (by chunk), its neighbours, and the shape of what they exchange."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        comm: Comm,
        activations: Tensor,
        on_action: OnAction = lambda action: None,
    ) -> None:
        """`activations` is any tensor of the shape [tokens, hidden], dtype and device that stages exchange. `on_action`
        is called before each action."""
        self.schedule, self.stages, self.comm, self.on_action = schedule, stages, comm, on_action
        self.activations = activations.to("meta")
        self.device = activations.device
        self.actions = schedule.actions[comm.index]
        self.last_to_add = schedule.last_to_add(comm.index)
        self.needs = [schedule.needs(comm.index, action) for action in self.actions]
        self.times_s: list[tuple[float, float]] = []
        self.receives = (*receive_points(schedule)[comm.index], ())

    def run(self, batches: Sequence[MicroBatch]) -> Tensor:
        """All actions of one step. Gradients end up in the flat buffers, and the stages' watcher hears of it. Returns
        the sum of this rank's losses, float64. After that `times_s` tells when each action began, with what it needs
        there, and ended (time.perf_counter; on a GPU, when the host had issued it)."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        step = _Step(batches=batches, loss=loss)
        self.times_s = []
        for index, (action, need) in enumerate(zip(self.actions, self.needs, strict=True)):
            self.on_action(action)
            self._receive_ahead(step, index)
            arrived = None if need is None else self._take(step, need)
            begin_s = time.perf_counter()
            if action.kind == "forward":
                self._forward(step, action, arrived)
            elif action.kind == "weight_gradient":
                self._weights(step, action)
            else:
                self._backward(step, action, arrived)
            self.times_s.append((begin_s, time.perf_counter()))
        for work, _ in step.sending.values():
            work.wait()
        assert not (step.kept or step.receiving or step.local or step.postponed), "the schedule left something undone"
        return step.loss

    def _forward(self, step: _Step, action: Action, inputs: Tensor | None) -> None:
        stage, batch = self.stages[action.chunk], step.batches[action.micro_batch]
        if batch.validates:
            output = stage.validate(inputs, batch)
        else:
            last = self.last_to_add[action.chunk]
            is_last = last.micro_batch == action.micro_batch and last.kind == "backward"
            output = stage.forward(None if inputs is None else inputs.requires_grad_(), batch, last=is_last)
            edge = None if output is None or output is inputs else get_gradient_edge(output)
            step.kept[action.chunk, action.micro_batch] = _Kept(inputs, edge)
        assert output is not None, "a first stage without an embedding"
        gift = self.schedule.gives(self.comm.index, action)
        if gift is None:
            step.loss += output.detach()
        else:
            self._give(step, gift, output.detach())

    def _backward(self, step: _Step, action: Action, output_grad: Tensor | None) -> None:
        """Gradients of the stage's input and, unless they have an action of their own, of its weights."""
        kept = step.kept.pop((action.chunk, action.micro_batch))
        stage = self.stages[action.chunk]
        postponed = [] if action.adds_gradients else [block.buffer for block in stage.blocks]
        with postponing(postponed) as products:
            if kept.output is not None:
                stage.backward(kept.output, output_grad, last=self.last_to_add[action.chunk] == action)
        if not action.adds_gradients:
            step.postponed[action.chunk, action.micro_batch] = products
        gift = self.schedule.gives(self.comm.index, action)
        if gift is not None:
            assert kept.inputs is not None
            input_grad = output_grad if kept.output is None else kept.inputs.grad
            assert input_grad is not None
            self._give(step, gift, input_grad)

    @torch.no_grad()
    def _weights(self, step: _Step, action: Action) -> None:
        """The weight gradients that an input-gradient action left; what they needed is let go one by one."""
        products = step.postponed.pop((action.chunk, action.micro_batch))
        while products:
            add_product(*products.pop())
        if self.last_to_add[action.chunk] == action:
            stage = self.stages[action.chunk]
            for block in reversed(stage.blocks):
                stage.watcher.after_backward(block, last=True)

    def _receive_ahead(self, step: _Step, index: int) -> None:
        """Post the receives that are due before the next action, so that messages travel while this one runs."""
        for need in self.receives[0] + self.receives[1] if index == 0 else self.receives[index + 1]:
            tensor = torch.empty_like(self.activations, device=self.device)
            work = self.comm.recv(
                tensor, source=need.source, channel=need.channel, purpose=_purpose(need), async_op=True
            )
            step.receiving[need] = tensor, work

    def _take(self, step: _Step, need: Transfer) -> Tensor:
        if need.local:
            return step.local.pop(need)
        tensor, work = step.receiving.pop(need)
        work.wait()
        return tensor

    def _give(self, step: _Step, gift: Transfer, tensor: Tensor) -> None:
        if gift.local:
            step.local[gift] = tensor
            return
        channel = gift.destination, gift.channel
        if channel in step.sending:
            step.sending.pop(channel)[0].wait()
        work = self.comm.send(tensor, to=gift.destination, channel=gift.channel, purpose=_purpose(gift), async_op=True)
        step.sending[channel] = work, tensor


def _purpose(transfer: Transfer) -> str:
    return "activations" if transfer.channel == FORWARD_CHANNEL else "activation gradients"
