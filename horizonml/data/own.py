"""Provides data sets of the user's own: map-style data sets of any tree of tensors, or the tensors themselves.

The description, and the task that a data set suits, are read off the data set's attributes and its first sample. A rank
that lacks the files may still work on the layers between: a data set that raises FileNotFoundError when it is made is
described by the ranks that have it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from horizonml.data.dataset import Data, DataInfo, Inputs, Rows, Split, TensorSpec, Tree
from horizonml.data.sampler import divide, hold_out, in_order, name_seed, subset
from horizonml.data.samples import Sample, as_inputs, inputs_of, random_state, sample_of, seeded, stack, tree_of
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, DataOutOfMemory, HorizonError, is_out_of_files, is_out_of_memory
from horizonml.machine.code import find, where
from horizonml.tasks.spec import TASKS

_WRAPPED = ("dataset", "data")  # attributes under which data sets such as torch's Subset keep the one that they wrap


def task_of(dataset: Any, inputs: Sequence[TensorSpec], target: TensorSpec | None) -> str:
    """Return what the data is made for: what it says itself, or what its targets look like."""
    told = _attribute(dataset, ("task",))
    if isinstance(told, str) and told in TASKS:
        return told
    if target is None or target.dtype.is_floating_point:
        return "regression"
    if not target.shape:
        return "classification"
    if len(target.shape) == 2 and len(inputs[0].shape) == 3:
        return "segmentation"
    if target.dtype == torch.int64 and inputs[0] == target:
        return "language_model"
    return "multi_label"


def outputs_of(spec: DataSpec, dataset: Any, title: str, task: str, target: TensorSpec | None) -> int:
    """Return how many classes, labels, words or values the model predicts. Raises DataError."""
    told = _attribute(dataset, ("outputs", "num_classes", "classes"))
    if told is not None:
        return int(told) if isinstance(told, int) else len(told)
    if spec.classes is not None:
        return spec.classes
    if target is None:
        return 0
    if target.dtype.is_floating_point or task == "multi_label":
        return math.prod(target.shape)
    if task == "classification" and isinstance(dataset, Arrays):
        return dataset.count_classes()
    raise DataError(
        f"{title}: the targets are whole numbers, but of how many classes? Set data.classes, or give the data "
        "set an attribute `classes` (a list or a number)"
    )


def labels_of(dataset: Any, outputs: int) -> tuple[str, ...]:
    """Return the names of the classes, if the data set has an attribute `classes` with a name for each."""
    told = _attribute(dataset, ("classes",))
    names = list(told) if isinstance(told, Sequence | Mapping) and not isinstance(told, str) else []
    return tuple(map(str, names)) if len(names) == outputs else ()


def _attribute(dataset: Any, names: Sequence[str]) -> Any:
    """Return the first of these attributes that a data set has, or the one that it wraps."""
    for _ in range(10):
        for name in names:
            value = getattr(dataset, name, None)
            if isinstance(value, (int, str, Sequence, Mapping)) and not isinstance(value, bool):
                return value
        inner = next((getattr(dataset, name) for name in _WRAPPED if hasattr(dataset, name)), None)
        if inner is None or not hasattr(inner, "__getitem__"):
            return None
        dataset = inner
    return None


@dataclass(frozen=True)
class Opened:
    """Holds a map-style data set, and its own held-out part if it has one; `title` names it in errors."""

    train: Any
    held_out: Any | None
    title: str
    encoding: Mapping[str, Any] | None = None  # how content becomes numbers, if that is learned from the training part

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the number of samples of each part. Raises DataError."""
        try:
            return len(self.train), len(self.held_out) if self.held_out is not None else 0
        except Exception as error:
            raise DataError(f"{self.title} does not tell its length: {where(error)}") from error


Opener = Callable[[DataSpec], Opened]

# What was opened to be described is kept until it is loaded, as opening may take long.
_kept: dict[str, Opened] = {}


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the user's own data, or None if this machine lacks its files. Raises DataError."""
    return describe_opened(spec, open_own)


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    """Open the user's own data set that `info` describes. Raises DataError."""
    return load_opened(spec, info, open_own, inputs, targets)


