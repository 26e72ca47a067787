"""Guards the accuracy of a run whose job leaves open how exact it is: lossy formats are tried before they are used.

A job does so with `parallel.exact: false`, for formats that the planner chooses, and with `precision: auto`. What it
sets itself (`parallel.activations`, `gradient_compression`, `stages`, `precision: bf16`) is used without a trial.

From the state that the run has, a warm-up of a few steps is trained exactly, and another one with all lossy choices of
the plan (formats of links, of sums of gradients, bf16 computing), on the same batches with the same random numbers.
Both are evaluated on the same held-out samples, four times in their second half, because a single evaluation of a model
that learns fast says little: with the digits, it differed by 3 points (standard deviation) between two runs that differ
by rounding only, and the mean of four by 1. Where the lossy one is worse by more than `MOST_LOST` and what chance
explains, each choice's error is measured: how much the gradients of one batch change if only this choice is lossy. The
worst choice, and others that are at least half as bad, are made more precise, and the warm-up is trained again.

Then the state is brought back to where the run was, and training goes on with what was chosen. So every step of the run
is recorded, evaluated and saved once, a run that is interrupted in a trial has lost nothing, and the run ends with the
same parameters, bit for bit, as one whose job sets these formats. A run that is too short for a trial (see `capacity`)
does without what should not be used untested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from horizonml.comm.expected import boolean, instance, measure, optional, plain
from horizonml.comm.group import Group
from horizonml.data.dataset import Data
from horizonml.data.sampler import sampler_for
from horizonml.engine.clock import Totals
from horizonml.engine.session import Session, Wishes
from horizonml.errors import Diverged
from horizonml.job.schema import Job
from horizonml.plan.lossy import LINK, PRECISION, SUMS, LossyChoice, Setting, Tried
from horizonml.plan.plan import Execution, Plan
from horizonml.planner.choose import is_better, with_objective
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.problem import Constraints
from horizonml.runtime.agreement import Agreed
from horizonml.runtime.checks import LOCAL_STEPS, MOST_WARM_UPS, NOT_HELD_OUT, too_short, trial_steps
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import Decision
from horizonml.runtime.trainer import held_out_batches, training_batch
from horizonml.state.carry import memory_here
from horizonml.state.optim import learning_rate
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.text import count, human_seconds

MOST_LOST = 0.01  # of the accuracy; of the loss, where a task has no accuracy, ten times as much
_ALIKE = 0.5  # of the worst error, from which other choices are made more precise, too
_MOST_MEASURED = 8  # choices whose errors are measured one by one; more are made more precise together
_EVALUATIONS = 4  # of a warm-up, in its second half; together they take at most as many batches as it has steps
_MEMORY = 0.5  # of what is left, that a copy of the state may take


@dataclass(frozen=True)
class Score:
    """Holds how well a warm-up did on held-out samples, in the mean of its evaluations."""

    metric: str
    value: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.1%}" if self.metric == "accuracy" else f"{self.value:.4f}"

    def loses(self, exact: Score) -> bool:
        """Return whether this is worse than the exact warm-up by more than chance explains."""
        if self.metric != "accuracy":
            return self.value > exact.value * (1 + 10 * MOST_LOST)
        return self.value < exact.value - MOST_LOST - 2 * self._error((self.value + exact.value) / 2)

    def shows_nothing(self, classes: int) -> bool:
        """Return whether an accuracy is that of guessing, as far as chance lets it be told apart."""
        if self.metric != "accuracy" or classes < 2:
            return False
        return self.value < 1 / classes + MOST_LOST + 2 * self._error(1 / classes)

    def _error(self, accuracy: float) -> float:
        """Return the standard error of the difference of two accuracies of about this size."""
        return math.sqrt(2 * accuracy * (1 - accuracy) / max(1, self.samples))


class _Stopped(Exception):
    """Reports that a rank was asked to stop in the middle of a trial."""


class Trial:
    """Tries the lossy choices of a setting, as one rank of a group; all ranks do the same."""

    def __init__(
        self,
        job: Job,
        data: Data,
        state: TrainState,
        group: Group,
        sessions: Callable[[Setting], Session],
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`sessions` makes a session that trains `state` in a setting; `stop` says whether this rank is to end."""
        self._job, self._data, self._state, self._group = job, data, state, group
        self._sessions, self._stop, self._say = sessions, stop, say
        self._sampler = sampler_for(data.info, job.batch_size, job.seed)
        self._per_epoch = self._sampler.steps_per_epoch

    def run(self, setting: Setting, steps: int | None = None) -> Tried | None:
        """Return what the run may use of a setting, or None if a rank was asked to stop before that was known.

        `steps` are those of each warm-up; by default `trial_steps`. Raises PeerLost. However this ends, the state is
        what it was.
        """
        before = self._state.step
        steps = trial_steps(self._job, self._per_epoch, before) if steps is None else steps
        reason = self._why_not(steps)
        if reason is not None:
            return self._untried(setting, reason)
        self._say(f"trying on a warm-up of {count(steps, 'step')} what this costs in accuracy: {_list(setting.lossy)}")
        self._restore = self._state.remember()
        try:
            exact = self._warm_up(setting.exact(), steps)
            if exact is None:
                return self._untried(setting, "the exact warm-up diverged")
            if exact.shows_nothing(self._data.info.outputs):
                return self._untried(
                    setting,
                    f"an exact warm-up of {count(steps, 'step')} had a held-out accuracy of only {exact}, which "
                    "shows nothing yet",
                )
            return self._improve(setting, exact, steps)
        except _Stopped:
            return None
        finally:
            self._restore()

    def _why_not(self, steps: int) -> str | None:
        if not steps:
            return too_short(self._job, self._per_epoch)
        if not self._data.info.held_out:
            return NOT_HELD_OUT
        room = memory_here(self._group) * _MEMORY > self._state.bytes()
        if not all(self._group.gather_json(room, boolean)):
            return "a rank has no memory for the copy of its state that a trial needs"
        return None

    def _untried(self, setting: Setting, reason: str) -> Tried:
        cautious, step = setting.cautious(), self._state.step
        changed = [f"{one}" for one in setting.lossy if one not in cautious.lossy]
        if not changed:
            text = f"nothing is tried on a warm-up, as {reason}; {_list(cautious.lossy)}, which needs no trial"
            return Tried.of(step, 0, cautious, (text,))
        instead = _list(cautious.lossy) if cautious.lossy else "everything stays exact"
        return Tried.of(step, 0, cautious, (f"the plan was that {', '.join(changed)}, but {reason}; so {instead}",))

    def _improve(self, setting: Setting, exact: Score, steps: int) -> Tried:
        """Return the first setting whose warm-up is as good as the exact one, from `setting` on."""
        texts: list[str] = []
        self._restore()
        before = self._state.step
        for _ in range(MOST_WARM_UPS - 1):
            if not setting.lossy:
                break
            found = self._warm_up(setting, steps)
            text = f"{_list(setting.lossy)}; on a warm-up of {count(steps, 'step')} "
            if found is None:
                text += "training diverged"
            else:
                text += f"held-out {found.metric} was {found} with that and {exact} without"
                if not found.loses(exact):
                    return Tried.of(before, steps, setting, (*texts, text))
            setting, raised = self._raised(setting)
            texts.append(f"{text}, so {raised}")
        if setting.lossy:
            setting = setting.exact()
            texts.append(f"{count(MOST_WARM_UPS - 1, 'lossy warm-up')} did worse than the exact one: all stays exact")
        return Tried.of(before, steps, setting, tuple(texts))

    def _warm_up(self, setting: Setting, steps: int) -> Score | None:
        """Train a warm-up from the state before the trial, and evaluate it; return None if it diverged."""
        self._restore()
        job, done = self._job, self._state.step
        total = job.total_steps(self._per_epoch)
        found: list[Totals] = []
        held_out = held_out_batches(job, self._data)[: max(1, steps // _EVALUATIONS)]
        points = {done + steps - steps * back // (2 * _EVALUATIONS) for back in range(_EVALUATIONS)}
        with closing(self._sessions(setting)) as session:
            try:
                for step in range(done, done + steps):
                    batch = training_batch(job, self._data, self._sampler, *divmod(step, self._per_epoch))
                    rate = learning_rate(job.lr_schedule, job.optimizer.lr, step, self._per_epoch, total)
                    if session.step(batch, rate, Wishes(stop=self._stop())).totals.stop:
                        raise _Stopped
                    if step + 1 in points:
                        found.append(session.evaluate(held_out))
            except Diverged:
                return None
        metric = "accuracy" if "accuracy" in found[0].metrics else "loss"
        values = [one.metrics.get(metric, one.loss) for one in found]
        # Processors differ in the last bit of what tasks compute, and all must agree.
        value = self._group.broadcast(math.fsum(values) / len(values), read=measure)
        return Score(metric, value, found[0].samples)

    def _raised(self, setting: Setting) -> tuple[Setting, str]:
        """Return a setting in which the choices with the largest errors are more precise, and say what has changed."""
        choices = setting.lossy
        measured = 1 < len(choices) <= _MOST_MEASURED
        errors = self._errors(setting) if measured else dict.fromkeys(choices, math.inf)
        worst, texts = max(errors.values()), []
        for choice in choices:
            if errors[choice] >= _ALIKE * worst:
                setting = setting.raised(choice)
                changed = next((one for one in setting.lossy if one[:2] == choice[:2]), None)
                effect = f" ({choice.value} alone changes gradients by {errors[choice]:.1%})" if measured else ""
                texts.append((str(changed) if changed is not None else f"not: {choice}") + effect)
        return setting, ", ".join(texts)

    def _errors(self, setting: Setting) -> dict[LossyChoice, float]:
        """Return by how much each lossy choice alone changes the gradients of the next batch, relative to their norm.

        The errors of sums are those of one step, without error feedback.
        """
        exact = self._gradients(setting.exact())
        norm = self._total(sum(map(_square, exact.values())))
        errors = {}
        for choice in setting.lossy:
            found = self._gradients(setting.only(choice))
            apart = sum(_square(found[name] - exact[name]) for name in exact if name in found)
            error = math.sqrt(self._total(apart) / norm) if norm > 0 else 0.0
            errors[choice] = error if math.isfinite(error) else math.inf
        return errors

    def _gradients(self, setting: Setting) -> dict[str, torch.Tensor]:
        self._restore()
        batch = training_batch(self._job, self._data, self._sampler, *divmod(self._state.step, self._per_epoch))
        with closing(self._sessions(setting)) as session:
            return session.gradients(batch)

    def _total(self, own: float) -> float:
        return math.fsum(self._group.gather_json(own, measure))


def _square(tensor: torch.Tensor) -> float:
    """Return the sum of squares; in 64 bits on the host, as some accelerators have none."""
    return float(tensor.to("cpu", torch.float64).square().sum())


def _list(choices: list[LossyChoice]) -> str:
    """Return choices in words, with the same choices of several stages as one."""
    alike: dict[tuple[str, str], list[LossyChoice]] = {}
    for choice in choices:
        alike.setdefault((choice.kind, choice.value), []).append(choice)
    texts = []
    for same in alike.values():
        if len(same) == 1:
            texts.append(str(same[0]))
        else:
            verb = "send" if same[0].kind == "link" else "sum gradients as"
            stages = ", ".join(str(one.stage) for one in same[:-1])
            texts.append(f"stages {stages} and {same[-1].stage} {verb} {same[0].value}")
    return ", ".join(texts)


_WORTH = 0.05  # of a step: the least that layers are moved for when formats have turned out to be too imprecise


def guarded_kinds(job: Job) -> frozenset[str]:
    """Return the kinds of lossy choices that are guarded."""
    parallel, kinds = job.parallel, set[str]()
    if not parallel.is_exact and parallel.strategy == "auto" and parallel.stages is None:
        kinds |= {LINK} if parallel.activations == "auto" else set()
        kinds |= {SUMS} if parallel.gradient_compression == "none" else set()
    return frozenset(kinds | ({PRECISION} if job.precision == "auto" else set()))


class Guard:
    """Decides how lossy a run may be, as one rank of a group; all ranks call the same."""

    def __init__(
        self, life: Life, group: Group, execution: Execution, say: Callable[[str], None], narrow: bool = False
    ) -> None:
        """`execution` says how this rank runs layers if bf16 is allowed; `narrow` says that some rank would use it."""
        self._life, self._group, self._execution, self._say = life, group, execution, say
        self._kinds = guarded_kinds(life.job)
        self._bf16 = PRECISION in self._kinds and narrow

    def applies(self, plan: Plan) -> bool:
        """Return whether there is anything to be tried.

        Local steps are not: what they cost shows only after many synchronisations, and not in a warm-up. So the planner
        chooses no format for them that would have to be tried.
        """
        return plan.local is None and bool(self._setting(plan).lossy)

    def say_what_is_not_tried(self, plan: Plan) -> None:
        """Say why layers are computed in 32 bits where a plan leaves no way to try anything else."""
        if self._bf16 and plan.local is not None:
            self._say(f"precision: auto: layers are computed in fp32, as {LOCAL_STEPS}")

    def _setting(self, plan: Plan) -> Setting:
        return Setting(plan, "bf16" if self._bf16 else "fp32", self._kinds)

    def settle(self, plan: Plan, data: Data, following: bool) -> Plan:
        """Return the plan as the run may use it, from what is known or from a trial. Raises PeerLost.

        The ranks hold the state that training goes on from, or are `following` the others; there is no session.
        """
        state, setting = self._life.state, self._setting(plan)
        assert state is not None
        kept = self._group.gather_json(
            state.tried.to_json() if state.tried is not None else None, optional(Tried.from_json)
        )
        tried = next((one for one in kept if one is not None), None)
        if tried is None and following:
            return setting.exact().plan  # until the next group, which can try
        if tried is None:
            stop = self._life.stop
            sessions = self._sessions(state, data)
            trial = Trial(self._life.job, data, state, self._group, sessions, lambda: stop.wanted, self._say)
            tried = trial.run(setting)
            for text in tried.texts if tried is not None else ():
                self._say(text)
        state.tried = tried
        return self.allowed(plan)

    def allowed(self, plan: Plan) -> Plan:
        """Return another plan as the run may use it: exact where nothing is known of lossy formats."""
        setting, state = self._setting(plan), self._life.state
        assert state is not None
        if not self.applies(plan):
            return plan
        return (state.tried.allowed(setting) if state.tried is not None else setting.exact()).plan

    def constraints(self, constraints: Constraints) -> Constraints:
        """Return the constraints on another plan, which may have no local steps, and nothing that `allowed` refuses."""
        state = self._life.state
        assert state is not None
        constraints = replace(constraints, every=())
        return constraints.after(state.tried) if state.tried is not None else constraints.exactly()

    def plan_again(self, agreed: Agreed, plan: Plan, *, search: bool) -> Agreed:
        """Return a plan that is better than what `settle` has made of the agreed one, or that with its true forecast.

        With `search` off, no other plan is looked for. Rank 0 knows what was measured; all ranks call this, and get
        the same.
        """
        if agreed.forecast is None or agreed.plan == plan:
            return replace(agreed, plan=plan)
        answer, problem = None, agreed.problem
        if problem is not None:
            problem = replace(problem, constraints=self.constraints(problem.constraints))
            evaluator = Evaluator(problem)
            found = evaluator.judge(plan)
            if search and problem.constraints.local is None:
                other = with_objective(problem, evaluator)
                found = other if is_better(problem, other, found, _WORTH) else found
            answer = plain(Decision.of(found))
        decided: Decision | None = self._group.broadcast(answer, read=optional(instance(Decision)))
        if decided is None or decided.forecast is None:  # rank 0 joined after the plan was made: nothing is known
            return replace(agreed, plan=plan)
        self._say(f"with what may be used, a step is predicted to take {human_seconds(decided.forecast.seconds)}")
        return Agreed(decided.plan, decided.forecast, problem, agreed.measured)

    def execution(self) -> Execution:
        """Return how this rank runs layers, as the run may."""
        state = self._life.state
        assert state is not None
        bf16 = PRECISION not in self._kinds or (state.tried is not None and state.tried.precision == "bf16")
        return self._in("bf16" if bf16 else "fp32")

    def _in(self, precision: str) -> Execution:
        return self._execution if precision == "bf16" else self._execution.exact()

    def _sessions(self, state: TrainState, data: Data) -> Callable[[Setting], Session]:
        job, task = self._life.job, task_for(self._life.job, data.info)

        def open_one(setting: Setting) -> Session:
            return Session(setting.plan, state, self._group, task, job.batch_size, self._in(setting.precision))

        return open_one
