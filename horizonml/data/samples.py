"""Turns what a data set of any kind returns for an index into tensors, and samples into rows of a batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from horizonml.data.dataset import DTYPES, Batch, BatchOfWorkers, Inputs, TensorSpec, Tree, mapped
from horizonml.data.sampler import python_seeded, python_state
from horizonml.errors import DataError

_SHAPE = (
    "return a pair (inputs, targets) or a mapping with the keys 'inputs' and 'targets'; inputs are a tensor, several "
    "in a tuple, or a mapping by the names of the model's arguments"
)
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}  # PyTorch calculates little with the narrower ones


@dataclass(frozen=True)
class Sample:
    """Holds one sample: the tensors that the model takes, their names if there are any, and the targets."""

    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    targets: Tree

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the description of each input."""
        return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in self.inputs)


def sample_of(value: Any, place: str) -> Sample:
    """Return what a data set returned for an index; `place` names it in errors. Raises DataError."""
    if isinstance(value, Mapping):
        if not {"inputs", "targets"} <= value.keys():
            raise DataError(f"{place} is a mapping with the keys {', '.join(map(str, value))}; {_SHAPE}")
        inputs, targets = value["inputs"], value["targets"]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == 2:
        inputs, targets = value
    else:
        size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise DataError(f"{place} is a {type(value).__name__}{size}; {_SHAPE}")
    tensors, names = inputs_of(inputs, place)
    return Sample(tensors, names, tree_of(targets, f"{place}: the target"))


def inputs_of(value: Any, place: str) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return the inputs of a sample as tensors, and their names. Raises DataError."""
    if isinstance(value, Mapping):
        parts = [tensor_of(part, f"{place}: the input {name!r}") for name, part in value.items()]
        return tuple(parts), tuple(map(str, value))
    if isinstance(value, (tuple, list)):
        return tuple(tensor_of(part, f"{place}: input {number}") for number, part in enumerate(value)), ()
    return (tensor_of(value, f"{place}: the input"),), ()


def tree_of(value: Any, place: str) -> Tree:
    """Return a tree of tensors; numbers become tensors without dimensions. Raises DataError."""
    if isinstance(value, Mapping):
        return {str(key): tree_of(part, f"{place}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [tree_of(part, f"{place}[{number}]") for number, part in enumerate(value)]
    return tensor_of(value, place)


def tensor_of(value: Any, place: str) -> Tensor:
    """Return a tensor as it is, and a number or an array of numpy as a tensor. Raises DataError.

    Python and numpy calculate with 64 bits by default, so their floating-point numbers become float32.
    """
    if isinstance(value, Tensor):
        return _usable(value.detach(), place)
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            # A copy, because arrays that are read from a file may not be writable.
            tensor = torch.from_numpy(numpy.array(value))
        except TypeError as error:
            raise DataError(f"{place} is an array that PyTorch cannot hold: {error}") from error
        return tensor.float() if tensor.dtype == torch.float64 else _usable(tensor, place)
    advice = "; convert it, for example with torchvision.transforms.ToTensor()" if hasattr(value, "getbands") else ""
    raise DataError(f"{place} is a {type(value).__name__}, which is no tensor{advice}")


def _usable(tensor: Tensor, place: str) -> Tensor:
    """Return a tensor in the memory of this machine, dense, and of a dtype that models take. Raises DataError."""
    if tensor.is_meta:
        raise DataError(f"{place} is a tensor on the device meta, which has no values")
    if tensor.dtype in _WIDER:
        tensor = tensor.to(_WIDER[tensor.dtype])
    if tensor.dtype not in DTYPES:
        known = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        raise DataError(f"{place} has the dtype {str(tensor.dtype).removeprefix('torch.')}; convert it to {known}")
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu()


def stack(trees: Sequence[Tree], place: str) -> Tree:
    """Return samples as the rows of one tree. Raises DataError if their shapes differ."""
    first = trees[0]
    if isinstance(first, Tensor):
        tensors = [tree for tree in trees if isinstance(tree, Tensor) and tree.shape == first.shape]
        if len(tensors) < len(trees):
            raise DataError(f"{place} have different shapes; give all samples the same, by cropping or padding")
        return torch.stack(tensors)
    if isinstance(first, Mapping):
        if not all(isinstance(tree, Mapping) and tree.keys() == first.keys() for tree in trees):
            raise DataError(f"{place} have different keys; give all samples the same")
        return {key: stack([tree[key] for tree in trees], place) for key in first}  # type: ignore[call-overload,index]
    if not all(isinstance(tree, Sequence) and len(tree) == len(first) for tree in trees):
        raise DataError(f"{place} have different lengths; give all samples the same")
    return [stack([tree[number] for tree in trees], place) for number in range(len(first))]  # type: ignore[index]


def rows_of(tree: Tree, start: int, stop: int) -> Tree:
    """Return the rows `start` to `stop - 1` of each tensor of a tree."""
    return mapped(tree, lambda tensor: tensor[start:stop])


def join(trees: Sequence[Tree]) -> Tree:
    """Return the rows of several trees, one after another."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([tree for tree in trees if isinstance(tree, Tensor)])
    if isinstance(first, Mapping):
        return {key: join([tree[key] for tree in trees]) for key in first}  # type: ignore[call-overload,index]
    return [join([tree[number] for tree in trees]) for number in range(len(first))]  # type: ignore[index]


