"""Connects a stage with a neighbour: activations travel one way, and their gradients travel back.

Members of the two stages may hold different parts of a micro-batch; each pair exchanges exactly the rows that both
hold. Receives are posted ahead of need and sends do not block, so bytes move while the rank computes.

A message is announced by a header of four bytes that its sender sends just before it. Time until the header arrives is
`wait`, because the sender was not ready; time after that is `transfer`. A message below `HEADED` bytes arrives in one
piece and has no header, so the time spent on it is `wait`.

The plan sets the format of each boundary: unchanged, 16 bits, 8 bits or 4 bits. Every sample is encoded by itself and
into the same number of bytes, so a message can hold any rows of a micro-batch. `int8` divides values by a scale and
rounds them to the nearest of 255 steps, so an error is at most 1/254 of the largest value that shares the scale. Where
channels are large, every channel of a sample has its own scale (per-channel quantisation); otherwise each sample has
one (per-row quantisation). `int4` has a scale for every 64 values of a sample, and rotates tiles that have negative
values (see `quantise`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.data.dataset import TensorSpec
from horizonml.engine import quantise
from horizonml.engine.clock import Clock
from horizonml.engine.staging import Staging
from horizonml.models.boundary import Boundary, Values
from horizonml.plan.plan import FORMATS, MOST_MICRO_BATCHES, Route
from horizonml.plan.syncs import HEADED

_SENDS_UNDER_WAY = 4


class Direction(IntEnum):
    """Tells what a link carries."""

    ACTIVATIONS = 0
    GRADIENTS = 1


@dataclass(frozen=True)
class Cut:
    """Describes the boundary between two stages: its tensors, the format on the link, and the later stage's number."""

    boundary: Boundary
    format: str
    number: int


@dataclass
class _Expected:
    """Describes a micro-batch whose parts are being received."""

    encoded: Tensor
    headers: list[tuple[Work, int]]
    parts: list[tuple[Work, int]]
    bytes: int = 0  # from other ranks


class Link:
    """Carries one direction of a boundary for this rank: a link either only receives or only sends."""

    def __init__(self, group: Group, clock: Clock, cut: Cut, direction: Direction, staging: Staging) -> None:
        self._staging = staging
        crossing = cut.boundary if direction is Direction.ACTIVATIONS else cut.boundary.gradients
        self._group, self._clock, self._codec = group, clock, BoundaryCodec(crossing, cut.format)
        self._rank = group.rank
        self._first = group.channel("boundaries").tag(cut.number * 4 * MOST_MICRO_BATCHES + 2 * direction)
        self._expected: dict[int, _Expected] = {}
        self._sending: deque[tuple[Work, int, Tensor]] = deque()
        self._header = torch.zeros(1)
        self.sent_bytes = self.received_bytes = 0

    def _tag(self, micro: int, header: bool = False) -> int:
        return self._first + 4 * micro + header

    def _has_header(self, route: Route) -> bool:
        large = (route.stop - route.start) * self._codec.bytes_per_sample >= HEADED
        return large and route.peer != self._rank

    def _bytes(self, encoded: Tensor, routes: list[Route]) -> int:
        """Return the number of bytes that go to, or come from, other ranks."""
        rows = sum(route.stop - route.start for route in routes if route.peer != self._rank)
        return rows * encoded.nbytes // max(1, len(encoded))

    def expect(self, micro: int, rows: int, routes: list[Route]) -> None:
        """Post the receives for this rank's `rows` of a micro-batch."""
        assert micro not in self._expected
        expected = _Expected(self._codec.empty(rows, **self._staging.host), [], [])
        expected.bytes = self._bytes(expected.encoded, routes)
        for route in routes:
            if self._has_header(route):
                header = torch.empty(1)
                expected.headers.append((self._group.receive(header, route.peer, self._tag(micro, True)), route.peer))
            part = expected.encoded[route.start : route.stop]
            expected.parts.append((self._group.receive(part, route.peer, self._tag(micro)), route.peer))
        self._expected[micro] = expected

    def receive(self, micro: int) -> Values:
        """Return the rows of a micro-batch, waiting until all of them are here."""
        expected = self._expected.pop(micro)
        self._staging.drain()  # or a rank that this one waits for might wait for what has not been sent yet
        everything_small = not expected.headers
        self._clock.switch("wait", "receive", micro)
        for work, peer in expected.headers:
            self._group.wait(work, peer)
        if not everything_small:
            self._clock.switch("transfer", "receive", micro)
        for work, peer in expected.parts:
            self._group.wait(work, peer)
        self.received_bytes += expected.bytes
        if self._codec.format != "fp32":
            self._clock.switch("compute", "decode", micro)
        return self._codec.decode(self._staging.to_device(expected.encoded))

    def send(self, micro: int, values: Values, routes: list[Route], seed: int | None = None) -> None:
        """Begin to send this rank's rows of a micro-batch; `seed` is that of `Codec.encode`."""
        if self._codec.format != "fp32":
            self._clock.switch("compute", "encode", micro)
        encoded = self._codec.encode(tuple(value.detach() for value in values), seed)
        self._clock.switch("transfer", "send", micro)
        self._staging.send(encoded, lambda host: self._begin(micro, host, routes))
        self.sent_bytes += self._bytes(encoded, routes)

    def _begin(self, micro: int, encoded: Tensor, routes: list[Route]) -> None:
        """Begin to send rows that are in the host's memory."""
        for route in routes:
            if self._has_header(route):
                work = self._group.send(self._header, route.peer, self._tag(micro, True))
                self._sending.append((work, route.peer, self._header))
            part = encoded[route.start : route.stop]
            self._sending.append((self._group.send(part, route.peer, self._tag(micro)), route.peer, part))
        while len(self._sending) > 2 * _SENDS_UNDER_WAY * len(routes):
            self._finish_one()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        self._staging.drain()
        while self._sending:
            self._finish_one()

    def _finish_one(self) -> None:
        work, peer, _ = self._sending.popleft()
        self._group.wait(work, peer)


_SMALLEST_CHANNEL = 64  # the fewest values that share a scale, so that the scale's four bytes are negligible


class Codec:
    """Encodes tensors `[rows, *spec.shape]` of float32 in one of the formats `plan.FORMATS`."""

    def __init__(self, spec: TensorSpec, format: str) -> None:
        """Prepare the encoding of such tensors; a dtype other than float32 is always sent unchanged."""
        self._spec = spec
        self.format = format if spec.dtype == torch.float32 and spec.values_per_sample else "fp32"
        by_channel = len(spec.shape) > 1 and spec.values_per_sample // spec.shape[0] >= _SMALLEST_CHANNEL
        self.scales = spec.shape[0] if by_channel else 1
        self.bytes_per_sample = int(spec.bytes_per_sample * FORMATS[self.format].ratio)
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