def describe_opened(spec: DataSpec, opener: Opener) -> DataInfo | None:
    """Return a description of what `opener` opens, or None if this machine lacks its files. Raises DataError."""
    try:
        opened = opener(spec)
    except FileNotFoundError:
        return None
    _kept.clear()
    _kept[spec.model_dump_json()] = opened
    samples, test = opened.lengths
    if not samples:
        raise DataError(f"{opened.title} has no samples")
    train, held_out = divide(spec, samples, test)
    _, first = _first(opened, spec)
    target = first.targets if isinstance(first.targets, Tensor) else None
    described = TensorSpec(tuple(target.shape), target.dtype) if target is not None else None
    task = task_of(opened.train, first.specs, described)
    outputs = outputs_of(spec, opened.train, opened.title, task, described)
    found = DataInfo(train, held_out, first.specs, first.names, outputs, described, task)
    return replace(found, labels=labels_of(opened.train, outputs), encoding=opened.encoding)


def load_opened(spec: DataSpec, info: DataInfo, opener: Opener, inputs: bool, targets: bool) -> Data:
    """Open the data set that `info` describes, unless this rank needs none of it. Raises DataError."""
    opened = _kept.pop(spec.model_dump_json(), None)
    if not inputs and not targets:
        nothing = OwnSplit([], torch.empty(0, dtype=torch.int64), info, "", False)
        return Data(info, nothing, nothing)
    try:
        opened = opened or opener(spec)
    except FileNotFoundError as error:
        needs = "inputs" if inputs else "targets"
        raise DataError(f"{missing(spec, error)}; it must have the data, because its stage reads {needs}") from error
    samples, test = opened.lengths
    if opened.held_out is not None:
        parts = (opened.train, subset(samples, info.train)), (opened.held_out, torch.arange(test)[: info.held_out])
    else:
        members, others = hold_out(samples, info.train, info.held_out)
        parts = (opened.train, members), (opened.train, others)
    draws = _draws(opened, spec)
    train, held_out = (OwnSplit(dataset, members, info, opened.title, draws) for dataset, members in parts)
    every = in_order(parts[0][1], parts[1][1])
    whole = OwnSplit(opened.train, every, info, opened.title, draws) if opened.held_out is None else None
    return Data(info, train, held_out, draws=draws, whole=whole)


def missing(spec: DataSpec, error: Exception) -> str:
    """Return in words which file of the data this rank lacks."""
    field = "data.path" if not spec.is_own else "data.name"
    return f"{field}: {spec.path or spec.name} is not there on this rank ({error})"


def open_own(spec: DataSpec) -> Opened:
    """Return what the user's own function returns. Raises DataError, or FileNotFoundError for what is not there."""
    build = find(spec.name, "data.name", DataError)
    if not callable(build):
        raise DataError(f"data.name: {spec.name} cannot be called; name a class, or a function that returns a data set")
    try:
        with seeded(name_seed(0, spec.name)):  # all ranks make the same
            made = build(**spec.options)
    except (FileNotFoundError, HorizonError):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_files(error):
            raise
        if is_out_of_memory(error):
            raise DataOutOfMemory.at(f"data.name: {spec.name}: {where(error)}") from error
        given = f" with data.options {spec.options}" if spec.options else ""
        raise DataError(f"data.name: {spec.name}{given} failed: {where(error)}") from error
    try:
        parts = as_parts(made)
    except DataError as error:
        raise DataError(f"data.name: {spec.name}: {error}") from None
    if len(parts) != 2:
        raise DataError(f"data.name: {spec.name} returned {len(parts)} things; return a data set, or (train, held_out)")
    for part in parts:
        if part is not None and not _is_map_style(part):
            raise DataError(
                f"data.name: {spec.name} returned a {type(part).__name__} without __getitem__ and __len__; return a "
                "map-style torch.utils.data.Dataset. Iterable ones give no sample by its index; for shards that do not "
                "fit a disk there is data.name: stream"
            )
    return Opened(parts[0], parts[1], f"data.name: {spec.name}")


