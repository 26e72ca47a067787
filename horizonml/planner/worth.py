"""Says whether connecting devices is worth it: what they do together, and what each of them does alone.

A device is a machine or a container, with as many ranks as it has. *Efficiency* is the speed of all devices together,
divided by the sum of what each of them does alone at its best: 1 would be perfect. The *speed-up* compares them with
the device that is fastest alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.search import alone_on
from horizonml.text import count, percent

_MOST_DEVICES = 64  # of which each is judged alone


@dataclass(frozen=True)
class Worth:
    """Holds how many samples a second devices train on: all together, and each one alone, if it can."""

    together: float
    alone: Sequence[float | None]  # by device; None for one that has not enough memory
    names: Sequence[str] = ()  # of the devices
    idle: int = 0  # devices that the plan leaves out

    @property
    def speed_up(self) -> float | None:
        """Return how many times as fast as the fastest device alone they are, or None if none could train alone."""
        known = [rate for rate in self.alone if rate]
        return self.together / max(known) if known else None

    @property
    def efficiency(self) -> float | None:
        """Return which part of the sum of the devices' speeds arrives, or None if one of them is not known."""
        known = [rate for rate in self.alone if rate]
        return self.together / sum(known) if known and len(known) == len(self.alone) else None

    @property
    def words(self) -> str:
        """Return it in a sentence without its full stop."""
        if self.speed_up is None:
            return f"none of the {count(len(self.alone), 'device')} has the memory to train this alone"
        if len(self.alone) == 1:
            return f"the ranks of this device train {self.speed_up:.2f} times as fast as one process would"
        best = max(range(len(self.alone)), key=lambda device: self.alone[device] or 0.0)
        name = f" ({self.names[best]})" if len(set(self.names)) == len(self.alone) else ""
        kind = "emulated devices" if "emulated" in "".join(self.names) else "devices"
        left = f", of which the plan leaves {self.idle} out," if self.idle else ""
        text = (
            f"{len(self.alone)} {kind}{left} train {self.speed_up:.2f} times as fast as the fastest of them alone{name}"
        )
        if self.efficiency is not None:
            return f"{text}; their efficiency is {percent(self.efficiency)} of what each of them does alone, added up"
        without = sum(not rate for rate in self.alone)
        return f"{text}; {without} of them {'has' if without == 1 else 'have'} not the memory to train it alone"

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object, in samples per second."""
        alone = [{"device": name, "alone": rate} for name, rate in zip(self.names, self.alone, strict=True)]
        facts = {"together": self.together, "speed_up": self.speed_up, "efficiency": self.efficiency}
        return {**facts, "devices": alone}


def predicted_worth(problem: Problem, evaluator: Evaluator, found: Candidate, names: Sequence[str]) -> Worth | None:
    """Return what a plan is predicted to be worth; None if it cannot be carried out, or there are too many devices.

    Where several ranks share a device, one process is taken to use all cores for which there are ranks as well as they
    do. `names[r]` is the name of rank r's device.
    """
    if not found.usable or problem.ranks == 1 or len(problem.hosts) > _MOST_DEVICES:
        return None
    alone: list[float | None] = []
    for host, left in zip(problem.hosts, problem.cores, strict=True):
        one = alone_on(problem, evaluator, host.ranks[0])
        cores = max(1.0, min(len(host.ranks), host.cores))
        cores *= host.cores / left  # alone, it has all of its quota, as there is nobody to talk to
        alone.append(cores * problem.batch_size / one.prediction.seconds if one.usable else None)
    used = {rank for stage in found.plan.stages for rank in stage.ranks}
    idle = sum(used.isdisjoint(host.ranks) for host in problem.hosts)
    leads = [names[host.ranks[0]] for host in problem.hosts]
    return Worth(problem.batch_size / found.prediction.seconds, alone, leads, idle)
