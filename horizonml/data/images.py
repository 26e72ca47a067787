"""Provides the data sets of labelled images: their descriptions, and their samples by index.

A rank asks for the images, the labels, or both: the first stage of a plan needs only images, and the last only labels.
The stages between need neither and read nothing.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import Data, DataInfo, Inputs, TensorSpec
from horizonml.data.files import (
    PHOTO_MEAN,
    PHOTO_SIZE,
    PHOTO_STD,
    ArraySource,
    FolderSource,
    FolderSplits,
    ImageSource,
    load_torchvision,
)
from horizonml.data.sampler import SPLIT_SEED, divide, hold_out, in_order, name_seed, subset
from horizonml.data.spec import DataSpec

_SYNTHETIC_SAMPLES = 10_000
_SYNTHETIC_CLASSES = 10


@dataclass(frozen=True)
class _Known:
    """Describes a data set that this module knows by name; zeros stand for what the data itself determines."""

    classes: int
    shape: tuple[int, int, int]
    train: int
    test: int  # samples of its own test split
    mean: float  # of the pixels, from 0 to 1
    std: float
    mirror: bool = False  # whether a mirrored image still belongs to its class


_KNOWN = {
    "cifar10": _Known(10, (3, 32, 32), 50_000, 10_000, 0.473, 0.251, mirror=True),
    "svhn": _Known(10, (3, 32, 32), 73_257, 26_032, 0.451, 0.199),
    "mnist": _Known(10, (1, 28, 28), 60_000, 10_000, 0.131, 0.308),
    "digits": _Known(10, (1, 8, 8), 1_797, 0, 0.305, 0.376),
    "folder": _Known(0, (3, 0, 0), 0, 0, PHOTO_MEAN, PHOTO_STD, mirror=True),
    "synthetic": _Known(0, (3, 0, 0), 0, 0, 0.0, 1.0, mirror=True),
}


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the data without reading it, or None for a folder that this machine does not have.

    The job's own `data.channels` takes precedence over the number that the model expects. Raises DataError.
    """
    if spec.name == "synthetic":
        train = spec.samples or _SYNTHETIC_SAMPLES
        size = spec.image_size or 32
        wanted = spec.channels or channels or 3
        classes = spec.classes or _SYNTHETIC_CLASSES
        return _info(classes, (wanted, size, size), train, max(1, round(train * spec.holdout)))
    known = _KNOWN[spec.name]
    classes, shape, train, test = known.classes, known.shape, known.train, known.test
    labels: list[str] = []
    if spec.name == "folder":
        assert spec.folder is not None
        if not Path(spec.folder).is_dir():
            return None
        splits = FolderSplits(Path(spec.folder))
        size = spec.image_size or PHOTO_SIZE
        labels, shape, train, test = splits.classes, (3, size, size), len(splits.train), len(splits.test)
        classes = len(labels)
    train, test = divide(spec, train, test)
    height, width = (spec.image_size, spec.image_size) if spec.image_size else shape[1:]
    wanted = spec.channels or channels or shape[0]
    return replace(_info(classes, (wanted, height, width), train, test), labels=tuple(labels))


def normalisation(spec: DataSpec) -> tuple[float, float] | None:
    """Return the mean and the standard deviation by which pixels from 0 to 1 are normalised, or None without pixels."""
    known = _KNOWN.get(spec.name) if spec.name != "synthetic" else None
    return (known.mean, known.std) if known is not None else None


def _info(classes: int, shape: tuple[int, int, int], train: int, held_out: int) -> DataInfo:
    return DataInfo(train, held_out, (TensorSpec(shape),), (), classes, TensorSpec((), torch.int64))


