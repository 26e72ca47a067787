"""Agrees on the state that training goes on with, after a group has lost or gained ranks.

Every rank keeps its state in memory. The newest step that any rank has reached counts, because all ranks had done their
part of it. A rank that misses only the others' consent applies the gradients that it still holds; one that misses more
drops its state, and receives that of a rank which has it. What no rank has may be rebuilt from a replica (`mirror`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horizonml.comm.expected import anything, fields, optional
from horizonml.comm.group import Group
from horizonml.errors import PeerLost
from horizonml.state.best import best_from
from horizonml.state.outer import PreparedOuter
from horizonml.state.train_state import TrainState


@dataclass(frozen=True)
class Held:
    """Describes the state that a rank has in memory."""

    step: int
    prepared: bool  # whether it holds what makes it the state after another step, too
    layers: tuple[int, ...]
    then: int | None = None  # that step, if it is not the next one

    @classmethod
    def of(cls, state: TrainState) -> Held:
        """Describe a state."""
        return cls(state.step, state.next is not None, tuple(state.layers()), state.next)

    def reaches(self, step: int) -> bool:
        """Return whether this is the state after `step`, or can be made so."""
        then = self.then if self.then is not None else self.step + 1
        return self.step == step or (self.prepared and then == step)

    def to_json(self) -> list[Any]:
        """Return plain JSON values."""
        return [self.step, self.prepared, list(self.layers), self.then]

    @classmethod
    def from_json(cls, value: Any) -> Held:
        """Return what `to_json` was called on. Raises PeerLost if a peer has sent anything else."""
        match value:
            case [int(step), bool(prepared), list(layers), int() | None as then] if all(
                type(number) is int for number in [step, *layers, *([] if then is None else [then])]
            ):
                return cls(step, prepared, tuple(layers), then)
        raise PeerLost("a rank does not say what state it has in memory")


@dataclass(frozen=True)
class Recovery:
    """Tells which step training goes on from, and which ranks hold each layer as it is after that step."""

    step: int
    holders: list[list[int]]

    @property
    def missing(self) -> list[int]:
        """Return the layers that no rank holds."""
        return [layer for layer, ranks in enumerate(self.holders) if not ranks]


def newest(reports: Sequence[Held | None], stateful: Sequence[bool]) -> Recovery | None:
    """Return where to go on from, or None if no rank has a state.

    `reports[r]` is the state of rank r, None if it has none. `stateful[l]` says whether layer l has any parameters or
    buffers that only its holders have; layers without any are held by all.
    """
    steps = [report.step for report in reports if report is not None]
    if not steps:
        return None
    step = max(steps)
    everyone = list(range(len(reports)))
    able = [(rank, report) for rank, report in enumerate(reports) if report is not None and report.reaches(step)]
    holders = [[rank for rank, report in able if layer in report.layers] for layer in range(len(stateful))]
    return Recovery(step, [there if has else everyone for there, has in zip(holders, stateful, strict=True)])


def agree_on_state(state: TrainState, begun: bool, group: Group) -> Recovery | None:
    """Return where all ranks go on from, or None if none of them has begun; all ranks of a group call this.

    `begun` says whether `state` is one that has been trained. It is brought to the step that training goes on from, or
    dropped if it cannot be. Raises PeerLost.
    """
    model = state.model
    if not state.valid:
        state.drop()
    own = Held.of(state).to_json() if begun and state.valid else None
    scale = state.scales.get(state.step - 1)
    best = {purpose: one.model_dump() for purpose, one in state.best.items()}
    answers = group.gather_json(
        [own, state.metrics, scale, best], fields(optional(Held.from_json), anything, anything, anything)
    )
    reports = [answer[0] for answer in answers]
    stateful = state.stateful()
    found = newest(reports, [layer in stateful for layer in range(len(model.chain))])
    if found is not None:
        # How the newest step's gradients were clipped is known to those who have applied them.
        there = [rank for rank, report in enumerate(reports) if report is not None and report.step == found.step]
        scales = [answers[rank][2] for rank in there if isinstance(answers[rank][2], float)]
        _adopt(state, found.step, scales[0] if scales else None)
        able = (rank for rank, report in enumerate(reports) if report is not None and report.reaches(found.step))
        _, metrics, _, best = answers[next(able)]
        state.metrics = dict(metrics) if isinstance(metrics, dict) else {}
        state.best = best_from(best)
    return found


def _adopt(state: TrainState, step: int, scale: float | None) -> None:
    """Bring a state in memory to a step that other ranks have reached, or drop it if that is not possible.

    `scale` is the factor by which the gradients of the step before were multiplied, None if nobody knows one.
    """
    clips = state.optimizer.spec.clip_norm is not None
    if state.step == step:
        state.settle(apply=False)
    elif isinstance(state.prepared, PreparedOuter) and state.next == step:
        state.settle(apply=True)
    elif state.next == step and not isinstance(state.prepared, PreparedOuter) and (scale is not None or not clips):
        state.settle(apply=True, scale=scale if clips else None)
    else:
        state.drop()
