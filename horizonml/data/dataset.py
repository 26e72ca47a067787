"""What every data set offers, whatever its samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Tree = Tensor | Mapping[str, "Tree"] | Sequence["Tree"]
"""Any nesting of tensors in mappings and sequences; the first dimension of each tensor is the batch."""


class Batch(Protocol):
    """A global batch, of which a rank reads only the rows it needs."""

    @property
    def size(self) -> int:
        """The number of samples in the global batch."""

    def inputs(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop - 1` of what enters the model, of any dtype; the first stage asks for them."""

    def targets(self, start: int, stop: int) -> Tree:
        """Return rows `start` to `stop - 1` of what outputs are judged against; the last stage asks for them."""


class DataInfo(Protocol):
    """What every rank must know of a data set, whether or not it reads any of it."""

    @property
    def train(self) -> int:
        """The number of samples to train on."""

    @property
    def held_out(self) -> int:
        """The number of samples held out for evaluation."""


class Split(Protocol):
    """Training or held-out samples, addressed by indices from 0.

    Every rank must get the same sample for the same index.
    """

    def inputs(self, indices: Tensor) -> Tensor:
        """Return what enters the model for these samples, `[len(indices), ...]`."""

    def targets(self, indices: Tensor) -> Tree:
        """Return what outputs are judged against for these samples, each tensor `[len(indices), ...]`."""

    def augment(self, inputs: Tensor, batch: int, start: int, seed: int) -> Tensor:
        """Vary training inputs at random; a data set that does not augment returns them as they are.

        `inputs` are the samples from `start` on of a global batch of `batch` samples. The same seed must give a sample
        the same form whichever rank holds it.
        """


@dataclass(frozen=True)
class Data:
    """A data set, split for training and evaluation."""

    info: DataInfo
    train: Split
    held_out: Split


@dataclass(frozen=True)
class DataBatch:
    """A global batch of a data set; it implements `Batch`. With a seed its inputs are augmented."""

    split: Split
    indices: Tensor
    augment_seed: int | None = None

    @property
    def size(self) -> int:
        """The number of samples in the global batch."""
        return len(self.indices)

    def inputs(self, start: int, stop: int) -> Tensor:
        """Return the inputs of rows `start` to `stop - 1`."""
        inputs = self.split.inputs(self.indices[start:stop])
        if self.augment_seed is None:
            return inputs
        return self.split.augment(inputs, self.size, start, self.augment_seed)

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`."""
        return self.split.targets(self.indices[start:stop])
