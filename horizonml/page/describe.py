"""Describes a run for the page, as JSON."""

from __future__ import annotations

import time
from typing import Any

from horizonml import __version__
from horizonml.errors import PlanError
from horizonml.page.flows import Flow, flows
from horizonml.page.planned import measured_links
from horizonml.plan.plan import Plan
from horizonml.planner.record import Planning
from horizonml.report.lines import PlanFacts, SpanLine
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import Member, State

_MOST_SPANS = 500  # of a rank; shorter ones are joined with their neighbours
_MOST_RANKS = 256
_WORDS = {
    State.WAITING: "no step is done yet",
    State.RUNNING: "training",
    State.FINISHED: "finished",
    State.STOPPED: "stopped as asked; the same command goes on from its checkpoint",
    State.FAILED: "failed; the ranks' logs say why",
    State.LOST: "nothing has been recorded for long: its processes are gone or cannot be reached",
}


def describe_run(run: LiveRun) -> dict[str, Any]:
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


def _rank(member: Member, planning: Planning | None) -> dict[str, Any]:
    known = planning is not None and member.rank < len(planning.devices)
    name = planning.names[member.rank] if planning is not None and known else ""
    return {**vars(member), "name": name}


def _links(members: list[Member], plan: Plan | None) -> list[dict[str, Any]]:
    """Return what flows over the links."""
    if plan is None:
        return []
    sent = {member.rank: member.sent for member in members}
    received = {member.rank: member.received for member in members}
    return [_flow(flow) for flow in flows(plan, sent, received)]


def _flow(flow: Flow) -> dict[str, Any]:
    return {"from": flow.sender, "to": flow.receiver, "what": flow.what, "flow": flow.rate}


def describe_timeline(run: LiveRun) -> dict[str, Any] | None:
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


def _joined(spans: list[SpanLine], begin: float, end: float) -> list[list[Any]]:
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
