"""A way to agree on gradients that stands outside the package: 16-bit brain floats, as an extension would add them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizonml.comm.work import Work
from horizonml.engine.sync.compressed import Compressed
from horizonml.plan.syncs import SYNCS, Sync

TOY = Sync(
    "toy",
    "16-bit brain floats",
    "tests.toy_sync:ToyAllReduce",
    fallback=Sync.FP16,
    error="each is off by at most 1/256 of itself",
    ratio=0.125,  # as if it were far smaller, so that planners would choose it
    codings=2,
    coding="tests.toy_sync:narrow",
    codec="toy",
    compression="toy",
    offered=True,
    tried_first=True,
)
SYNCS.setdefault(TOY.name, TOY)


def narrow(gradients: Tensor) -> Tensor:
    """Gradients that were converted and back."""
    return gradients.bfloat16().float()


class ToyAllReduce(Compressed):
    """Rounds gradients, and sums them as 32-bit floats: it is a toy."""

    def _sum_compressed(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        with torch.no_grad():
            flat.copy_(narrow(flat))
        return self._staging.sum(flat, self._all_reduce)
