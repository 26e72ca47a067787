"""Runs one stage of a plan on one of its members, with its layers, its links and its gradient sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.data.dataset import BatchOfWorkers, sample_of_row
from horizonml.data.sampler import name_seed, python_seeded
from horizonml.engine.clock import LOAD, Clock, Way
from horizonml.engine.execution import CastWeights, Forward, SplitBackward, backward, runs_for, sums_as_they_lie
from horizonml.engine.link import Cut, Direction, Link
from horizonml.engine.staging import Staging
from horizonml.engine.sync import sync_for
from horizonml.engine.sync.base import APART, Members, is_looked_at, projections, trainable
from horizonml.engine.sync.norms import SyncedNorms
from horizonml.errors import DataError, ModelError
from horizonml.models.boundary import Values, values_of
from horizonml.models.own_state import put_back_buffers
from horizonml.models.watch import Watch
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution, Plan, Route, routes
from horizonml.plan.schedules import Action, Kind
from horizonml.tasks.task import Batch, Task, Tree, WrongClass, check_results, detached
from horizonml.text import count

# What travels where nothing here depends on a tensor: a zero. But parameters before it have no gradient at all, so that
# the optimizer leaves them alone, as in one process.
NONE = -0.0


def is_none(gradient: Tensor) -> bool:
    """Return whether a gradient that has arrived stands for none: it has nothing but negative zeros."""
    first = float(gradient.flatten()[0]) if gradient.numel() else 1.0
    return first == 0.0 and math.copysign(1.0, first) < 0.0 and bool(((gradient == 0.0) & gradient.signbit()).all())


def as_sent(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as it travels: none as negative zeros, and one that has nothing else as zeros."""
    if gradient is None:
        return torch.full_like(like, NONE)
    return gradient.abs() if is_none(gradient) else gradient


@dataclass(frozen=True)
class Micro:
    """Describes this member's rows of a micro-batch, `start` to `stop - 1` of the global batch, and who shares them."""

    start: int
    stop: int
    before: list[Route]
    after: list[Route]
    members: Sequence[tuple[int, int]]  # each member's rows, counted from the start of the micro-batch

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


class StageStep:
    """Holds a step that is under way in one stage."""

    def __init__(
        self, batch: Batch, micros: list[Micro], task: Task, seed: int, number: int, staging: Staging | None = None
    ) -> None:
        self._staging = staging or Staging()
        self.batch, self.micros, self.seed, self.number = batch, micros, seed, number
        self.held: dict[int, tuple[Values, Values]] = {}  # inputs and outputs of each micro-batch
        self.split: dict[int, SplitBackward] = {}
        self.loading: Literal["wait", "compute"] = "compute"
        if isinstance(batch, BatchOfWorkers) and batch.waits:
            self.loading = "wait"
        self._task = task
        self._judged: list[tuple[Tensor, Tensor]] = []  # the loss and the metrics of rows that this member has judged
        self.units = 0  # of these rows
        self._of_batch: int | None = None  # the units of the global batch, once they are needed

    def targets(self, micro: Micro) -> Tree:
        """Return the targets of some rows, once it is known how many units the batch has if that is needed."""
        if torch.is_grad_enabled():
            self._batch_units()
        return self.batch.targets(micro.start, micro.stop)

    def judge(self, outputs: Tree, targets: Tree, start: int) -> Tensor:
        """Return the loss of rows from `start` on as a part of the batch's mean, and add it to the step's sums.

        The metrics are added, too. Raises DataError if a target is no class of the data.
        """
        training = torch.is_grad_enabled()
        here = self._staging.tree_to_device(targets)
        try:
            loss = self._task.loss(outputs, here, training=training)
        except WrongClass as error:
            part = "training" if training else "held-out"
            place = sample_of_row(self.batch, start + error.row)
            raise DataError(f"the target of {part} {place} {error}") from error
        with torch.no_grad():
            if self._staging.has_float64:
                sums = self._task.judge(detached(outputs), here)
            else:
                sums = self._task.judge(self._staging.tree_to_host(detached(outputs)), targets)
        check_results(self._task, loss, sums, training)
        self._judged.append((loss.detach(), sums))
        self.units += self._task.units(targets)
        return loss / max(1, self._batch_units()) if training else loss

    @property
    def loss(self) -> float:
        """Return the sum of the loss over the rows that this member has judged, once its device has computed it."""
        total = 0.0
        for loss, _ in self._judged:  # one after the other: Python's own sum would round differently
            total += float(loss)
        return total

    @property
    def sums(self) -> Tensor:
        """Return the sum of each metric over these rows, on the host."""
        total = torch.zeros(len(self._task.metrics), dtype=torch.float64)
        for _, sums in self._judged:
            total += self._staging.to_host(sums) if self._staging.has_float64 else sums  # judged on the host
        return total

    def _batch_units(self) -> int:
        """Return the units of the global batch."""
        if self._of_batch is None:
            each = self._task.units_per_sample
            if each is not None:
                self._of_batch = self.batch.size * each
            else:
                self._of_batch = self._task.units(self.batch.targets(0, self.batch.size))
        return self._of_batch


