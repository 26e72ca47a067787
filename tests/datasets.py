"""Data sets as users write them, named in jobs as `tests.datasets:NAME`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, random_split


class Points(Dataset[Any]):
    """Pairs of 5 numbers and 2 numbers to learn; `broken` samples cannot be read."""

    def __init__(self, samples: int = 61, noise: float = 0.0, broken: Sequence[int] = (), marks: str = "") -> None:
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(samples, 5, generator=generator)
        self.values = torch.randn(samples, 2, generator=generator)
        self.noise, self.broken, self.marks = noise, set(broken), marks

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.marks:
            with open(self.marks, "a", encoding="utf-8") as file:
                file.write(f"{index}\n")
        if index in self.broken:
            raise ValueError(f"the disk lost point {index}")
        point = self.points[index]
        return point + self.noise * torch.randn(5) if self.noise else point, self.values[index]


class Fatal(Points):
    """Points of which those after the 30th end the process that loads them, or ask it for too much memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.how == "memory" and index > 30:
            raise MemoryError
        if multiprocessing.parent_process() is not None and index > 30:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Named(Dataset[Any]):
    """Two inputs by name, and a mapping as the target; everything is a number of Python or numpy."""

    num_classes = 7

    def __init__(self, swap: bool = False) -> None:
        self.swap = swap

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy

        inputs = {"left": numpy.full(3, float(index)), "right": index}
        if self.swap and index % 2:
            inputs = dict(reversed(inputs.items()))
        return {"inputs": inputs, "targets": {"value": index / 2, "pair": (index, [index > 3])}}


class Classes(Dataset[Any]):
    """Images of one of three classes; the labels can be read without the images."""

    classes = ("a", "b", "c")

    def __init__(self, samples: int = 30) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 4, 4), float(index)), self.target(index)

    def target(self, index: int) -> int:
        return index % 3


class Ragged(Points):
    """Points of different lengths."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, value = super().__getitem__(index)
        return point[: 4 if index == 9 else 5], value


class Stuck(Points):
    """Every point but the first ones takes for ever, in a process that loads samples, or on one rank."""

    reads = 0

    def __init__(self, samples: int = 61, rank: int | None = None) -> None:
        super().__init__(samples)
        self.rank = rank

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        here = multiprocessing.parent_process() is not None or os.environ.get("RANK") == str(self.rank)
        if here and self.reads > 18:
            threading.Event().wait()
        return super().__getitem__(index)


class Endless(IterableDataset[Any]):
    """No sample has an index."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Sized(Endless):
    """No sample has an index, although their number is known."""

    def __len__(self) -> int:
        return 1


class Lengthless(Points):
    """A mistake in `__len__`."""

    def __len__(self) -> int:
        raise TypeError("how should I know")


class Strange(Points):
    """Points as `how` says: tensors that are not dense, have a gradient, a strange dtype or no values, or words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        import numpy

        point, value = super().__getitem__(index)
        match self.how:
            case "sparse":
                return point.to_sparse(), value.to_sparse()
            case "gradient":
                return point.requires_grad_() * 1, value
            case "uint16":
                return numpy.arange(5, dtype=numpy.uint16) + index, value
            case "complex":
                return point + 1j, value
            case "meta":
                return point.to("meta"), value
            case "word":
                return point, "large"
        raise SystemExit(f"no {self.how}")


def split() -> list[Subset[Any]]:
    """Two parts in a list, as torch returns them."""
    return random_split(Points(), [50, 11], torch.Generator().manual_seed(1))


def pair(train: int = 20, test: int = 5) -> tuple[Points, Points]:
    """A training and a held-out part."""
    return Points(train), Points(test)


def part() -> Subset[Any]:
    """A part of a data set, which keeps its classes."""
    return Subset(Classes(), range(10, 20))


def from_files(folder: str) -> Points:
    """Points from a folder that may not be there."""
    return Points(int((Path(folder) / "count").read_text()))


def three() -> tuple[int, int, int]:
    """Too much."""
    return 1, 2, 3


def failing(reason: str) -> None:
    """Code with a mistake."""
    raise RuntimeError(reason)


def numbers() -> Dataset[Any]:
    """Classes, without saying how many."""

    class Unnamed(Classes):
        classes = None  # type: ignore[assignment]

    return Unnamed()
