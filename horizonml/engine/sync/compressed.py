"""Sums of gradients that send fewer bytes: in 16 bits, or as products of thin matrices (PowerSGD).

Both are lossy; `none` is the default everywhere. PowerSGD (Vogels et al., NeurIPS 2019) is torch's own communication
hook, with error feedback and warm start; what it has to remember is not in checkpoints, so a resumed run sends the
first steps whole, as a new one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from horizonml.engine.group import Group, Work
from horizonml.plan.gradients import POWERSGD_RANK, POWERSGD_WORTH, powersgd_numbers

WHOLE_STEPS = 10  # before PowerSGD begins


class Compressed(Protocol):
    """A way of summing buckets."""

    @property
    def ratio(self) -> float:
        """Bytes that are summed in a step, compared with float32's."""

    def begin(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        """Begin to sum `flat`, of which `views` are the gradients, in place; all is done when the work is."""


def compressed(kind: str, group: Group, ranks: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> Compressed:
    """The way named `kind`: "fp16" or "powersgd"; `shapes` are those of the parameters."""
    return _Half(group, ranks) if kind == "fp16" else _PowerSgd(group, ranks, shapes)


def compression_ratio(kind: str, shapes: Sequence[Sequence[int]]) -> float:
    """Numbers that travel, once compression has begun, compared with those of float32 sums."""
    if kind == "powersgd":
        every = sum(math.prod(shape) for shape in shapes)
        return sum(map(powersgd_numbers, shapes)) / every if every else 1.0
    return 0.5 if kind == "fp16" else 1.0


@dataclass
class _HalfSum:
    flat: Tensor
    sent: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.sent)


class _Half:
    """Sums of 16-bit floats."""

    ratio = 0.5

    def __init__(self, group: Group, ranks: tuple[int, ...]) -> None:
        self._group, self._ranks = group, ranks

    def begin(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        sent = flat.half()
        return _HalfSum(flat, sent, self._group.all_reduce(sent, self._ranks))


@dataclass(frozen=True)
class _Bucket:
    """What torch's hook asks of DDP's buckets."""

    flat: Tensor
    views: Sequence[Tensor]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return list(self.views)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@dataclass
class _WhenWaitedFor:
    start: Callable[[], Any]

    def wait(self) -> None:
        self.start()


class _PowerSgd:
    """torch's hook, which averages.

    It begins some of its sums on other threads, so it has to run while this rank begins no other sum: otherwise the
    members would not all have the same order of sums. So it runs when the work is waited for.
    """

    def __init__(self, group: Group, ranks: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._members = len(ranks)
        self._thin = compression_ratio("powersgd", shapes)
        self._state = PowerSGDState(
            group.among(ranks),
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=WHOLE_STEPS,
            min_compression_rate=POWERSGD_WORTH,
        )
        state = self._state
        group.at_close(lambda: setattr(state, "process_group", None))

    @property
    def ratio(self) -> float:
        return self._thin if self._state.iter >= WHOLE_STEPS else 1.0

    def begin(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        return _WhenWaitedFor(lambda: self._sum(flat, views))

    @torch.no_grad()
    def _sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        powerSGD_hook(self._state, _Bucket(flat, views)).wait()  # type: ignore[arg-type]
        flat.mul_(self._members)
