"""Models whose code does something else after some steps than a proof of a few steps has seen.

A stage that would not see it must not train on. `LATE` has the words with which training ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.awkward_models import WIDTH, Base, Block

LATE_AFTER = 6  # steps, which are more than a proof takes


class _Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.aux = 0, None

    @property
    def is_late(self) -> bool:
        return self.calls > LATE_AFTER

    def forward(self, value: Tensor) -> Any:
        self.calls += self.training
        return super().forward(value)


class _ReturnsANumber(_Counts):
    def forward(self, value: Tensor) -> Any:
        return super().forward(value), 0.5 * self.is_late


class WarmsUp(Base):
    block = _ReturnsANumber

    def forward(self, value: Tensor) -> Tensor:
        found, beta = self.middle(self.first(self.stem(value.flatten(1))))
        return self.head(self.last(found)) * (1 + beta)


class _ReturnsMore(_Counts):
    def forward(self, value: Tensor) -> Any:
        found = super().forward(value)
        return found, found.square().mean(1, keepdim=True) if self.is_late else None


class BalancesLater(Base):
    block = _ReturnsMore

    def forward(self, value: Tensor) -> Tensor:
        found, aux = self.middle(self.first(self.stem(value.flatten(1))))
        found = self.head(self.last(found))
        return found if aux is None else found + aux


class _SetsAux(_Counts):
    def forward(self, value: Tensor) -> Any:
        found = super().forward(value)
        self.aux = found.square().mean(1, keepdim=True) if self.is_late else None
        return found


class ReadsAuxLater(Base):
    block = _SetsAux

    def forward(self, value: Tensor) -> Tensor:
        found = self.head(self.body(value))
        return found if self.middle.aux is None else found + self.middle.aux


class _Settings:
    """Is known to one block as an object, and to another by a method of it."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get(self) -> float:
        return self.scale


class _Switches(_Counts):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, value: Tensor) -> Any:
        if self.is_late:
            self.settings.scale = 0.25
        return super().forward(value)


class _Scales(Block):
    def __init__(self, get: Callable[[], float]) -> None:
        super().__init__()
        self.get = get

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.get()


class SharesSettings(Base):
    def __init__(self) -> None:
        super().__init__()
        settings = _Settings()
        self.first, self.last = _Switches(settings), _Scales(settings.get)


class _WritesIntoADict(_Counts):
    def forward(self, value: Tensor, losses: dict[str, Tensor]) -> Any:  # type: ignore[override]
        found = super().forward(value)
        if self.is_late:
            losses["balance"] = found.square().mean(1, keepdim=True)
        return found


class CollectsLosses(Base):
    block = _WritesIntoADict

    def forward(self, value: Tensor) -> Tensor:
        losses: dict[str, Tensor] = {}
        found = self.head(self.last(self.middle(self.first(self.stem(value.flatten(1))), losses)))
        return sum(losses.values(), found)


