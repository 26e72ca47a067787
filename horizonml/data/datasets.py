"""The data sets: what they look like, and their images and labels by index.

A rank asks for the images, the labels, or both: the first stage of a plan needs only images, the last only labels,
and the stages between need neither and read nothing.
"""

from __future__ import annotations

import dataclasses
import gzip
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.files import FolderSource, FolderSplits, load_torchvision
from horizonml.data.seeds import name_seed
from horizonml.data.source import ArraySource, Source
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError

_SPLIT_SEED = 1797  # the held-out samples are the same whatever the job's seed, so that runs compare
_SYNTHETIC_SAMPLES = 10_000
_FOLDER_IMAGE_SIZE = 224


@dataclass(frozen=True)
class DataInfo:
    """What every rank must know of the data, whether or not it reads any."""

    classes: int
    shape: tuple[int, int, int]  # channels, height, width, as the model sees them
    train: int
    held_out: int


# classes, shape, training and test samples, mean and standard deviation of the pixels
_KNOWN = {
    "cifar10": (10, (3, 32, 32), 50_000, 10_000, 0.473, 0.251),
    "svhn": (10, (3, 32, 32), 73_257, 26_032, 0.451, 0.199),
    "mnist": (10, (1, 28, 28), 60_000, 10_000, 0.131, 0.308),
    "digits": (10, (1, 8, 8), 1_797, 0, 0.305, 0.376),
    "folder": (0, (3, 0, 0), 0, 0, 0.449, 0.226),
}
_MIRROR = frozenset({"cifar10", "folder", "synthetic"})


def describe(spec: DataSpec, channels: int | None = None) -> DataInfo | None:
    """What the data looks like, without reading it; None if it is a folder that this machine does not have.

    `channels` is what the model wants; the job's own `data.channels` comes first. Raises DataError.
    """
    if spec.name == "synthetic":
        train = spec.samples or _SYNTHETIC_SAMPLES
        size = spec.image_size or 32
        wanted = spec.channels or channels or 3
        return DataInfo(spec.classes, (wanted, size, size), train, max(1, round(train * spec.holdout)))
    classes, shape, train, test, _, _ = _KNOWN[spec.name]
    if spec.name == "folder":
        assert spec.folder is not None
        if not Path(spec.folder).is_dir():
            return None
        splits = FolderSplits(Path(spec.folder))
        size = spec.image_size or _FOLDER_IMAGE_SIZE
        classes, shape, train, test = len(splits.classes), (3, size, size), len(splits.train), len(splits.test)
    if not test:
        test = max(1, round(train * spec.holdout))
        train -= test
    if train < 1:
        raise DataError(f"data.holdout: {spec.holdout} leaves no training samples of {train + test}")
    if spec.samples is not None and spec.samples > train:
        raise DataError(f"data.samples: {spec.samples}, but {spec.name} has {train} training samples; lower it")
    height, width = (spec.image_size, spec.image_size) if spec.image_size else shape[1:]
    wanted = spec.channels or channels or shape[0]
    return DataInfo(classes, (wanted, height, width), spec.samples or train, test)


