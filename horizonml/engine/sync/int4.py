"""Sums gradients in 4 bits per value; see `CodedSum`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from horizonml.comm.work import Work
from horizonml.engine.sync.base import Members
from horizonml.engine.sync.coded_sum import CodedSum, CodedWork
from horizonml.engine.sync.compressed import Compressed

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
