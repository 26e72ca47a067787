"""Decides by seeds which samples are held out to evaluate on, and which form each batch, alike in every plan.

All ranks compute the same `(epoch, step) -> sample indices`, so every way of training sees the same samples in the same
order, and a resumed run goes on with the sample that it would have seen. Nothing is dropped: the last batch of an epoch
is simply smaller.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horizonml.data.dataset import DataInfo
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError


def name_seed(seed: int, *names: object) -> int:
    """Return a seed of 63 bits from the job's seed and the purpose of the random numbers."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_spare: list[Any] = []  # generators of numpy that are not in use


@contextmanager
def python_seeded(seed: int) -> Iterator[Callable[[], bool]]:
    """Let Python and numpy draw random numbers from `seed` on, and leave their generators as they were.

    What it yields tells whether a number has been drawn from either; it may be asked once, at the end.
    """
    numpy = sys.modules.get("numpy")
    kept, generator, own = random.getstate(), None, None
    random.seed(seed)
    if numpy is not None:  # another generator for a while: copying the state of one takes a third of a millisecond
        generator = numpy.random.get_bit_generator()
        own = _spare.pop() if _spare else numpy.random.MT19937(0)
        numpy.random.set_bit_generator(own)
        numpy.random.seed(seed % 2**32)

    def has_drawn() -> bool:
        """Return whether the next numbers are not the first ones; comparing whole states takes much longer."""
        if random.getrandbits(64) != random.Random(seed).getrandbits(64):
            return True
        if numpy is None or own is None:
            return False
        following = own.random_raw()
        numpy.random.seed(seed % 2**32)
        return bool(own.random_raw() != following)

    try:
        yield has_drawn
    finally:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_bit_generator(generator)
            _spare.append(own)


def python_state() -> tuple[Any, bytes]:
    """Return the state of Python's and numpy's generators, to tell whether something has drawn from them."""
    numpy = sys.modules.get("numpy")
    own = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), own[1].tobytes() + bytes(str(own[2]), "ascii") if own is not None else b""


SPLIT_SEED = 1797  # the held-out samples do not depend on the job's seed, so that runs can be compared


def divide(spec: DataSpec, train: int, test: int) -> tuple[int, int]:
    """Return how many samples to train and to evaluate on, of as many as the data has in each part of its own.

    Without a test part, `data.holdout` of the samples are held out. A single sample can be evaluated, but not trained
    on: `check_divided` tells that. Raises DataError.
    """
    if not test:
        test = max(1, round(train * spec.holdout))
        train -= test
    if spec.samples is not None and spec.samples > train:
        raise DataError(f"data.samples: {spec.samples}, but {spec.name} has {train} training samples; lower it")
    return spec.samples or train, test


def check_divided(spec: DataSpec, train: int, held_out: int) -> None:
    """Raise DataError if there is nothing to train on."""
    if train < 1:
        raise DataError(f"data.holdout: {spec.holdout} leaves no training samples of {train + held_out}")


def in_order(train: Tensor, held_out: Tensor) -> Tensor:
    """Return the indices of the samples of both parts, in the order in which the data has them."""
    return torch.cat([train, held_out]).sort().values


def hold_out(samples: int, train: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the samples to train on, and of those held out, of a set without a test part."""
    order = _permutation(samples)
    return order[held_out:][:train], order[:held_out]


def subset(samples: int, wanted: int, seed: int = SPLIT_SEED) -> Tensor:
    """Return the indices of the wanted number of samples, which the seed draws."""
    return torch.arange(samples) if wanted == samples else _permutation(samples, seed)[:wanted]


def _permutation(samples: int, seed: int = SPLIT_SEED) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(name_seed(seed, samples)))


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