class ImageSplit:
    """Provides training or held-out images with their labels by index, counted from 0."""

    def __init__(self, source: ImageSource, members: Tensor, info: DataInfo, spec: DataSpec) -> None:
        """Prepare the split; `members` are the indices of its samples in `source`."""
        self._source, self._members, self._info = source, members, info
        self._known, self._augment = _KNOWN[spec.name], spec.augment

    def inputs(self, indices: Tensor) -> Tensor:
        """Return normalised float32 images `[len(indices), channels, height, width]`."""
        images = self._source.images(self._members[indices])
        if images.dtype == torch.uint8:
            images = images.float().div_(255.0).sub_(self._known.mean).div_(self._known.std)
        channels, height, width = self._info.inputs[0].shape
        if images.shape[1] != channels:
            images = images.expand(-1, 3, -1, -1) if channels == 3 else images.mean(1, keepdim=True)
        if images.shape[2:] != (height, width):
            images = functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
        return images.contiguous()

    def targets(self, indices: Tensor) -> Tensor:
        """Return the images' classes, int64 `[len(indices)]`."""
        return self._source.labels(self._members[indices])

    def augment(self, inputs: Inputs, batch: int, start: int, seed: int) -> Tensor:
        """Return the images, shifted and mirrored at random if the job asks for it.

        They are the samples from `start` on of a batch of `batch` samples. The random numbers are drawn for the whole
        batch, so a sample is varied in the same way on whichever rank holds it.
        """
        assert isinstance(inputs, Tensor)
        if not self._augment:
            return inputs
        generator = torch.Generator().manual_seed(seed)
        reach = max(1, inputs.shape[-1] // 8)
        draws = torch.randint(0, 2 * reach + 1, (batch, 2), generator=generator)
        flips = torch.rand(batch, generator=generator) < 0.5
        own = slice(start, start + len(inputs))
        rows = draws[own, 0, None] + torch.arange(inputs.shape[2])
        columns = draws[own, 1, None] + torch.arange(inputs.shape[3])
        if self._known.mirror:
            columns = torch.where(flips[own, None], columns.flip(1), columns)
        padded = functional.pad(inputs, (reach, reach, reach, reach))
        each = torch.arange(len(inputs))[:, None, None]
        return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool = True, targets: bool = True) -> Data:
    """Read the wanted parts of the data set that `info` describes, and keep no other in memory. Raises DataError."""
    if inputs or targets:
        train, test = _read(spec, info, cache)
    else:
        train = test = (ArraySource(None, None), torch.empty(0, dtype=torch.int64))
    for source, _ in (train, test):
        if isinstance(source, ArraySource):
            source.keep(inputs, targets)
    splits = [ImageSplit(source, members, info, spec) for source, members in (train, test)]
    whole = ImageSplit(train[0], in_order(train[1], test[1]), info, spec) if train[0] is test[0] else None
    folders = [source for source, _ in (train, test) if isinstance(source, FolderSource)]
    identity = "".join(one.identity for one in folders) if folders and spec.corrupt == "skip" else None
    return Data(info, splits[0], splits[1], identity=identity, whole=whole)


_Part = tuple[ImageSource, Tensor]  # a source, and the indices of those of its samples that belong to a split


def _read(spec: DataSpec, info: DataInfo, cache: Path) -> tuple[_Part, _Part]:
    """Return the sources of the training and the held-out samples."""
    own_test: ImageSource | None
    if spec.name == "synthetic":
        train, test = _synthetic(info, "train"), _synthetic(info, "held out")
        return (train, torch.arange(info.train)), (test, torch.arange(info.held_out))
    source: ImageSource
    if spec.name == "digits":
        source, own_test = _digits(), None
    elif spec.name == "folder":
        assert spec.folder is not None
        splits, size = FolderSplits(Path(spec.folder)), info.inputs[0].shape[1]
        source = FolderSource(splits.train, splits.classes, size)
        own_test = FolderSource(splits.test, splits.classes, size) if splits.test else None
    else:
        folder = Path(spec.folder) if spec.folder else cache
        source = load_torchvision(spec.name, folder, train=True, download=spec.download)
        own_test = load_torchvision(spec.name, folder, train=False, download=spec.download)
    if own_test is not None:
        return (source, subset(len(source), info.train)), (own_test, torch.arange(info.held_out))
    kept, held_out = hold_out(len(source), info.train, info.held_out)
    return (source, kept), (source, held_out)


def _digits() -> ArraySource:
    with resources.files("horizonml.data").joinpath("digits.csv.gz").open("rb") as file:
        text = gzip.decompress(file.read()).decode()
    table = torch.tensor([[int(value) for value in line.split(",")] for line in text.splitlines()])
    images = (table[:, :64] * 255 // 16).to(torch.uint8).reshape(-1, 1, 8, 8)
    return ArraySource(images, table[:, 64].clone())


def _synthetic(info: DataInfo, split: str) -> ArraySource:
    """Return a pool of class patterns in strong noise, which is reused for any number of samples."""
    generator = torch.Generator().manual_seed(name_seed(SPLIT_SEED, "synthetic"))
    pool = info.outputs * max(1, 256 // info.outputs)
    labels = torch.arange(pool) % info.outputs
    patterns = torch.randn(info.outputs, *info.inputs[0].shape, generator=generator)
    noise = torch.randn(
        pool, *info.inputs[0].shape, generator=generator.manual_seed(name_seed(SPLIT_SEED, "synthetic", split))
    )
    return ArraySource((patterns[labels] + 3 * noise) / 10**0.5, labels, wrap=True)
