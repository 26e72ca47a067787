"""Sums gradients in fewer bytes: as 16-bit floats, as products of thin matrices (PowerSGD), or in 4 bits.

All are lossy; plain sums are the default everywhere. PowerSGD (Vogels et al., NeurIPS 2019) is torch's own
communication hook, with error feedback and warm start. Its state is not saved in checkpoints, so a resumed run sends
its first steps uncompressed, as a new run does.

For 4 bits, every rank owns a part of the vector. In the first phase it sends each other rank that rank's part, encoded;
the owner decodes the parts, and adds them to its own as 32-bit floats, in the order of ranks. In the second phase it
sends the encoded sum to all, and every rank, the owner too, goes on with what is decoded: so all of them hold the same
bits. A rank sends 2 (n - 1) / n of the encoded vector, as a ring does of the whole one.

What a rank's rounding leaves out in one sum is added to what it encodes in the next one (error feedback; Seide et al.,
Interspeech 2014), in both phases (DoubleSqueeze; Tang et al., ICML 2019). So no part of a gradient is lost, it only
comes later, and values are rounded to the nearest step. The remainders, as large as the vector and one part of it, live
as long as the sum: after a restart, or once ranks come or go, they begin with zeros, and the run goes on a little
differently than it would have without an interruption.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group, TreeSum
from horizonml.comm.work import Deferred, Work
from horizonml.engine.quantise import TILE, decode, encode, encoded_bytes
from horizonml.engine.sync.allreduce import AllReduce, Bucket
from horizonml.engine.sync.base import Members
from horizonml.plan.syncs import POWERSGD_RANK, POWERSGD_WORTH

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


class HalfAllReduce(Compressed):
    """Sums gradients as 16-bit floats."""

    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        sent = flat.half()
        work = self._staging.sum(sent, self._all_reduce)

        def take() -> None:
            work.wait()
            flat.copy_(sent)

        return Deferred(take)


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
            return Deferred(lambda: self._run_hook(host, there))

        return self._staging.sum(flat, begin)

    @torch.no_grad()
    def _run_hook(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        bucket: Any = SimpleNamespace(  # has the methods of DDP's buckets that the hook calls
            buffer=lambda: flat, gradients=lambda: list(views), index=lambda: 0, is_last=lambda: True
        )
        self._group.follow(powerSGD_hook(self._state, bucket)).wait()
        flat.mul_(len(self._members.ranks))


def halves(gradients: Tensor) -> Tensor:
    """Return gradients that were converted to 16-bit floats and back, for the planner's cost of `fp16`."""
    return gradients.half().float()


def thin(gradients: Tensor) -> Tensor:
    """Return what PowerSGD leaves of a matrix: it makes two thin products, and subtracts theirs. See `halves`."""
    left: Tensor = torch.linalg.qr(gradients @ torch.ones(gradients.shape[1], POWERSGD_RANK)).Q
    return gradients - left @ (gradients.T @ left).T


def coded_bytes(values: int, members: int, place: int) -> int:
    """Return the bytes that the member at `place` sends in a sum of so many values; it receives others' parts."""
    sizes = [encoded_bytes(stop - start) for start, stop in parts_of(values, members)]
    return sum(sizes) - sizes[place] + (members - 1) * sizes[place]


