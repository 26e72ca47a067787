"""More models of that kind: what their code keeps, and where, is what a cut may lose. `ROWS` is the table of all."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests import awkward_models
from tests.awkward_models import WIDTH, Base, Block


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


class CopiesABlock(Base):
    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value) + copy.deepcopy(self.middle)(self.stem(value.flatten(1))))


class Context:
    """Is an object of the author's own class."""

    scale, count = 1.0, 0


OBJECT, ARRAY = Context(), np.ones(1)


def scaled() -> float:
    return getattr(scaled, "factor", 1.0)


class _Sets(Block):
    def __init__(self, write: Callable[[float], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, value: Tensor) -> Tensor:
        self.write(1.0 + self.training)
        return super().forward(value)


class SharesAnObject(Base):
    """Has a block that sets something outside of the model, which the model's own forward reads."""

    write = staticmethod(lambda value: setattr(OBJECT, "scale", value))
    read = staticmethod(lambda: OBJECT.scale)

    def __init__(self) -> None:
        super().__init__()
        self.middle = _Sets(type(self).write)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.body(value)) * float(self.read())


class SharesAnArray(SharesAnObject):
    write = staticmethod(lambda value: ARRAY.fill(value))
    read = staticmethod(lambda: ARRAY[0])


class SharesAFunction(SharesAnObject):
    write = staticmethod(lambda value: setattr(scaled, "factor", value))
    read = staticmethod(lambda: scaled())


class SharesTheEnvironment(SharesAnObject):
    write = staticmethod(lambda value: os.environ.update(SCALE_FOR_TEST=str(value)))
    read = staticmethod(lambda: float(os.environ.get("SCALE_FOR_TEST", "1")))


class CountsInAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Context()

    def forward(self, value: Tensor) -> Tensor:
        found = self.body(value)
        self.counter.count += self.training
        return self.head(found) * (3 if self.counter.count > 1 else 1)


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


class SeedsInForward(Base):
    def forward(self, value: Tensor) -> Tensor:
        torch.manual_seed(3)
        found = self.middle(self.first(self.stem(value.flatten(1)))) * torch.rand(WIDTH)
        return self.head(self.last(found))


class ReturnsAnotherTypeInEvaluation(Base):
    def forward(self, value: Tensor) -> Tensor:
        found = self.first(self.stem(value.flatten(1)))
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.training):
            found = self.middle(found)
        return self.head(self.last(found.float()))


class _AnnealsInAClosure(Block):
    """Holds functions that remember something: a number of their own, and the module itself."""

    def __init__(self) -> None:
        super().__init__()
        temperature, self.calls = 1.0, 0
        self.scale = lambda value: value / (1 + self.calls)

        def anneal() -> float:
            nonlocal temperature
            temperature *= 0.7
            return temperature

        self.anneal = anneal

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(self.scale(value)) * (self.anneal() if self.training else 0.5)


class AnnealsInAClosure(Base):
    block = _AnnealsInAClosure


class _IsReady(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @property
    def is_ready(self) -> bool:
        return self.calls > 14

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(value)


class ReadsAProperty(Base):
    block = _IsReady

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * (0.5 if self.middle.is_ready else 1.0)


class OrdersRows(Base):
    """Puts the rows of a batch into an order, and back: members of a stage know the order of their own rows only."""

    def forward(self, value: Tensor) -> Tensor:
        value = value.flatten(1)
        order = value.abs().sum(1).argsort(descending=True)
        found = self.last(self.middle(self.first(self.stem(value[order]))))
        return self.head(found[order.argsort()])


class HasNormalisedWeights(Base):
    """Computes a weight in a hook, and keeps it: a tensor with a history, which nothing can copy as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.first.inner)


class ReadsACounterInTrain(Base):
    """Decides on modes by a buffer that its forward counts, which constructing it without memory cannot read."""

    block = lambda: nn.Sequential(Block(), nn.Dropout(0.0))  # noqa: E731

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.middle[1].train(mode and int(self.passes) + self.calls < 14)
        return self

    def forward(self, value: Tensor) -> Tensor:
        self.passes += self.training
        self.calls += self.training
        return super().forward(value)


class RemembersByDefault(Base):
    def forward(self, value: Tensor, calls: dict[str, int] = {}) -> Tensor:  # noqa: B006
        calls["count"] = calls.get("count", 0) + self.training
        return super().forward(value) * (0.5 if calls["count"] > 14 else 1.0)


class _DetachesLater(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(value.detach() if self.calls > 1 else value)


class FreezesAfterAStep(Base):
    """Leaves parameters without a gradient after a step, which momentum and weight decay must not move."""

    block = _DetachesLater


class HasTwoNames(Base):
    """Registers its blocks twice, as ports of checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.first, self.middle, self.last])

    def forward(self, value: Tensor) -> Tensor:
        found = self.stem(value.flatten(1))
        for block in self.blocks:
            found = block(found)
        return self.head(found)


