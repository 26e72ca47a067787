"""Averages parameters over the steps: an exponential moving average of what the optimizer makes of them.

Every member of a stage updates the averages of its parameters with each step, as it updates the parameters. They are
kept beside the optimizer's own state, as `optimizer/NAME/average`, so they are saved, moved, mirrored and shared with
it.

Describes the best evaluation so far, by one metric: part of every checkpoint, and of what ranks tell one another.

Remembers by which factors the gradients of the latest steps were scaled.

Clipping multiplies all gradients of a step by one factor, on which all ranks agree after their sums. Whoever repeats a
step, or applies gradients that were left open, needs the factor of that step.

Names what local steps add to the state, and which parts of it all members of a stage then have in common.

Between two synchronisations each member has parameters and optimizer state of its own. Right after one, all members of
a stage hold the same parameters, buffers, moving averages and momentum of the outer optimizer; the state of the inner
optimizer stays each member's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan
from horizonml.state.parts import named
from horizonml.state.spec import Ema

AVERAGE = "average"


def decay_of(spec: Ema, step: int) -> float:
    """Return the share of the average that a step keeps; steps count from 0.

    Without the warm-up, the averages of a short run would consist mostly of the initial values.
    """
    assert spec.decay is not None
    return min(spec.decay, (1 + step) / (10 + step)) if spec.warmup else spec.decay


@torch.no_grad()
def follow(averages: Sequence[Tensor], parameters: Sequence[Tensor], decay: float) -> None:
    """Move averages towards parameters, in place."""
    torch._foreach_lerp_(list(averages), list(parameters), 1 - decay)


@contextmanager
def swapped(averages: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Use averages in the place of their parameters while the context lasts."""
    own = {parameter: parameter.data for parameter in averages}
    try:
        for parameter, average in averages.items():
            parameter.data = average
        yield
    finally:
        for parameter, value in own.items():
            parameter.data = value


def sources(names: Iterable[str], average: bool) -> dict[str, str]:
    """Return which tensor of a checkpoint becomes which entry of the model's state dict.

    With `average`, parameters that have an average are taken from it; buffers and frozen parameters are as they are.
    """
    available = set(names)
    found = {}
    for name in sorted(available):
        kind, _, own = name.partition("/")
        if kind == "model":
            other = f"optimizer/{own}/{AVERAGE}"
            found[own] = other if average and other in available else name
    return found


KEPT = "keep_best"  # for the checkpoint that is never deleted
STOPPING = "early_stop"  # for the decision to end a training early


class Best(BaseModel):
    """Holds the best value of a metric, and when it was measured."""

    model_config = ConfigDict(strict=True, frozen=True)

    metric: str
    value: float | int
    step: int = Field(ge=0)  # the number of steps that had been done
    waited: int = Field(0, ge=0)  # evaluations since then


_MOST = 1 << 15  # steps; more than a log of messages reaches back


class Scales:
    """Holds the factors of the latest steps; without an entry for any step, gradients are not clipped."""

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}  # in the order of the steps

    def note(self, step: int, factor: float) -> None:
        """Note the factor of a step, counted from 0, which replaces what is known of later steps."""
        while self._factors and next(reversed(self._factors)) >= step:
            self._factors.popitem()
        self._factors[step] = factor
        if len(self._factors) > _MOST:
            del self._factors[next(iter(self._factors))]

    def get(self, step: int) -> float | None:
        """Return the factor of a step, or None if it is not known."""
        return self._factors.get(step)

    def of(self, step: int) -> float:
        """Return the factor of a step. Raises PeerLost if it is not known."""
        factor = self._factors.get(step)
        if factor is None:
            raise PeerLost(f"nobody here knows how the gradients of step {step} were clipped")
        return factor


MOMENTUM = "outer_momentum"
"""The key of the outer optimizer's momentum among a parameter's optimizer state."""


@dataclass(frozen=True)
class PreparedOuter:
    """Holds what a synchronisation has found, while this rank cannot know whether the others have taken it over.

    Every rank has received all of it: if another rank goes on from it, so must this one.
    """

    step: int  # after which members synchronised
    tensors: dict[str, Tensor]  # new values by the names that they have in the state


def is_inner(key: str) -> bool:
    """Return whether a tensor of the state belongs to the optimizer of a single member."""
    return named(key)[1] not in (None, MOMENTUM, AVERAGE)


def in_common(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Return those tensors that all members of a stage hold alike at a step boundary that is saved or compared."""
    if plan.local is None:
        return dict(tensors)
    return {key: tensor for key, tensor in tensors.items() if not is_inner(key)}
