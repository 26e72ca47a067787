"""Provides samples that lie in tensors or arrays already, a row of each for every sample."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from horizonml.errors import DataError


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