class _Reverses(torch.autograd.Function):
    """Hands back negative zeros, as a reversal of gradients does whose factor is 0."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -torch.zeros_like(gradient)


class _ReversesBy0(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(_Reverses.apply(value))  # type: ignore[no-untyped-call]


class HasNegativeZeros(Base):
    block = _ReversesBy0


class LeavesTiesAlone(Base):
    """Has tied parameters without a gradient after the first step: momentum and weight decay must not move them."""

    def __init__(self) -> None:
        super().__init__()
        self.last.inner.weight, self.calls = self.first.inner.weight, 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        found = self.stem(value.flatten(1))
        return self.head(self.last(self.first(found)) if self.calls < 2 else self.middle(found))


class DrawsByItsGenerator(Base):
    """Is constructed with random numbers of its own generator, as Fourier features are."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        nn.init.normal_(self.stem.weight, std=0.1, generator=own)
        self.register_buffer("frequencies", torch.randn(64, WIDTH, generator=own))

    def forward(self, value: Tensor) -> Tensor:
        waves = (value.flatten(1) @ self.frequencies).sin()
        return self.head(self.last(self.middle(self.first(self.stem(value.flatten(1)) + waves))))


class HasAModuleCalledRoot(Base):
    """Has names that PyTorch's graphs and this project's own modules once used themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.root = _Masks()
        self.meta, self.constants = Block(), Block()

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.constants(self.meta(self.root(self.body(value)))))


class _Masks(Block):
    """Has buffers that averages would change though no step does: infinite ones, and numbers that are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((WIDTH,), float("-inf")).masked_fill(torch.arange(WIDTH) < 9, 0.0))
        self.register_buffer("ids", torch.arange(float(WIDTH)))
        self.register_buffer("third", torch.full((WIDTH,), 1 / 3, dtype=torch.bfloat16))

    def forward(self, value: Tensor) -> Tensor:
        kept = (self.ids == 7.0) + (self.ids == 5.0) + self.third.float()
        return super().forward(value) * kept + (value + self.mask).softmax(1)


class CountsInAHook(Base):
    """Has a hook that counts outside of the model, which all copies of the model share."""

    def __init__(self) -> None:
        super().__init__()
        calls = [0]

        def shrink(gradient: Tensor) -> Tensor:
            calls[0] += 1
            return gradient * (calls[0] < 3)

        self.stem.weight.register_hook(shrink)


class GoesInCycles(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 0.5, 2.0])

    def forward(self, value: Tensor) -> Tensor:
        scale = next(self.scales) if self.training else 1.0
        return self.head(self.body(value) * scale)


class _Centers(Block):
    """Puts another tensor in the place of its buffer, as DINO does with the centre of its teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        found = super().forward(value) - self.center
        if self.training:
            self.center = 0.5 * self.center + 0.5 * found.detach().mean(0)
        return found


class ReplacesACenter(Base):
    block = _Centers


class _CountsBackward(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

        def count(module: nn.Module, given: Any, returned: Any) -> None:
            module.passes += 0.5

        self.register_full_backward_hook(count)


class ChangesABufferInBackward(Base):
    block = _CountsBackward


class SharesABuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_buffer("step", torch.zeros(()))
        self.last.register_buffer("step", self.first.step)

    def forward(self, value: Tensor) -> Tensor:
        self.first.step += self.training
        return super().forward(value) * (1 + self.last.step)


@dataclass(frozen=True)
class Row:
    """Says what becomes of a model: `refusal` is what its pipelines are refused with, or None if it can be cut."""

    model: type[nn.Module]
    refusal: str | None = None


PARTS = "it does not run in parts"
DRAWS = "draws from Python's or numpy's random numbers"
REFUSALS = {
    "LeavesTiesAlone": "in the same order each time",
    "CountsInAHook": r"changes a hook of stem\.weight",
    "GoesInCycles": "scales, which its code sets, is not the same|its outputs differ",
    "SharesABuffer": "are one buffer that changes",
    "DropsLayersByPython": DRAWS,
    "DropsLayersByNumpy": DRAWS,
    "HookThatKeeps": PARTS,
    "SharesMemory": "different tensors in the same memory",
    "LooksAtWeight": "view, which its code sets",
    "FollowsByAverage": "its outputs differ",
    "CopiesABlock": "in the same order each time",
    "SharesAnObject": r"changes tests\.awkward_states\.OBJECT",
    "SharesAnArray": r"\.ARRAY, which stages",
    "SharesAFunction": r"\.scaled, which stages",
    "SharesTheEnvironment": "changes os.environ",
    "CountsInAnObject": "counter, which its code sets, is not the same",
    "OrdersRows": "needs rows in the order of the whole batch",
    "ReadsAProperty": "sets calls, which ReadsAProperty reads",
    "ReadsACounterInTrain": "sets calls, which train reads",
    "SeedsInForward": "seeds PyTorch's random numbers",
    "RemembersByDefault": r"changes .*RemembersByDefault\.forward",
    "DrawsFromItsOwn": r"a generator of its own \(generator\)",
}
ROWS = [
    Row(kind, REFUSALS.get(name))
    for module in (awkward_models, sys.modules[__name__])
    for name, kind in list(vars(module).items())
    if isinstance(kind, type) and issubclass(kind, Base) and kind.__module__ == module.__name__ and kind is not Base
]
