"""Averages parameters over the steps: an exponential moving average of what the optimizer makes of them.

Every member of a stage updates the averages of its parameters with each step, as it updates the parameters. They are
kept beside the optimizer's own state, as `optimizer/NAME/average`, so they are saved, moved, mirrored and shared with
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

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
