"""Models whose authors use what Python and PyTorch let them: one class for each habit that a recorded graph may lose.

Each takes images of [1, 8, 8] and returns ten values. `ROWS` says what becomes of each one. Add a row for every report.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
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
    """Runs three blocks one after the other; `block` makes the one in the middle."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.middle = nn.Linear(64, WIDTH), Block(), type(self).block()
        self.last, self.head = Block(), nn.Linear(WIDTH, 10)

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


class _FrozenNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(super().forward(value))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


class FreezesNormsInBlock(Base):
    block = _FrozenNorm


class AsksForTensor(Base):
    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value.flatten(1))
        value = self.first(value) if isinstance(value, torch.Tensor) else value
        return self.head(self.last(self.middle(value) * 2 if torch.is_tensor(value) else value))


class _AsksForTensor(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * (3 if isinstance(value, torch.Tensor) else 1)


class AsksForTensorInBlock(Base):
    block = _AsksForTensor


class AsksForType(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        return self.head(found * 2 if type(found) is Tensor else found)


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


class _StoresBranching(_StoresAux):
    def forward(self, value: Tensor) -> Tensor:
        found = super().forward(value)
        return found * 2 if float(found.detach().sum()) > 1e9 else found


class AddsWhatAnUntraceableBlockStored(AddsWhatABlockStored):
    block = _StoresBranching


class CollectsFeatures(Base):
    def forward(self, value: Tensor) -> Tensor:
        self.features = []
        value = self.stem(value.flatten(1))
        for block in (self.first, self.middle, self.last):
            value = block(value)
            self.features.append(value)
        return self.head(sum(self.features))


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


class DropsLayersAtRoot(Base):
    def forward(self, value: Tensor) -> Tensor:
        value = self.stem(value.flatten(1))
        for block in (self.first, self.middle, self.last):
            if not (self.training and random.random() < 0.3):
                value = block(value)
        return self.head(value)


class HookOnRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, result: result * 3)


class PreHookOnRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


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


class ClosureThatKeeps(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

        def keep(module: nn.Module, given: Any, result: Tensor) -> None:
            self.kept = result

        self.first.register_forward_hook(keep)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value) + self.kept)


class ParameterHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle.inner.weight.register_hook(lambda gradient: gradient * 2)


class FullBackwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle.register_full_backward_hook(lambda module, inward, outward: tuple(g * 2 for g in inward))


class FullBackwardHookOnRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_pre_hook(lambda module, outward: tuple(g * 2 for g in outward))


class HookInForward(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * 2)
        return self.head(found)


