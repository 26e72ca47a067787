"""Connects the ranks of one generation with gloo, for messages, sums and agreements.

Nothing here waits without a deadline: the group's timeout holds for every message. A peer that is gone or late raises
`PeerLost`, which names the peer where it can be known.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, Store

from horizonml.comm.connect import Connections
from horizonml.comm.expected import Reader, anything, fields, instance, optional, plain, text
from horizonml.comm.playback import Recording
from horizonml.comm.tunnel.client import Links
from horizonml.comm.work import (
    SMALL_MESSAGE,
    Collective,
    Deferred,
    Done,
    Message,
    MessageLog,
    Moves,
    Naming,
    SumChain,
    Work,
)
from horizonml.errors import HorizonError, PeerLost, of_kind
from horizonml.machine.emulation import machine_of

T = TypeVar("T")
_log = logging.getLogger(__name__)

MOST_JSON = 64 << 20  # bytes of the values that ranks gather, all together; typical values take kilobytes
_LEAST_JSON = 1 << 20  # of one rank's value, however many ranks there are
_SIZE, _HEAD = 8, 1 << 10  # bytes of a value's length, and of what travels at once: most values, with their length

# Each purpose has tags of its own, so that no message is taken for another's.
_CHANNELS = (
    "boundaries", "gradients", "members", "totals", "finite", "stragglers", "probe", "state", "layers", "files",
    "mirror", "coded",
)  # fmt: skip
_MESSAGES = 1 << 27  # of each channel


@dataclass(frozen=True)
class Channel:
    """Provides the tags of one purpose."""

    first: int

    def tag(self, message: int = 0) -> int:
        """Return the tag of one of the channel's messages, which both ends number alike."""
        assert 0 <= message < _MESSAGES, message
        return self.first + message

    @property
    def tags(self) -> range:
        """Return all tags of the channel."""
        return range(self.first, self.first + _MESSAGES)


