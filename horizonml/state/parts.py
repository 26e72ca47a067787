"""Describes which part of a tensor each member of a stage holds, where the members split channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizonml.comm.group import Group


@dataclass(frozen=True)
class Part:
    """Describes what the members of a stage hold of a tensor: member i has `[start, stop) = bounds[i]` along `dim`."""

    dim: int
    bounds: tuple[tuple[int, int], ...]
    member: int  # this member's number
    ranks: tuple[int, ...]  # of all members

    @property
    def size(self) -> int:
        """Return the size of the whole tensor along `dim`."""
        return self.bounds[-1][1]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this member's part of the whole tensor, as a copy."""
        start, stop = self.bounds[self.member]
        return tensor.detach().narrow(self.dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    def whole(self, own: Tensor, group: Group) -> Tensor:
        """Return the tensor assembled from all members' parts; all members must call this. Raises PeerLost."""
        return gather(own, self.dim, self.bounds, group, self.ranks)


def gather(own: Tensor, dim: int, bounds: Sequence[tuple[int, int]], group: Group, ranks: tuple[int, ...]) -> Tensor:
    """Return the members' tensors joined along `dim`; member i's is at `bounds[i]`. Raises PeerLost."""
    front = own.detach().movedim(dim, 0)
    longest = max(stop - start for start, stop in bounds)
    padded = front.new_zeros(longest, *front.shape[1:])
    padded[: len(front)] = front
    everyone = group.all_gather(padded, ranks)
    rows = [tensor[: stop - start] for tensor, (start, stop) in zip(everyone, bounds, strict=True)]
    return torch.cat(rows).movedim(0, dim).contiguous()