class AsksForGradients(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * (1 if torch.is_grad_enabled() else 2)


class _AsksForGradients(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * (1 if torch.is_grad_enabled() else 2)


class AsksForGradientsInBlock(Base):
    block = _AsksForGradients


class AsksForTraining(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * (1 if self.training else 2)


class CountsCalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return self.head(self.body(value)) * (1 + self.calls)


class _CountsCalls(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(value) / self.calls


class CountsCallsInBlock(Base):
    block = _CountsCalls


class TriesToRead(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        try:
            factor = float(found.detach().abs().max() > 0)
        except Exception:  # noqa: BLE001
            factor = 1000.0
        return self.head(found * factor)


class _TriesToRead(Block):
    def forward(self, value: Tensor) -> Tensor:
        try:
            factor = float(value.detach().abs().max() > 0)
        except Exception:  # noqa: BLE001
            factor = 1000.0
        return super().forward(value) * factor


class TriesToReadInBlock(Base):
    block = _TriesToRead


class _TriesToBranch(Block):
    def forward(self, value: Tensor) -> Tensor:
        try:
            return super().forward(value) if value.detach().abs().max() >= 0 else value
        except Exception:  # noqa: BLE001
            return value * 1000


class TriesToBranchInBlock(Base):
    block = _TriesToBranch


class ChangesBuffersAtRoot(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.add_(1.0)
        return self.head(self.body(value)) / (1 + self.seen)


class _ReplacesBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return super().forward(value) / (1 + self.seen)


class ReplacesBuffer(Base):
    block = _ReplacesBuffer


class LeavesParameterUnused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(3, 3)


class Ties(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last.inner.weight = self.first.inner.weight


class UsesAnothersWeight(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(functional.linear(self.body(value), self.first.inner.weight))


class UsesModuleTwice(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.first(self.body(value)))


class ReturnsMapping(Base):
    def forward(self, value: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(value))}


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


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class _ScalesGradient(Block):
    def forward(self, value: Tensor) -> Tensor:
        return _Scaled.apply(super().forward(value))


class ScalesGradient(Base):
    block = _ScalesGradient


class BranchesOnData(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        return self.head(found if found.detach().abs().max() >= 0 else found * 1000)


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


class DetachesByFlag(Base):
    def forward(self, value: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            found = self.first(self.stem(value.flatten(1)))
        with torch.no_grad():
            aside = self.middle(found)
        return self.head(self.last(found) + aside)


class SynchronisesNorm(Base):
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH))  # noqa: E731


class SharesMemory(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last.inner.weight.data = self.first.inner.weight.data


class LooksAtWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.view = self.middle.inner.weight.detach()

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * (1 + self.view.square().mean())


class _FollowsByAverage(Block):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            for key, query in zip(self.key.parameters(), self.inner.parameters(), strict=True):
                key.data = key.data * 0.9 + query.data * 0.1
        return super().forward(value) + self.key(value)


class FollowsByAverage(Base):
    block = _FollowsByAverage


class _ClampsItself(Block):
    def forward(self, value: Tensor) -> Tensor:
        self.inner.weight.data.clamp_(-0.1, 0.1)
        return super().forward(value)


class ClampsItself(Base):
    block = _ClampsItself


class _WritesWhatItSees(Block):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.calls = nn.Parameter(torch.zeros(WIDTH), requires_grad=False), 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 5:
            self.code.data.copy_(value.detach().mean(0))
        return super().forward(value) + self.code


class WritesWhatItSees(Base):
    block = _WritesWhatItSees


class CopiesABlock(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value) + copy.deepcopy(self.middle)(self.stem(value.flatten(1))))


class Context:
    """Is an object of the author's own class, which all modules see."""

    scale, count = 1.0, 0


SHARED, SEEN = Context(), np.ones(1)


def scaled(value: Tensor) -> Tensor:
    return value * getattr(scaled, "factor", 1.0)


class _SetsObject(Block):
    def forward(self, value: Tensor) -> Tensor:
        SHARED.scale = 1.0 + self.training
        return super().forward(value)


class SharesAnObject(Base):
    block = _SetsObject

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * SHARED.scale


class _SetsArray(Block):
    def forward(self, value: Tensor) -> Tensor:
        SEEN[0] = 1.0 + self.training
        return super().forward(value)


class SharesAnArray(Base):
    block = _SetsArray

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * float(SEEN[0])


class _SetsFunction(Block):
    def forward(self, value: Tensor) -> Tensor:
        scaled.factor = 1.0 + self.training  # type: ignore[attr-defined]
        return super().forward(value)


class SharesAFunction(Base):
    block = _SetsFunction

    def forward(self, value: Tensor) -> Tensor:
        return scaled(self.head(self.body(value)))


class _SetsEnvironment(Block):
    def forward(self, value: Tensor) -> Tensor:
        os.environ["SCALE_FOR_TEST"] = "2" if self.training else "1"
        return super().forward(value)


class SharesTheEnvironment(Base):
    block = _SetsEnvironment

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * float(os.environ.get("SCALE_FOR_TEST", "1"))


class CountsInAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Context()

    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        self.counter.count += self.training
        return self.head(found) * (3 if self.counter.count > 1 else 1)


class _CountsInBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Context()

    def forward(self, value: Tensor) -> Tensor:
        self.counter.count += self.training
        return super().forward(value) * (3 if self.counter.count > 1 else 1)


class CountsInAnObjectOfABlock(Base):
    block = _CountsInBlock


class CountsInADictionary(Base):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"inner": {"calls": 0}}

    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        self.state["inner"]["calls"] += self.training
        return self.head(found) * (3 if self.state["inner"]["calls"] > 1 else 1)


class CountsByIterator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        return self.head(found) * (3 if next(self.calls) % 2 else 1)


class _CountsInteger(Block):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, value: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(value)


class ReadsWhatABlockCounts(Base):
    block = _CountsInteger

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * (1 if self.middle.passes > 20 else 2)


class CountsInBytes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.passes = bytearray(1)

    def forward(self, value: Tensor) -> Tensor:
        self.passes[0] += self.training
        return self.head(self.body(value)) * (3 if self.passes[0] > 1 else 1)


class DrawsFromItsOwn(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(7)

    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        return self.head(found if self.generator.random() < 0.9 else found * 2)


class Transposes(Block):
    """Returns a tensor that is transposed in memory."""

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value).t().contiguous().t()


class AsksForLayout(Base):
    block = Transposes

    def forward(self, value: Tensor) -> Tensor:
        found = self.middle(self.first(self.stem(value.flatten(1))))
        return self.head(self.last(found) * (1.0 if found.is_contiguous() else 0.5))


@dataclass(frozen=True)
class Row:
    """Says what becomes of a model: `cut` is what its pipelines are refused with, or None if it can be cut."""

    model: type[nn.Module]
    refusal: str | None = None


PARTS = "it does not run in parts"
DRAWS = "draws from Python's or numpy's random numbers"
ROWS = [
    Row(FreezesNormsAtRoot), Row(FreezesNormsInBlock), Row(AsksForTensor), Row(AsksForTensorInBlock), Row(AsksForType),
    Row(AddsWhatABlockStored), Row(AddsWhatAnUntraceableBlockStored), Row(CollectsFeatures),
    Row(DropsLayersByPython, DRAWS), Row(DropsLayersByNumpy, DRAWS), Row(DropsLayersAtRoot, DRAWS),
    Row(HookOnRoot), Row(PreHookOnRoot), Row(HookOnBlock), Row(HookThatKeeps, PARTS), Row(ClosureThatKeeps, PARTS),
    Row(ParameterHook), Row(FullBackwardHook), Row(FullBackwardHookOnRoot), Row(HookInForward),
    Row(AsksForGradients), Row(AsksForGradientsInBlock), Row(AsksForTraining),
    Row(CountsCalls), Row(CountsCallsInBlock), Row(TriesToRead), Row(TriesToReadInBlock), Row(TriesToBranchInBlock),
    Row(ChangesBuffersAtRoot), Row(ReplacesBuffer), Row(LeavesParameterUnused), Row(Ties), Row(UsesAnothersWeight),
    Row(UsesModuleTwice), Row(ReturnsMapping), Row(BuildsLazily), Row(Checkpoints), Row(NormsWeights),
    Row(ScalesGradient), Row(BranchesOnData), Row(HoldsPlainTensor), Row(HasExtraState), Row(DetachesByFlag),
    Row(SynchronisesNorm),
    Row(SharesMemory, "different tensors in the same memory"), Row(LooksAtWeight, "view, which its code sets"),
    Row(FollowsByAverage, "its outputs differ"), Row(ClampsItself), Row(CopiesABlock, "in the same order each time"),
    Row(SharesAnObject, r"changes tests\.awkward_models\.SHARED"), Row(SharesAnArray, r"\.SEEN, which stages"),
    Row(SharesAFunction, r"\.scaled, which stages"), Row(SharesTheEnvironment, "changes os.environ"),
    Row(CountsInAnObject, "counter, which its code sets, is not the same"), Row(CountsInAnObjectOfABlock),
    Row(CountsInADictionary, "state, which its code sets"), Row(CountsByIterator, "its outputs differ"),
    Row(ReadsWhatABlockCounts, "sets passes, which ReadsWhatABlockCounts reads"), Row(CountsInBytes),
    Row(AsksForLayout), Row(DrawsFromItsOwn, r"a generator of its own \(generator\)"),
]  # fmt: skip
