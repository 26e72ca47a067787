"""Implements the optimizers with what they keep of each parameter, and the learning rate as a function of the step.

The update itself is PyTorch's fused kernel, called through its functional API. PyTorch's optimizer classes would import
the compiler (torch._dynamo) into every rank, which costs 70 MB and a second of start-up that a small device cannot
spare. State is kept by parameter name, as checkpoints need it.

Moving averages of parameters are kept beside the optimizer's own state, as `optimizer/NAME/average`, so they are saved,
moved, mirrored and shared with it. Every member of a stage updates those of its parameters with each step.

Between two synchronisations of local steps, each member has parameters and optimizer state of its own. Right after one,
all members of a stage hold the same parameters, buffers, averages and momentum of the outer optimizer; the state of the
inner optimizer stays each member's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan
from horizonml.state.parts import named
from horizonml.state.spec import Adam, Ema, LrSchedule, Sgd

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

    @property
    def is_adam(self) -> bool:
        """Return whether updates are divided by the noise of gradients."""
        return isinstance(self.spec, Adam)

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
            sgd(
                tensors,
                gradients,
                [entries.get("momentum_buffer") for entries in kept],
                fused=_is_fused(tensors),
                foreach=False,
                weight_decay=self.spec.weight_decay,
                momentum=self.spec.momentum,
                lr=learning_rate,
                dampening=0.0,
                nesterov=self.spec.nesterov,
                maximize=False,
            )
        else:
            adam(
                tensors,
                gradients,
                [entries["exp_avg"] for entries in kept],
                [entries["exp_avg_sq"] for entries in kept],
                [],
                [entries["step"] for entries in kept],
                fused=_is_fused(tensors),
                foreach=False,
                decoupled_weight_decay=self.spec.name == "adamw",
                amsgrad=False,
                beta1=self.spec.betas[0],
                beta2=self.spec.betas[1],
                lr=learning_rate,
                weight_decay=self.spec.weight_decay,
                eps=1e-8,
                maximize=False,
            )
        if self.ema is not None and not self.local:
            follow([entries[AVERAGE] for entries in kept], tensors, decay_of(self.ema, number))


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


_MOST = 1 << 15  # steps; more than a log of messages reaches back


class Scales:
    """Holds the factors by which clipping has multiplied the gradients of the latest steps; without any, none is.

    All ranks agree on a step's factor after their sums, and whoever repeats the step needs it.
    """

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


@dataclass(frozen=True)
class OwnSteps:
    """Holds what a member of the replicas has done since all agreed last, when its group ended in between.

    The state itself has gone back to what all agreed on; in the next group, the member goes on from its own steps.
    """

    since: int  # the step after which all agreed last
    done: int  # the step up to which this member has trained
    replica: tuple[int, int]  # the number of its replica, and how many ranks that had
    rows: tuple[float, ...]  # on which the replica has worked since the last sum of each fragment
    tensors: tuple[dict[str, Tensor], ...]  # of each fragment, this member's own parameters and buffers
    pending: int  # the step in which the others may have gone on from a synchronisation; 0 if there was none
    sums: tuple[int, ...]  # the fragments of that synchronisation
    found: Tensor  # the totals of the replica's steps
    samples: int


def is_inner(key: str) -> bool:
    """Return whether a tensor of the state belongs to the optimizer of a single member."""
    return named(key)[1] not in (None, MOMENTUM, AVERAGE)


def in_common(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Return those tensors that all members of a stage hold alike at a step boundary that is saved or compared."""
    if plan.local is None:
        return dict(tensors)
    return {key: tensor for key, tensor in tensors.items() if not is_inner(key)}
