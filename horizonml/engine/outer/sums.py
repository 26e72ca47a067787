"""Sums vectors over the members of a stage for local steps, in the plan's format, while training may go on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.engine.outer.sparse import decode, encode, encoded_bytes
from horizonml.engine.sync.coded_sum import CodedSum
from horizonml.plan.plan import Stage

_MOST_FRAGMENTS = 1 << 12  # of a stage, for the tags of messages


class Sum(Protocol):
    """Sums vectors of one length over the members of a stage, one at a time; all members hold the same bits then."""

    bytes_sent: int
    """The bytes that this member sends of each vector; it receives about as many."""

    def begin(self, vector: Tensor) -> Work:
        """Begin to sum a vector in place; it must not change until the work is done."""


def sum_for(format: str, group: Group, stage: Stage, number: int, fragment: int, values: int, size: int) -> Sum:
    """Return a sum of vectors of so many values, of `size` bytes each, in a format of `plan.local`.

    All members call this in one order.
    """
    match format:
        case "int4":
            tag = group.channel("coded").tag(2 * (number * _MOST_FRAGMENTS + fragment))
            return CodedSum(group, stage.ranks, tag, values)
        case "topk":
            return SparseSum(group, stage, number, values)
    return WholeSum(group, stage, number, size * values)


class WholeSum:
    """Sums vectors as they are, by gloo's ring."""

    def __init__(self, group: Group, stage: Stage, number: int, size: int) -> None:
        self._group, self._ranks, self._number = group, stage.ranks, number
        self.bytes_sent = 2 * (len(stage.ranks) - 1) * size // len(stage.ranks)

    def begin(self, vector: Tensor) -> Work:
        """See `Sum`."""
        return self._group.all_reduce(vector, self._ranks, self._number)


class SparseSum:
    """Sums the largest values of each member's vector; what a member leaves out is a part of its next vector.

    Every member receives the others' encoded vectors and adds them up in the members' order.
    """

    def __init__(self, group: Group, stage: Stage, number: int, values: int) -> None:
        self._group, self._ranks, self._number, self._values = group, stage.ranks, number, values
        self.remainder = torch.zeros(values)
        self.bytes_sent = (len(stage.ranks) - 1) * encoded_bytes(values)

    @torch.no_grad()
    def begin(self, vector: Tensor) -> Work:
        """See `Sum`."""
        wanted = self.remainder.add_(vector)
        own = encode(wanted)
        wanted -= decode(own, self._values)
        every = [torch.empty_like(own) for _ in self._ranks]
        gathered = self._group.begin_all_gather(own, every, self._ranks, self._number)
        return _Sparse(gathered, every, vector)


class _Sparse:
    """Stands for a sum whose terms are on their way."""

    def __init__(self, gathered: Work, every: list[Tensor], vector: Tensor) -> None:
        self._gathered, self._every, self._vector = gathered, every, vector

    @torch.no_grad()
    def wait(self) -> None:
        """Block until the vector holds the sum."""
        self._gathered.wait()
        self._vector.zero_()
        for encoded in self._every:
            self._vector += decode(encoded, self._vector.numel())
