"""Adds to a run's description what it was planned for: names of devices, measured links, and a simulated step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError
from horizonml.planner.record import Planning, read_planning
from horizonml.planner.simulate import predict

_MOST_RANKS = 64  # of whose links all are described
_MOST_SPANS = 500  # of a rank


class SimulatedStep:
    """Simulates a step of the newest plan, once."""

    def __init__(self) -> None:
        self._planning: Planning | None = None
        self._found: dict[str, Any] | None = None

    def timeline(self, planning: Planning | None) -> dict[str, Any] | None:
        """Return a step of the plan as it is predicted, or None if nothing was measured for it."""
        if planning is not self._planning:
            self._planning = planning
            self._found = _simulated(planning) if planning is not None and planning.problem is not None else None
        return self._found


def problem_of(folder: Path, planning: Planning | None) -> str:
    """Return why what was noted when the run was planned cannot be read; nothing if it can, or is not there."""
    if planning is None:
        try:
            read_planning(folder)
        except HorizonError as error:
            return str(error)
    return ""


def measured_links(planning: Planning | None) -> list[dict[str, Any]]:
    """Return the rate, in bytes per second, and the latency of each link from one rank to another."""
    if planning is None or planning.problem is None or planning.problem.ranks > _MOST_RANKS:
        return []
    network, ranks = planning.problem.network, range(planning.problem.ranks)
    return [
        {"from": a, "to": b, "rate": link.bandwidth, "latency": link.latency}
        for a in ranks
        for b in ranks
        if a != b
        for link in [network.between(a, b)]
    ]


def _simulated(planning: Planning) -> dict[str, Any] | None:
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
