"""Models whose authors use what Python and PyTorch let them: one class for each habit that a recorded graph may lose.

Each takes images of [1, 8, 8] and returns ten values. `ROWS` in `awkward_states` says what becomes of each one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    """Is a layer with an activation, as most of these models have some."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value).tanh()


class Base(nn.Module):
    """Runs three blocks one after the other; `start`, `block` and `end` make them."""

    start: Callable[[], nn.Module] = Block
    block: Callable[[], nn.Module] = Block
    end: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        kind = type(self)
        self.stem, self.first, self.middle = nn.Linear(64, WIDTH), kind.start(), kind.block()
        self.last, self.head = kind.end(), nn.Linear(WIDTH, 10)

    def body(self, value: Tensor) -> Tensor:
        return self.last(self.middle(self.first(self.stem(value.flatten(1)))))

    def forward(self, value: Tensor) -> Any:
        return self.head(self.body(value))


class FreezesNormsAtRoot(Base):
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # noqa: E731

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.middle[1].eval()
        return self


class AsksForTensor(Base):
    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value.flatten(1))
        value = self.first(value) if isinstance(value, torch.Tensor) else value
        return self.head(self.last(self.middle(value) * 2 if torch.is_tensor(value) else value))


class _StoresAux(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = 0.0

    def forward(self, value: Tensor) -> Tensor:
        found = super().forward(value)
        self.aux = found.square().mean(1, keepdim=True)
        return found


class AddsWhatABlockStored(Base):
    block = _StoresAux

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) + self.middle.aux * self.head.bias


class _DropsByPython(Block):
    def forward(self, value: Tensor) -> Tensor:
        return value if self.training and random.random() < 0.5 else super().forward(value)


class DropsLayersByPython(Base):
    block = _DropsByPython


class _DropsByNumpy(Block):
    def forward(self, value: Tensor) -> Tensor:
        return value if self.training and np.random.rand() < 0.5 else super().forward(value)


class DropsLayersByNumpy(Base):
    block = _DropsByNumpy


class HookOnRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, result: result * 3)


class HookOnBlock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle.register_forward_hook(lambda module, given, result: result * 2)


class HookThatKeeps(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.first.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, given: Any, result: Tensor) -> None:
        self.kept = result

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value) + self.kept)


class ParameterHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle.inner.weight.register_hook(lambda gradient: gradient * 2)


class FullBackwardHookOnRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_pre_hook(lambda module, outward: tuple(g * 2 for g in outward))


class AsksForGradients(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * (1 if torch.is_grad_enabled() else 2)


class CountsCalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return self.head(self.body(value)) * (1 + self.calls)


class TriesToRead(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        try:
            factor = float(found.detach().abs().max() > 0)
        except Exception:  # noqa: BLE001
            factor = 1000.0
        return self.head(found * factor)


class LeavesParameterUnused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(3, 3)


class UsesAnothersWeight(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(functional.linear(self.body(value), self.first.inner.weight))


class BuildsLazily(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(10)


class Checkpoints(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.first(self.stem(value.flatten(1)))
        return self.head(self.last(checkpoint(self.middle, found, use_reentrant=False)))


class NormsWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle.inner = nn.utils.parametrizations.weight_norm(self.middle.inner)


class _PlainTensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((), 2.0)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.scale


class HoldsPlainTensor(Base):
    block = _PlainTensor


class _ExtraState(Block):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


class HasExtraState(Base):
    block = _ExtraState


class KeepsItsOwnMode(Base):
    """Has another mode than its modules, and hands them a list, so that no graph of it is recorded."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.training = False
        return self

    def forward(self, value: Tensor) -> Tensor:
        values = [value.flatten(1)]
        for layer in (self.stem, self.first, self.middle, self.last):
            values.append(layer(values[-1]))
            if len(values) > 2 and values[-1].shape[0] > 10_000:
                values = values[1:]
        return self.head(values[-1] * 2 if self.training else values[-1])
