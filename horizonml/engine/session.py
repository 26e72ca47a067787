"""Trains a state with one group and one plan, a step at a time.

A step takes a global batch through the stages in micro-batches, forward and backward, in the order of the schedule.
Then all ranks agree on the loss and on whether to go on, the gradients are summed within each stage, and the parameters
are updated. The state changes only in the update, so a session can be dropped at any other moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from horizonml.comm.expected import items, mapping, text
from horizonml.comm.group import Group
from horizonml.comm.playback import Messages, Playback, Recording
from horizonml.data.dataset import NeededRows
from horizonml.engine.clock import WAYS, Clock, StepResult, Totals, Way
from horizonml.engine.stage import Micro, StageRuntime, StageStep
from horizonml.engine.staging import Staging, staging_for
from horizonml.engine.sync.base import is_looked_at
from horizonml.engine.verdict import GradientCheck, TiedGradients, TotalsSum, check_held_out, refuse_loss
from horizonml.errors import PeerLost
from horizonml.machine.emulation import pace_here
from horizonml.machine.host import cpu_seconds
from horizonml.models.structure import Structure
from horizonml.models.tracing import tried_out
from horizonml.models.watch import require_alike, set_everywhere
from horizonml.plan.plan import PLAIN, Execution, Plan
from horizonml.plan.schedules import Action, Kind
from horizonml.state.follow import Following
from horizonml.state.train_state import Prepared, TrainState
from horizonml.tasks.task import Batch, Task

_POSTED_AHEAD = 2  # how many actions ahead receives are posted
_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # after these, a micro-batch's gradients are complete


def run_passes(actions: Sequence[Action], stages: Mapping[int, StageRuntime], clock: Clock) -> None:
    """Run forward and backward actions in the given order. Raises PeerLost.

    `actions` must not contain actions on micro-batches of which this rank has no rows.
    """
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in _LAST}
    for index, action in enumerate(actions):
        for ahead in actions[index if index == 0 else index + _POSTED_AHEAD : index + _POSTED_AHEAD + 1]:
            stages[ahead.stage].expect(ahead)
        stage = stages[action.stage]
        if last.get(action.stage) == index:
            stage.sync.arm(stage.weight, stage.pending(action))
        match action.kind:
            case Kind.FORWARD:
                stage.forward(action.micro)
            case Kind.BACKWARD:
                stage.backward(action.micro)
            case Kind.BACKWARD_INPUT:
                stage.backward_input(action.micro)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(action.micro)
            case Kind.REDUCE | Kind.UPDATE:
                raise ValueError(f"{action} is no pass")
        clock.switch("compute", "prepare")


@dataclass(frozen=True)
class Wishes:
    """Says what a rank asks for in a step."""

    measure_divergence: bool = False  # to know how far the gradients of members are apart
    stop: bool = False  # to end after this step
    newcomers: bool = False  # to take in ranks that want to join
    look: bool = False  # to compare times with the plan
    full: bool = False  # to have one set of parameters after this step, as all plans have but those with local steps


NO_WISHES = Wishes()


class Trainer(Protocol):
    """Defines what the training loop needs of a session: of a `Session`, and of one that takes local steps.

    `Session` documents the methods; `local_steps.LocalSession` says where it differs.
    """

    plan: Plan
    state: TrainState
    group: Group
    task: Task
    clock: Clock
    stages: dict[int, StageRuntime]
    execution: Execution
    following: Following | None

    @property
    def is_first(self) -> bool:
        """Return whether this rank is a member of the first stage, which reads inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Return whether this rank is a member of the last stage, which reads targets."""
        return len(self.plan.stages) - 1 in self.stages

    def begin(self) -> None:
        """Make ready for the first step of a group, with the state that all ranks have agreed on.

        The only rank that is left of replicas that took local steps goes on from its own ones.
        """
        own, self.state.own_steps = self.state.own_steps, None
        if own is not None and self.group.world_size == own.replica[1] == 1 and own.since == self.state.step:
            tensors = {f"model/{name}": tensor for part in own.tensors for name, tensor in part.items()}
            self.state.take_over(tensors)
            self.state.step = max(self.state.step, own.done)

    def follow(self, following: Following) -> None: ...
    def end_following(self) -> None: ...
    def step(self, batch: Batch, learning_rate: float, wishes: Wishes = NO_WISHES) -> StepResult: ...
    def evaluate(self, batches: Sequence[Batch]) -> Totals: ...
    def needs(self, size: int, training: bool, step: int) -> NeededRows: ...
    def try_smallest(self, size: int) -> str | None: ...
    def close(self) -> None: ...


class Session(Trainer):
    """Holds this rank's part in one generation: the group, the plan, and the stages of which this rank is a member."""

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        group: Group,
        task: Task,
        batch_size: int,
        execution: Execution = PLAIN,
        staging: Staging | None = None,
    ) -> None:
        """Connect the stages; all ranks of the group call this together.

        `state` keeps the layers of this rank that it holds already, and creates the others. `batch_size` is the size of
        a full global batch. `execution` says how layers run here. `staging` is by
        default what the state's device needs. Raises PlanError, ModelError or PeerLost.
        """
        self.staging = staging if staging is not None else staging_for(state.device)
        model = state.model
        plan.check(len(model.chain), group.world_size)
        self.following: Following | None = None  # while some ranks follow the others
        self._whole = plan  # which `plan` is, too, unless some ranks follow
        self.plan, self.state, self.group, self.task = plan, state, group, task
        self.clock = Clock(self.staging.watch(), pace_here())
        self._batch_size, self.execution = batch_size, execution
        held = plan.stages_of(group.rank)
        splits = any(plan.stages[number].splits_channels for number in held)
        modules = state.take([(plan.stages[number].start, plan.stages[number].stop) for number in held], splits)
        # Stages connect their members next. The barrier waits for the ranks that are slower to create their layers, and
        # it notices at once if one of them is gone.
        group.barrier()
        self.stages = {}
        try:
            for number, module in zip(held, modules, strict=True):
                stage = StageRuntime(plan, number, module, model, group, self.clock, self.staging, execution)
                self.stages[number] = stage
                if stage.sync.parts:
                    state.split(stage.sync.parts)
        except BaseException:
            self.close()  # the parameters must not keep the hooks of a session that has never begun
            raise
        self._totals = TotalsSum(group, task, self.stages, len(plan.stages) - 1)
        ties = [[(name, state.layer_of(f"model/{name}")) for name in names] for names in model.ties]
        held_here = {number: stage.parameters for number, stage in self.stages.items()}
        self._tied = TiedGradients(ties, plan, group, self.clock, held_here, self.staging)
        clip_norm = state.optimizer.spec.clip_norm
        self._check = GradientCheck(plan, ties, group, self.clock, self.stages, clip_norm, self.staging)
        self._looks = 0  # steps in which the parts' flags might have been compared
        self._cuts: dict[int, dict[int, list[Micro]]] = {}
        self._cpu = 0.0  # seconds that the process had used when the step began
        self._prepared = False  # whether only the others' consent is missing to update
        self.draws = model.seed  # what dropout is seeded with, besides the step
        self.found = torch.zeros(0)  # the sums of the last step over this rank's rows: its loss, units and metrics

    def follow(self, following: Following) -> None:
        """Give no samples to ranks that follow the others; all ranks call this between the same steps."""
        self.following = following
        self._share(self._whole.idle(following.ranks))

    def end_following(self) -> None:
        """Give all ranks the samples that the plan says; all ranks call this between the same steps."""
        self.following = None
        self._share(self._whole)

    def _share(self, plan: Plan) -> None:
        """Go on with a plan that differs in its shares only."""
        self.plan, self._cuts = plan, {}
        for stage in self.stages.values():
            stage.share(plan)

    def step(self, batch: Batch, learning_rate: float, wishes: Wishes = NO_WISHES) -> StepResult:
        """Train on one global batch and update the parameters.

        The step adds one to `state.step`, which also seeds dropout. For what a rank may ask for, see `Wishes`.
        Raises PeerLost; raises Diverged on every rank, before any parameter changes, if the loss or a gradient is not
        finite.
        """
        self._prepared, self.state.prepared = False, None
        try:
            return self._step(batch, learning_rate, wishes)
        except PeerLost:
            if self._prepared:
                self._leave_open(learning_rate)
            else:
                self._roll_back()
            raise
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        for running in self.stages.values():
            running.roll_back()

    def _leave_open(self, learning_rate: float) -> None:
        """Keep the gradients of a step that other ranks may have agreed on; see `TrainState.settle`."""
        gradients: dict[str, Tensor] = {}
        before: dict[str, Tensor] = {}
        for stage in self.stages.values():
            gradients |= {name: p.grad for name, p in stage.parameters.items() if p.grad is not None}
            before |= stage.before
        self.state.prepared = Prepared(gradients, before, learning_rate)

    def replay(self, batch: Batch, learning_rate: float, scale: float) -> None:
        """Repeat a step that the other ranks have done already, from the messages that they sent in it.

        The session's group has these messages. `scale` is the factor by which all ranks have multiplied the step's
        gradients.
        """
        self._reduce(self._pass(batch, False)[0], others=False)
        self._commit(list(self.stages), learning_rate, scale)
        for stage in self.stages.values():
            stage.flush()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradients of a batch by name, summed over the members of stages, and leave the state as it was.

        Of a stage with several members only the first one returns them. All ranks call this. Raises PeerLost.
        """
        try:
            self._reduce(self._pass(batch, False)[0])
            for stage in self.stages.values():
                stage.flush()
            speaking = [stage.parameters for stage in self.stages.values() if stage.member == 0]
            found = {name: p.grad for named in speaking for name, p in named.items() if p.grad is not None}
            return {name: self.staging.to_host(gradient.clone()) for name, gradient in found.items()}
        finally:
            self._roll_back()

    def _pass(self, batch: Batch, measure_divergence: bool) -> tuple[list[Action], dict[int, StageStep]]:
        """Run all forward and backward passes of a batch; return the step's actions, and its results by stage."""
        runs = self._begin(batch)
        for stage in self.stages.values():
            stage.begin_training(measure_divergence)
            if self.following is not None and self.group.rank in self.following.ranks:
                stage.sync.arm(0.0, ())  # at once, so that the others' sums do not wait for those of a follower
        actions = self._with_rows(self.plan.actions(self.group.rank, self._micro_batches(batch)), runs)
        run_passes([action for action in actions if action.micro >= 0], self.stages, self.clock)
        for stage in self._summed(actions):
            stage.sync.send_rest(stage.weight)
        self.staging.drain()
        return actions, runs

    def _summed(self, actions: Sequence[Action]) -> list[StageRuntime]:
        """Return the stages whose gradients are summed, in that order."""
        return [self.stages[action.stage] for action in actions if action.kind is Kind.REDUCE]

    def _reduce(self, actions: Sequence[Action], others: bool = True) -> list[float | None]:
        """Complete the sums of gradients; return how far each stage's gradients were apart, where that is measured.

        `others` says whether the other ranks take this step, too. Raises ModelError if the model's own code has changed
        one of several copies of a parameter.
        """
        divergences = [stage.sync.finish(stage.weight) for stage in self._summed(actions)]
        if others and self.following is None:  # a rank that follows does not hold the others' parameters yet
            for _, stage in sorted(self.stages.items()):
                stage.refuse_unequal()
            self._tied.refuse_unequal()
            self._require_alike()
        self._tied.sum()
        return divergences

    def _require_alike(self) -> None:
        """Raise ModelError if the parts of a model, which all run its own forward, have come to hold different flags.

        This is looked for in some steps only, and all ranks call it together.
        """
        self._looks += 1
        if len(self.plan.stages) > 1 and isinstance(self.state.model.chain, Structure) and is_looked_at(self._looks):
            here = [set_everywhere(stage.module) for stage in self.stages.values() if stage.member == 0]
            every = self.group.gather_json(here, items(mapping(text)))
            require_alike([part for parts in every for part in parts])

    def _step(self, batch: Batch, learning_rate: float, wishes: Wishes) -> StepResult:
        self.clock.restart()
        self._cpu = cpu_seconds()
        self._totals.post()
        self._check.post()
        actions, runs = self._pass(batch, wishes.measure_divergence)
        # Where a stage has several members, its gradients may already be travelling between them.
        finite = self._check.before_sums()
        self.clock.switch("wait", "others")
        # Without sums nothing but the others' consent is missing now: who has it may already have updated.
        self._prepared = not self._check.has_round and all(len(stage.ranks) == 1 for stage in self.plan.stages)
        found = self.found = self._totals.found(runs)
        asked = wishes.stop, wishes.newcomers, finite, wishes.look
        totals = self._totals.agree(found, batch.size, self.following, *asked)
        if not math.isfinite(totals.loss):
            refuse_loss(self.group, self.state.step, totals.loss, float(found[0]))
        if not totals.finite:
            self._check.refuse(self.state.step)
        self.clock.switch("compute", "update")
        divergences = self._reduce(actions)
        self._prepared = self._prepared or self._check.has_round
        verdict = self._check.after_sums()
        if not verdict.finite:
            self._check.refuse(self.state.step)
        self._prepared = False
        updated = [action.stage for action in actions if action.kind is Kind.UPDATE]
        self._commit(updated, learning_rate, verdict.scale)
        self.clock.switch("transfer", "send")
        for stage in self.stages.values():
            stage.flush()
        return self._report(totals, divergences, verdict.norm)

    def _micro_batches(self, batch: Batch) -> int:
        return len(self.plan.micro_sizes(batch.size, self._batch_size))

    def _begin(self, batch: Batch) -> dict[int, StageStep]:
        """Prepare this rank's stages for a batch."""
        runs = {}
        for number, stage in self.stages.items():
            micros = self._cut(batch.size)[number]
            runs[number] = StageStep(batch, micros, self.task, self.draws, self.state.step, self.staging)
            stage.begin(runs[number])
            stage.set_training(torch.is_grad_enabled())
        return runs

    def _cut(self, size: int) -> dict[int, list[Micro]]:
        """Return this rank's parts of the micro-batches of a batch, by stage."""
        if size not in self._cuts:
            self._cuts[size] = {number: stage.cut(size, self._batch_size) for number, stage in self.stages.items()}
        return self._cuts[size]

    def needs(self, size: int, training: bool, step: int) -> NeededRows:
        """Return which rows of a batch of `size` this rank will ask for, in the step that follows `step` others."""
        cuts = self._cut(size)
        inputs, targets = (
            [(micro.start, micro.stop) for micro in cuts.get(number, ()) if micro.rows]
            for number in (0, len(self.plan.stages) - 1)
        )
        counts = training and bool(targets) and self.task.units_per_sample is None
        return NeededRows(inputs, [(0, size), *targets] if counts else targets)

    @staticmethod
    def _with_rows(actions: Sequence[Action], runs: dict[int, StageStep]) -> list[Action]:
        """Return the actions without those on micro-batches of which this rank has no rows."""
        return [action for action in actions if action.micro < 0 or runs[action.stage].micros[action.micro].rows]

    def _commit(self, stages: Sequence[int], learning_rate: float, scale: float) -> None:
        """Apply all gradients at once, multiplied by `scale`; no other part of a step changes the state."""
        self._check.scale(scale)
        if self.state.optimizer.spec.clip_norm is not None:
            self.state.scales.note(self.state.step, scale)
        for number in stages:
            if self.following is not None and self.following.behind:
                self.following.keep(self.stages[number].parameters, learning_rate)
            else:
                self.state.update(self.stages[number].parameters, learning_rate, self.state.step)
        self.state.step += 1
        for stage in self.stages.values():
            stage.commit()

    def _report(self, totals: Totals, divergences: Sequence[float | None], norm: float | None) -> StepResult:
        """Return the step as this rank saw it, and tell the others of it."""
        wall = self.clock.finish()
        traffic: dict[Way, tuple[int, int]] = dict.fromkeys(WAYS, (0, 0))
        for stage in self.stages.values():
            for way, (sent, received) in stage.traffic().items():
                traffic[way] = traffic[way][0] + sent, traffic[way][1] + received
        first, spent = self.stages.get(0), self.clock.totals
        step = StepResult(
            totals,
            wall,
            compute=spent["compute"],
            transfer=spent["transfer"],
            wait=spent["wait"],
            told=self._totals.heard(),
            samples=max((stage.rows for stage in self.stages.values()), default=0),
            entered=first.rows if first is not None and first.speaks else 0,
            traffic=traffic,
            divergence=max((value for value in divergences if value is not None), default=None),
            spans=self.clock.spans,
            load=self.clock.load,
            gradient_norm=norm,
        )
        self._totals.tell(step, self._cpu)
        return step

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Totals:
        """Return the loss and the metrics on held-out batches, which take the same stages.

        Raises PeerLost; raises Diverged on every rank if the loss is not finite.
        """
        self._totals.post()
        found, samples = self.judge(batches)
        totals = self._totals.agree(found, samples, self.following)
        check_held_out(self.group, self.state.step, totals.loss, float(found[0]))
        return totals

    @torch.no_grad()
    def judge(self, batches: Iterable[Batch]) -> tuple[Tensor, int]:
        """Return the sums over this rank's rows of held-out batches, and how many samples these batches have."""
        self.clock.pause()
        found, samples = self._totals.found({}), 0
        with self.state.judged():
            for batch in batches:
                runs = self._begin(batch)
                actions = self.plan.evaluation(self.group.rank, self._micro_batches(batch))
                run_passes(self._with_rows(actions, runs), self.stages, self.clock)
                found, samples = found + self._totals.found(runs), samples + batch.size
        for stage in self.stages.values():
            stage.flush()
        return found, samples

    def try_smallest(self, size: int) -> str | None:
        """Return why this rank cannot train on a batch of `size`, or None if it can.

        A batch may leave the rank a single sample, on which some layers (such as BatchNorm) cannot train.
        """
        for number, stage in self.stages.items():
            if all(micro.rows != 1 for micro in self._cut(size)[number]):
                continue
            module = stage.module
            stage.set_training(True)
            copies = {
                name: tensor.detach().clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            }
            try:
                with torch.no_grad(), self.staging.creating(), tried_out(getattr(module, "horizonml_root", module)):
                    entered = self.staging.all_to_device(stage.entry.zeros(1))
                    torch.func.functional_call(module, copies, entered)
            except ValueError as error:
                return str(error)
        return None

    def close(self) -> None:
        """Release everything but the state; whoever made the group closes it."""
        self.staging.clear()
        while self.stages:
            self.stages.popitem()[1].close()


def replay(
    plan: Plan,
    states: Mapping[int, TrainState],
    steps: Callable[[int], Iterator[tuple[Messages, Batch, float, float]]],
    task: Task,
    batch_size: int,
    execution: Execution = PLAIN,
) -> None:
    """Bring the state of ranks to the present, from the messages that their neighbours had sent to them.

    `states[r]` holds the layers of rank r's stages as they were before the first of its `steps(r)`, each of which is
    given by what the rank received from others than these, the global batch, the learning rate, and the factor by which
    the gradients were multiplied. All members of a stage are among the ranks. Raises PeerLost if a message is missing.
    """
    playback = Playback(states)

    def work(rank: int) -> None:
        recording = Recording(playback, rank)
        group = Group.played_back(rank, plan.world_size, recording)
        with closing(Session(plan, states[rank], group, task, batch_size, execution)) as session:
            for recording.messages, batch, learning_rate, scale in steps(rank):
                session.replay(batch, learning_rate, scale)

    playback.run(work)