def _is_map_style(part: Any) -> bool:
    """Return whether samples can be read by their index; torch's base class only seems to have a `__getitem__`."""
    method = getattr(type(part), "__getitem__", None)
    return method is not None and method is not Dataset.__getitem__ and hasattr(part, "__len__")


def _first(opened: Opened, spec: DataSpec) -> tuple[int, Sample]:
    """Return the first sample and its index; with `data.corrupt: skip`, the first one that can be read."""
    for index in range(len(opened.train)):
        try:
            return index, sample_of(_get(opened.train, index, opened.title, 0), f"{opened.title}: sample {index}")
        except DataError:
            if spec.corrupt == "stop":
                raise
    raise DataError(f"{opened.title}: no sample can be read")


def _get(dataset: Any, index: int, title: str, seed: int | None, method: str = "__getitem__") -> Any:
    """Return one sample as the data set gives it; with a seed, it draws its random numbers from there."""
    try:
        if seed is None:
            return getattr(dataset, method)(index)
        with seeded(name_seed(seed, "sample", index)):
            return getattr(dataset, method)(index)
    except DataError as error:
        raise DataError(f"{title}: sample {index} cannot be read: {error}") from error
    except HorizonError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_files(error):
            raise
        if is_out_of_memory(error):
            raise DataOutOfMemory.at(f"{title}: sample {index}: {where(error)}") from error
        raise DataError(f"{title}: sample {index} cannot be read: {where(error)}") from error


def _draws(opened: Opened, spec: DataSpec) -> bool:
    """Return whether reading a sample draws from the generators that all of the process shares."""
    index, _ = _first(opened, spec)
    with seeded(0):
        before = random_state()
        _get(opened.train, index, opened.title, None)
        return random_state() != before


class OwnSplit(Split):
    """Provides samples of a map-style data set, which varies them itself, by index, counted from 0 in the split."""

    def __init__(self, dataset: Any, members: Tensor, info: DataInfo, title: str, draws: bool) -> None:
        """Prepare the split; `members` are the indices of its samples in `dataset`."""
        self._dataset, self._members, self._info, self._title, self._draws = dataset, members, info, title, draws

    def read(self, indices: Tensor, seed: int, inputs: bool, targets: bool) -> Rows:
        """Return the wanted parts of these samples; `seed` decides what is random in them. Raises DataError."""
        members = self._members[indices].tolist()
        found = [self._sample(index, seed if self._draws else None, inputs, targets) for index in members]
        values: Inputs | None = None
        if inputs:
            values = as_inputs([torch.stack(column) for column in zip(*(one.inputs for one in found), strict=True)])
        place = f"{self._title}: the targets of samples {', '.join(map(str, members[:8]))}"
        return Rows(values, stack([one.targets for one in found], place) if targets else None)

    def _sample(self, index: int, seed: int | None, inputs: bool, targets: bool) -> Sample:
        """Return a sample, checked against the description. Raises DataError.

        Where only one part is wanted, the data set's method `input(index)` or `target(index)` is used if it has one.
        """
        place = f"{self._title}: sample {index}"
        if not inputs and callable(getattr(self._dataset, "target", None)):
            value = _get(self._dataset, index, self._title, seed, "target")
            return Sample((), (), tree_of(value, f"{place}: the target"))
        if not targets and callable(getattr(self._dataset, "input", None)):
            tensors, names = inputs_of(_get(self._dataset, index, self._title, seed, "input"), place)
            sample = Sample(tensors, names, [])
        else:
            sample = sample_of(_get(self._dataset, index, self._title, seed), place)
        return self._checked(sample, place)

    def _checked(self, sample: Sample, place: str) -> Sample:
        """Return a sample with its inputs in the order of the description. Raises DataError if it differs from it."""
        info = self._info
        if sample.names and set(sample.names) == set(info.names):
            by_name = dict(zip(sample.names, sample.inputs, strict=True))
            sample = Sample(tuple(by_name[name] for name in info.names), info.names, sample.targets)
        for tensor, expected in zip(sample.inputs, info.inputs, strict=False):
            if (tuple(tensor.shape), tensor.dtype) != (expected.shape, expected.dtype):
                raise DataError(
                    f"{place} has an input of {tensor.dtype} and shape {list(tensor.shape)}, but sample 0 has "
                    f"{expected.dtype} and shape {list(expected.shape)}; give all samples the same"
                )
        if sample.names != info.names or len(sample.inputs) != len(info.inputs):
            raise DataError(
                f"{place} has the inputs {list(sample.names) or len(sample.inputs)}, but sample 0 has "
                f"{list(info.names) or len(info.inputs)}"
            )
        target = sample.targets
        if isinstance(target, Tensor) and info.target is not None and target.dtype != info.target.dtype:
            raise DataError(f"{place} has a target of {target.dtype}, but sample 0 has {info.target.dtype}")
        return sample

    @property
    def reach(self) -> int:
        """Return how many samples ahead `expect` should be told; 0 if that is of no use."""
        return int(getattr(self._dataset, "reach", 0))

    def expect(self, indices: Tensor) -> None:
        """Note that these samples are needed soon: a stream begins to fetch them."""
        self._dataset.expect(self._members[indices].tolist())

    def inputs(self, indices: Tensor) -> Inputs:
        """Return the inputs of these samples, as they are read for evaluation."""
        found = self.read(indices, 0, True, False).inputs
        assert found is not None
        return found

    def targets(self, indices: Tensor) -> Tree:
        """Return the targets of these samples, as they are read for evaluation."""
        found = self.read(indices, 0, False, True).targets
        assert found is not None
        return found


