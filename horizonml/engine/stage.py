"""One stage of a plan on one of its members: its layers, its links, and how its members agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.data.seeds import name_seed
from horizonml.engine.backward import backward
from horizonml.engine.clock import Clock
from horizonml.engine.link import Cut, Direction, Link
from horizonml.engine.split_backward import SplitBackward
from horizonml.engine.step import Way
from horizonml.engine.sync import sync_for
from horizonml.engine.sync.base import Members, trainable
from horizonml.models.chain import Boundary
from horizonml.plan.actions import Action, Kind
from horizonml.plan.plan import Plan, Route, routes
from horizonml.tasks.task import Batch, Task


@dataclass(frozen=True)
class Micro:
    """This member's part of a micro-batch: rows `start` to `stop - 1` of the global batch, and who shares them."""

    start: int
    stop: int
    before: list[Route]
    after: list[Route]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.stop - self.start


class StageStep:
    """A step under way in one stage."""

    def __init__(self, batch: Batch, micros: list[Micro], task: Task, seed: int, number: int) -> None:
        self.batch, self.micros, self.seed, self.number = batch, micros, seed, number
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # what entered and what left, of micro-batches
        self.split: dict[int, SplitBackward] = {}
        self._task = task
        self.loss = torch.zeros(())  # of these rows: their part of the batch's mean
        self.sums = torch.zeros(len(task.metrics), dtype=torch.float64)

    def judge(self, outputs: Tensor, micro: Micro) -> Tensor:
        """Return the loss of some rows as a part of the batch's mean; add it up, and the metrics."""
        targets = self.batch.targets(micro.start, micro.stop)
        with torch.no_grad():
            self.sums += self._task.judge(outputs.detach(), targets)
        loss = self._task.loss(outputs, targets, training=torch.is_grad_enabled())
        loss = loss / (self.batch.size * self._task.units_per_sample)
        self.loss += loss.detach()
        return loss


