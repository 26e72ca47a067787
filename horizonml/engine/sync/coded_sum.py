"""Sums gradients in 4 bits per value each way, and feeds back what rounding has left out.

Every rank owns a part of the vector. In the first phase it sends each other rank that rank's part, encoded; the owner
decodes the parts, and adds them to its own as 32-bit floats, in the order of ranks. In the second phase it sends the
encoded sum to all, and every rank, the owner too, goes on with what is decoded: so all of them hold the same bits. A
rank sends 2 (n - 1) / n of the encoded vector, as a ring does of the whole one.

What a rank's rounding leaves out in one sum is added to what it encodes in the next one (error feedback; Seide et al.,
Interspeech 2014), in both phases (DoubleSqueeze; Tang et al., ICML 2019). So no part of a gradient is lost, it only
comes later, and values are rounded to the nearest step. The remainders, as large as the vector and one part of it, live
as long as the sum: after a restart, or once ranks come or go, they begin with zeros, and the run goes on a little
differently than it would have without an interruption.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.engine.quantise import TILE, decode, encode, encoded_bytes
from horizonml.engine.sync.base import Members
from horizonml.engine.sync.compressed import Compressed


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

    def __init__(self, group: Group, ranks: Sequence[int], tag: int, values: int, rotate: bool = True) -> None:
        """Prepare sums of `values` float32 values; all of `ranks` make the same calls.

        Messages have `tag` and `tag + 1`, which nothing else may use. `rotate` is that of `quantise.encode`.
        """
        self._group, self._ranks, self._tag, self._rotate = group, tuple(ranks), tag, rotate
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
        part = encode(wanted, self._rotate)
        torch.sub(wanted, decode(part, wanted.numel(), self._rotate), out=remainder)
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
                total += decode(self._arriving[rank], stop - start, self._rotate)
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
            vector[start:stop] = decode(self._sums[rank], stop - start, self._rotate)

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


@dataclass
class _InTurn:
    """Stands for a bucket's sum. The first one that is waited for takes all others halfway, too."""

    work: CodedWork
    under_way: list[CodedWork]

    def wait(self) -> None:
        for one in self.under_way:
            one.halfway()
        self.work.wait()


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
        coded = self._sums[id(flat)]

        def begin(host: Tensor) -> Work:
            work = coded.begin(host)
            self._under_way.append(work)
            return _InTurn(work, self._under_way)

        return self._staging.sum(flat, begin)
