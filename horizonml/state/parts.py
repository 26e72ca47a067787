"""Describes which part of a tensor each member of a stage holds, where the members split channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.errors import PeerLost


@dataclass(frozen=True)
class TensorSplit:
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


def joined(parts: Mapping[str, TensorSplit], members: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors made of all members' parts; `members[r]` has those of rank r, by names in `parts`.

    Tensors that are not in `parts` are the same on all members. Raises PeerLost if the members' parts do not fit.
    """
    found = {}
    for key, own in next(iter(members.values())).items():
        part = parts.get(name_of(key))
        if part is None or own.dim() == 0:
            found[key] = own
            continue
        try:
            found[key] = torch.cat([members[rank][key] for rank in part.ranks], part.dim)
        except (KeyError, RuntimeError) as error:
            raise PeerLost(f"the copies of a stage's members do not fit each other at {key} ({error})") from error
    return found


def name_of(key: str) -> str:
    """Return the parameter's or buffer's name in the original model, from the name of a tensor of the state."""
    return named(key)[0]


def named(key: str) -> tuple[str, str | None]:
    """Return the parameter's or buffer's name, and which entry of its optimizer state a tensor is, None if none."""
    kind, _, rest = key.partition("/")
    name, _, entry = rest.rpartition("/")
    return (rest, None) if kind == "model" else (name, entry)


def gather(own: Tensor, dim: int, bounds: Sequence[tuple[int, int]], group: Group, ranks: tuple[int, ...]) -> Tensor:
    """Return the members' tensors joined along `dim`; member i's is at `bounds[i]`. Raises PeerLost."""
    front = own.detach().movedim(dim, 0)
    longest = max(stop - start for start, stop in bounds)
    padded = front.new_zeros(longest, *front.shape[1:])
    padded[: len(front)] = front
    everyone = group.all_gather(padded, ranks)
    rows = [tensor[: stop - start] for tensor, (start, stop) in zip(everyone, bounds, strict=True)]
    return torch.cat(rows).movedim(0, dim).contiguous()
