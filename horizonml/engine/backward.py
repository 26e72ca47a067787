"""A backward pass from a gradient that came from elsewhere.

When `torch.autograd.backward` of torch 2.13 is given a gradient, it imports sympy: 34 MB and a quarter of a second for
every rank that is not in the last stage. It does not when it starts from a single number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Seed(torch.autograd.Function):
    """A number whose gradient with respect to `output` is `gradient`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def seeded(output: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a number from which to start a backward pass; `gradient` has the shape of `output`, None for a loss."""
    if gradient is None:
        return output
    number: Tensor = _Seed.apply(output, gradient)  # type: ignore[no-untyped-call]
    return number


def backward(output: Tensor, gradient: Tensor | None) -> None:
    """Compute the gradients of all leaves from `gradient`, which has the shape of `output`; None for a loss."""
    torch.autograd.backward(seeded(output, gradient))