class Group:
    """Holds this rank's connections to all others; with a world size of 1 there are none."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        hosts: Sequence[str] | None = None,
        over: threading.Event | None = None,
        links: Links | None = None,
        moves: Moves | None = None,
        started_as: Sequence[int] | None = None,
    ) -> None:
        """Connect to the other ranks through `store`, within `timeout` seconds; give up when `over` is set.

        `hosts[r]`, if known, is the machine of rank r. If all ranks are on this one, nobody else can connect to them.
        Else `links` connect the machines, through tunnels; without links, gloo connects them by the network interface
        that GLOO_SOCKET_IFNAME names, readable for everyone on the way. `moves` counts messages and sums. Errors name
        rank r as `started_as[r]`. Raises PeerLost.
        """
        self.hosts = list(hosts) if hosts is not None else [f"rank-{rank}" for rank in range(world_size)]
        self._hosts_known = hosts is not None
        self.rank, self.world_size, self.timeout = rank, world_size, timeout  # seconds that it waits for a message
        self.started_as = list(started_as if started_as is not None else range(world_size))
        self._store = store
        self._moves = moves or Moves()
        self.devices: dict[int, str] = {}  # the accelerators that ranks compute on, once they have told one another
        self._outbox: dict[int, Tensor] = {}  # messages of this rank to itself
        self.log: MessageLog | None = None  # which takes note of what is sent
        self._over = over or threading.Event()  # set once the group has been broken off
        self._waiters = threading.local()  # see `Message`
        self._subgroups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._closing: list[Callable[[], Any]] = []
        self._twins: list[Group] = []
        self._twins_over: list[threading.Event] = []
        alone = hosts is not None and len({machine_of(host) for host in hosts}) == 1
        self.links = None if alone else links
        address = "127.0.0.1" if alone else None
        connecting = Connections(store, rank, world_size, timeout, self._over, address, self.links, self.started_as)
        self._connections: Connections | Recording = connecting
        connecting.arrive()
        self._world = self._connections.connect("world", tuple(range(world_size)))

    def within(self, ranks: Sequence[int]) -> Group:
        """Return the group of some of these ranks, numbered anew in their order, all of which call this together.

        It connects the same machines, and ends with this group, which closes it. Raises PeerLost.
        """
        part = copy.copy(self)
        part.rank, part.world_size = ranks.index(self.rank), len(ranks)
        part.started_as = [self.started_as[rank] for rank in ranks]
        part.hosts = [self.hosts[rank] for rank in ranks]
        part.devices = {place: self.devices[rank] for place, rank in enumerate(ranks) if rank in self.devices}
        part.log, part._outbox, part._subgroups = None, {}, {}
        part._world = self.among(tuple(ranks)) if len(ranks) > 1 else None
        return part

    @classmethod
    def played_back(cls, rank: int, world_size: int, recording: Recording) -> Group:
        """Return the group of a lost rank whose work is repeated, and which receives what was recorded."""
        group = cls(None, 0, 1, 1.0)
        group.rank, group.world_size, group.started_as = rank, world_size, list(range(world_size))
        group._world, group._connections = recording, recording
        return group

    def twin(self, name: str, timeout: float) -> Group:
        """Return a group of the same ranks with connections of its own, for a thread that works beside this group's.

        Collectives of one process group must come in the same order on all ranks, which two threads cannot promise.
        The twin waits for agreements up to `timeout` seconds, and connects as fast as this group. It is broken off
        together with this group; who asked for it closes it. All ranks call this in the same order. Raises PeerLost.
        """
        store = PrefixStore(f"{name}-{len(self._twins)}", self._store) if self._store is not None else None
        hosts = self.hosts if self._hosts_known else None
        over = threading.Event()
        self._twins_over.append(over)
        twin = Group(store, self.rank, self.world_size, self.timeout, hosts, over, self.links, None, self.started_as)
        if twin._world is not None:
            twin._world._set_default_timeout(timedelta(seconds=timeout))
        self._twins.append(twin)
        if self.is_over:  # which it became while the twin connected
            twin.abort()
        return twin

    @property
    def store(self) -> Store:
        """Return the store through which the ranks have connected."""
        assert self._store is not None
        return self._store

    @property
    def calls(self) -> int:
        """Return how often this rank has turned to the others: a number that grows while its main thread moves on."""
        return self._moves.count

    def moved_on(self) -> None:
        """Count a call for work that does without the others for a while."""
        self._moves.count += 1

    @property
    def is_over(self) -> bool:
        """Return whether the group has been broken off."""
        return self._over.is_set()

    def name(self, rank: int) -> str:
        """Return a rank in words, by the number that it was started as, because the group numbers its ranks anew."""
        return f"rank {self.started_as[rank]}"

    def on_one_host(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are known to share a machine."""
        return self._hosts_known and len({self.hosts[rank] for rank in ranks}) == 1

    @staticmethod
    def channel(name: str) -> Channel:
        """Return the tags for messages of one purpose, one of `_CHANNELS`."""
        return Channel(_CHANNELS.index(name) * _MESSAGES)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send a contiguous tensor; it must not change until the work is done."""
        self._moves.count += 1
        if peer == self.rank:
            self._outbox[tag] = tensor
            return Done()
        if self.log is not None:
            self.log.add(tensor, peer, tag)
        self._moves.count += 1
        with Naming(self.name, peer):
            return self._under_way(self._world.send([tensor], peer, tag), tensor)

    def receive(self, into: Tensor, peer: int, tag: int) -> Work:
        """Begin to receive into a contiguous tensor of the size that was sent."""
        self._moves.count += 1
        if peer == self.rank:
            return Deferred(lambda: into.copy_(self._outbox.pop(tag)))
        with Naming(self.name, peer):
            return self._under_way(self._world.recv([into], peer, tag), into)

    def _under_way(self, work: Work, tensor: Tensor) -> Work:
        whole = tensor.nbytes <= SMALL_MESSAGE or isinstance(work, Done)
        return work if whole else Message(work, self._waiters, self._over)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], stage: int = 0) -> Work:
        """Begin to sum a tensor over `ranks` in place. All must make the same calls for a `stage` in the same order."""
        with Naming(self.name, None):
            work = self.among(ranks, stage).allreduce([tensor])
        return Collective(work, self._over)

    def follow(self, future: Any) -> Work:
        """Return the work that a future stands for, of sums that were begun on a process group of `among`."""
        return SumChain(future, self._over)

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """Return the tensors of `ranks`, all of one shape, in their order. All of them must make the same calls."""
        tensors = [torch.empty_like(tensor) for _ in ranks]
        self.wait(self.begin_all_gather(tensor, tensors, ranks))
        return tensors

    def begin_all_gather(self, own: Tensor, every: list[Tensor], ranks: tuple[int, ...], stage: int = 0) -> Work:
        """Begin to gather the tensors of `ranks` into `every`. All must make the same calls for a `stage` in order."""
        with Naming(self.name, None):
            work = self.among(ranks, stage).allgather([every], [own])
        return Collective(work, self._over)

    def among(self, ranks: tuple[int, ...], stage: int = 0) -> Any:
        """Return the process group of the members of a stage; all of them must ask for it together the first time.

        Stages with the same members have one each, for their sums do not come in the same order on all members.
        """
        self._moves.count += 1
        if (ranks, stage) not in self._subgroups:
            name = f"stage-{stage}-ranks-" + "-".join(map(str, ranks))
            self._subgroups[ranks, stage] = self._connections.connect(name, ranks)
        return self._subgroups[ranks, stage]

    def wait(self, work: Work, peer: int | None = None) -> None:
        """Wait for a message from or to `peer`, or for a sum. Raises PeerLost."""
        self._moves.count += 1
        with Naming(self.name, peer):
            work.wait()
        self._moves.count += 1

    def gather_json(self, value: Any, read: Reader[Any] = anything) -> list[Any]:
        """Return every rank's `value`, in the order of ranks, on every rank.

        The values travel as JSON, so nothing that is received is ever executed. `read` (see `expected`) returns what a
        value stands for, or refuses it: then PeerLost names the rank.
        """
        if self.world_size == 1:
            return [self._read(0, json.loads(json.dumps(value)), read)]
        own = _framed(value)
        heads = [torch.zeros(_HEAD, dtype=torch.uint8) for _ in range(self.world_size)]
        self._gather(heads, _padded(own[:_HEAD], _HEAD))
        # Before memory is taken for them: each rank's takes as much as the longest one.
        most = max(_LEAST_JSON, MOST_JSON // self.world_size)
        sizes = [self._announced(rank, head, most) for rank, head in enumerate(heads)]
        rest = _SIZE + max(sizes) - _HEAD
        texts = heads
        if rest > 0:
            tails = [torch.zeros(rest, dtype=torch.uint8) for _ in range(self.world_size)]
            self._gather(tails, _padded(own[_HEAD:], rest))
            texts = [torch.cat(pair) for pair in zip(heads, tails, strict=True)]
        parts = enumerate(zip(texts, sizes, strict=True))
        return [
            self._read(rank, self._parse(rank, content[_SIZE : _SIZE + size]), read) for rank, (content, size) in parts
        ]

    def _announced(self, rank: int, head: Tensor, most: int) -> int:
        """Return the length of a rank's value, of which these are the first bytes. Raises PeerLost if it cannot be."""
        size = int.from_bytes(head[:_SIZE].numpy().tobytes(), "little", signed=True)
        if not 0 <= size <= most:
            raise PeerLost(f"{self.name(rank)} announced a message of {size} bytes; at most {most} are allowed")
        return size

    def exchange(self, own: T) -> list[T]:
        """Return every rank's dataclass of a kind, in the order of ranks, on every rank; see `gather_json`."""
        return self.gather_json(plain(own), instance(type(own)))

    def _gather(self, into: list[Tensor], own: Tensor) -> None:
        with Naming(self.name, None):
            work = self._world.allgather([into], [own])
        self.wait(Collective(work, self._over))

    def _read(self, rank: int, value: Any, read: Reader[T]) -> T:
        """Return what a value of a rank stands for. Raises PeerLost."""
        try:
            return read(value)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise PeerLost(f"{self.name(rank)} sent something else than is expected here: {error}") from error

    def _parse(self, rank: int, content: Tensor) -> Any:
        try:
            return json.loads(content.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise PeerLost(f"{self.name(rank)} sent a message that is not JSON ({error})") from error

    def broadcast(self, value: Any, source: int = 0, read: Reader[Any] = anything) -> Any:
        """Return the `value` of rank `source` on every rank. It travels as JSON, as in `gather_json`."""
        if self.world_size == 1:
            return self._read(source, json.loads(json.dumps(value)), read)
        content = _framed(value) if self.rank == source else torch.zeros(_HEAD, dtype=torch.uint8)
        head = _padded(content[:_HEAD], _HEAD)
        self._broadcast(head, source)
        size = self._announced(source, head, MOST_JSON)
        rest = _SIZE + size - _HEAD
        if rest > 0:
            tail = content[_HEAD:] if self.rank == source else torch.zeros(rest, dtype=torch.uint8)
            self._broadcast(tail, source)
            head = torch.cat([head, tail])
        return self._read(source, self._parse(source, head[_SIZE : _SIZE + size]), read)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with Naming(self.name, source):
            work = self._world.broadcast([tensor], options)
        self.wait(Collective(work, self._over), source)

    def agree(self, action: Callable[[], Any], read: Reader[Any] = anything) -> list[Any]:
        """Run `action` on every rank; return the results, which are JSON values, in the order of ranks.

        They are read as in `gather_json`.

        If it raises a HorizonError on any rank, all ranks raise an error of that type, which names the first such rank.
        """
        value, failure = None, None
        try:
            value = action()
        except PeerLost:
            raise
        except HorizonError as error:
            failure = [type(error).__name__, str(error)]
        found = self.gather_json([value, failure], fields(anything, optional(fields(text, text))))
        for rank, (_, problem) in enumerate(found):
            if problem is not None:
                raise of_kind(problem[0], problem[1] if self.world_size == 1 else f"{self.name(rank)}: {problem[1]}")
        return [self._read(rank, value, read) for rank, (value, _) in enumerate(found)]

    def barrier(self) -> None:
        """Wait until all ranks have called this. Raises PeerLost, immediately if a rank is gone."""
        self.gather_json(None)

    def at_close(self, function: Callable[[], Any]) -> None:
        """Register a function to call when the connections are dropped; the last one registered is called first."""
        self._closing.append(function)

    def abort(self) -> None:
        """Break every connection at once, so that pending operations soon fail, here and on the other ranks.

        gloo ends an operation only when its peer answers, closes the connection, or lets the timeout pass, and a
        process group waits for its operations before it closes anything. Without `abort`, ranks that have all lost the
        same peer would wait for one another until the timeout. Any thread may call this.
        """
        for over in (self._over, *self._twins_over):
            over.set()
        for twin in self._twins:
            twin.abort()
        self._connections.cut()

    def close(self) -> None:
        """Drop the connections. Nothing else may hold a process group by then (see `at_close`)."""
        self.abort()  # first, because the functions below may wait for pending operations
        while self._closing:
            try:
                self._closing.pop()()
            except RuntimeError as error:  # the others are called all the same, and nothing hides why the group closes
                _log.debug("closing a group: %s", error)
        dropped = [*self._subgroups.values(), self._world]
        self._subgroups.clear()
        self._world = None
        try:
            threading.Thread(target=_drop, args=(dropped,), name="group-drop", daemon=True).start()
        except (RuntimeError, MemoryError) as error:  # no memory for one more thread: they are released here and now
            _log.debug("closing a group: %s", error)


def _framed(value: Any) -> Tensor:
    """Return a value's length and its JSON, as bytes."""
    content = json.dumps(value).encode()
    return torch.frombuffer(bytearray(len(content).to_bytes(_SIZE, "little") + content), dtype=torch.uint8)


def _padded(part: Tensor, size: int) -> Tensor:
    """Return some bytes, with zeros behind them up to this size."""
    return torch.cat([part, torch.zeros(size - len(part), dtype=torch.uint8)])


def _drop(groups: list[Any]) -> None:
    """Release process groups in a thread that nobody waits for.

    Their destructors wait for pending operations. Breaking the connections ends these, but occasionally an operation
    begins to wait at that very moment, and gloo wakes it only at its timeout (seen in about one of 30 kills).
    """
    groups.clear()


_ARITY = 8


class TreeSum:
    """Sums a small vector over some ranks along a tree: up to the first rank, and back down.

    gloo's own all-reduce is a ring, made for large tensors: it sends 4 (n - 1) messages per rank, one after the other.
    A tree sends two per rank, over 2 log(n) hops, which is what counts for a few numbers. The order of summation is
    fixed, so the result is the same bit for bit on every run and on every rank.
    """

    def __init__(self, group: Group, ranks: Sequence[int], tag: int, like: Tensor) -> None:
        """Prepare sums of vectors with the shape and dtype of `like`; `tag` must be unused by anything else."""
        self._group, self._tag = group, tag
        place = ranks.index(group.rank)
        self._parent = ranks[(place - 1) // _ARITY] if place else None
        children = range(_ARITY * place + 1, min(_ARITY * (place + 1), len(ranks) - 1) + 1)
        self._children = [ranks[child] for child in children]
        self._parts = [torch.empty_like(like) for _ in self._children]
        self._total = torch.empty_like(like)
        self._posted: list[Work] = []
        self.messages = len(self._children) + (self._parent is not None)  # sent per sum; as many are received

    def post(self) -> None:
        """Post the receives early, so that an arriving vector finds its destination."""
        if not self._posted:
            sources = list(zip(self._parts, self._children, strict=True))
            if self._parent is not None:
                sources.append((self._total, self._parent))
            self._posted = [self._group.receive(into, peer, self._tag) for into, peer in sources]

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of all ranks' vectors; this may be `vector` itself, changed in place."""
        self.post()
        works, self._posted = self._posted, []
        total, sent = vector, []
        for work, part, child in zip(works, self._parts, self._children, strict=False):
            self._group.wait(work, child)
            total += part
        if self._parent is not None:
            sent.append((self._group.send(total, self._parent, self._tag), self._parent))
            self._group.wait(works[-1], self._parent)
            total = self._total
        sent += [(self._group.send(total, child, self._tag), child) for child in self._children]
        for work, peer in sent:
            self._group.wait(work, peer)
        return total