class StageRuntime:
    """Runs the actions of one stage. What it holds of micro-batches is forgotten at the next step."""

    def __init__(
        self, plan: Plan, number: int, module: nn.Module, boundaries: Sequence[Boundary], group: Group, clock: Clock
    ) -> None:
        """Connect the stage's members; all of them call this together. Raises PeerLost, ModelError.

        `boundaries[i]` is what enters layer i of the model. Where members split channels, `module` is changed in place.
        """
        self.number, self.module, self._plan, self._clock = number, module, plan, clock
        self.stage = plan.stages[number]
        self.member = self.stage.ranks.index(group.rank)
        self.is_first, self.is_last = number == 0, number == len(plan.stages) - 1
        self.sync = sync_for(module, Members(self.stage, number, group, clock))
        self.parameters = trainable(module)
        self._buffers = list(module.buffers())
        self._before: list[Tensor] = []  # the buffers' values before the step under way
        self._step: StageStep | None = None
        before = "fp32" if self.is_first else self._plan.stages[self.number - 1].send
        entry = Cut(boundaries[self.stage.start], before, self.number)
        end = Cut(boundaries[self.stage.stop], self.stage.send, self.number + 1)
        self.entry = entry.boundary
        self._inputs = Link(group, self._clock, entry, Direction.ACTIVATIONS)
        self._outputs = Link(group, self._clock, end, Direction.ACTIVATIONS)
        self._gradients_in = Link(group, self._clock, end, Direction.GRADIENTS)
        self._gradients_out = Link(group, self._clock, entry, Direction.GRADIENTS)
        self._links = (self._inputs, self._outputs, self._gradients_in, self._gradients_out)

    @property
    def speaks(self) -> bool:
        """Whether this member's results count: where all members work on the same samples, those of the first do."""
        return self.sync.replicas == 1 or self.member == 0

    def cut(self, size: int, full: int) -> list[Micro]:
        """Return this member's parts of the micro-batches of a batch; `full` is the size of a full batch."""
        micros, offset = [], 0
        for samples in self._plan.micro_sizes(size, full):
            own = self.stage.rows(samples)[self.member]
            before = [] if self.is_first else routes(own, self._plan.stages[self.number - 1], samples)
            after = [] if self.is_last else routes(own, self._plan.stages[self.number + 1], samples)
            micros.append(Micro(offset + own[0], offset + own[1], before, after))
            offset += samples
        return micros

    def begin(self, step: StageStep) -> None:
        """Prepare for the actions of a step or an evaluation."""
        self._step = step
        for link in self._links:
            link.sent_bytes = link.received_bytes = 0

    def begin_training(self, measure_divergence: bool) -> None:
        """Prepare for gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._before = [buffer.clone() for buffer in self._buffers]
        self.sync.begin(measure_divergence)

    def commit(self) -> None:
        """Keep what the step has changed."""
        self._before = []

    def roll_back(self) -> None:
        """Undo what forward passes of a step that fails have changed: running statistics. Gradients go, too."""
        for buffer, value in zip(self._buffers, self._before, strict=False):
            buffer.copy_(value)
        self._before = []
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def rows(self) -> int:
        """Rows of the batch that this member works on."""
        assert self._step is not None
        return sum(micro.rows for micro in self._step.micros)

    @property
    def weight(self) -> float:
        """This member's part of the batch."""
        assert self._step is not None
        return self.rows / self._step.batch.size / self.sync.replicas

    def expect(self, action: Action) -> None:
        """Post the receives that an action will need."""
        assert self._step is not None
        micro = self._step.micros[action.micro]
        if action.kind is Kind.FORWARD and not self.is_first:
            self._inputs.expect(action.micro, micro.rows, micro.before)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and not self.is_last:
            self._gradients_in.expect(action.micro, micro.rows, micro.after)

    def forward(self, number: int) -> None:
        """Take a micro-batch through the layers, and send what leaves them or judge it."""
        step = self._step
        assert step is not None
        member = 0 if self.sync.replicas > 1 else self.member  # all members drop the same
        torch.default_generator.manual_seed(name_seed(step.seed, "step", step.number, self.number, member, number))
        micro = step.micros[number]
        if self.is_first:
            entered = step.batch.inputs(micro.start, micro.stop)
        else:
            entered = self._inputs.receive(number).requires_grad_(torch.is_grad_enabled())
        self._clock.switch("compute", "forward", number)
        left: Tensor = self.module(entered)
        if self.is_last:
            left = step.judge(left, micro)
        else:
            self._outputs.send(number, left, micro.after)
        if torch.is_grad_enabled():
            step.held[number] = entered, left

    def backward(self, number: int) -> None:
        """Take the gradient of a micro-batch back through the layers, and send that of what entered them."""
        entered, left, gradient = self._gradient(number)
        self._clock.switch("compute", "backward", number)
        if left.requires_grad:  # not so in a first stage without parameters
            backward(left, gradient)
        self._send_gradient(number, entered)

    def backward_input(self, number: int) -> None:
        """Do the part of the backward pass for which the stage before waits."""
        assert self._step is not None
        entered, left, gradient = self._gradient(number)
        self._clock.switch("compute", "backward", number)
        split = SplitBackward(left, gradient, None if self.is_first else entered)
        split.input_part()
        self._step.split[number] = split
        self._send_gradient(number, entered)

    def backward_weight(self, number: int) -> None:
        """Do the rest of the backward pass."""
        assert self._step is not None
        self._clock.switch("compute", "backward weight", number)
        self._step.split.pop(number).weight_part()

    def _gradient(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what entered the layers, what left them, and the gradient of that (None for a loss)."""
        assert self._step is not None
        entered, left = self._step.held.pop(number)
        return entered, left, None if self.is_last else self._gradients_in.receive(number)

    def _send_gradient(self, number: int, entered: Tensor) -> None:
        assert self._step is not None
        if not self.is_first:
            assert entered.grad is not None
            self._gradients_out.send(number, entered.grad, self._step.micros[number].before)

    def flush(self) -> None:
        """Wait until everything is sent."""
        for link in self._links:
            link.flush()

    def traffic(self) -> dict[Way, tuple[int, int]]:
        """Return the bytes sent and received since `begin`."""
        return {
            "previous": (self._gradients_out.sent_bytes, self._inputs.received_bytes),
            "next": (self._outputs.sent_bytes, self._gradients_in.received_bytes),
            "members": (self.sync.bytes_sent, self.sync.bytes_sent),
        }

    def not_finite(self) -> str | None:
        """Return the name of a parameter whose gradient has a value that is not finite, or None."""
        found = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None and p.grad.numel()]
        if not found:
            return None
        # A sum is finite only if all its terms are, and takes a millisecond where looking at each value takes forty.
        sums = torch.stack([gradient.sum() for _, gradient in found])
        if bool(torch.isfinite(sums).all()):
            return None
        return next((name for name, gradient in found if not bool(torch.isfinite(gradient).all())), None)

    def close(self) -> None:
        """Let go of gradients, activations and hooks: the parameters outlive the group."""
        self._step = None
        self.sync.close()
        for parameter in self.parameters.values():
            parameter.grad = None