class _Anchored(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchor", torch.ones(WIDTH))


class GoesThroughBuffers(Base):
    block = _Anchored

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        found = self.head(self.body(value))
        if self.calls > LATE_AFTER:
            found = found * sum(one.mean() for one in self.buffers())
        return found


class ReadsItsState(GoesThroughBuffers):
    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        found = self.head(self.body(value))
        return found * self.state_dict()["stem.weight"].std() if self.calls > LATE_AFTER else found


class SetsAFlagAtItsEnd(Base):
    """Sets a flag that its forward reads where the parts before the last one do not get to."""

    block = lambda: nn.Sequential(*(Block() for _ in range(2)))  # noqa: E731

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.flag = 0, 1.0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += self.training
        found = self.first(self.stem(value.flatten(1)) * self.flag)
        if float(found.detach().sum()) > 1e9:  # which no graph shows
            return found
        found = self.head(self.last(self.middle(found)))
        if self.calls > LATE_AFTER:
            self.flag = 0.5
        return found


class TakesAFew(Base):
    """Hands on the first rows of a batch, which are all of one and of two."""

    block = lambda: nn.Sequential(*(Block() for _ in range(6)))  # noqa: E731

    def forward(self, value: Tensor) -> Tensor:
        found = self.first(self.stem(value.flatten(1)))
        few = found[:4]
        return self.head(self.last(self.middle(found)) + few.mean(0))


class _Tempered(Block):
    temperature = 1.0

    def forward(self, value: Tensor) -> Any:
        return super().forward(value) * type(self).temperature


class _SetsTheClass(_Tempered):
    def __init__(self) -> None:
        super().__init__()
        self.calls, _Tempered.temperature = 0, 1.0

    def forward(self, value: Tensor) -> Any:
        self.calls += self.training
        if self.calls > LATE_AFTER:
            _Tempered.temperature = 0.5
        return super().forward(value)


class SetsItsClassLater(Base):
    block, end = _SetsTheClass, _Tempered


class _DrawsLater(_Counts):
    def forward(self, value: Tensor) -> Any:
        found = super().forward(value)
        return value if self.is_late and random.random() < 0.5 else found


class DrawsLater(Base):
    block = _DrawsLater


class _OpensAfter(_Counts):
    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before = [before]

    def forward(self, value: Tensor) -> Any:
        found = super().forward(value)
        return value if self.before[0] is not None and self.before[0].is_late else found


class LooksAtTheOneBefore(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = _OpensAfter(None)
        self.last = _OpensAfter(self.first)


SETTINGS = {"scale": 1.0}


class _SetsAGlobal(_Counts):
    def forward(self, value: Tensor) -> Any:
        if self.is_late:
            SETTINGS["scale"] = 0.5
        return super().forward(value)


class _ReadsAGlobal(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * SETTINGS["scale"]


class SetsAGlobalLater(Base):
    block, end = _SetsAGlobal, _ReadsAGlobal


class _Prunes(_Counts):
    def forward(self, value: Tensor) -> Any:
        found = super().forward(value)
        return found[:, : WIDTH // 2] if self.is_late else found


class _Pads(Block):
    def forward(self, value: Tensor) -> Tensor:
        missing = WIDTH - value.shape[1]
        return super().forward(nn.functional.pad(value, (0, missing)) if missing else value)


class PrunesLater(Base):
    start, block = _Prunes, _Pads
    end = lambda: nn.Sequential(Block(), Block())  # noqa: E731


class KeepsAList(SetsAFlagAtItsEnd):
    """Decides by the length of a list that it extends at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        found = super().forward(value if len(self._seen) < LATE_AFTER else value * 0.5)
        if self.training:
            self._seen.append(found.detach().mean())
        return found


LISTS = "the model's forward goes through all parameters or buffers"
LATE: list[tuple[type[Base], str]] = [
    (WarmsUp, "middle returns 0.5 where it returned 0.0"),
    (BalancesLater, "middle returns other values beside its tensors than when the model was cut (Tensor, Tensor, "),
    (ReadsAuxLater, "middle.aux has changed, which code in another part of the model reads"),
    (SharesSettings, "first.settings has changed"),
    (CollectsLosses, "middle returns other values beside its tensors than when the model was cut"),
    (GoesThroughBuffers, LISTS),
    (ReadsItsState, LISTS),
    (SetsAGlobalLater, "SETTINGS has changed"),
    (PrunesLater, "each sample's tensors that leave stage 0 have the shapes [[8]], and had [[16]]"),
    (KeepsAList, "_seen has changed"),
    (SetsItsClassLater, "_Tempered.temperature has changed"),
    (DrawsLater, "the code of layers"),
    (LooksAtTheOneBefore, "first.calls has changed"),
    (SetsAFlagAtItsEnd, "flag is 1.0 in one part of the model and 0.5 in another"),
    (TakesAFew, "a tensor that leaves stage 1 has 4 rows for"),
]
