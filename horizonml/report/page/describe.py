"""Describes a run for the page, as JSON: how it stands, what it was planned for, and a simulated step.

What flows over each link is estimated: records say how much a rank sends in which direction, and the plan to whom.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from horizonml import __version__
from horizonml.errors import HorizonError, PlanError
from horizonml.plan.plan import Plan, routes
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.record import Planning, read_planning
from horizonml.planner.simulate import predict
from horizonml.planner.worth import Worth, predicted_worth
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import LiveRank, RunState
from horizonml.telemetry.record import AloneRecord, RecordedSpan
from horizonml.telemetry.run_info import PlanFacts

ACTIVATIONS, GRADIENTS = "activations", "gradients"


@dataclass(frozen=True)
class Flow:
    """Describes what goes from one rank to another, in bytes per second."""

    sender: int
    receiver: int
    what: str  # ACTIVATIONS (and their gradients on the way back), or GRADIENTS that members sum
    rate: float


Rates = Mapping[int, Mapping[str, float]]  # rank -> direction ("previous", "next", "members") -> bytes per second


def flows(plan: Plan, sent: Rates, received: Rates) -> list[Flow]:
    """Return what goes from each rank to each other one.

    What goes to another stage is spread over its members as the samples are; what members exchange goes around the ring
    that they form. Where the sender's records are elsewhere, those of the receiver tell.
    """
    found: dict[tuple[int, int, str], float] = {}
    for what, direction, back, weights in (
        (ACTIVATIONS, "next", "previous", _between(plan)),
        (ACTIVATIONS, "previous", "next", {(b, a): weight for (a, b), weight in _between(plan).items()}),
        (GRADIENTS, "members", "members", _among(plan)),
    ):
        for (one, other), weight in weights.items():
            leaving = sum(part for (sender, _), part in weights.items() if sender == one)
            coming = sum(part for (_, receiver), part in weights.items() if receiver == other)
            known = sent.get(one, {}).get(direction, 0.0) * weight / leaving
            rate = known or received.get(other, {}).get(back, 0.0) * weight / coming
            if rate > 0:
                found[one, other, what] = found.get((one, other, what), 0.0) + rate
    return [Flow(one, other, what, rate) for (one, other, what), rate in sorted(found.items())]


def _between(plan: Plan) -> dict[tuple[int, int], float]:
    """Return how many samples of a micro-batch go from each rank to each other one on their way forward."""
    size = max(plan.micro_sizes(plan.micro_batches * 1024, plan.micro_batches * 1024))
    found: dict[tuple[int, int], float] = {}
    for stage, after in pairwise(plan.stages):
        for rank, rows in zip(stage.ranks, stage.rows(size), strict=True):
            for route in routes(rows, after, size):
                if route.peer != rank:
                    found[rank, route.peer] = found.get((rank, route.peer), 0.0) + route.stop - route.start
    return found


def _among(plan: Plan) -> dict[tuple[int, int], float]:
    """Return the links of the rings that the members of stages form, each with how many of them it belongs to."""
    found: dict[tuple[int, int], float] = {}
    for stage in plan.stages:
        if len(stage.ranks) > 1:
            for rank, after in zip(stage.ranks, (*stage.ranks[1:], stage.ranks[0]), strict=True):
                found[rank, after] = found.get((rank, after), 0.0) + 1.0
    return found


_MOST_SPANS = 500  # of a rank; shorter ones are joined with their neighbours
_MOST_RANKS = 256
_WORDS = {
    RunState.WAITING: "no step is done yet",
    RunState.RUNNING: "training",
    RunState.FINISHED: "finished",
    RunState.STOPPED: "stopped as asked; the same command goes on from its checkpoint",
    RunState.FAILED: "failed; the ranks' logs say why",
    RunState.LOST: "nothing has been recorded for long: its processes are gone or cannot be reached",
}


def describe_run(run: LiveRun) -> dict[str, object]:
    """Return how a run stands."""
    newest, state, speed = run.newest, run.state, run.speed
    planning = run.planning
    members, plan = run.members[:_MOST_RANKS], read_plan(run.plan)
    return {
        "version": __version__,
        "name": run.name,
        "folder": run.folder.absolute().name,
        "time": time.time(),
        "state": state.value,
        "words": _WORDS[state],
        "step": run.step,
        "steps": run.total_steps,
        "epoch": newest.epoch if newest is not None else 0,
        "epochs": run.total_epochs,
        "step_seconds": run.step_seconds,
        "forecast": run.forecast,
        "speed": {"value": speed[0], "unit": speed[1]} if speed is not None else None,
        "seconds_left": run.seconds_left,
        "loss": newest.loss if newest is not None else None,
        "accuracy": run.accuracy,
        "checkpoint": run.checkpoint,
        "damaged": run.damaged,
        "plan": run.plan.model_dump(),
        "layers": run.layers,
        "ranks": [_rank(member, planning) for member in members],
        "links": [*_links(members, plan), *measured_links(planning)],
    }


def read_plan(facts: PlanFacts) -> Plan | None:
    """Return a recorded plan as the engine runs it, or None if it is of a kind that this version does not know."""
    try:
        plan = Plan.from_json(facts.model_dump())
        plan.check(plan.layers, plan.world_size)
    except (KeyError, TypeError, ValueError, IndexError, PlanError):
        return None
    return plan


def _rank(member: LiveRank, planning: Planning | None) -> dict[str, object]:
    known = planning is not None and member.rank < len(planning.devices)
    name = planning.names[member.rank] if planning is not None and known else ""
    return {**vars(member), "name": name}


def _links(members: list[LiveRank], plan: Plan | None) -> list[dict[str, object]]:
    if plan is None:
        return []
    sent = {member.rank: member.sent for member in members}
    received = {member.rank: member.received for member in members}
    found = flows(plan, sent, received)
    return [{"from": one.sender, "to": one.receiver, "what": one.what, "flow": one.rate} for one in found]


def describe_timeline(run: LiveRun) -> dict[str, object] | None:
    """Return what the ranks did when in the newest step of which that is recorded, in seconds of that step."""
    found = run.timeline
    if found is None:
        return None
    step, lines = found
    spans = {rank: line.spans for rank, line in lines.items() if line.spans}
    if not spans:
        return None
    begin = min(line[0].begin for line in spans.values())
    end = max(line[-1].end for line in spans.values())
    return {
        "step": step,
        "is_simulated": False,
        "seconds": end - begin,
        "ranks": [{"rank": rank, "spans": _joined(line, begin, end)} for rank, line in sorted(spans.items())],
    }


def _joined(spans: Sequence[RecordedSpan], begin: float, end: float) -> list[list[Any]]:
    """Return a rank's spans as [kind, what, micro-batch, begin, end]; the shortest are joined with what precedes."""
    shortest = (end - begin) / _MOST_SPANS if len(spans) > _MOST_SPANS else 0.0
    found: list[list[Any]] = []
    for span in spans:
        one = [span.kind, span.what[:40], span.micro, span.begin - begin, span.end - begin]
        if found and span.end - span.begin < shortest:
            found[-1][4] = one[4]
        else:
            found.append(one)
    return found


