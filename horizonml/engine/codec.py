"""Encodes activations and their gradients for a link: unchanged, in 16 bits, or in 8 bits.

Every sample is encoded by itself and into the same number of bytes, so a message can hold any rows of a micro-batch.
`int8` divides values by a scale and rounds them to the nearest of 255 steps, so an error is at most 1/254 of the
largest value that shares the scale. Where channels are large, every channel of a sample has its own scale (per-channel
quantisation); otherwise each sample has one (per-row quantisation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizonml.models.chain import Boundary
from horizonml.plan.plan import FORMATS

_SMALLEST_CHANNEL = 64  # the fewest values that share a scale, so that the scale's four bytes are negligible


class Codec:
    """Encodes tensors `[rows, *boundary.shape]` of float32 in one of the formats `plan.FORMATS`."""

    def __init__(self, boundary: Boundary, format: str) -> None:
        """Prepare the encoding of the tensors at `boundary`; a dtype other than float32 is always sent unchanged."""
        self._boundary = boundary
        self.format = format if boundary.dtype == torch.float32 else "fp32"
        values = boundary.bytes_per_sample // boundary.dtype.itemsize
        by_channel = len(boundary.shape) > 1 and values // boundary.shape[0] >= _SMALLEST_CHANNEL
        self.scales = boundary.shape[0] if by_channel else 1
        self.bytes_per_sample = int(boundary.bytes_per_sample * FORMATS[self.format])
        if self.format == "int8":
            self.bytes_per_sample += 4 * self.scales

    def empty(self, rows: int) -> Tensor:
        """Return an uninitialised tensor for `rows` encoded rows, with the rows along the first dimension."""
        if self.format == "fp32":
            return torch.empty(rows, *self._boundary.shape, dtype=self._boundary.dtype)
        if self.format == "bf16":
            return torch.empty(rows, *self._boundary.shape, dtype=torch.bfloat16)
        return torch.empty(rows, self.bytes_per_sample, dtype=torch.uint8)

    def encode(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor as they are sent: contiguous, and possibly `tensor` itself."""
        if self.format == "fp32":
            return tensor.contiguous()
        if self.format == "bf16":
            return tensor.to(torch.bfloat16).contiguous()
        encoded = self.empty(len(tensor))
        groups = tensor.reshape(len(tensor), self.scales, -1)
        scales = torch.linalg.vector_norm(groups, float("inf"), dim=2) / 127
        # A channel of zeros has scale 0. One with an infinite or undefined value decodes to undefined values, as it
        # should.
        quotients = groups * torch.where(scales > 0, scales.reciprocal(), torch.zeros_like(scales)).unsqueeze(2)
        head = 4 * self.scales
        encoded[:, :head] = scales.contiguous().view(torch.uint8)
        encoded[:, head:].view(torch.int8).copy_(quotients.round_().view(len(tensor), -1))
        return encoded

    def decode(self, encoded: Tensor) -> Tensor:
        """Return the tensor that `encode` was given, except for rounding."""
        if self.format == "fp32":
            return encoded
        if self.format == "bf16":
            return encoded.to(torch.float32)
        head = 4 * self.scales
        scales = encoded[:, :head].contiguous().view(torch.float32)
        values = encoded[:, head:].view(torch.int8).to(torch.float32).view(len(encoded), self.scales, -1)
        return values.mul_(scales.unsqueeze(2)).view(len(encoded), *self._boundary.shape)
