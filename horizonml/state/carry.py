"""Carries state between the ranks of a group: layers that change hands, and what a stage's members must hold alike.

`senders` says which layer goes from whom to whom. `parcels` makes messages of that, within what the model says there
can be, and `carry` sends and receives them. A move does so at once; `follow` does it beside the training, in pieces.

Gradients are summed, and parameters never are, so members of a stage that begin unequal would stay unequal to the end:
`share_state` compares them, and gives all of them the state of the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizonml.comm.expected import boolean, fields, items, mapping, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.errors import PeerLost, StateDiffers
from horizonml.machine.host import memory_left
from horizonml.plan.plan import Plan
from horizonml.state.optim import in_common
from horizonml.state.train_state import TrainState

Moves = list[tuple[int, int, int]]  # (layer, from, to), in the order of layers
Holders = Sequence[Sequence[int]]  # the ranks that hold each layer
Digests = dict[str, str]  # of the state of each stage that a rank shares with others, by the stage's number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def memory_here(group: Group) -> float:
    """Return the bytes of memory that are left for this rank, as one of those on its machine."""
    return memory_left(processes=group.hosts.count(group.hosts[group.rank]))


def holders(plan: Plan) -> Holders:
    """Return the ranks that hold each layer in a plan."""
    return [next(stage.ranks for stage in plan.stages if stage.start <= n < stage.stop) for n in range(plan.layers)]


def senders(held: Holders, plan: Plan) -> Moves:
    """Return which layer goes from which rank to which, so that every rank has its layers in the plan.

    A rank that already has a layer receives none; of several possible senders, the one that has sent least sends.
    """
    sent: Counter[int] = Counter()
    found = []
    for layer, (there, wanted) in enumerate(zip(held, holders(plan), strict=True)):
        for rank in wanted:
            if rank not in there:
                sender = min(there, key=lambda holder: (sent[holder], holder))
                sent[sender] += 1
                found.append((layer, sender, rank))
    return found


@dataclass(frozen=True)
class Parcel:
    """A tensor that one rank sends to another, as both of them know it."""

    key: str  # the tensor's name in the state
    tensor: Tensor  # what is sent, or where it arrives: contiguous
    source: int
    target: int

    def begin(self, group: Group, tag: int) -> tuple[Work, int]:
        """Begin to send or to receive it; return the work, and the rank at the other end."""
        flat = self.tensor.view(-1)
        if group.rank == self.source:
            return group.send(flat, self.target, tag), self.target
        return group.receive(flat, self.source, tag), self.source


def carry(own: Iterable[Parcel], group: Group, channel: str) -> dict[str, Tensor]:
    """Send and receive this rank's own parcels, all at once, and return what has arrived by name.

    The two ranks of each parcel list those between them in the same order. Raises PeerLost.
    """
    numbers: Counter[tuple[int, int]] = Counter()
    works, arrived = [], {}
    for one in own:
        lane = one.source, one.target
        works.append(one.begin(group, group.channel(channel).tag(numbers[lane])))
        numbers[lane] += 1
        if group.rank == one.target:
            arrived[one.key] = one.tensor
    for work, peer in works:
        group.wait(work, peer)
    return arrived


def parcels(state: TrainState, moves: Moves, group: Group, *, copy: bool = False) -> list[Parcel]:
    """Return what this rank sends and receives; all ranks call this. Raises PeerLost.

    With `copy`, it sends the state as it is now, and otherwise the state's own tensors. A layer goes without what the
    others have from a file.
    """
    held: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in state.tensors().items():
        if not state.is_constant(key):
            held[state.layer_of(key)][key] = tensor
    offers = _offers(held, moves, group)
    tensors: dict[str, Tensor] = {}
    found = []
    for layer, sender, receiver in moves:
        expected = state.expected(layer) if group.rank in (sender, receiver) else {}
        for key in offers[layer] if expected else ():
            if key not in expected:  # a peer decides neither shapes nor dtypes
                raise PeerLost(f"rank {sender} offers {key}, which layer {layer} does not have")
            if key not in tensors and group.rank == receiver:
                tensors[key] = torch.empty(expected[key].shape, dtype=expected[key].dtype)
            elif key not in tensors:
                own = held[layer][key]
                tensors[key] = own.clone(memory_format=torch.contiguous_format) if copy else own.contiguous()
            found.append(Parcel(key, tensors[key], sender, receiver))
    return found


def _offers(held: Mapping[int, Mapping[str, Tensor]], moves: Moves, group: Group) -> dict[int, list[str]]:
    """Return which tensors of each layer are to be sent; all ranks call this, with what they hold. Raises PeerLost.

    A rank without the layer does not know whether its optimizer state exists yet.
    """
    mine = sorted({layer for layer, sender, _ in moves if sender == group.rank})
    own = [[layer, list(held[layer])] for layer in mine if layer in held]
    offers: dict[int, list[str]] = defaultdict(list)
    for rank, offered in enumerate(group.gather_json(own, items(fields(whole(), items(text))))):
        for layer, keys in offered:
            if not any(sender == rank for moved, sender, _ in moves if moved == layer) or len({*keys}) < len(keys):
                raise PeerLost(f"rank {rank} offers layer {layer}, which it is not asked for, or a tensor of it twice")
            offers[layer] += [key for key in keys if key not in offers[layer]]
    return offers


def move(state: TrainState, moves: Moves, group: Group) -> int:
    """Send the parameters, buffers and optimizer state of layers from ranks to ranks.

    All ranks must call this, with no session on the state; the next session releases the layers that have moved away,
    and reads what is frozen from the file of pretrained weights.
    Return the bytes that this rank has received. Raises PeerLost.
    """
    received = carry(parcels(state, moves, group), group, "layers")
    state.put(received)
    return sum(tensor.nbytes for tensor in received.values())


def hand_over(state: TrainState, plan: Plan, group: Group, leaves: bool) -> None:
    """Bring the layers that only leaving ranks hold to ranks that stay, and make whole what the members had split.

    All ranks call this, without a session. Raises PeerLost.
    """
    told = group.gather_json([leaves, state.valid], fields(boolean, boolean))
    leaving = [rank for rank, (gone, _) in enumerate(told) if gone]
    staying = [rank for rank in range(group.world_size) if rank not in leaving]
    if not staying:
        return
    state.join(group)
    if not state.valid:  # this rank follows; whatever it is handed is valid, and all it has
        state.drop()
        state.valid = True
    plan = plan.without([rank for rank, (_, valid) in enumerate(told) if not valid])
    last = [(layer, ranks[0]) for layer, ranks in enumerate(holders(plan)) if all(rank in leaving for rank in ranks)]
    move(state, [(layer, rank, staying[n % len(staying)]) for n, (layer, rank) in enumerate(last)], group)


def share_state(
    state: TrainState, plan: Plan, group: Group, everyone: Sequence[Digests] | None = None
) -> list[tuple[int, str]]:
    """Compare the state of every stage's members, and give the state of the first member to those that differ.

    Return, on all ranks, the ranks that differed, each with the name of a tensor that did. All ranks of the group call
    this, with the digests of all ranks if they know them already. Raises StateDiffers if some cannot be made equal.
    """
    differing = _differing(state, plan, group, everyone)
    if not differing:
        return []
    own = []
    for rank, stage, _ in differing:
        source = plan.stages[stage].ranks[0]
        if group.rank in (rank, source):
            tensors = sorted(_in_common(state, plan, stage).items())
            own += [Parcel(key, tensor.contiguous(), source, rank) for key, tensor in tensors]
    state.take_over(carry(own, group, "state"))
    left = _differing(state, plan, group)
    if left:
        told = "; ".join(f"rank {rank} differs in {name}" for rank, _, name in left)
        raise StateDiffers(f"members of a stage do not hold the same state: {told}")
    return [(rank, name) for rank, _, name in differing]


def digests_of(state: TrainState, plan: Plan, rank: int, *, quick: bool = False) -> Digests:
    """Return what the members of a stage compare: a digest of what each of this rank's stages holds in common.

    A `quick` one adds up the bits of each tensor, which is ten times as fast. Differences that come from rounding do
    not cancel out in all tensors at once.
    """
    found = {}
    for number in _shared(plan, rank):
        tensors = sorted(_in_common(state, plan, number).items())
        lines = [f"{key} {_sum(tensor) if quick else digest(key, tensor)}\n" for key, tensor in tensors]
        found[str(number)] = hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
    return found


def digest(key: str, tensor: Tensor) -> str:
    """Return a digest of a tensor's name, shape, dtype and bytes."""
    content = hashlib.blake2b(f"{key} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    content.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, taken as integers; it wraps around."""
    flat = tensor.detach().contiguous().view(-1)
    wide = flat.numel() * flat.element_size() % 8 == 0
    return int(flat.view(torch.int64 if wide else _INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


def _shared(plan: Plan, rank: int) -> list[int]:
    return [number for number in plan.stages_of(rank) if len(plan.stages[number].ranks) > 1]


def _in_common(state: TrainState, plan: Plan, number: int) -> dict[str, Tensor]:
    """Return the tensors that all members of a stage hold alike."""
    stage = plan.stages[number]
    return in_common(state.replicated(stage.start, stage.stop), plan)


def _differing(
    state: TrainState, plan: Plan, group: Group, everyone: Sequence[Digests] | None = None
) -> list[tuple[int, int, str]]:
    """Return the members whose state is not that of their stage's first member: rank, stage, and a tensor's name."""
    if all(len(stage.ranks) == 1 for stage in plan.stages):
        return []
    if everyone is None:
        everyone = group.gather_json(digests_of(state, plan, group.rank), mapping(text))
    unequal = [
        (rank, number)
        for number, stage in enumerate(plan.stages)
        for rank in stage.ranks[1:]
        if everyone[rank].get(str(number)) != everyone[stage.ranks[0]].get(str(number))
    ]
    if not unequal:
        return []
    # The tensors are compared only where there is a difference to report.
    own = {
        str(number): {key: digest(key, tensor) for key, tensor in _in_common(state, plan, number).items()}
        for number in _shared(plan, group.rank)
    }
    every = group.gather_json(own, mapping(mapping(text)))
    found = []
    for rank, number in unequal:
        lead = plan.stages[number].ranks[0]
        first, other = (every[one].get(str(number), {}) for one in (lead, rank))
        if first.keys() != other.keys():
            raise StateDiffers(f"rank {rank} and rank {lead} do not both hold {min(first.keys() ^ other.keys())}")
        names = [name for name in first if first[name] != other[name]]
        if not names:
            raise PeerLost(f"rank {rank} or rank {lead} told two digests of the same state")
        found.append((rank, number, min(names)))
    return found
