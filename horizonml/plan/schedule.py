"""The order in which a stage works through its micro-batches: pure functions of stage and counts.

- GPipe (Huang et al., NeurIPS 2019): all forwards, then all backwards.
- 1F1B (PipeDream-Flush; Narayanan et al., ICML 2021): as few forwards as fill the pipeline, then one backward
  after each forward. A stage then holds at most `stages - stage` micro-batches in memory instead of all.

Both leave each stage idle for a part `(P - 1) / (M + P - 1)` of the step with P equal stages and M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage: the forward or backward pass of a micro-batch."""

    kind: Literal["forward", "backward"]
    micro: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe's order; backwards run from the last micro-batch to the first."""
    assert 0 <= stage < stages
    forwards = [Action("forward", micro) for micro in range(micro_batches)]
    return forwards + [Action("backward", micro) for micro in reversed(range(micro_batches))]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B's order."""
    assert 0 <= stage < stages
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action("forward", micro) for micro in range(ahead)]
    for micro in range(micro_batches - ahead):
        actions += [Action("forward", ahead + micro), Action("backward", micro)]
    return actions + [Action("backward", micro) for micro in range(micro_batches - ahead, micro_batches)]


def evaluation(micro_batches: int) -> list[Action]:
    """Forward passes only."""
    return [Action("forward", micro) for micro in range(micro_batches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in SCHEDULES[schedule](stage, stages, micro_batches):
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most
