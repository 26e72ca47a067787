"""Implements the optimizers, and the learning rate as a pure function of the step.

The update itself is PyTorch's fused kernel, called through its functional API. PyTorch's optimizer classes would import
the compiler (torch._dynamo) into every rank, which costs 70 MB and a second of start-up that a small device cannot
spare. State is kept by parameter name, as checkpoints need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from horizonml.state.average import AVERAGE, decay_of, follow
from horizonml.state.spec import Adam, Ema, LrSchedule, Sgd


class Optimizer:
    """Updates parameters by name with SGD with momentum, Adam or AdamW; the state itself is kept by `TrainState`.

    `state[name][key]` are tensors: `momentum_buffer`, or `exp_avg`, `exp_avg_sq` and `step`. They are the same as those
    of torch.optim's optimizers with these names. `average` is the moving average of the parameter, if there is to be
    one.
    """

    def __init__(self, spec: Sgd | Adam, ema: Ema | None = None) -> None:
        self.spec = spec
        self.ema = ema if ema is not None and ema.decay is not None else None
        self.local = False  # whether averages follow what local steps agree on, and not each step

    def initial(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer state of a parameter before its first update, on the parameter's device."""
        average = {AVERAGE: _copy(parameter)} if self.ema is not None else {}
        return self._initial(parameter) | average

    def _initial(self, parameter: Tensor) -> dict[str, Tensor]:
        if isinstance(self.spec, Sgd):
            return {"momentum_buffer": _zeros_like(parameter)} if self.spec.momentum else {}
        return {
            "exp_avg": _zeros_like(parameter),
            "exp_avg_sq": _zeros_like(parameter),
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        }

    def expected(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer state of a parameter as tensors of the right shapes and dtypes that take no memory."""
        return self.initial(parameter.detach().to("meta")) if parameter.requires_grad else {}

    @torch.no_grad()
    def step(
        self,
        parameters: Mapping[str, nn.Parameter],
        state: dict[str, dict[str, Tensor]],
        learning_rate: float,
        number: int = 0,
    ) -> None:
        """Update the parameters that have a gradient, and their entries of `state`, in place.

        `number` is the number of steps done before.
        """
        names = [name for name, parameter in parameters.items() if parameter.grad is not None]
        if not names:  # for example, in a stage of pooling layers only
            return
        for name in names:
            if name not in state:
                state[name] = self.initial(parameters[name].detach())
            _lay_alike(parameters[name], state[name])
        tensors: list[Tensor] = [parameters[name] for name in names]
        gradients: list[Tensor] = [gradient for name in names if (gradient := parameters[name].grad) is not None]
        kept = [state[name] for name in names]
        if isinstance(self.spec, Sgd):
            self._sgd(self.spec, tensors, gradients, kept, learning_rate)
        else:
            self._adam(self.spec, tensors, gradients, kept, learning_rate)
        if self.ema is not None and not self.local:
            follow([entries[AVERAGE] for entries in kept], tensors, decay_of(self.ema, number))

    @staticmethod
    def _sgd(
        spec: Sgd, tensors: list[Tensor], gradients: list[Tensor], kept: list[dict[str, Tensor]], learning_rate: float
    ) -> None:
        sgd(
            tensors,
            gradients,
            [entries.get("momentum_buffer") for entries in kept],
            fused=_is_fused(tensors),
            foreach=False,
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=spec.nesterov,
            maximize=False,
        )

    @staticmethod
    def _adam(
        spec: Adam, tensors: list[Tensor], gradients: list[Tensor], kept: list[dict[str, Tensor]], learning_rate: float
    ) -> None:
        first, second = spec.betas
        adam(
            tensors,
            gradients,
            [entries["exp_avg"] for entries in kept],
            [entries["exp_avg_sq"] for entries in kept],
            [],
            [entries["step"] for entries in kept],
            fused=_is_fused(tensors),
            foreach=False,
            decoupled_weight_decay=spec.name == "adamw",
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=learning_rate,
            weight_decay=spec.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def _is_fused(tensors: list[Tensor]) -> bool:
    """Return whether the fused kernels update these; PyTorch's for SGD leave numbers of 16 bits on CPUs as they are."""
    return all(tensor.dtype in (torch.float32, torch.float64) or tensor.device.type != "cpu" for tensor in tensors)


def _lay_alike(parameter: nn.Parameter, entries: dict[str, Tensor]) -> None:
    """Put the gradient and the state of a parameter into its memory format, which the fused update takes for granted.

    They differ after they have come from a file or from another rank, or when the parameter's format has changed.
    """
    if parameter.grad is not None and not lies_alike(parameter, parameter.grad):
        parameter.grad = torch.empty_like(parameter.detach()).copy_(parameter.grad)
    for key, value in entries.items():
        if value.shape == parameter.shape and not lies_alike(parameter, value):
            entries[key] = torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)


def lies_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether the values of two tensors of the same shape lie in the same order."""
    if one.stride() == other.stride():
        return True
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1)


def _zeros_like(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's shape, or a tensor without memory if the parameter has none.

    For tensors without memory, PyTorch's own `zeros_like` would import its compiler, which takes 0.3 s.
    """
    if parameter.is_meta:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return torch.zeros_like(parameter)


def _copy(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, which takes no memory if the parameter takes none."""
    return _zeros_like(parameter) if parameter.is_meta else parameter.detach().clone()


def learning_rate(spec: LrSchedule, peak: float, step: int, steps_per_epoch: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0 over the whole run of `total` steps."""
    if step < spec.warmup_steps:
        return peak * (step + 1) / spec.warmup_steps
    if spec.name == "constant":
        return peak
    if spec.name == "step":
        return peak * spec.factor ** (step // (spec.every_steps or spec.every_epochs * steps_per_epoch))
    last = max(1, total - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / last)
    shape = 1 - progress if spec.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (spec.final + (1 - spec.final) * shape)
