"""Defines what every data set provides, whatever its samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from horizonml.data.tensors import TensorSpec

Tree = Tensor | Mapping[str, "Tree"] | Sequence["Tree"]
"""Any nesting of tensors in mappings and sequences; the first dimension of each tensor is the batch."""

Inputs = Tensor | tuple[Tensor, ...]
"""What a model takes: a tensor of any dtype, or several in the order of the task's `InputSpec`."""


def detached(tree: Tree) -> Tree:
    """Return the same tree of tensors without their history."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, Mapping):
        return {key: detached(value) for key, value in tree.items()}
    return [detached(value) for value in tree]


class Batch(Protocol):
    """Provides the rows of a global batch; a rank reads only those that it needs."""

    @property
    def size(self) -> int:
        """Return the number of samples in the global batch."""

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return rows `start` to `stop - 1` of the model's inputs; the first stage asks for them."""

    def targets(self, start: int, stop: int) -> Tree:
        """Return rows `start` to `stop - 1` of the targets to judge outputs against; the last stage asks for them."""


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

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "train": self.train,
            "held_out": self.held_out,
            "inputs": [spec.to_json() for spec in self.inputs],
            "names": list(self.names),
            "outputs": self.outputs,
            "target": self.target.to_json() if self.target is not None else None,
            "task": self.task,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataInfo:
        """Return the description from which `to_json` made `value`."""
        target = value["target"]
        return cls(
            int(value["train"]),
            int(value["held_out"]),
            tuple(map(TensorSpec.from_json, value["inputs"])),
            tuple(map(str, value["names"])),
            int(value["outputs"]),
            None if target is None else TensorSpec.from_json(target),
            str(value["task"]),
        )


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


@dataclass(frozen=True)
class Data:
    """Holds a data set, split for training and evaluation."""

    info: DataInfo
    train: Split
    held_out: Split


@dataclass(frozen=True)
class DataBatch:
    """Implements `Batch` for a data set; with a seed, the inputs are augmented."""

    split: Split
    indices: Tensor
    augment_seed: int | None = None

    @property
    def size(self) -> int:
        """Return the number of samples in the global batch."""
        return len(self.indices)

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return the inputs of rows `start` to `stop - 1`."""
        inputs = self.split.inputs(self.indices[start:stop])
        if self.augment_seed is None:
            return inputs
        return self.split.augment(inputs, self.size, start, self.augment_seed)

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`."""
        return self.split.targets(self.indices[start:stop])
