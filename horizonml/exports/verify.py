"""Compares what was exported with the trained model, before anything is said to be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizonml.errors import ExportError
from horizonml.text import count

# Runtimes add up in another order and merge operations, which changes the last digits. A wrong graph changes the first.
RELATIVE_TOLERANCE = 1e-4
_ABSOLUTE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Agreement:
    """Tells how far the outputs of an exported model are from those of the model itself."""

    difference: float  # the largest one of any output
    tolerance: float  # for that output
    largest: float  # absolute value in that output

    def words(self) -> str:
        """Return the numbers for people."""
        return (
            f"largest difference {self.difference:.1e} in outputs of up to {self.largest:.3g} "
            f"(tolerance {self.tolerance:.1e})"
        )


def compare(file: str, samples: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Agreement:
    """Return how the outputs for some samples agree. Raises ExportError if they do not."""
    if len(expected) != len(found):
        raise _differs(file, samples, f"it returns {count(len(found), 'tensor')} instead of {len(expected)}")
    agreements = []
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        output = f"output {number}" if len(expected) > 1 else "the output"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(file, samples, f"{output} is {_kind(theirs)}, but the model returns {_kind(ours)}")
        agreements.append(_agreement(file, samples, output, ours, theirs))
    return max(agreements, key=lambda one: one.difference / one.tolerance)


def check_weights(file: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Return, in words, that a file's weights are bit for bit those of the checkpoint. Raises ExportError."""
    if missing := sorted(expected.keys() ^ found.keys()):
        has = "lacks" if missing[0] in expected else "also has"
        raise ExportError(f"{file} is not written: read back, it {has} {missing[0]}")
    for name, tensor in expected.items():
        other = found[name]
        same = tensor.shape == other.shape and tensor.dtype == other.dtype
        if not same or not torch.equal(_bits(tensor), _bits(other)):
            raise ExportError(f"{file} is not written: read back, its {name} differs from the checkpoint")
    return f"{count(len(expected), 'tensor')} read back, bit for bit those of the checkpoint"


def _agreement(file: str, samples: str, output: str, ours: Tensor, theirs: Tensor) -> Agreement:
    first, second = ours.double(), theirs.double()
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()) or not torch.equal(
        first[~finite].nan_to_num(), second[~finite].nan_to_num()
    ):
        raise _differs(file, samples, f"{output} has infinite values or NaN in other places")
    first, second = first[finite], second[finite]
    difference = float((first - second).abs().max()) if len(first) else 0.0
    largest = float(first.abs().max()) if len(first) else 0.0
    precision = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    tolerance = max(RELATIVE_TOLERANCE, 4 * precision) * largest + _ABSOLUTE_TOLERANCE
    agreement = Agreement(difference, tolerance, largest)
    if difference > tolerance:
        raise _differs(file, samples, f"{output} differs from the model's, {agreement.words()}")
    return agreement


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in which NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _differs(file: str, samples: str, problem: str) -> ExportError:
    return ExportError(f"{file} is not written: on {samples}, {problem}")
