"""Decides which samples form which batch, with one seeded function that every plan shares.

All ranks compute the same `(epoch, step) -> sample indices`, so every way of training sees the same samples in the same
order, and a resumed run goes on with the sample that it would have seen. Nothing is dropped: the last batch of an epoch
is simply smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizonml.data.dataset import DataInfo
from horizonml.data.seeds import name_seed


class Sampler:
    """Divides a new permutation of the samples into batches for every epoch."""

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        assert samples > 0
        assert batch_size > 0
        self.samples, self.batch_size, self._seed = samples, batch_size, seed
        self._orders: dict[int, Tensor] = {}  # of two epochs: the end of one and the beginning of the next

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches in an epoch, including the smaller last one."""
        return -(-self.samples // self.batch_size)

    def indices(self, epoch: int, step: int) -> Tensor:
        """Return the sample indices, int64 `[batch]`, of a step (from 0) of an epoch (from 0)."""
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(name_seed(self._seed, "order", epoch))
            self._orders[epoch] = self._permutation(generator)
            if len(self._orders) > 2:
                del self._orders[next(iter(self._orders))]
        return self._orders[epoch][step * self.batch_size : (step + 1) * self.batch_size]

    def _permutation(self, generator: torch.Generator) -> Tensor:
        """Return the order of an epoch's samples."""
        return torch.randperm(self.samples, generator=generator)

    def batch_sizes(self) -> set[int]:
        """Return the batch sizes that occur: one, or two if the last batch is smaller."""
        rest = self.samples % self.batch_size
        full = {self.batch_size} if self.samples >= self.batch_size else set()
        return full | ({rest} if rest else set())


class ShardSampler(Sampler):
    """Shuffles the shards, and the samples of each few shards that follow one another.

    Only these few must be at hand at a time, whatever the size of the whole data set.
    """

    def __init__(self, shards: Sequence[int], batch_size: int, seed: int, mixed: int = 4) -> None:
        """`shards` are the number of samples in each shard, `mixed` how many of them are shuffled together."""
        super().__init__(sum(shards), batch_size, seed)
        self._shards, self._mixed = tuple(shards), mixed

    def _permutation(self, generator: torch.Generator) -> Tensor:
        starts = torch.tensor([0, *self._shards]).cumsum(0).tolist()
        order = torch.randperm(len(self._shards), generator=generator).tolist()
        parts = []
        for first in range(0, len(order), self._mixed):
            some = [torch.arange(starts[shard], starts[shard + 1]) for shard in order[first : first + self._mixed]]
            together = torch.cat(some)
            parts.append(together[torch.randperm(len(together), generator=generator)])
        return torch.cat(parts)


def sampler_for(info: DataInfo, batch_size: int, seed: int) -> Sampler:
    """Return the sampler of a data set, which all ranks must make in the same way."""
    return ShardSampler(info.shards, batch_size, seed) if info.shards else Sampler(info.train, batch_size, seed)