def parts_of(values: int, members: int) -> list[tuple[int, int]]:
    """Return each member's part `[start, stop)` of a vector, in whole tiles except for the last one's tail."""
    tiles = -(-values // TILE)
    ends = [min(values, tiles * place // members * TILE) for place in range(members)] + [values]
    return list(itertools.pairwise(ends))


class CodedSum:
    """Sums vectors of one length over two or more ranks; at most one sum is under way at a time."""

    def __init__(self, group: Group, ranks: Sequence[int], tag: int, values: int) -> None:
        """Prepare sums of `values` float32 values; all of `ranks` make the same calls.

        Messages have `tag` and `tag + 1`, which nothing else may use.
        """
        self._group, self._ranks, self._tag = group, tuple(ranks), tag
        self._place = self._ranks.index(group.rank)
        self._parts = parts_of(values, len(self._ranks))
        start, stop = self._parts[self._place]
        self.remainders = [torch.zeros(values), torch.zeros(stop - start)]  # of the two phases
        self.bytes_sent = coded_bytes(values, len(self._ranks), self._place)
        own = encoded_bytes(stop - start)
        self._arriving = {rank: torch.empty(own, dtype=torch.uint8) for rank in self._others}
        self._sums = {
            rank: torch.empty(encoded_bytes(end - begin), dtype=torch.uint8)
            for rank, (begin, end) in zip(self._ranks, self._parts, strict=True)
        }
        self._posted: list[dict[int, Work]] = []

    @property
    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one, so that not all of them send to the same one first."""
        count = len(self._ranks)
        return [self._ranks[(self._place + step) % count] for step in range(1, count)]

    def post(self) -> None:
        """Post the receives of both phases early, so that what arrives finds its destination."""
        if not self._posted:
            first = {rank: self._group.receive(self._arriving[rank], rank, self._tag) for rank in self._others}
            second = {rank: self._group.receive(self._sums[rank], rank, self._tag + 1) for rank in self._others}
            self._posted = [first, second]

    @torch.no_grad()
    def begin(self, vector: Tensor) -> CodedWork:
        """Begin to sum `vector` in place; it must not change until the work is done."""
        self.post()
        sent = []
        for rank in self._others:
            start, stop = self._parts[self._ranks.index(rank)]
            part = self._remember(vector[start:stop].float(), self.remainders[0][start:stop])
            sent.append((self._group.send(part, rank, self._tag), rank, part))
        return CodedWork(self, vector, sent)

    def _remember(self, values: Tensor, remainder: Tensor) -> Tensor:
        """Return the encoded sum of values and the `remainder`, which becomes what that leaves out."""
        wanted = values + remainder
        part = encode(wanted, rotate=True)
        torch.sub(wanted, decode(part, wanted.numel(), rotate=True), out=remainder)
        return part

    @torch.no_grad()
    def send_sum(self, vector: Tensor) -> list[tuple[Work, int, Tensor]]:
        """Wait for the others' parts of this rank's part of `vector`, add them up, and begin to send the sum."""
        start, stop = self._parts[self._place]
        total = torch.zeros(stop - start)
        for rank in self._ranks:  # in an order that does not depend on who is first
            if rank == self._group.rank:
                total += vector[start:stop]
            else:
                self._group.wait(self._posted[0][rank], rank)
                total += decode(self._arriving[rank], stop - start, rotate=True)
        own = self._remember(total, self.remainders[1])
        self._sums[self._group.rank] = own
        return [(self._group.send(own, rank, self._tag + 1), rank, own) for rank in self._others]

    @torch.no_grad()
    def take(self, vector: Tensor) -> None:
        """Wait for the other parts of the sum, and write all of it into `vector`."""
        posted, self._posted = self._posted, []
        for rank, (start, stop) in zip(self._ranks, self._parts, strict=True):
            if rank != self._group.rank:
                self._group.wait(posted[1][rank], rank)
            vector[start:stop] = decode(self._sums[rank], stop - start, rotate=True)

    def finish(self, sent: Sequence[tuple[Work, int, Tensor]]) -> None:
        """Wait until everything has been sent."""
        for work, rank, _ in sent:
            self._group.wait(work, rank)


class CodedWork:
    """Stands for a sum that is under way."""

    def __init__(self, coded: CodedSum, vector: Tensor, sent: list[tuple[Work, int, Tensor]]) -> None:
        self._coded, self._vector, self._sent = coded, vector, sent
        self._summed = False

    def halfway(self) -> None:
        """Wait for the first phase and begin the second; where several sums are under way, call it for each first."""
        if not self._summed:
            self._summed = True
            self._sent += self._coded.send_sum(self._vector)

    def wait(self) -> None:
        """Block until the vector holds the sum. Raises PeerLost."""
        self.halfway()
        self._coded.take(self._vector)
        self._coded.finish(self._sent)


_MOST_BUCKETS = 1 << 12  # of a stage


class Int4AllReduce(Compressed):
    """Sums gradients in 4 bits per value each way, with error feedback. A bucket is sent as soon as it is full."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        super().__init__(module, members)
        channel, first = members.group.channel("coded"), members.number * _MOST_BUCKETS
        assert len(self._buckets) <= _MOST_BUCKETS
        self._sums = {
            id(bucket.flat): CodedSum(
                members.group, members.ranks, channel.tag(2 * (first + number)), bucket.flat.numel()
            )
            for number, bucket in enumerate(self._buckets)
            if bucket.views
        }
        self._under_way: list[CodedWork] = []

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        super().begin(measure_divergence)
        self._under_way = []
        for coded in self._sums.values():
            coded.post()

    def close(self) -> None:
        """See `GradientSync`. What rounding has left out is dropped, too."""
        super().close()
        self._sums, self._under_way = {}, []

    def _bytes_of_gradients(self) -> int:
        return sum(coded.bytes_sent for coded in self._sums.values())

    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        coded, under_way = self._sums[id(flat)], self._under_way

        def begin(host: Tensor) -> Work:
            work = coded.begin(host)
            under_way.append(work)

            def take() -> None:
                for one in under_way:  # the first one that is waited for takes all others halfway, too
                    one.halfway()
                work.wait()

            return Deferred(take)

        return self._staging.sum(flat, begin)
