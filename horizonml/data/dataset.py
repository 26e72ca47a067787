"""Defines what every data set provides, whatever its samples are, and which rows of a batch a rank needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from horizonml.data.spec import DataSpec
from horizonml.errors import DataOutOfMemory, is_out_of_memory

_NAMES = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
DTYPES: frozenset[torch.dtype] = frozenset(getattr(torch, name) for name in _NAMES)

_MOST_VALUES = 1 << 32  # of one sample
_MOST_DIMENSIONS = 16


def whole(value: Any, most: int) -> int:
    """Return a whole number from 0 to `most`, which may come from elsewhere. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{ascii(value)[:60]} is not a whole number from 0 to {most}")
    return value


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor: its shape without the batch dimension, its dtype, and whether its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    differentiable: bool = True

    @property
    def values_per_sample(self) -> int:
        """Return how many values one sample has."""
        return math.prod(self.shape)

    @property
    def bytes_per_sample(self) -> int:
        """Return the size of one sample in bytes."""
        return self.values_per_sample * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """Return plain JSON values."""
        return [list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, value: Any) -> TensorSpec:
        """Return the description from which `to_json` made `value`. Raises ValueError."""
        shape, name = value
        dtype = getattr(torch, name) if name in _NAMES else None
        if dtype is None:
            raise ValueError(f"{name!r} is not the dtype of a tensor")
        found = cls(tuple(whole(extent, _MOST_VALUES) for extent in shape), dtype)
        if len(found.shape) > _MOST_DIMENSIONS or found.values_per_sample > _MOST_VALUES:
            raise ValueError(f"a sample of shape {list(found.shape)[:_MOST_DIMENSIONS]} is too large")
        return found

    def example(self, rows: int, needs_gradient: bool = False) -> Tensor:
        """Return `rows` synthetic samples to measure with: noise, or zeros for a dtype that is not floating-point."""
        shape = (rows, *self.shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, dtype=self.dtype, requires_grad=needs_gradient and self.differentiable)


MOST_SAMPLES = 1 << 40
MOST_OUTPUTS = 1 << 31

Tree = Tensor | Mapping[str, "Tree"] | Sequence["Tree"]
"""Any nesting of tensors in mappings and sequences; the first dimension of each tensor is the batch."""

Inputs = Tensor | tuple[Tensor, ...]
"""What a model takes: a tensor of any dtype, or several in the order of the task's `InputSpec`."""


