"""Ranks on a pretended device: its copies to the host are as late, and messages as short-lived, as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.engine import session
from horizonml.engine.staging import Overlapping
from horizonml.state.train_state import TrainState
from tests.distributed.pool import Pool
from tests.pretend import CUDA, PretendDevice, Pretended

_EVERY = 3  # copies, one of which is complete as soon as somebody looks


class LateCopy:
    """A copy that is made when somebody waits for it, so it shows what was written meanwhile."""

    def __init__(self, source: Tensor, soon: bool) -> None:
        assert isinstance(source, Pretended), "what is brought to the host has to be on the device"
        self.host = torch.empty_like(source.detach().inner, memory_format=torch.contiguous_format)
        self._source, self._soon = source.detach(), soon

    def query(self) -> bool:
        if self._soon:
            self.synchronize()
        return self._soon

    def synchronize(self) -> None:
        self.host.copy_(self._source.inner)


class LateStaging(Overlapping):
    """Copies late, and spoils a message of the host once it is on the device: nobody may use it any more."""

    late: ClassVar[int] = 0  # copies that were begun by this process

    def _begin_copy(self, tensor: Tensor) -> tuple[Tensor, LateCopy]:
        LateStaging.late += 1
        copy = LateCopy(tensor, LateStaging.late % _EVERY == 0)
        return copy.host, copy

    def to_device(self, tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, Pretended), "what is brought to the device has to be on the host"
        found = super().to_device(tensor)
        _spoil(tensor)
        return found

    def _put(self, host: Tensor, into: Tensor) -> None:
        super()._put(host, into)
        _spoil(host)


class NarrowStaging(LateStaging):
    """A device that has no 64-bit floats."""

    has_float64: ClassVar[bool] = False


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 85)


@contextmanager
def every_state_on_device(staging: type[LateStaging] = LateStaging) -> Iterator[None]:
    """Pretend a device that every state of this process is on, unless it is told otherwise."""
    initialise = TrainState.__init__

    def on_the_device(self: TrainState, *arguments: Any, **others: Any) -> None:
        initialise(self, *arguments, **{**others, "device": CUDA})

    chosen = session.staging_for
    TrainState.__init__, session.staging_for = on_the_device, staging  # type: ignore[method-assign, assignment]
    try:
        with PretendDevice(narrow=not staging.has_float64):
            yield
    finally:
        TrainState.__init__, session.staging_for = initialise, chosen  # type: ignore[method-assign]


def run_on(
    rank: int,
    world_size: int,
    store: Store,
    where: frozenset[int],
    function: Any,
    *arguments: Any,
    staging: type[LateStaging] = LateStaging,
) -> Any:
    """Run what a test runs on each rank; the states of the ranks in `where` are on a pretended device."""
    if rank not in where:
        return function(rank, world_size, store, *arguments)
    before = LateStaging.late
    with every_state_on_device(staging):
        found = function(rank, world_size, store, *arguments)
    assert LateStaging.late > before, "nothing was copied from the device"
    return found


def run_narrowly(rank: int, world_size: int, store: Store, *arguments: Any) -> Any:
    """The same on a device that has no 64-bit floats."""
    return run_on(rank, world_size, store, *arguments, staging=NarrowStaging)


@dataclass
class OnDevice(Pool):
    """A pool of which some ranks are on a pretended device."""

    pool: Pool
    where: frozenset[int]

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """See `Pool`."""
        return self.pool.run(world_size, run_on, self.where, function, *arguments)
