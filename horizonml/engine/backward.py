"""Runs a backward pass from a gradient that a later stage has computed.

When `torch.autograd.backward` in torch 2.13 is given a gradient, it imports sympy, which costs every rank outside the
last stage 34 MB and a quarter of a second. It does not import sympy when it starts from a scalar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizonml.models.boundary import Values


class _Seed(torch.autograd.Function):
    """Makes a scalar whose gradients with respect to the `outputs` are the `gradients`."""

    @staticmethod
    def forward(ctx: Any, gradients: Values, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def seeded(outputs: Values, gradients: Values | None) -> Tensor:
    """Return a scalar from which to start a backward pass.

    Each gradient has the shape of its output; there are none if the only output is a loss.
    """
    if gradients is None:
        (loss,) = outputs
        return loss
    number: Tensor = _Seed.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return number


def backward(outputs: Values, gradients: Values | None) -> None:
    """Compute the gradients of all leaves from those of the `outputs`; there are none if the only output is a loss."""
    torch.autograd.backward(seeded(outputs, gradients))