def mapped(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """Return a tree with `function` of each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, function) for key, value in tree.items()}
    if tree is None:  # what a model leaves out of its result
        return tree
    return [mapped(value, function) for value in tree]


def detached(tree: Tree) -> Tree:
    """Return the same tree of tensors without their history."""
    return mapped(tree, lambda tensor: tensor.detach())


class Batch(Protocol):
    """Provides the rows of a global batch; a rank reads only those that it needs."""

    @property
    def size(self) -> int:
        """Return the number of samples in the global batch."""

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return rows `start` to `stop - 1` of the model's inputs; the first stage asks for them."""

    def targets(self, start: int, stop: int) -> Tree:
        """Return rows `start` to `stop - 1` of the targets to judge outputs against; the last stage asks for them."""


@runtime_checkable
class BatchOfWorkers(Protocol):
    """Tells of a batch whether workers load its rows: asking for them waits, and does not read them here."""

    @property
    def waits(self) -> bool:
        """Return whether that is so."""


@dataclass(frozen=True)
class DataInfo:
    """Describes a data set for every rank, including those that read none of it."""

    train: int  # samples to train on
    held_out: int  # samples for evaluation
    inputs: tuple[TensorSpec, ...]  # as the model sees them
    names: tuple[str, ...] = ()  # of the inputs, as arguments of the model's forward; one input needs none
    outputs: int = 0  # classes, labels, words or values that the model predicts; 0 if the data does not tell
    target: TensorSpec | None = None  # if targets are single tensors
    task: str = "classification"  # what the data is made for
    # The indices of training and of held-out samples that cannot be read; None as long as nobody has tried them all.
    unreadable: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    shards: tuple[int, ...] = ()  # the number of training samples in each, where samples are fetched in shards
    labels: tuple[str, ...] = ()  # the names of the classes in their order, if they have any
    # How the training part says that content becomes numbers, as a JSON object: means, words or a vocabulary. Whoever
    # reads other content for the same model does it in the same way. None where there is nothing to remember.
    encoding: Mapping[str, Any] | None = field(default=None, hash=False)
    characters: str = ""  # those of a text that consists of characters, in the order of their numbers
    # The perplexity on the held-out part of a model that knows how frequent each token is, and nothing else. It is not
    # compared, because processors may differ in its last bit.
    unigram: float | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, object]:
        """Return the fields as a JSON object."""
        return {
            **vars(self),
            "inputs": [spec.to_json() for spec in self.inputs],
            "names": list(self.names),
            "target": self.target.to_json() if self.target is not None else None,
            "labels": list(self.labels),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataInfo:
        """Return the description from which `to_json` made `value`, which may come from elsewhere.

        Raises ValueError, TypeError, LookupError or AttributeError for anything else.
        """
        target, unreadable, encoding = value["target"], value["unreadable"], value.get("encoding")
        if encoding is not None and not isinstance(encoding, Mapping):
            raise ValueError(f"encoding is {type(encoding).__name__}, not an object")
        return cls(
            whole(value["train"], MOST_SAMPLES),
            whole(value["held_out"], MOST_SAMPLES),
            tuple(map(TensorSpec.from_json, value["inputs"])),
            tuple(map(str, value["names"])),
            whole(value["outputs"], MOST_OUTPUTS),
            None if target is None else TensorSpec.from_json(target),
            str(value["task"]),
            None if unreadable is None else (_samples(unreadable[0]), _samples(unreadable[1])),
            _samples(value["shards"]),
            tuple(map(str, value["labels"])),
            encoding,
            str(value.get("characters", "")),  # which older checkpoints lack, as what follows
            None if value.get("unigram") is None else float(value["unigram"]),
        )


def _samples(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(whole(value, MOST_SAMPLES) for value in values)


def sample_of_row(batch: Batch, row: int) -> str:
    """Return words for the sample that is a row of a batch: its number in its part of the data, where that is known."""
    source = getattr(batch, "source", batch)
    return f"sample {int(source.indices[row])}" if isinstance(source, DataBatch) else f"row {row} of the batch"


class Split(Protocol):
    """Provides training or held-out samples by index, counted from 0.

    Every rank must get the same sample for the same index.
    """

    def inputs(self, indices: Tensor) -> Inputs:
        """Return the model's inputs for these samples, `[len(indices), ...]`."""

    def targets(self, indices: Tensor) -> Tree:
        """Return the targets for these samples, each tensor `[len(indices), ...]`."""

    def augment(self, inputs: Inputs, batch: int, start: int, seed: int) -> Inputs:
        """Return randomly varied training inputs; a data set that does not augment returns them unchanged.

        `inputs` are the samples from `start` on of a global batch of `batch` samples. With the same seed, a sample must
        be varied in the same way on whichever rank holds it.
        """
        return inputs


@runtime_checkable
class WholeSamples(Split, Protocol):
    """Reads inputs and targets of a sample together, as data sets of any kind return them."""

    def read(self, indices: Tensor, seed: int, inputs: bool, targets: bool) -> Rows:
        """Return the wanted parts of these samples; `seed` decides what is random in them."""


@dataclass(frozen=True)
class Rows:
    """Holds the rows of a batch, or those parts of them that were asked for."""

    inputs: Inputs | None
    targets: Tree | None


@dataclass(frozen=True)
class Data:
    """Holds a data set, split for training and evaluation."""

    info: DataInfo
    train: Split
    held_out: Split
    draws: bool = False  # whether reading a sample draws from the generators that all of the process shares
    identity: str | None = None  # changes whenever a file of the data changes, where that can be told
    whole: Split | None = None  # all samples in the order in which the data has them, if the two parts are cut from it

    def batch(self, training: bool, indices: Tensor, augment_seed: int | None = None) -> DataBatch:
        """Return a batch of training or held-out samples, with others in place of those that cannot be read."""
        unreadable = self.info.unreadable[0 if training else 1] if self.info.unreadable is not None else ()
        split, skipped = self.train if training else self.held_out, 0
        if unreadable:
            indices, skipped = stand_ins(indices, unreadable, self.info.train if training else self.info.held_out)
        return DataBatch(split, indices, augment_seed, skipped)


def stand_ins(indices: Tensor, unreadable: Collection[int], samples: int) -> tuple[Tensor, int]:
    """Return the indices with the next readable one in place of each unreadable one, and how many were replaced.

    `samples` is the number of samples, at least one of which can be read. All ranks call this with the same list, so
    inputs and targets are those of the same sample although different ranks read them.
    """
    bad, found, replaced = frozenset(unreadable), indices.tolist(), 0
    for place, index in enumerate(found):
        replaced += index in bad
        while found[place] in bad:
            found[place] = (found[place] + 1) % samples
    return torch.tensor(found, dtype=torch.int64), replaced


@dataclass(frozen=True)
class DataBatch:
    """Implements `Batch` for a data set; with a seed, the inputs are augmented."""

    split: Split
    indices: Tensor
    augment_seed: int | None = None
    skipped: int = 0  # how many of the indices stand in for samples that cannot be read

    @property
    def size(self) -> int:
        """Return the number of samples in the global batch."""
        return len(self.indices)

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return the inputs of rows `start` to `stop - 1`."""
        inputs = self.rows(start, stop, True, False).inputs
        assert inputs is not None
        return inputs

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`."""
        targets = self.rows(start, stop, False, True).targets
        assert targets is not None
        return targets

    def rows(self, start: int, stop: int, inputs: bool, targets: bool) -> Rows:
        """Return the wanted parts of rows `start` to `stop - 1`. Raises DataError and DataOutOfMemory."""
        try:
            return self._rows(start, stop, inputs, targets)
        except Exception as error:
            if is_out_of_memory(error):
                raise DataOutOfMemory.at("data: the samples of a batch") from error
            raise

    def _rows(self, start: int, stop: int, inputs: bool, targets: bool) -> Rows:
        indices = self.indices[start:stop]
        if isinstance(self.split, WholeSamples):
            return self.split.read(indices, self.augment_seed or 0, inputs, targets)
        found = self.split.inputs(indices) if inputs else None
        if found is not None and self.augment_seed is not None:
            found = self.split.augment(found, self.size, start, self.augment_seed)
        return Rows(found, self.split.targets(indices) if targets else None)


Range = tuple[int, int]

_MOST_ROWS = 16  # of a chunk
_UNKNOWN_BYTES = 64  # of a target, where the description of the data does not tell


@dataclass(frozen=True)
class NeededRows:
    """Says which rows of a batch a rank asks for, as ranges of `start` to `stop - 1`."""

    inputs: Sequence[Range] = ()
    targets: Sequence[Range] = ()

    def chunks(self, workers: int) -> list[tuple[int, int, bool, bool]]:
        """Return the chunks to read, as `start`, `stop`, and whether their inputs and their targets are needed.

        They are in the order in which the rows are asked for, and small enough for all workers to have some.
        """
        ranges = [*self.inputs, *self.targets]
        total = sum(stop - start for start, stop in ranges)
        size = max(1, min(_MOST_ROWS, -(-total // max(1, 2 * workers)))) if workers else total
        edges = sorted({edge for one in ranges for edge in one})
        found: list[tuple[int, int, bool, bool]] = []
        for begin, end in pairwise(edges):
            inputs, targets = (_covers(ranges, begin) for ranges in (self.inputs, self.targets))
            if inputs or targets:
                found += [(row, min(row + size, end), inputs, targets) for row in range(begin, end, size)]
        return found


def loads_ahead(spec: DataSpec) -> bool:
    """Return whether ranks load samples of the next steps while a step computes.

    By itself, that is where reading a sample takes work: it is decoded, fetched, or made by code of the user's own.
    """
    return spec.source.decodes if spec.workers == "auto" else spec.workers > 0


def sample_bytes(info: DataInfo) -> tuple[int, int]:
    """Return the bytes of the inputs and of the targets of a sample."""
    targets = info.target.bytes_per_sample if info.target is not None else _UNKNOWN_BYTES
    return sum(spec.bytes_per_sample for spec in info.inputs), targets


def _covers(ranges: Sequence[Range], row: int) -> bool:
    return any(start <= row < stop for start, stop in ranges)
