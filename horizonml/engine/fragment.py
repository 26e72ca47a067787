"""Holds what members agree on for some layers of a stage: outer parameters, momentum, and buffers.

A fragment's outer gradient is `sum_m w_m (outer - own_m)`: `own_m` are the parameters of member m, and `w_m` is its
part of the samples that all members have worked on since the last synchronisation. The outer optimizer is SGD with
Nesterov momentum, as in DiLoCo (arXiv 2311.08105). Every member computes the same update from the same sum, so all
hold the same bits. If an update arrives late, it is mixed with the parameters after the steps in between (Streaming
DiLoCo, arXiv 2501.18512, section 2.3).

The sums travel in the plan's format while training goes on. The sparse format has only the largest values of a vector,
as SparseLoCo (arXiv 2508.15706) sends them: of every block of 4096 values the 64 largest, each with its place in 12
bits, its sign, and a bit that says whether it is one of the larger or one of the smaller of them. The mean size of
both kinds travels in 16 bits each. That is 141 times fewer bytes than float32 has. Everyone decodes the same bits.

What a member has left out of its outer gradient is not lost: it takes up a part of it when training goes on, so that
its own parameters differ from the outer ones by that, and adds the rest to its next outer gradient (error feedback;
Stich et al., NeurIPS 2018). `Local.taken_up` says which part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.comm.work import Deferred, Work
from horizonml.engine.sync.base import Members, SyncedBuffers
from horizonml.engine.sync.compressed import CodedSum
from horizonml.models.module_slice import HOST
from horizonml.plan.local import Local
from horizonml.plan.plan import Stage
from horizonml.state.optim import AVERAGE, MOMENTUM, decay_of, follow
from horizonml.state.train_state import TrainState

_MOST_FRAGMENTS = 1 << 12  # of a stage, for the tags of messages


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
        group.among(stage.ranks, number)  # which connects members now, for one may be late with its first sum
        # The bytes that this member sends of each vector; it receives about as many.
        self.bytes_sent = 2 * (len(stage.ranks) - 1) * size // len(stage.ranks)

    def begin(self, vector: Tensor) -> Work:
        """Begin to sum a vector in place; it must not change until the work is done."""
        return self._group.all_reduce(vector, self._ranks, self._number)


class SparseSum:
    """Sums the largest values of each member's vector.

    Every member receives the others' encoded vectors and adds them up in the members' order.
    """

    def __init__(self, group: Group, stage: Stage, number: int, values: int) -> None:
        self._group, self._ranks, self._number, self._values = group, stage.ranks, number, values
        group.among(stage.ranks, number)
        self.sent = torch.zeros(0)  # what others get of the last vector
        self.bytes_sent = (len(stage.ranks) - 1) * encoded_bytes(values)

    @torch.no_grad()
    def begin(self, vector: Tensor) -> Work:
        """See `WholeSum`."""
        own = encode(vector)
        self.sent = decode(own, self._values)
        every = [torch.empty_like(own) for _ in self._ranks]
        gathered = self._group.begin_all_gather(own, every, self._ranks, self._number)

        @torch.no_grad()
        def take() -> None:
            gathered.wait()
            vector.zero_()
            for encoded in every:
                vector.add_(decode(encoded, vector.numel()))

        return Deferred(take)


Sum = WholeSum | SparseSum | CodedSum

MIXING = 0.5  # the part of a member's own parameters that it keeps when an update arrives late


class Fragment:
    """Holds one fragment of one stage, as one of its members.

    Outer parameters and momentum are in the host's memory, whatever the member computes on.
    """

    def __init__(
        self,
        number: int,
        local: Local,
        members: Members,
        state: TrainState,
        parameters: Mapping[str, nn.Parameter],
        buffers: SyncedBuffers,
        copies: Mapping[str, tuple[str, nn.Parameter]],
    ) -> None:
        """Take the parameters and buffers as they are for what all members agree on; all call this in one order.

        `copies` are other parameters that are tied to one of the `parameters`, whose name stands with each.
        """
        self._local, self._members, self._state = local, members, state
        self._outer_rate, self._outer_momentum = local.outer(len(members.ranks), state.optimizer.is_adam)
        self._parameters, self._buffers, self._copies = dict(parameters), buffers, dict(copies)
        double = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        self._dtype = torch.float64 if double else torch.float32
        self._sizes = [parameter.numel() for parameter in parameters.values()]
        self._counts = [0.0] * len(members.ranks)  # the rows that each member has worked on since the last agreement
        self._summed = self._counts  # those that the last sum is about, until it is taken over
        self._since = state.step  # the step of that agreement
        count, group, stage = sum(self._sizes), members.group, members.stage
        self._sum: Sum | None = None
        if count:
            self._sum = sum_for(local.format, group, stage, members.number, number, count, self._dtype.itemsize)
        size = sum(buffer.numel() for buffer in buffers.named().values())
        self._buffer_sum = WholeSum(group, stage, members.number, 4 * size) if size else None
        self.outer = self._flat()
        self.momentum = torch.zeros(count, dtype=self._dtype)
        if not self._outer_momentum:
            state.forget_outer()
        known, views = state.entries(MOMENTUM), self._by_name(self.momentum)
        for name in known.keys() & views.keys():
            views[name].copy_(known[name])
        self._kept = {name: buffer.clone() for name, buffer in buffers.named().items()}
        self._averaged = set(state.entries(AVERAGE)) & set(parameters)
        self._works: list[Work] = []
        self._vector, self._own = torch.zeros(0), torch.zeros(0)
        self._unsent = self._left = torch.zeros(0)  # of the sum under way, and of the last one until it is taken up
        self._rest = torch.zeros(0)  # of the last one, once that has been done
        self._arrived: list[Tensor] = []
        self.found: dict[str, Tensor] = {}  # what the last synchronisation has found, by the names in the state
        self._next = torch.zeros(0), torch.zeros(0)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this member sends in a synchronisation; it receives about as many."""
        return sum(one.bytes_sent for one in (self._sum, self._buffer_sum) if one is not None)

    def _flat(self) -> Tensor:
        """Return a copy of this member's own parameters."""
        found = [parameter.detach().flatten().to(HOST, self._dtype) for parameter in self._parameters.values()]
        return torch.cat(found) if found else torch.zeros(0)

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes) if self._sizes else ()
        pairs = zip(self._parameters.items(), parts, strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in pairs}

    def count(self, rows: Sequence[int]) -> None:
        """Note how many rows each member has worked on in a step."""
        self._counts = [before + more for before, more in zip(self._counts, rows, strict=True)]

    @property
    def has_changed(self) -> bool:
        """Return whether any member has worked on rows since the last sum began; all members know the same."""
        return any(self._counts)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to sum this member's outer gradient, and its buffers, with those of the others. Raises PeerLost."""
        total = sum(self._counts)
        weight = self._counts[self._members.place] / total if total else 1.0 / len(self._counts)
        self._counts, self._summed = [0.0] * len(self._counts), self._counts
        self._works = []
        if self._sum is not None:
            self.take_up(0.0)
            self._own = self.outer - self._flat()
            if self._rest.numel():
                self._own += self._rest
            self._vector = self._own * weight
            if self._local.format != "fp32":
                self._vector = self._vector.float()
            self._works.append(self._sum.begin(self._vector))
            if isinstance(self._sum, SparseSum):
                self._unsent = self._own - self._sum.sent / weight if weight else self._own.clone()
                self._sum.sent = torch.zeros(0)
        if self._buffer_sum is not None:
            averaged, copied = self._buffers.float_and_other()
            first = float(self._members.leads)
            parts = [b.flatten().to(HOST, torch.float32) * weight for b in averaged]
            parts += [b.flatten().to(HOST, torch.float32) * first for b in copied]
            self._arrived = [torch.cat(parts)]
            self._works.append(self._buffer_sum.begin(self._arrived[0]))

    def wait(self) -> None:
        """Wait for the sum. Raises PeerLost."""
        works, self._works = self._works, []
        for work in works:
            self._members.group.wait(work)

    @torch.no_grad()
    def finish(self, step: int) -> tuple[bool, float | None]:
        """Wait for the sum, and compute what all members go on from after `step` steps. Raises PeerLost.

        Return whether it is finite, and how far this member's outer gradient was from the mean, relative to that.
        """
        self.wait()
        divergence, finite = None, True
        if self._sum is not None:
            gradient = self._vector.to(self._dtype)
            finite = bool(torch.isfinite(gradient.sum()))
            norm, sent = float(gradient.norm()), self._own - self._unsent if self._unsent.numel() else self._own
            divergence = float((sent - gradient).norm()) / norm if norm > 0 else 0.0
            momentum = self.momentum * self._outer_momentum + gradient
            direction = gradient + self._outer_momentum * momentum
            self._next = self.outer - self._outer_rate * direction, momentum
        self.found = self._name(step)
        return finite, divergence

    def _name(self, step: int) -> dict[str, Tensor]:
        """Return the new values by the names that they have in the state."""
        found: dict[str, Tensor] = {}
        if self._sum is not None:
            outer, momentum = map(self._by_name, self._next)
            known = self._state.entries(MOMENTUM)
            for name, parameter in self._parameters.items():
                found[f"model/{name}"] = outer[name].to(parameter.dtype)
                # A parameter that no member has ever changed has no optimizer state.
                if self._outer_momentum and (name in known or bool(momentum[name].any())):
                    found[f"optimizer/{name}/{MOMENTUM}"] = momentum[name].to(parameter.dtype)
            found |= self._averages(outer, step)
            for name, (first, _) in self._copies.items():
                for key in ("model/{}", f"optimizer/{{}}/{AVERAGE}"):
                    if key.format(first) in found:
                        found[key.format(name)] = found[key.format(first)]
        if self._arrived:
            averaged, copied = self._buffers.float_and_other()
            names = {id(buffer): name for name, buffer in self._buffers.named().items()}
            every = [*averaged, *copied]
            parts = self._arrived[0].split([buffer.numel() for buffer in every])
            for buffer, part in zip(every, parts, strict=True):
                found[f"model/{names[id(buffer)]}"] = part.view(buffer.shape).to(buffer.dtype)
        return found

    def _averages(self, outer: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the moving averages, which follow what members agree on as they would follow as many steps."""
        found: dict[str, Tensor] = {}
        ema = self._state.optimizer.ema
        if ema is None:
            return found
        before, known = self._by_name(self.outer), self._state.entries(AVERAGE)
        keeps = decay_of(ema, step - 1) ** max(1, step - self._since)
        for name in known.keys() & self._parameters.keys():
            # What a member's first step began an average with is only its own.
            average = (known[name].to(HOST) if name in self._averaged else before[name].to(known[name].dtype)).clone()
            follow([average], [outer[name].to(average.dtype)], keeps)
            found[f"optimizer/{name}/{AVERAGE}"] = average
            self._averaged.add(name)
        return found

    @torch.no_grad()
    def commit(self, step: int, late: bool) -> None:
        """Go on from what was found; if it is `late`, keep a part of the steps taken since the sum began."""
        every = {**self._parameters, **{name: copy for name, (_, copy) in self._copies.items()}}
        own = {name: parameter.detach().clone() for name, parameter in every.items()} if late else {}
        self._state.take_over({key: value.clone() for key, value in self.found.items()} if self._copies else self.found)
        if self._sum is not None:
            self.outer, self.momentum = self._next
        self._kept = {name: buffer.clone() for name, buffer in self._buffers.named().items()}
        for name, value in own.items():
            every[name].detach().lerp_(value, MIXING)
        if self._unsent.numel():
            # Of what was in this member's parameters, mixing has kept a part there.
            kept = (self._unsent - self._rest if self._rest.numel() else self._unsent) if late else 0.0
            self._left = self._unsent - MIXING * kept
        self._unsent = self._rest = torch.zeros(0)
        self._summed = [0.0] * len(self._counts)
        self._since, self.found, self._next = step, {}, (torch.zeros(0), torch.zeros(0))
        self._vector, self._own, self._arrived = torch.zeros(0), torch.zeros(0), []

    @torch.no_grad()
    def take_up(self, part: float) -> None:
        """Go on with a part of what this member's last outer gradient has left out; the next one has the rest."""
        if not self._left.numel():
            return
        for name, left in self._by_name(part * self._left).items():
            self._parameters[name].detach().sub_(left.to(self._parameters[name]))
        for first, copy in self._copies.values():
            copy.detach().copy_(self._parameters[first])
        self._left, self._rest = torch.zeros(0), (1 - part) * self._left

    @property
    def rows(self) -> float:
        """Return how many rows this member has worked on since the last agreement."""
        return self._counts[self._members.place] + self._summed[self._members.place]

    def own(self) -> dict[str, Tensor]:
        """Return this member's own parameters and buffers, by name; these are no copies."""
        copies = {name: copy.detach() for name, (_, copy) in self._copies.items()}
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return own | copies | self._buffers.named()

    def go_on(self, own: Mapping[str, Tensor] | None, rows: Sequence[float]) -> None:
        """Go on from what this member has done in an earlier group, if it has; `rows` are those of each member."""
        if own is not None:
            for name, tensor in self.own().items():
                tensor.copy_(own[name])
        self._counts = list(rows)

    @torch.no_grad()
    def roll_back(self) -> None:
        """Go back to what members agreed on last."""
        outer = self._by_name(self.outer)
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(outer[name])
        for first, copy in self._copies.values():
            copy.detach().copy_(outer[first])
        for name, buffer in self._buffers.named().items():
            buffer.copy_(self._kept[name])


def fragments_of(
    local: Local,
    members: Members,
    state: TrainState,
    parameters: Mapping[str, nn.Parameter],
    module: nn.Module,
    ties: Sequence[Sequence[str]],
) -> list[Fragment]:
    """Return a stage's fragments: consecutive layers with about as many parameters each; some may be empty.

    `ties` are the names of parameters of which several in the stage are one; all but the first follow that.
    """
    first = {name: names[0] for names in ties for name in names[1:]}
    names = (*parameters, *SyncedBuffers(module).named())
    layers = sorted({state.layer_of(f"model/{name}") for name in names})
    size = dict.fromkeys(layers, 0)
    for name, parameter in parameters.items():
        size[state.layer_of(f"model/{name}")] += parameter.numel() if name not in first else 0
    total, before, place = sum(size.values()), 0, {}
    for layer in layers:
        middle = before + size[layer] / 2
        place[layer] = min(local.fragments - 1, int(local.fragments * middle / total)) if total else 0
        before += size[layer]

    def belongs(name: str, number: int) -> bool:
        return place[state.layer_of(f"model/{first.get(name, name)}")] == number

    return [
        Fragment(
            number,
            local,
            members,
            state,
            {name: one for name, one in parameters.items() if name not in first and belongs(name, number)},
            SyncedBuffers(module, partial(belongs, number=number)),
            {name: (first[name], one) for name, one in parameters.items() if name in first and belongs(name, number)},
        )
        for number in range(local.fragments)
    ]


BLOCK = 4096
KEPT = 64  # values of a block
_SCALES, _PLACES, _KINDS = 4, KEPT // 2 * 3, KEPT // 4  # bytes of a block
_BYTES = _SCALES + _PLACES + _KINDS


def encoded_bytes(values: int) -> int:
    """Return the bytes that so many values take."""
    return _BYTES * -(-values // BLOCK)


@torch.no_grad()
def encode(vector: Tensor) -> Tensor:
    """Return the largest values of a float32 vector as bytes. A block with a value that is not finite stays so."""
    blocks = -(-vector.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: vector.numel()] = vector
    rows = padded.view(blocks, BLOCK)
    sizes, places = rows.abs().topk(KEPT, dim=1)
    others = sizes != 0
    # Where fewer values are not zero, the first one takes the places of the others, so that zeros stay what they are.
    sizes, places = torch.where(others, sizes, sizes[:, :1]), torch.where(others, places, places[:, :1])
    larger = sizes > _mean_where(others, sizes).unsqueeze(1)  # none, where a size is not finite
    scales = torch.stack([_mean_where(others & ~larger, sizes), _mean_where(others & larger, sizes)], 1)
    scales = scales.to(torch.bfloat16)
    first, second = places[:, ::2], places[:, 1::2]
    packed = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2)
    kinds = (larger | (rows.gather(1, places) < 0) << 1).view(blocks, _KINDS, 4)
    encoded = torch.empty(blocks, _BYTES, dtype=torch.uint8)
    encoded[:, :_SCALES] = scales.view(torch.uint8)
    encoded[:, _SCALES : _SCALES + _PLACES] = packed.view(blocks, _PLACES)
    encoded[:, _SCALES + _PLACES :] = (kinds << _KIND_BITS).sum(2)
    return encoded.view(-1)


_KIND_BITS = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")


def _mean_where(chosen: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of the chosen sizes of each row, or 0 where none is chosen."""
    return torch.where(chosen, sizes, 0.0).sum(1) / chosen.sum(1).clamp_(min=1)


@torch.no_grad()
def decode(encoded: Tensor, values: int) -> Tensor:
    """Return the vector that was encoded, with zeros in place of what was left out."""
    rows = encoded.view(-1, _BYTES)
    scales = rows[:, :_SCALES].contiguous().view(torch.bfloat16).float()
    low, middle, high = rows[:, _SCALES : _SCALES + _PLACES].long().view(len(rows), -1, 3).unbind(2)
    places = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 2).view(len(rows), KEPT)
    kinds = (rows[:, _SCALES + _PLACES :].unsqueeze(2) >> _KIND_BITS & 3).view(len(rows), KEPT).long()
    sizes = scales.gather(1, kinds & 1)
    found = torch.zeros(len(rows), BLOCK)
    found.scatter_(1, places, torch.where(kinds > 1, -sizes, sizes))
    return found.view(-1)[:values]
