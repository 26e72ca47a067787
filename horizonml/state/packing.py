"""Copies a state into one piece of memory, as the bytes of a safetensors file, again and again at the least cost."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save
from torch import Tensor

from horizonml.state.train_state import TrainState


class Packer:
    """Remembers where each tensor of a state lies in the file, so that a further copy only moves the values."""

    def __init__(self) -> None:
        self._head = torch.empty(0, dtype=torch.uint8)  # the length of the header, and the header
        self._places: dict[str, tuple[int, int]] = {}  # where the bytes of each tensor begin and end

    def pack(self, state: TrainState, into: Tensor | None = None) -> Tensor:
        """Return a copy of all tensors as bytes: in `into` if that has the right size, or else in new memory."""
        tensors = {name: tensor.contiguous() for name, tensor in state.tensors().items()}
        sizes = {name: end - begin for name, (begin, end) in self._places.items()}
        if sizes != {name: tensor.nbytes for name, tensor in tensors.items()}:
            self._lay_out(tensors)
        total = max((end for _, end in self._places.values()), default=len(self._head))
        if into is None or len(into) != total:
            into = torch.empty(total, dtype=torch.uint8)
        into[: len(self._head)] = self._head
        for name, (begin, end) in self._places.items():
            into[begin:end].copy_(tensors[name].view(-1).view(torch.uint8))
        return into

    def _lay_out(self, tensors: dict[str, Tensor]) -> None:
        """Let safetensors decide on the places, which depend on names, shapes and dtypes only."""
        content = bytearray(save(tensors))
        start = 8 + int.from_bytes(content[:8], "little")
        self._head = torch.frombuffer(content, dtype=torch.uint8)[:start].clone()
        header = json.loads(content[8:start])
        self._places = {
            name: (start + header[name]["data_offsets"][0], start + header[name]["data_offsets"][1]) for name in tensors
        }
