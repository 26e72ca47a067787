"""Stages tensors for an Apple GPU, which computes in the same memory but has no streams: copies wait for it."""

from __future__ import annotations

from time import perf_counter
from typing import ClassVar

import torch

from horizonml.engine.staging import Copying


class MpsStaging(Copying):
    """Copies at once. These GPUs have no 64-bit floats, so metrics are computed on the host."""

    has_float64: ClassVar[bool] = False

    def seed(self, number: int) -> None:
        """See `Staging`."""
        super().seed(number)
        torch.mps.manual_seed(number)

    def watch(self) -> MpsWatch:
        """See `Staging`."""
        return MpsWatch()


class MpsWatch:
    """Implements `DeviceWatch` by waiting for the device."""

    def __init__(self) -> None:
        self._at = 0.0

    def mark(self) -> None:
        """See `DeviceWatch`."""
        torch.mps.synchronize()
        self._at = perf_counter()

    def finished(self) -> float:
        """See `DeviceWatch`."""
        return self._at
