"""Holds the plan that a group trains by. Nothing else changes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from horizonml.comm.expected import whole
from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataInfo
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.profile import Host
from horizonml.runtime.agreement import Agreed, make_plan, optimizer_copies
from horizonml.runtime.capacity import refuse_what_cannot_fit
from horizonml.runtime.guarding import Guard
from horizonml.runtime.introduction import Introduction
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.state.carry import Moves, holders, move, senders
from horizonml.text import human_bytes, human_seconds


@dataclass
class GroupPlan:
    """Agrees on the plan of a group, on what becomes of it after a trial, and on better ones; all ranks do the same."""

    life: Life
    group: Group
    started_as: list[int]
    names: Sequence[str]  # of the ranks' machines
    guard: Guard
    model: Model
    say: Callable[[str], None]
    agreed: Agreed = field(init=False)
    detector: StragglerDetector | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan that the group trains by now."""
        return self.agreed.plan

    def agree(self, info: DataInfo, hosts: Sequence[Host], told: Sequence[Introduction]) -> None:
        """Take a plan that was made for the same ranks before, if any, as another one ends elsewhere by rounding.

        A rank that does not know it takes it over from one that does.
        """
        life, kept = self.life, self.life.plans.get(tuple(self.started_as))
        decided = next((one.plan for one in told if one.plan is not None), None)
        if decided is None:
            measured = life.measured_among(self.started_as)
            used = self.guard.execution()  # profiles are taken without bf16 as long as it is not allowed
            context = life.job, self.model, info, self.group, hosts, self.names, self.say, measured, used
            found = make_plan(*context, is_measured=told[0].measured)
            refuse_what_cannot_fit(found.plan, self.model, optimizer_copies(life.job), hosts, self.names)
            if found.measured is not None and found.measured is not measured:
                life.measured, life.measured_for = found.measured, self.started_as
        elif kept is not None and kept.plan.to_json() == decided.plan.to_json() and kept.forecast == decided.forecast:
            found = kept  # which, on rank 0, also knows the problem
        else:
            found = Agreed(decided.plan, decided.forecast)
        found.plan.check(len(self.model.chain), self.group.world_size)  # it may be another rank's
        self._remember(found)

    def settle(self, data: Data, following: bool) -> None:
        """Try lossy formats of the plan, if it has any that need it; go on without those that may not be used.

        The ranks hold the state that training goes on from, or are `following` the others; there is no session.
        """
        state, before = self.life.state, self.agreed
        assert state is not None
        plan = self.guard.settle(before.plan, data, following)
        found = self.guard.plan_again(before, plan, search=state.tried is not None and not following)
        if state.tried is None or following:  # so the next group tries the plan itself
            self.agreed = found
            return
        moves = senders(holders(plan), found.plan)
        if moves or found.plan.stages != plan.stages:
            self.say("with these formats, another plan is better:")
            self.say(found.plan.describe(self.model.chain.names))
        if moves:
            self.say(self._move(moves))
        self._remember(found)

    def watch(self, told: Sequence[Introduction]) -> None:
        """Begin to compare steps with the plan, if it is one that was predicted; replicas do not compare theirs."""
        parallel = self.life.job.parallel
        if self.agreed.forecast is None or self.plan.local is not None:
            return
        self.detector = StragglerDetector(
            self.group,
            self.plan,
            self.agreed.forecast,
            self.agreed.problem,
            parallel.replan_threshold,
            parallel.replans,
            self.life.condition,
            time.monotonic,
            self.guard.constraints,
            parallel.deadline_seconds,
            max(one.seconds for one in told),
        )

    def improve(self) -> str:
        """Go on by the better plan that the detector has found; return what to say of the layers that have moved."""
        detector, state = self.detector, self.life.state
        assert detector is not None
        assert state is not None
        predicted = human_seconds(detector.forecast.seconds)
        self.say(f"step {state.step}: a new plan, predicted to take {predicted} a step:")
        self.say(detector.plan.describe(self.model.chain.names))
        moved = self._move(senders(holders(self.plan), detector.plan))
        # The problem is that of the devices as they are now.
        self._remember(replace(self.agreed, plan=detector.plan, forecast=detector.forecast, problem=detector.problem))
        self.agreed = replace(self.agreed, plan=self.guard.allowed(self.plan))
        return moved

    def _move(self, moves: Moves) -> str:
        """Bring layers to where another plan has them; return what to say of it."""
        state = self.life.state
        assert state is not None
        moved = sum(self.group.gather_json(move(state, moves, self.group), whole())) if moves else 0
        return f"{human_bytes(moved)} of parameters and optimizer state changed hands"

    def _remember(self, found: Agreed) -> None:
        """Take a plan, also for the next time that these ranks meet."""
        self.agreed = self.life.plans[tuple(self.started_as)] = found
