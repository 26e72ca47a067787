"""Models of that kind with tensors in unusual places, and the table of all: `ROWS` says what becomes of each one."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import awkward_models, awkward_states
from tests.awkward_models import WIDTH, Base, Block


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
    "SharesAFunction": r"\.noted, which stages",
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
    for module in (awkward_models, awkward_states, sys.modules[__name__])
    for name, kind in list(vars(module).items())
    if isinstance(kind, type) and issubclass(kind, Base) and kind.__module__ == module.__name__ and kind is not Base
]
