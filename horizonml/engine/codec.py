"""Encodes activations and their gradients for a link: unchanged, in 16 bits, in 8 bits, or in 4 bits.

Every sample is encoded by itself and into the same number of bytes, so a message can hold any rows of a micro-batch.
`int8` divides values by a scale and rounds them to the nearest of 255 steps, so an error is at most 1/254 of the
largest value that shares the scale. Where channels are large, every channel of a sample has its own scale (per-channel
quantisation); otherwise each sample has one (per-row quantisation). `int4` has a scale for every 64 values of a sample,
and rotates tiles that have negative values (see `quantise`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizonml.data.tensors import TensorSpec
from horizonml.engine import quantise
from horizonml.models.boundary import Boundary, Values
from horizonml.plan.plan import FORMATS

_SMALLEST_CHANNEL = 64  # the fewest values that share a scale, so that the scale's four bytes are negligible


class Codec:
    """Encodes tensors `[rows, *spec.shape]` of float32 in one of the formats `plan.FORMATS`."""

    def __init__(self, spec: TensorSpec, format: str) -> None:
        """Prepare the encoding of such tensors; a dtype other than float32 is always sent unchanged."""
        self._spec = spec
        self.format = format if spec.dtype == torch.float32 and spec.values_per_sample else "fp32"
        by_channel = len(spec.shape) > 1 and spec.values_per_sample // spec.shape[0] >= _SMALLEST_CHANNEL
        self.scales = spec.shape[0] if by_channel else 1
        self.bytes_per_sample = int(spec.bytes_per_sample * FORMATS[self.format])
        if self.format == "int8":
            self.bytes_per_sample += 4 * self.scales
        elif self.format == "int4":
            self.bytes_per_sample = quantise.encoded_bytes(spec.values_per_sample)

    def empty(self, rows: int, **where: Any) -> Tensor:
        """Return an uninitialised tensor for `rows` encoded rows, with the rows along the first dimension.

        `where` are further arguments of `torch.empty`.
        """
        if self.format == "fp32":
            return torch.empty(rows, *self._spec.shape, dtype=self._spec.dtype, **where)
        if self.format == "bf16":
            return torch.empty(rows, *self._spec.shape, dtype=torch.bfloat16, **where)
        return torch.empty(rows, self.bytes_per_sample, dtype=torch.uint8, **where)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Return the rows of a tensor as they are sent: contiguous, and possibly `tensor` itself.

        With a `seed`, int4 rounds stochastically.
        """
        if self.format == "fp32":
            return tensor.contiguous()
        if self.format == "bf16":
            return tensor.to(torch.bfloat16).contiguous()
        if self.format == "int4":
            return quantise.encode(tensor.reshape(len(tensor), self._spec.values_per_sample), rotate=True, seed=seed)
        encoded = self.empty(len(tensor), device=tensor.device)
        groups = tensor.contiguous().view(len(tensor), self.scales, self._spec.values_per_sample // self.scales)
        scales = torch.maximum(groups.amax(2), -groups.amin(2)) / 127
        # A channel of zeros has scale 0. One with an infinite or undefined value decodes to undefined values, as it
        # should.
        quotients = groups * torch.where(scales > 0, scales.reciprocal(), torch.zeros_like(scales)).unsqueeze(2)
        head = 4 * self.scales
        encoded[:, :head] = scales.reshape(-1).view(torch.uint8).view(len(tensor), head)
        encoded[:, head:].view(torch.int8).copy_(quotients.round_().view(len(tensor), self._spec.values_per_sample))
        return encoded

    def decode(self, encoded: Tensor) -> Tensor:
        """Return the tensor that `encode` was given, except for rounding."""
        if self.format == "fp32":
            return encoded
        if self.format == "bf16":
            return encoded.to(torch.float32)
        if self.format == "int4":
            values = quantise.decode(encoded, self._spec.values_per_sample, rotate=True)
            return values.view(len(encoded), *self._spec.shape)
        head = 4 * self.scales
        scales = encoded[:, :head].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = encoded[:, head:].view(torch.int8).to(torch.float32)
        values = values.view(len(encoded), self.scales, self._spec.values_per_sample // self.scales)
        return values.mul_(scales.unsqueeze(2)).view(len(encoded), *self._spec.shape)


class BoundaryCodec:
    """Encodes all tensors that cross a boundary into one: a single tensor as `Codec` does, several as rows of bytes."""

    def __init__(self, boundary: Boundary, format: str) -> None:
        """Prepare the encoding of the tensors at `boundary`, which must not be empty."""
        self._codecs = [Codec(spec, format) for spec in boundary.tensors]
        self.format = format if any(codec.format != "fp32" for codec in self._codecs) else "fp32"
        self.bytes_per_sample = sum(codec.bytes_per_sample for codec in self._codecs)

    def empty(self, rows: int, **where: Any) -> Tensor:
        """Return an uninitialised tensor for `rows` encoded rows, as `Codec.empty` does."""
        if len(self._codecs) == 1:
            return self._codecs[0].empty(rows, **where)
        return torch.empty(rows, self.bytes_per_sample, dtype=torch.uint8, **where)

    def encode(self, values: Values, seed: int | None = None) -> Tensor:
        """Return the rows of the tensors as they are sent; `seed` is that of `Codec.encode`."""
        parts = [
            codec.encode(value, None if seed is None else seed + number)
            for number, (codec, value) in enumerate(zip(self._codecs, values, strict=True))
        ]
        if len(parts) == 1:
            return parts[0]
        encoded, start = self.empty(len(parts[0]), device=parts[0].device), 0
        for codec, part in zip(self._codecs, parts, strict=True):
            stop = start + codec.bytes_per_sample
            encoded[:, start:stop] = part.view(-1).view(torch.uint8).view(len(part), stop - start)
            start = stop
        return encoded

    def decode(self, encoded: Tensor) -> Values:
        """Return the tensors that `encode` was given, except for rounding."""
        if len(self._codecs) == 1:
            return (self._codecs[0].decode(encoded),)
        values, start = [], 0
        for codec in self._codecs:
            stop = start + codec.bytes_per_sample
            like = codec.empty(0)
            part = encoded[:, start:stop].clone(memory_format=torch.contiguous_format).view(like.dtype)
            values.append(codec.decode(part.view(len(encoded), *like.shape[1:])))
            start = stop
        return tuple(values)
