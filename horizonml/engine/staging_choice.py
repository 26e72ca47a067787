"""Chooses how a rank stages tensors between the host and the device that it computes on."""

from __future__ import annotations

import torch

from horizonml.engine.staging import Staging


def staging_for(device: torch.device) -> Staging:
    """Return how a rank stages tensors that computes on a device."""
    if device.type == "cpu":
        return Staging()
    if device.type == "cuda":
        from horizonml.engine.cuda import CudaStaging  # which loads CUDA

        return CudaStaging(device)
    from horizonml.engine.mps import MpsStaging

    return MpsStaging(device)
