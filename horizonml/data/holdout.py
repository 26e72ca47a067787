"""Divides samples into those to train on and those to evaluate on, in the same way for every seed and plan."""

from __future__ import annotations

import torch
from torch import Tensor

from horizonml.data.seeds import name_seed
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError

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


def subset(samples: int, wanted: int) -> Tensor:
    """Return the indices of the samples to train on, of a training part."""
    return torch.arange(samples) if wanted == samples else _permutation(samples)[:wanted]


def _permutation(samples: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(name_seed(SPLIT_SEED, samples)))
