"""The optimizers, and the learning rate as a pure function of the step.

The update itself is PyTorch's fused kernel through its functional API. PyTorch's optimizer classes would import the
compiler (torch._dynamo) into every rank: 70 MB and a second of start-up that a small device does not have to spare.
State is kept by parameter name, as checkpoints want it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from horizonml.state.spec import Adam, LrSchedule, Sgd


class Optimizer:
    """SGD with momentum, Adam or AdamW over a module's trainable parameters, by name.

    `state[name][key]` are tensors: `momentum_buffer`, or `exp_avg`, `exp_avg_sq` and `step`. They are what
    torch.optim's optimizers of the same names keep.
    """

    def __init__(self, spec: Sgd | Adam, module: nn.Module) -> None:
        self._spec = spec
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.state: dict[str, dict[str, Tensor]] = {}

    def expected(self, name: str) -> dict[str, Tensor]:
        """Return what is kept for a parameter, as tensors of the right shapes and dtypes without memory."""
        return self._initial(self._parameters[name].detach().to("meta")) if name in self._parameters else {}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Go on from this state."""
        self.state = state

    def step(self, lr: float) -> None:
        """Update the parameters that have a gradient."""
        names = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if not names:  # a stage of pooling layers, say
            return
        for name in names:
            if name not in self.state:
                self.state[name] = self._initial(self._parameters[name])
        parameters: list[Tensor] = [self._parameters[name] for name in names]
        gradients = [self._parameters[name].grad for name in names]
        states = [self.state[name] for name in names]
        with torch.no_grad():
            if isinstance(self._spec, Sgd):
                sgd(
                    parameters,
                    gradients,  # type: ignore[arg-type]
                    [state.get("momentum_buffer") for state in states],
                    fused=True,
                    foreach=False,
                    weight_decay=self._spec.weight_decay,
                    momentum=self._spec.momentum,
                    lr=lr,
                    dampening=0.0,
                    nesterov=self._spec.nesterov,
                    maximize=False,
                )
            else:
                first, second = self._spec.betas
                adam(
                    parameters,
                    gradients,  # type: ignore[arg-type]
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    foreach=False,
                    decoupled_weight_decay=self._spec.name == "adamw",
                    amsgrad=False,
                    beta1=first,
                    beta2=second,
                    lr=lr,
                    weight_decay=self._spec.weight_decay,
                    eps=1e-8,
                    maximize=False,
                )

    def _initial(self, parameter: Tensor) -> dict[str, Tensor]:
        if isinstance(self._spec, Sgd):
            return {"momentum_buffer": torch.zeros_like(parameter)} if self._spec.momentum else {}
        return {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.zeros((), dtype=torch.float32),
        }


def learning_rate(spec: LrSchedule, peak: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The learning rate of a step, counted from 0 over the whole run."""
    if step < spec.warmup_steps:
        return peak * (step + 1) / spec.warmup_steps
    if spec.name == "constant":
        return peak
    if spec.name == "step":
        return peak * spec.factor ** (step // (spec.every_epochs * steps_per_epoch))
    last = max(1, steps_per_epoch * epochs - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / last)
    shape = 1 - progress if spec.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (spec.final + (1 - spec.final) * shape)