class Arrays:
    """Makes a map-style data set of inputs and targets: each a tensor, an array, or a tuple or mapping of them."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        """Raise DataError if they do not all have the same number of rows."""
        self._inputs, self._targets = inputs, targets
        lengths = [len(array) for array in (*_arrays(inputs), *_arrays(targets))]
        if len(set(lengths)) > 1:
            raise DataError(
                f"the inputs and targets have {', '.join(map(str, lengths))} rows; give a row for each sample"
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.input(index), self.target(index)

    def input(self, index: int) -> Any:
        """Return the inputs of a sample."""
        return _row(self._inputs, index)

    def target(self, index: int) -> Any:
        """Return the targets of a sample."""
        return _row(self._targets, index)

    def count_classes(self) -> int:
        """Return the number of classes, if the targets are their numbers from 0 on."""
        return int(self._targets.max()) + 1


def as_parts(made: Any) -> tuple[Any, ...]:
    """Return the parts of what a user gives as data: a data set alone, or one to train on and one to hold out.

    `(inputs, targets)` in tensors or arrays is one data set. Raises DataError.
    """
    if _is_pair(made):
        return (_from_pair(made), None)
    if isinstance(made, tuple):
        return tuple(_from_pair(part) if _is_pair(part) else part for part in made)
    if isinstance(made, list) and len(made) == 2 and all(isinstance(part, Dataset) for part in made):
        return tuple(made)  # as torch.utils.data.random_split returns them
    return (made, None)


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or an array of numpy with rows."""
    numpy = sys.modules.get("numpy")
    arrays = (Tensor,) if numpy is None else (Tensor, numpy.ndarray)
    return isinstance(value, arrays) and len(value.shape) > 0


def _is_pair(made: Any) -> bool:
    """Return whether this is `(inputs, targets)`, or a mapping with these keys."""
    if isinstance(made, Mapping):
        return set(made) == {"inputs", "targets"} and all(map(_is_tree, made.values()))
    return isinstance(made, tuple | list) and len(made) == 2 and all(map(_is_tree, made)) and is_array(made[1])


def _from_pair(pair: Any) -> Arrays:
    return Arrays(pair["inputs"], pair["targets"]) if isinstance(pair, Mapping) else Arrays(*pair)


def _is_tree(value: Any) -> bool:
    """Return whether this is an array, or a tuple or mapping of arrays."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(map(is_array, parts))


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple) else [value]


def _row(value: Any, index: int) -> Any:
    if isinstance(value, Mapping):
        return {name: array[index] for name, array in value.items()}
    return tuple(array[index] for array in value) if isinstance(value, tuple) else value[index]
