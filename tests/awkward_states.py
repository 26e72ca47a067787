"""More models of that kind: what their code keeps, and where, is what a cut may lose."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

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


def noted() -> None:
    """Has an attribute that a block sets."""


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
    write = staticmethod(lambda value: setattr(noted, "factor", value))
    read = staticmethod(lambda: getattr(noted, "factor", 1.0))


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
    block = _DetachesLater
