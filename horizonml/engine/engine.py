"""The engine: runs any plan, one step at a time.

A step takes a global batch through the stages in micro-batches, forward and backward, in the order of the schedule;
sums gradients within each stage; agrees with all ranks on loss and on whether to go on; and updates the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor

from horizonml.data.seeds import name_seed
from horizonml.engine.backward import backward
from horizonml.engine.clock import Clock, Span
from horizonml.engine.group import Group, TreeSum
from horizonml.engine.link import Link
from horizonml.engine.optim import Optimizer
from horizonml.engine.sync.allreduce import GradientSum, Reducer
from horizonml.engine.sync.channels import Channels, Exchange
from horizonml.errors import Diverged
from horizonml.job.schema import Adam, Sgd
from horizonml.models.zoo import Model
from horizonml.plan.actions import Action, Kind
from horizonml.plan.plan import Plan, Route, routes
from horizonml.tasks.task import Batch, Task

_POSTED_AHEAD = 2
# Links use tags from 0 on, four for each micro-batch.
_TAG_TOTALS = 1 << 30
_TAG_GRADIENTS = _TAG_TOTALS + 1
_TAG_CHANNELS = _TAG_TOTALS + 2
_TAG_FINITE = _TAG_TOTALS + 3


_UNCHANGED = (
    "Parameters are as they were before this step; lower optimizer.lr, add lr_schedule.warmup_steps, or look at "
    "the data"
)

Direction = Literal["previous", "next", "members"]  # the stage before, the one after, and this stage's other members


@dataclass(frozen=True)
class Totals:
    """What all ranks agree on after a step or an evaluation."""

    loss: float
    metrics: dict[str, float]  # the task's metrics by name, means over the units of all ranks
    samples: int
    stop: bool = False
    newcomers: bool = False
    finite: bool = True  # whether all gradients are that no other member has a part of


@dataclass(frozen=True)
class Step:
    """One training step as this rank saw it. Times in seconds; they add up to `wall`."""

    totals: Totals
    wall: float
    compute: float
    transfer: float
    wait: float
    samples: int  # rows of the batch that this rank's stage worked on here
    entered: int  # rows of the batch that entered the first stage here: over all ranks they add up to the batch
    traffic: dict[Direction, tuple[int, int]]  # bytes sent and received
    divergence: float | None
    spans: list[Span]

    @property
    def bytes_sent(self) -> int:
        """To all other ranks."""
        return sum(sent for sent, _ in self.traffic.values())

    @property
    def bytes_received(self) -> int:
        """From all other ranks."""
        return sum(received for _, received in self.traffic.values())


@dataclass(frozen=True)
class _Micro:
    """This rank's part of a micro-batch: rows `start` to `stop - 1` of the global batch, and who shares them."""

    start: int
    stop: int
    before: list[Route]
    after: list[Route]

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Engine:
    """This rank's stage of a plan, ready to train."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        group: Group,
        optimizer: Sgd | Adam,
        batch_size: int,
        task: Task,
        gradient_compression: str = "none",
    ) -> None:
        """Make the layers of this rank's stage. `batch_size` is that of a full global batch.

        `gradient_compression` is "none", or how gradients are compressed on their way within stages.
        """
        plan.check(len(model.chain), group.world_size)
        self.plan, self.group, self.clock = plan, group, Clock()
        self._model_seed, self._batch_size, self._task = model.seed, batch_size, task
        self._compression = gradient_compression
        (self.stage_number,) = plan.stages_of(group.rank)
        self._stage = plan.stages[self.stage_number]
        self.member = self._stage.ranks.index(group.rank)
        self.is_first = self.stage_number == 0
        self.is_last = self.stage_number == len(plan.stages) - 1
        self.module = model.stage(self._stage.start, self._stage.stop)
        self._channels = None
        if self._stage.splits_channels:
            exchange = Exchange(group, self._stage.ranks, self.clock, _TAG_CHANNELS)
            self._channels = Channels(self.module, self._stage, self.member, exchange)
        # Where members split channels, all have the same samples, which count once.
        self._alike = len(self._stage.ranks) if self._channels else 1
        self._parameters = list(self.module.parameters())
        # Stages connect their members now. Who is slower to make its layers is waited for here, where it is noticed at
        # once when it is gone.
        group.barrier()
        self.optimizer, self._reducer = self._update_by(optimizer)
        entry, exit_ = model.chain.boundaries[self._stage.start], model.chain.boundaries[self._stage.stop]
        self._entry = entry
        before = "fp32" if self.is_first else plan.stages[self.stage_number - 1].send
        self._inputs = Link(group, self.clock, entry, 0, before)
        self._outputs = Link(group, self.clock, exit_, 0, self._stage.send)
        self._gradients_in = Link(group, self.clock, exit_, 1, self._stage.send)
        self._gradients_out = Link(group, self.clock, entry, 1, before)
        self._links = (self._inputs, self._outputs, self._gradients_in, self._gradients_out)
        self._agree = TreeSum(
            group, range(group.world_size), _TAG_TOTALS, torch.zeros(5 + len(task.metrics), dtype=torch.float64)
        )
        # Members of one stage see the same sums; other stages have to be told if these are not finite.
        self._agree_on_sums = None
        if self._channels or (len(plan.stages) > 1 and any(len(stage.ranks) > 1 for stage in plan.stages)):
            self._agree_on_sums = TreeSum(group, range(group.world_size), _TAG_FINITE, torch.zeros(1))
        self._cuts: dict[int, list[_Micro]] = {}

    def _update_by(self, spec: Sgd | Adam) -> tuple[Optimizer, GradientSum]:
        """What sums the gradients of this rank's layers, and what updates their parameters."""
        split = self._channels.parts if self._channels else {}
        reducer = Reducer(
            (parameter for name, parameter in self.module.named_parameters() if name not in split),
            (buffer for name, buffer in self.module.named_buffers() if name not in split),
            self.group,
            self._stage.ranks,
            self.clock,
            _TAG_GRADIENTS,
            alike=self._channels is not None,
            compression=self._compression,
        )
        return Optimizer(spec, self.module), reducer

    def step(
        self,
        batch: Batch,
        lr: float,
        number: int,
        *,
        measure_divergence: bool = False,
        stop: bool = False,
        newcomers: bool = False,
    ) -> Step:
        """Train on one global batch and update the parameters.

        `number` is the step's number in the run, which seeds dropout; `stop` says that this rank wants to end after
        this step, `newcomers` that it knows of ranks that want to take part. Raises Diverged on every rank, before any
        parameter changes, if the loss or a gradient is not finite; PeerLost.
        """
        self.clock.restart()
        for link in self._links:
            link.sent_bytes = link.received_bytes = 0
        if self._channels:
            self._channels.exchange.bytes = 0
        for parameter in self._parameters:
            parameter.grad = None
        self._agree.post()
        if self._agree_on_sums is not None:
            self._agree_on_sums.post()
        self._reducer.begin(measure_divergence)
        micros = self._cut(batch.size)
        rows = sum(micro.rows for micro in micros)
        weight = rows / batch.size / self._alike
        passes = (Kind.FORWARD, Kind.BACKWARD)
        actions = [a for a in self.plan.actions(self.group.rank, len(micros)) if a.kind in passes]
        self.module.train()
        loss, judged = self._run(batch, micros, actions, number)
        # Where a stage has several members, gradients may be on their way between them already.
        final = len(self._stage.ranks) > 1 or self._not_finite() is None
        self.clock.switch("wait", "others")
        samples = batch.size if self.stage_number == self.member == 0 else 0
        totals = self._totals(loss, judged, samples, stop, newcomers, final)
        if not math.isfinite(totals.loss):
            raise Diverged(f"step {number}: the loss is {totals.loss}. {_UNCHANGED}")
        if not totals.finite:
            self._tell_diverged(number)
        self.clock.switch("compute", "update")
        divergence = self._reducer.finish(weight)
        if not self._sums_finite():
            self._tell_diverged(number)
        self.optimizer.step(lr)
        self.clock.switch("transfer", "send")
        for link in self._links:
            link.flush()
        wall = self.clock.finish()
        reduced = self._reducer.bytes_per_step + (self._channels.exchange.bytes if self._channels else 0)
        return Step(
            totals,
            wall,
            **self.clock.totals,
            samples=rows,
            entered=rows if self.is_first and (self.member == 0 or not self._channels) else 0,
            traffic={
                "previous": (self._gradients_out.sent_bytes, self._inputs.received_bytes),
                "next": (self._outputs.sent_bytes, self._gradients_in.received_bytes),
                "members": (reduced, reduced),
            },
            divergence=divergence,
            spans=self.clock.spans,
        )

    def _not_finite(self) -> str | None:
        """Return the name of a parameter whose gradient has a value that is not finite, or None."""
        found = [(name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None and p.grad.numel()]
        if not found:
            return None
        # A sum is finite only if all its terms are, and takes a millisecond where looking at each value takes forty.
        sums = torch.stack([gradient.sum() for _, gradient in found])
        if bool(torch.isfinite(sums).all()):
            return None
        return next((name for name, gradient in found if not bool(torch.isfinite(gradient).all())), None)

    def _sums_finite(self) -> bool:
        """Whether the gradients that are about to be applied are finite, on all ranks."""
        finite = len(self._stage.ranks) == 1 or self._not_finite() is None
        if self._agree_on_sums is None:
            return finite
        self.clock.switch("wait", "others")
        total = self._agree_on_sums.sum(torch.tensor([float(not finite)]))
        self.clock.switch("compute", "update")
        return float(total) == 0

    def _tell_diverged(self, number: int) -> NoReturn:
        """Say which gradient is not finite; all ranks call this."""
        names = self.group.gather_json(self._not_finite())
        rank, name = next((rank, name) for rank, name in enumerate(names) if name is not None)
        hint = ", or set parallel.gradient_compression: none" if self._compression != "none" else ""
        raise Diverged(
            f"step {number}: the gradient of {name} (stage {self.plan.stages_of(rank)[0]}, rank {rank}) is not finite. "
            f"{_UNCHANGED}{hint}"
        )

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> Totals:
        """Return the loss and the metrics on held-out batches, through the same stages. Raises PeerLost."""
        self.clock.pause()
        self._agree.post()
        self.module.eval()
        loss, judged, samples = 0.0, torch.zeros(len(self._task.metrics), dtype=torch.float64), 0
        for batch in batches:
            micros = self._cut(batch.size)
            batch_loss, batch_judged = self._run(batch, micros, self.plan.evaluation(self.group.rank, len(micros)), 0)
            loss, judged, samples = loss + batch_loss * batch.size, judged + batch_judged, samples + batch.size
        for link in self._links:
            link.flush()
        totals = self._evaluated(loss, judged, samples if self.stage_number == self.member == 0 else 0)
        return Totals(totals.loss / totals.samples, totals.metrics, totals.samples)

    def try_smallest(self, size: int) -> str | None:
        """Whether a batch of `size` leaves this rank a single sample that its layers cannot train on; if so, why."""
        if all(micro.rows != 1 for micro in self._cut(size)):
            return None
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        sample = torch.zeros(1, *self._entry.shape, dtype=self._entry.dtype)
        try:
            with torch.no_grad():
                torch.func.functional_call(self.module.train(), buffers, sample)
        except ValueError as error:
            return str(error)
        return None

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state of this rank's layers: `model/NAME` and `optimizer/NAME/KEY`.

        The tensors are the engine's own, not copies, except where members split channels: these are put together, so
        all members must call this. All members of a stage return the same values.
        """
        whole = self._channels.whole if self._channels else lambda name, tensor: tensor
        tensors = {
            f"model/{name}": whole(name, tensor.detach())
            for name, tensor in self.module.state_dict(keep_vars=True).items()
        }
        for name, state in self.optimizer.state.items():
            tensors |= {f"optimizer/{name}/{key}": whole(name, value) for key, value in state.items()}
        return tensors

    def replicated_state(self) -> dict[str, Tensor]:
        """Return the part of `state` that every member of this stage holds alike, as the engine's own tensors."""
        split = self._channels.parts if self._channels else {}
        tensors = {
            f"model/{name}": tensor.detach()
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if name not in split
        }
        for name, state in self.optimizer.state.items():
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items() if name not in split}
        return tensors

    def expects(self, key: str) -> Tensor | None:
        """Return a tensor of the shape and dtype that this rank keeps under a name of `state`, or None if it does not.

        Where members split channels, it is this member's part.
        """
        kind, _, name = key.partition("/")
        if kind == "model":
            return self.module.state_dict(keep_vars=True).get(name)
        name, _, entry = name.rpartition("/")
        return self.optimizer.expected(name).get(entry)

    def load_state(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """Take parameters, buffers and optimizer state from `read(name)`; `names` are those there are.

        Raises KeyError for a missing parameter or buffer, ValueError for one of another shape or dtype.
        """
        available = set(names)
        own = self._channels.own if self._channels else lambda name, tensor: tensor
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if f"model/{name}" not in available:
                raise KeyError(name)
            tensor.detach().copy_(_like(tensor, own(name, read(f"model/{name}")), name))
        state = {}
        for name, _ in self.module.named_parameters():
            expected = self.optimizer.expected(name)
            if any(f"optimizer/{name}/{key}" in available for key in expected):
                state[name] = {
                    key: _like(tensor, own(name, read(f"optimizer/{name}/{key}")), f"{key} of {name}")
                    for key, tensor in expected.items()
                }
        self.optimizer.load(state)

    def _evaluated(self, loss: float, judged: Tensor, samples: float) -> Totals:
        """The sums of an evaluation over all ranks."""
        return self._totals(loss, judged, samples)

    def _totals(
        self,
        loss: float,
        judged: Tensor,
        samples: float,
        stop: bool = False,
        newcomers: bool = False,
        finite: bool = True,
    ) -> Totals:
        if self._channels and self.member:
            loss, judged = 0.0, torch.zeros_like(judged)
        flags = [float(flag) for flag in (stop, newcomers, not finite)]
        vector = torch.cat([torch.tensor([loss, samples, *flags], dtype=torch.float64), judged])
        loss, samples, stops, comers, broken, *sums = self._agree.sum(vector).tolist()
        metrics = self._means(sums, samples)
        return Totals(loss, metrics, int(samples), stops > 0, comers > 0, broken == 0)

    def _means(self, sums: list[float], samples: float) -> dict[str, float]:
        units = samples * self._task.units_per_sample
        return {name: value / units for name, value in zip(self._task.metrics, sums, strict=True)}

    def _cut(self, size: int) -> list[_Micro]:
        """This rank's parts of the micro-batches of a batch."""
        if size not in self._cuts:
            micros, offset = [], 0
            for samples in self.plan.micro_sizes(size, self._batch_size):
                own = self._stage.rows(samples)[self.member]
                number, stages = self.stage_number, self.plan.stages
                before = [] if self.is_first else routes(own, stages[number - 1], samples)
                after = [] if self.is_last else routes(own, stages[number + 1], samples)
                micros.append(_Micro(offset + own[0], offset + own[1], before, after))
                offset += samples
            self._cuts[size] = micros
        return self._cuts[size]

    def _run(self, batch: Batch, micros: list[_Micro], actions: list[Action], number: int) -> tuple[float, Tensor]:
        """Work through the actions; return this rank's part of the mean loss, and its sums of the metrics."""
        actions = [action for action in actions if micros[action.micro].rows]
        last_backward = next((a.micro for a in reversed(actions) if a.kind == "backward"), None)
        weight = sum(micro.rows for micro in micros) / batch.size / self._alike
        member = 0 if self._channels else self.member
        held: dict[int, tuple[Tensor, Tensor]] = {}
        loss, judged = torch.zeros(()), torch.zeros(len(self._task.metrics), dtype=torch.float64)
        for index, action in enumerate(actions):
            for ahead in actions[index if index == 0 else index + _POSTED_AHEAD : index + _POSTED_AHEAD + 1]:
                self._expect(ahead, micros[ahead.micro])
            micro = micros[action.micro]
            if action.kind == "forward":
                torch.default_generator.manual_seed(
                    name_seed(self._model_seed, "step", number, self.stage_number, member, action.micro)
                )
                entered, left = self._forward(batch, micro, action.micro)
                if self.is_last:
                    targets = batch.targets(micro.start, micro.stop)
                    judged += self._task.judge(left.detach(), targets)
                    left = self._task.loss(left, targets, training=torch.is_grad_enabled())
                    left = left / (batch.size * self._task.units_per_sample)
                    loss += left.detach()
                else:
                    self._outputs.send(action.micro, left, micro.after)
                if torch.is_grad_enabled():
                    held[action.micro] = entered, left
            else:
                entered, left = held.pop(action.micro)
                gradient = None if self.is_last else self._gradients_in.receive(action.micro)
                if action.micro == last_backward:
                    self._reducer.arm(weight)
                self.clock.switch("compute", "backward", action.micro)
                if left.requires_grad:  # not so in a first stage without parameters
                    backward(left, gradient)
                if not self.is_first:
                    assert entered.grad is not None
                    self._gradients_out.send(action.micro, entered.grad, micro.before)
            self.clock.switch("compute", "prepare")
        return float(loss), judged

    def _expect(self, action: Action, micro: _Micro) -> None:
        """Post the receives that an action will need."""
        if action.kind == "forward" and not self.is_first:
            self._inputs.expect(action.micro, micro.rows, micro.before)
        elif action.kind == "backward" and not self.is_last:
            self._gradients_in.expect(action.micro, micro.rows, micro.after)

    def _forward(self, batch: Batch, micro: _Micro, number: int) -> tuple[Tensor, Tensor]:
        """What entered the stage, and what leaves it."""
        if self.is_first:
            entered = batch.inputs(micro.start, micro.stop)
        else:
            entered = self._inputs.receive(number).requires_grad_(torch.is_grad_enabled())
        self.clock.switch("compute", "forward", number)
        left: Tensor = self.module(entered)
        return entered, left


def _like(expected: Tensor, value: Tensor, name: str) -> Tensor:
    """Return the value, if it is of the expected shape and dtype. Raises ValueError."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise ValueError(
            f"{name} is {value.dtype} of shape {list(value.shape)}, but the model wants {expected.dtype} of shape "
            f"{list(expected.shape)}"
        )
    return value