def join_inputs(trees: Sequence[Tree]) -> Inputs:
    """Return the rows of several inputs, one after another."""
    joined = join(trees)
    return joined if isinstance(joined, Tensor) else tuple(part for part in joined if isinstance(part, Tensor))


def as_inputs(tensors: Sequence[Tensor]) -> Inputs:
    """Return the only tensor, or all of them as a tuple."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed` on, and leave the generators of Python, numpy and PyTorch as they were."""
    with torch.random.fork_rng(devices=[]), python_seeded(seed):
        torch.default_generator.manual_seed(seed)
        yield


def random_state() -> tuple[bytes, Any, bytes]:
    """Return the state of the generators, to tell whether something has drawn from them."""
    return bytes(torch.get_rng_state().numpy()), *python_state()


@dataclass(frozen=True)
class BatchRows:
    """Describes rows `start` to `stop - 1` of a batch."""

    batch: Batch
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


class JoinedBatch:
    """Implements `Batch` for parts of other batches, one after another."""

    def __init__(self, parts: Sequence[BatchRows]) -> None:
        self._parts = [part for part in parts if part.size]

    @property
    def size(self) -> int:
        """Return the number of rows of all parts."""
        return sum(part.size for part in self._parts)

    @property
    def waits(self) -> bool:
        """Return whether workers load any of the rows; see `BatchOfWorkers`."""
        return any(isinstance(part.batch, BatchOfWorkers) and part.batch.waits for part in self._parts)

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return the inputs of rows `start` to `stop - 1`."""
        return join_inputs([part.batch.inputs(part.start, part.stop) for part in self._between(start, stop)._parts])

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`."""
        return join([part.batch.targets(part.start, part.stop) for part in self._between(start, stop)._parts])

    def split(self, pieces: int) -> list[JoinedBatch]:
        """Return the rows in so many pieces of about the same size, without those that would be empty."""
        edges = [self.size * number // pieces for number in range(pieces + 1)]
        return [self._between(first, end) for first, end in pairwise(edges) if first < end]

    def _between(self, start: int, stop: int) -> JoinedBatch:
        parts, before = [], 0
        for part in self._parts:
            first, end = max(start - before, 0), min(stop - before, part.size)
            if first < end:
                parts.append(BatchRows(part.batch, part.start + first, part.start + end))
            before += part.size
        return JoinedBatch(parts)
