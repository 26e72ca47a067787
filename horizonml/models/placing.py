"""Moves a module's tensors to the device that a rank computes on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from horizonml.models.module_slice import ModuleSlice

HOST = torch.device("cpu")


def bring(module: nn.Module, device: torch.device) -> None:
    """Bring a module's parameters, buffers and constants to a device; those that are there stay the same tensors."""
    moved: dict[int, Tensor] = {}  # what several modules hold stays one tensor
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device != device:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    if isinstance(module, ModuleSlice):
        module.bring_constants(device)