class StageRuntime:
    """Runs the actions of one stage; what it holds of micro-batches is dropped when the next step begins."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        module: nn.Module,
        model: Model,
        group: Group,
        clock: Clock,
        staging: Staging,
        execution: Execution = PLAIN,
    ) -> None:
        """Connect the stage's members; all of them call this together. Raises PeerLost or ModelError.

        Where members split channels, `module` is changed in place. `execution` says how the layers run.
        """
        self.number, self.module, self._plan, self._clock, self._staging = number, module, plan, clock, staging
        self.stage = plan.stages[number]
        self.member = self.stage.ranks.index(group.rank)
        self.is_first, self.is_last = number == 0, number == len(plan.stages) - 1
        self._members = Members(self.stage, number, group, clock, staging)
        self._run: Forward = module
        if not self.stage.splits_channels:  # the layers of which are replaced
            lies = sums_as_they_lie(self.stage.ranks, self.stage.sync)
            self._run = runs_for(model, module, self.stage.stop, execution, sums_as_they_lie=lies)
        whole_model = len(plan.stages) == 1
        self._watch = None if whole_model else Watch(module, model.recorded)
        self._cast_weights = CastWeights()
        self.sync = sync_for(module, self._members)
        self._norms = SyncedNorms(module, self._members)
        self.parameters = trainable(module)
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._trained = 0  # steps in this session
        self._training: bool | None = None  # the module's mode, once it is set
        self._kinds: dict[bool, list[torch.dtype]] = {}  # of the tensors that leave, with and without gradients
        # The buffers that steps change, once that is known: their modules, and their names there.
        self._changing: dict[str, tuple[nn.Module, str]] | None = None
        self._before: dict[str, Tensor] = {}  # copies of these at the start of the step
        self._step: StageStep | None = None
        before = "fp32" if self.is_first else self._plan.stages[self.number - 1].send
        entry = Cut(model.chain.boundaries[self.stage.start], before, self.number)
        end = Cut(model.chain.boundaries[self.stage.stop], self.stage.send, self.number + 1)
        self.entry, self._exit = entry.boundary, end.boundary
        # Gradients travel only to what depends on trained parameters.
        self._entry_learns = not self.is_first and bool(self.entry.gradients.tensors)
        self._exit_learns = not self.is_last and bool(self._exit.gradients.tensors)
        self._learns = self._entry_learns or self._exit_learns or self.is_last  # whether it has a backward pass at all
        self._inputs = Link(group, self._clock, entry, Direction.ACTIVATIONS, staging)
        self._outputs = Link(group, self._clock, end, Direction.ACTIVATIONS, staging)
        self._gradients_in = Link(group, self._clock, end, Direction.GRADIENTS, staging)
        self._gradients_out = Link(group, self._clock, entry, Direction.GRADIENTS, staging)
        self._links = (self._inputs, self._outputs, self._gradients_in, self._gradients_out)

    @property
    def speaks(self) -> bool:
        """Return whether this member's results count.

        Where all members work on the same samples, only the first member's results do.
        """
        return self.sync.replicas == 1 or self.member == 0

    def share(self, plan: Plan) -> None:
        """Go on with a plan that differs in its shares only."""
        self._plan, self.stage = plan, plan.stages[self.number]
        self._members.stage = self.stage

    def cut(self, size: int, full: int) -> list[Micro]:
        """Return this member's parts of the micro-batches of a batch; `full` is the size of a full batch."""
        micros, offset = [], 0
        for samples in self._plan.micro_sizes(size, full):
            members = self.stage.rows(samples)
            own = members[self.member]
            before = [] if self.is_first else routes(own, self._plan.stages[self.number - 1], samples)
            after = [] if self.is_last else routes(own, self._plan.stages[self.number + 1], samples)
            micros.append(Micro(offset + own[0], offset + own[1], before, after, members))
            offset += samples
        return micros

    def begin(self, step: StageStep) -> None:
        """Prepare for the actions of a step or an evaluation."""
        self._step = step
        for link in self._links:
            link.sent_bytes = link.received_bytes = 0

    def set_training(self, training: bool) -> None:
        """Put the module into training or evaluation mode, once for all the steps that follow, as usual loops do."""
        if training != self._training:
            self.module.train(training)
            self._training = training

    def begin_training(self, measure_divergence: bool) -> None:
        """Prepare for computing gradients. Raises ModelError if another parameter is trained than at the beginning."""
        thawed = next((name for name, parameter in self._frozen.items() if parameter.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"parameter {thawed} was frozen when training began, and the model's code trains it now; which "
                "parameters are trained must not change. Train it from the beginning, or resume from a checkpoint with "
                "another model.freeze"
            )
        for parameter in self.parameters.values():
            parameter.grad = None
        self._trained += 1
        if self._changing is None:
            self._before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        else:  # without a walk through all modules, which takes a millisecond
            found = ((name, owner._buffers.get(last)) for name, (owner, last) in self._changing.items())
            self._before = {name: buffer.clone() for name, buffer in found if buffer is not None}
        if self._run is not self.module:
            self._cast_weights.open()
        self.sync.begin(measure_divergence)

    def _is_looked_at(self) -> bool:
        """Return whether members compare their parameters in this step."""
        shared = len(self.stage.ranks) > 1 and not self.stage.splits_channels
        return shared and bool(self.parameters or self._frozen) and is_looked_at(self._trained)

    def refuse_unequal(self) -> None:
        """Raise ModelError if the members' parameters are no longer equal, because the model's own code changes them.

        This is looked for in some steps only, and all members call it together. Raise it also if one part of the model
        has changed what another one reads.
        """
        if self._watch is not None:
            self._watch.check()
        if not self._is_looked_at():
            return
        named: dict[str, Tensor] = {**self.parameters, **self._frozen}
        own = self._staging.to_host(projections(list(named.values())))
        group, ranks = self._members.group, self._members.ranks
        every = [torch.empty_like(own) for _ in ranks]
        group.wait(group.begin_all_gather(own, every, ranks, self._members.number))
        found, norms = torch.stack(every, 1)
        apart = found.amax(0) - found.amin(0) > APART * norms.amax(0)
        if bool(apart.any()):
            name = list(named)[int(apart.nonzero()[0, 0])]
            raise ModelError(
                f"parameter {name} is no longer the same on all members of its stage: the model's own code changes it "
                "while it trains, by each member from its own samples; change it by the optimizer only, hold what is "
                "computed from the data as a buffer, or train with one rank (parallel.strategy: single)"
            )

    @property
    def before(self) -> dict[str, Tensor]:
        """Return copies of the buffers that the step changes, as they were before it."""
        return dict(self._before)

    def commit(self) -> None:
        """Keep what the step has changed."""
        self._cast_weights.close()
        if self._changing is None:
            # By value: what BatchNorm's kernel writes does not count as a version of the tensor.
            now = dict(self.module.named_buffers())
            modules = dict(self.module.named_modules())
            changed = [name for name, value in self._before.items() if not torch.equal(now[name], value)]
            paths = {name: name.rpartition(".") for name in changed}
            self._changing = {name: (modules[path], last) for name, (path, _, last) in paths.items()}
        self._before = {}

    def roll_back(self) -> None:
        """Undo what the forward passes of a failed step have changed: running statistics. Gradients go, too."""
        self._cast_weights.close()
        put_back_buffers(self.module, self._before)
        self._before = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    @property
    def rows(self) -> int:
        """Return the number of rows of the batch that this member works on."""
        assert self._step is not None
        return sum(micro.rows for micro in self._step.micros)

    @property
    def weight(self) -> float:
        """Return this member's part of the batch, as a fraction."""
        assert self._step is not None
        return self.rows / self._step.batch.size / self.sync.replicas

    def expect(self, action: Action) -> None:
        """Post the receives that an action will need."""
        assert self._step is not None
        micro = self._step.micros[action.micro]
        if action.kind is Kind.FORWARD and not self.is_first:
            self._inputs.expect(action.micro, micro.rows, micro.before)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and self._exit_learns:
            self._gradients_in.expect(action.micro, micro.rows, micro.after)

    def forward(self, number: int) -> None:
        """Run the forward pass of a micro-batch, and send its output or compute the loss."""
        step = self._step
        assert step is not None
        micro = step.micros[number]
        if self.is_first:
            self._clock.switch(step.loading, LOAD, number)
            entered = self._staging.all_to_device(values_of(step.batch.inputs(micro.start, micro.stop)))
        else:
            entered = self.entry.leaves(self._inputs.receive(number), torch.is_grad_enabled())
        if self.is_last:
            self._clock.switch(step.loading, LOAD, number)
            targets = step.targets(micro)
        self._norms.begin(micro.members)
        self._clock.switch("compute", "forward", number)
        member = 0 if self.sync.replicas > 1 else self.member  # all members drop the same values
        self._staging.seed(name_seed(step.seed, "step", step.number, self.number, member, number))
        # Every rank draws the same numbers for a micro-batch, as one process would.
        own_draws = python_seeded(name_seed(step.seed, "python", step.number, number))
        with self._staging.creating(), own_draws as has_drawn:
            result = self._run(*entered)
            left: Values = (step.judge(result, targets, micro.start),) if self.is_last else values_of(result)
            drawn = self._watch is not None and has_drawn()
        if drawn:
            raise ModelError(
                f"the code of layers {self.stage.start} to {self.stage.stop - 1} draws from Python's or numpy's random "
                "numbers, which stages cannot draw alike; draw from PyTorch's, or train with parallel.strategy: ddp"
            )
        if not self.is_last:
            self._require_kinds(left, micro.rows)
            self._outputs.send(number, left, micro.after)
        if torch.is_grad_enabled() and self._learns:
            step.held[number] = entered, left

    def _require_kinds(self, left: Values, rows: int) -> None:
        """Raise ModelError unless what travels on has a row for each sample and is of the same kinds as ever."""
        wrong = next((len(value) for value in left if len(value) != rows), None)
        if wrong is not None:
            raise ModelError(
                f"a tensor that leaves stage {self.number} has {wrong} rows for {count(rows, 'sample')}; "
                "what travels between stages must have a row for each sample"
            )
        shapes = [list(value.shape[1:]) for value in left]
        wanted = [list(spec.shape) for spec in self._exit.tensors]
        if shapes != wanted:
            raise ModelError(
                f"each sample's tensors that leave stage {self.number} have the shapes {shapes}, and had {wanted} when "
                "the model was cut; what travels between stages must not change its shape"
            )
        kinds = [value.dtype for value in left]
        before = self._kinds.setdefault(torch.is_grad_enabled(), kinds)
        if kinds != before:
            raise ModelError(
                f"what leaves stage {self.number} is of {', '.join(map(str, kinds))} now, and was of "
                f"{', '.join(map(str, before))}; the code of a model that is cut must return one kind of number"
            )

    def backward(self, number: int) -> None:
        """Run the backward pass of a micro-batch, and send the gradient of its input."""
        entered, left, gradients = self._gradients(number)
        self._clock.switch("compute", "backward", number)
        if left:  # nothing in a first stage without parameters
            backward(left, gradients)
        self._send_gradients(number, entered)

    def backward_input(self, number: int) -> None:
        """Run the part of the backward pass for which the previous stage waits."""
        assert self._step is not None
        entered, left, gradients = self._gradients(number)
        self._clock.switch("compute", Kind.BACKWARD_INPUT.value, number)
        split = SplitBackward(left, gradients, self.entry.differentiable(entered) if self._entry_learns else None)
        split.input_part()
        self._step.split[number] = split
        self._send_gradients(number, entered)

    def backward_weight(self, number: int) -> None:
        """Run the rest of the backward pass."""
        assert self._step is not None
        self._clock.switch("compute", Kind.BACKWARD_WEIGHT.value, number)
        self._step.split.pop(number).weight_part()

    def _gradients(self, number: int) -> tuple[Values, Values, Values | None]:
        """Return the inputs of the layers, the outputs that depend on what is trained, and the outputs' gradients.

        A loss has no gradients: they begin with it.
        """
        assert self._step is not None
        if not self._learns:
            return (), (), ()
        entered, left = self._step.held.pop(number)
        if self.is_last:
            return entered, tuple(value for value in left if value.requires_grad), None
        arrived = self._gradients_in.receive(number) if self._exit_learns else ()
        pairs = zip(self._exit.differentiable(left), arrived, strict=True)
        wanted = [(value, gradient) for value, gradient in pairs if value.requires_grad and not is_none(gradient)]
        return entered, tuple(value for value, _ in wanted), tuple(gradient for _, gradient in wanted)

    def _send_gradients(self, number: int, entered: Values) -> None:
        assert self._step is not None
        if self._entry_learns:
            found = (as_sent(value.grad, value) for value in self.entry.differentiable(entered))
            # Gradients that are rounded stochastically are right in the mean. A replay of the step rounds them alike.
            step = self._step
            seed = name_seed(step.seed, "round", step.number, self.number, self.member, number)
            self._gradients_out.send(number, tuple(found), step.micros[number].before, seed)

    def pending(self, action: Action) -> list[Tensor] | None:
        """Return the parameters whose gradients the step's last action computes; None stands for all of them."""
        assert self._step is not None
        return self._step.split[action.micro].pending if action.kind is Kind.BACKWARD_WEIGHT else None

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for link in self._links:
            link.flush()

    def traffic(self) -> dict[Way, tuple[int, int]]:
        """Return the bytes sent and received since `begin`."""
        return {
            "previous": (self._gradients_out.sent_bytes, self._inputs.received_bytes),
            "next": (self._outputs.sent_bytes, self._gradients_in.received_bytes),
            "members": (self.sync.bytes_sent, self.sync.bytes_sent),
        }

    def not_finite(self, as_summed: bool = False) -> str | None:
        """Return the name of a parameter whose gradient contains a value that is not finite, or None.

        `as_summed` says that the gradients are as the members' sums have left them.
        """
        if as_summed and self.sync.are_finite:
            return None
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        # A sum is finite only if all its terms are; it takes a millisecond, where a check of each value takes forty.
        if not gradients or math.isfinite(float(torch.stack([gradient.sum() for gradient in gradients]).sum())):
            return None
        found = ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        return next((name for name, gradient in found if not bool(torch.isfinite(gradient).all())), None)

    def close(self) -> None:
        """Release gradients, activations and hooks; the parameters outlive the group."""
        self._step = None
        self._cast_weights.close()
        self._run = self.module  # which the state empties when it makes other modules
        self._norms.close()
        self.sync.close()
        for parameter in self.parameters.values():
            parameter.grad = None
