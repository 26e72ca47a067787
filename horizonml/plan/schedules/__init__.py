"""Defines the schedules: the orders in which ranks work through the micro-batches of a step.

Every module in this folder is one schedule and is discovered automatically. It defines

- `NAME`, the schedule's name in job files and plans;
- `STAGES_PER_RANK`, how many stages the planner gives to each rank of a pipeline;
- `passes(lane, lanes, micro_batches)`, a pure function that returns the forward and backward actions of a lane. Each of
  its stages has one forward pass for every micro-batch, and one backward pass or both of its parts.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from horizonml.plan.actions import Action, Lanes


@dataclass(frozen=True)
class Schedule:
    """Describes a schedule in `SCHEDULES`."""

    name: str
    about: str  # the first line of the module's docstring
    stages_per_rank: int
    passes: Callable[[int, Lanes, int], list[Action]]


def _found() -> dict[str, Schedule]:
    schedules = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        about = (module.__doc__ or "").partition("\n")[0]
        passes = functools.lru_cache(maxsize=4096)(module.passes)
        schedules[module.NAME] = Schedule(module.NAME, about, module.STAGES_PER_RANK, passes)
    return schedules


SCHEDULES = _found()