class Split:
    """Training or held-out samples, addressed by indices from 0."""

    def __init__(self, source: Source, members: Tensor, info: DataInfo, mean: float, std: float, mirror: bool) -> None:
        self._source, self._members, self._info = source, members, info
        self._mean, self._std, self._mirror = mean, std, mirror

    def images(self, indices: Tensor) -> Tensor:
        """Normalised float32 images `[len(indices), channels, height, width]`."""
        images = self._source.images(self._members[indices])
        if images.dtype == torch.uint8:
            images = images.float().div_(255.0).sub_(self._mean).div_(self._std)
        channels, height, width = self._info.shape
        if images.shape[1] != channels:
            images = images.expand(-1, 3, -1, -1) if channels == 3 else images.mean(1, keepdim=True)
        if images.shape[2:] != (height, width):
            images = functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
        return images.contiguous()

    def labels(self, indices: Tensor) -> Tensor:
        """Classes, int64 `[len(indices)]`."""
        return self._source.labels(self._members[indices])

    def augment(self, images: Tensor, batch: int, start: int, seed: int) -> Tensor:
        """Shift and mirror `images`, which are the samples from `start` on of a batch of `batch` samples.

        The random numbers are drawn for the whole batch, so a sample looks the same whichever rank holds it.
        """
        generator = torch.Generator().manual_seed(seed)
        reach = max(1, images.shape[-1] // 8)
        draws = torch.randint(0, 2 * reach + 1, (batch, 2), generator=generator)
        flips = torch.rand(batch, generator=generator) < 0.5
        own = slice(start, start + len(images))
        rows = draws[own, 0, None] + torch.arange(images.shape[2])
        columns = draws[own, 1, None] + torch.arange(images.shape[3])
        if self._mirror:
            columns = torch.where(flips[own, None], columns.flip(1), columns)
        padded = functional.pad(images, (reach, reach, reach, reach))
        each = torch.arange(len(images))[:, None, None]
        return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Data:
    """A data set, split for training and evaluation."""

    info: DataInfo
    train: Split
    held_out: Split


def load(spec: DataSpec, info: DataInfo, cache: Path, images: bool = True, labels: bool = True) -> Data:
    """Read what is wanted of the data set that `info` describes; downloads go to `cache`. Raises DataError.

    The splits must not be asked for images without `images`, nor for labels without `labels`: those are not kept in
    memory. Without either nothing is read.
    """
    _, _, _, _, mean, std = _KNOWN.get(spec.name, (0, (0, 0, 0), 0, 0, 0.0, 1.0))
    train: Source
    test: Source
    if not images and not labels:
        train = test = ArraySource(None, None)
        train_members = test_members = torch.empty(0, dtype=torch.int64)
    elif spec.name == "synthetic":
        train, test = _synthetic(info, "train"), _synthetic(info, "held out")
        train_members, test_members = torch.arange(info.train), torch.arange(info.held_out)
    elif spec.name == "digits":
        train = test = _digits()
        train_members, test_members = _hold_out(len(train), info)
    elif spec.name == "folder":
        assert spec.folder is not None
        splits = FolderSplits(Path(spec.folder))
        train = test = FolderSource(splits.train, splits.classes, info.shape[1])
        if splits.test:
            test = FolderSource(splits.test, splits.classes, info.shape[1])
            train_members, test_members = _subset(len(train), info.train), torch.arange(len(test))
        else:
            train_members, test_members = _hold_out(len(train), info)
    else:
        folder = Path(spec.folder) if spec.folder else cache
        train = load_torchvision(spec.name, folder, train=True, download=spec.download)
        test = load_torchvision(spec.name, folder, train=False, download=spec.download)
        train_members, test_members = _subset(len(train), info.train), torch.arange(info.held_out)
    for source in (train, test):
        if isinstance(source, ArraySource):
            source.keep(images, labels)
    mirror = spec.name in _MIRROR
    return Data(
        info,
        Split(train, train_members, info, mean, std, mirror),
        Split(test, test_members, info, mean, std, mirror),
    )


def agree(found: list[DataInfo | None], spec: DataSpec) -> DataInfo:
    """The one description that all ranks that see the data agree on. Raises DataError."""
    seen = {rank: info for rank, info in enumerate(found) if info is not None}
    if not seen:
        raise DataError(f"data.folder: {spec.folder} is not a directory on any rank")
    first = min(seen)
    for rank, info in seen.items():
        if info != seen[first]:
            raise DataError(
                f"data: rank {first} sees {_words(seen[first])}, rank {rank} sees {_words(info)}; "
                "give all ranks the same data"
            )
    return seen[first]


def _words(info: DataInfo) -> str:
    fields = dataclasses.asdict(info)
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _permutation(samples: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(name_seed(_SPLIT_SEED, samples)))


def _hold_out(samples: int, info: DataInfo) -> tuple[Tensor, Tensor]:
    order = _permutation(samples)
    return order[info.held_out :][: info.train], order[: info.held_out]


def _subset(samples: int, wanted: int) -> Tensor:
    return torch.arange(samples) if wanted == samples else _permutation(samples)[:wanted]


def _digits() -> ArraySource:
    with resources.files("horizonml.data").joinpath("digits.csv.gz").open("rb") as file:
        text = gzip.decompress(file.read()).decode()
    table = torch.tensor([[int(value) for value in line.split(",")] for line in text.splitlines()])
    images = (table[:, :64] * 255 // 16).to(torch.uint8).reshape(-1, 1, 8, 8)
    return ArraySource(images, table[:, 64].clone())


def _synthetic(info: DataInfo, split: str) -> ArraySource:
    """A pool of class patterns in much noise, reused for any number of samples."""
    generator = torch.Generator().manual_seed(name_seed(_SPLIT_SEED, "synthetic"))
    pool = info.classes * max(1, 256 // info.classes)
    labels = torch.arange(pool) % info.classes
    patterns = torch.randn(info.classes, *info.shape, generator=generator)
    noise = torch.randn(pool, *info.shape, generator=generator.manual_seed(name_seed(_SPLIT_SEED, "synthetic", split)))
    return ArraySource((patterns[labels] + 3 * noise) / 10**0.5, labels, wrap=True)
