"""Describes how a device runs layers: the memory format of images, and the precision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Execution:
    """Describes how a device runs all layers that it has."""

    channels_last: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    """With bf16: autocast, with float32 parameters and float32 sums of gradients."""
    channels_last_weights: bool = False
    """Whether convolutions keep their weights in the memory format channels_last, on all ranks alike."""

    @property
    def words(self) -> str:
        """Return a few words on how layers run."""
        found = ["channels_last"] * self.channels_last + ["bf16"] * (self.precision == "bf16")
        return " and ".join(found) or "plain"

    def among(self, everyone: Collection[Execution]) -> Execution:
        """Return the execution of a rank among those of `everyone`, itself included.

        What members of a stage sum lies in memory as their weights do, so weights are channels_last only if all ranks
        run so. Elsewhere a convolution in that format converts its weights each time.
        """
        return replace(self, channels_last_weights=all(one.channels_last for one in everyone))

    def exact(self) -> Execution:
        """Return the execution in float32."""
        return replace(self, precision="fp32")


PLAIN = Execution()