_MOST_PLANNED = 64  # of whose links all are described


class SimulatedStep:
    """Simulates a step of the newest plan, and of each device alone, once for each plan."""

    def __init__(self) -> None:
        self._planning: Planning | None = None
        self.timeline: dict[str, object] | None = None  # None if nothing was measured for the plan
        self.worth: Worth | None = None  # that is predicted

    def look(self, planning: Planning | None) -> None:
        """Simulate a plan, unless it is the one of the last call."""
        if planning is not self._planning:
            self._planning = planning
            measured = planning is not None and planning.problem is not None
            self.timeline = _simulated(planning) if planning is not None and measured else None
            self.worth = _worth(planning) if planning is not None and measured else None


def problem_of(folder: Path, planning: Planning | None) -> str:
    """Return why what was noted when the run was planned cannot be read; nothing if it can, or is not there."""
    if planning is None:
        try:
            read_planning(folder)
        except HorizonError as error:
            return str(error)
    return ""


def measured_links(planning: Planning | None) -> list[dict[str, object]]:
    """Return the rate, in bytes per second, and the latency of each link from one rank to another."""
    if planning is None or planning.problem is None or planning.problem.ranks > _MOST_PLANNED:
        return []
    network, ranks = planning.problem.network, range(planning.problem.ranks)
    return [
        {"from": a, "to": b, "rate": link.bandwidth, "latency": link.latency}
        for a in ranks
        for b in ranks
        if a != b
        for link in [network.between(a, b)]
    ]


def _worth(planning: Planning) -> Worth | None:
    """Return what the plan is predicted to be worth, against each device alone."""
    problem = planning.problem
    if problem is None or any(stage.splits_channels for stage in planning.plan.stages):
        return None
    evaluator = Evaluator(problem)
    return predicted_worth(problem, evaluator, evaluator.judge(planning.plan), planning.names)


def describe_worth(measured: AloneRecord | None, predicted: Worth | None, batch_size: int | None) -> dict[str, object]:
    """Return what the devices do together and alone, as measured at the end of a run, or else as predicted.

    `alone` has the seconds of a step on the device that is predicted to be fastest alone.
    """
    found: dict[str, object] = {"alone": None, "worth": None}
    if predicted is not None and batch_size and (rate := max((one or 0.0 for one in predicted.alone), default=0.0)):
        device = predicted.names[list(predicted.alone).index(rate)]
        found["alone"] = {"device": device, "seconds": batch_size / rate}
    worth = Worth(measured.together, measured.alone, measured.names) if measured is not None else predicted
    if worth is not None:
        found["worth"] = {**worth.to_json(), "words": worth.words, "is_measured": measured is not None}
    return found


def _simulated(planning: Planning) -> dict[str, object] | None:
    """Return the planner's simulation of a step, in which a rank that does not compute waits."""
    assert planning.problem is not None
    if any(stage.splits_channels for stage in planning.plan.stages):
        return None  # what is sent in the middle of its layers is not simulated
    found = predict(planning.problem, planning.plan)
    ranks: dict[int, list[list[Any]]] = {rank: [] for rank in range(planning.plan.world_size)}
    for span in sorted(found.spans, key=lambda span: span.begin):
        own = ranks[span.rank]
        free = own[-1][4] if own else 0.0
        if span.begin > free:
            own.append(["wait", "others", -1, free, span.begin])
        own.append(["compute", span.kind.value, span.micro, span.begin, span.end])
    return {
        "step": 0,
        "is_simulated": True,
        "seconds": found.seconds,
        "ranks": [{"rank": rank, "spans": spans[:_MOST_SPANS]} for rank, spans in ranks.items()],
    }
