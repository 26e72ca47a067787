"""Connects a stage with a neighbour: activations travel one way, and their gradients travel back.

Members of the two stages may hold different parts of a micro-batch; each pair exchanges exactly the rows that both
hold. Receives are posted ahead of need and sends do not block, so bytes move while the rank computes. The plan sets the
format in which each boundary sends.

A message is announced by a header of four bytes that its sender sends just before it. Time until the header arrives is
`wait`, because the sender was not ready; time after that is `transfer`. A message below `SMALL` bytes arrives in one
piece and has no header, so the time spent on it is `wait`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.engine.clock import Clock
from horizonml.engine.codec import BoundaryCodec
from horizonml.engine.staging import Staging
from horizonml.models.boundary import Boundary, Values
from horizonml.plan.plan import MOST_MICRO_BATCHES, Route

SMALL = 64 << 10
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
        large = (route.stop - route.start) * self._codec.bytes_per_sample >= SMALL
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
