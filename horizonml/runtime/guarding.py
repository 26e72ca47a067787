"""Guards the accuracy of a run whose job leaves open how exact it is: lossy formats are tried before they are used.

A job does so with `parallel.exact: false`, for formats that the planner chooses, and with `precision: auto`. What it
sets itself (`parallel.activations`, `gradient_compression`, `stages`, `precision: bf16`) is used without a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from horizonml.comm.expected import boolean, optional
from horizonml.comm.group import Group
from horizonml.data.dataset import Data
from horizonml.engine.session import Session
from horizonml.job.schema import Job
from horizonml.plan.execution import Executions, without_bf16
from horizonml.plan.lossy import LINK, PRECISION, SUMS, Setting, Tried
from horizonml.plan.plan import Plan
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.problem import Constraints
from horizonml.planner.saving import is_better, with_objective
from horizonml.runtime.agreement import Agreed
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import Forecast
from horizonml.runtime.trial import Trial
from horizonml.runtime.warm_up import LOCAL_STEPS
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.text import human_seconds

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

    def __init__(self, life: Life, group: Group, executions: Executions, say: Callable[[str], None]) -> None:
        """`executions` say how this rank runs layers if bf16 is allowed."""
        self._life, self._group, self._executions, self._say = life, group, executions, say
        self._kinds = guarded_kinds(life.job)
        self._bf16 = PRECISION in self._kinds and any(
            group.gather_json(any(layer.precision == "bf16" for layer in executions.layers), boolean)
        )

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
            answer = {"plan": found.plan.to_json(), "forecast": Forecast.of(found).to_json()}
        decided: Agreed | None = self._group.broadcast(answer, read=optional(Agreed.from_json))
        if decided is None or decided.forecast is None:  # rank 0 joined after the plan was made: nothing is known
            return replace(agreed, plan=plan)
        self._say(f"with what may be used, a step is predicted to take {human_seconds(decided.forecast.seconds)}")
        return replace(decided, problem=problem, measured=agreed.measured)

    def executions(self) -> Executions:
        """Return how this rank runs layers, as the run may."""
        state = self._life.state
        assert state is not None
        bf16 = PRECISION not in self._kinds or (state.tried is not None and state.tried.precision == "bf16")
        return self._executions if bf16 else self._in("fp32")

    def _in(self, precision: str) -> Executions:
        exact = replace(self._executions, layers=without_bf16(self._executions.layers))
        return self._executions if precision == "bf16" else exact

    def _sessions(self, state: TrainState, data: Data) -> Callable[[Setting], Session]:
        """Return what makes a session for a setting."""
        job, task = self._life.job, task_for(self._life.job, data.info)

        def open_one(setting: Setting) -> Session:
            return Session(setting.plan, state, self._group, task, job.batch_size, self._in(setting.precision))

        return open_one
