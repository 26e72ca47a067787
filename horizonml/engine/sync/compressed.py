"""Sums gradients in fewer bytes: as 16-bit floats, or as products of thin matrices (PowerSGD).

Both are lossy; plain sums are the default everywhere. PowerSGD (Vogels et al., NeurIPS 2019) is torch's own
communication hook, with error feedback and warm start. Its state is not saved in checkpoints, so a resumed run sends
its first steps uncompressed, as a new run does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.comm.group import TreeSum
from horizonml.comm.work import Work
from horizonml.engine.sync.allreduce import AllReduce, Bucket
from horizonml.engine.sync.base import Members
from horizonml.plan.gradients import POWERSGD_RANK, POWERSGD_WORTH

WHOLE_STEPS = 10  # uncompressed steps before PowerSGD begins


class Compressed(AllReduce, ABC):
    """Sums a compressed form of the gradients. Buffers are never compressed and have a message of their own."""

    def _make_buckets(self, extra: int) -> list[Bucket]:
        buckets = super()._make_buckets(0)
        return [*buckets, Bucket([], extra, self._device)] if extra else buckets

    def _make_tree(self, total: int) -> TreeSum | None:
        return None

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        super().begin(measure_divergence)
        extra = sum(4 * bucket.extra for bucket in self._buckets)
        count = len(self._members.ranks)
        self.bytes_sent = self._bytes_of_gradients() + int(2 * (count - 1) * extra / count)

    def _sum(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        return self._sum_compressed(flat, views) if views else super()._sum(flat, views)

    def _bytes_of_gradients(self) -> int:
        """Return the bytes of gradients that this member sends in a step: along a ring, those of the plan's `Sync`."""
        count, shapes = len(self._members.ranks), [parameter.shape for parameter in self._parameters]
        return int(2 * (count - 1) * self._members.stage.sync.bytes_of(shapes) / count)

    @abstractmethod
    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        """Begin to sum `flat` in place; `views` are its gradients. Waiting for the work completes the sum."""


@dataclass
class _HalfSum:
    flat: Tensor
    sent: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.sent)


class HalfAllReduce(Compressed):
    """Sums gradients as 16-bit floats."""

    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        sent = flat.half()
        return _HalfSum(flat, sent, self._staging.sum(sent, self._all_reduce))


@dataclass(frozen=True)
class _HookBucket:
    """Provides the methods of DDP's buckets that torch's hook calls."""

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


class PowerSgdAllReduce(Compressed):
    """Sums thin matrices with torch's hook, which averages.

    The hook begins some of its sums on other threads, so it must run while this rank begins no other sum; otherwise the
    members would not all have the same order of sums. It therefore runs when the work is waited for.
    """

    def __init__(self, module: nn.Module, members: Members) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        state = PowerSGDState(
            members.group.among(members.ranks, members.number),
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=WHOLE_STEPS,
            min_compression_rate=POWERSGD_WORTH,
        )
        self._state = state
        self._remembered = [state]  # which `close` empties, for the group may live on

        def forget(states: list[PowerSGDState] = self._remembered) -> None:
            for one in states:
                one.process_group = None

        members.group.at_close(forget)
        super().__init__(module, members)

    def close(self) -> None:
        """See `GradientSync`. What PowerSGD remembers goes, too."""
        super().close()
        self._remembered.clear()
        self._state.process_group = None
        for remembered in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            remembered.clear()

    def _make_buckets(self, extra: int) -> list[Bucket]:
        # torch's hook hangs with more than one bucket on gloo.
        buckets = [Bucket(self._parameters[::-1], device=self._device)]
        return [*buckets, Bucket([], extra, self._device)] if extra else buckets

    def _bytes_of_gradients(self) -> int:
        if self._state.iter >= WHOLE_STEPS:
            return super()._bytes_of_gradients()
        count = len(self._members.ranks)
        return 2 * (count - 1) * sum(4 * parameter.numel() for parameter in self._parameters) // count

    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        def begin(host: Tensor) -> Work:
            there = views
            if host is not flat:  # the hook computes where its sums are
                there = [host.as_strided(view.size(), view.stride(), view.storage_offset()) for view in views]
            return _WhenWaitedFor(lambda: self._run_hook(host, there))

        return self._staging.sum(flat, begin)

    @torch.no_grad()
    def _run_hook(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        self._group.follow(powerSGD_hook(self._state, _HookBucket(flat, views))).wait()  # type: ignore[arg-type]
        flat.mul_(len(self._members.ranks))


def halves(gradients: Tensor) -> Tensor:
    """Return gradients that were converted to 16-bit floats and back, for the planner's cost of `fp16`."""
    return gradients.half().float()


def thin(gradients: Tensor) -> Tensor:
    """Return what PowerSGD leaves of a matrix: it makes two thin products, and subtracts theirs. See `halves`."""
    left: Tensor = torch.linalg.qr(gradients @ torch.ones(gradients.shape[1], POWERSGD_RANK)).Q
    return gradients - left @ (gradients.T @ left).T
