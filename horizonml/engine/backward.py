"""Runs a backward pass from a gradient that a later stage has computed.

When `torch.autograd.backward` in torch 2.13 is given a gradient, it imports sympy, which costs every rank outside the
last stage 34 MB and a quarter of a second. It does not import sympy when it starts from a scalar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Seed(torch.autograd.Function):
    """Makes a scalar whose gradient with respect to `output` is `gradient`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def seeded(output: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a scalar from which to start a backward pass.

    `gradient` has the shape of `output`; it is None if `output` is a loss.
    """
    if gradient is None:
        return output
    number: Tensor = _Seed.apply(output, gradient)  # type: ignore[no-untyped-call]
    return number


def backward(output: Tensor, gradient: Tensor | None) -> None:
    """Compute the gradients of all leaves from `gradient`.

    `gradient` has the shape of `output`; it is None if `output` is a loss.
    """
    torch.autograd.backward(seeded(output, gradient))
