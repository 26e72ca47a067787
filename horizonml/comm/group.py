"""Connects the ranks of one generation with gloo, for messages, sums and agreements.

Nothing here waits without a deadline: the group's timeout holds for every message. A peer that is gone or late raises
`PeerLost`, which names the peer where it can be known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

from horizonml.comm.log import MessageLog
from horizonml.errors import HorizonError, PeerLost, of_kind

T = TypeVar("T")
_log = logging.getLogger(__name__)

MOST_JSON = 64 << 20  # bytes of a value that ranks gather; typical values take kilobytes


_ARRIVE_SECONDS = 60.0  # for the ranks of a group that has just formed
_LOOK_SECONDS = 0.02  # between two looks at who has arrived
_WAIT = timedelta(seconds=0.2)  # for a sum, before a rank looks again whether its group is over


class Work(Protocol):
    """Stands for a message or a sum that is under way."""

    def wait(self) -> Any:
        """Block until the work is done."""


# Each purpose has tags of its own, so that no message is taken for another's.
_CHANNELS = (
    "boundaries", "gradients", "members", "totals", "finite", "stragglers", "probe", "state", "layers", "files",
    "mirror",
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


class _Collective:
    """Stands for a sum that is under way, for which a rank waits no longer than its group lasts.

    When a connection is closed at the very moment at which one of gloo's threads begins to wait for it, gloo may miss
    that, and wake up at the group's timeout only.
    """

    def __init__(self, work: Any, over: threading.Event) -> None:
        self._work, self._over = work, over

    def wait(self) -> None:
        while True:
            try:
                self._work.wait(_WAIT)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # which raises what went wrong, unless it was done just after the time was up
                    return
                if self._over.is_set():
                    raise PeerLost("the group was broken off") from None


class _Done:
    """Stands for work that was complete as soon as it began."""

    def wait(self) -> None:
        return None


@dataclass
class _FromItself:
    """Stands for a message from this rank to itself, which is sent by the time the rank waits for it."""

    outbox: dict[int, Tensor]
    tag: int
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.outbox.pop(self.tag))


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
    ) -> None:
        """Connect to the other ranks through `store`, within `timeout` seconds; give up when `over` is set.

        The network interface is the one named by GLOO_SOCKET_IFNAME. `hosts[r]`, if known, is the machine of rank r.
        Raises PeerLost.
        """
        self.hosts = list(hosts) if hosts is not None else [f"rank-{rank}" for rank in range(world_size)]
        self._hosts_known = hosts is not None
        self.rank, self.world_size, self._timeout = rank, world_size, timeout
        self._store = store
        self._sockets: set[tuple[int, int]] = set()
        self._outbox: dict[int, Tensor] = {}  # messages of this rank to itself
        self.log: MessageLog | None = None  # which takes note of what is sent
        self._over = over or threading.Event()  # set once the group has been broken off
        self._subgroups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._closing: list[Callable[[], Any]] = []
        self._twins: list[Group] = []
        self._twins_over: list[threading.Event] = []
        self._arrive()
        self._world = self._connect("world", tuple(range(world_size)))

    def _arrive(self) -> None:
        """Check that all ranks are about to connect; gloo would wait for a lost rank as long as for a step."""
        if self.world_size == 1:
            return
        assert self._store is not None
        seconds = min(self._timeout, _ARRIVE_SECONDS)
        keys = [f"arrived/{rank}" for rank in range(self.world_size)]
        until = time.monotonic() + seconds
        try:
            self._store.set(keys[self.rank], "")
            while not self._store.check(keys):
                if self._over.is_set():
                    raise PeerLost("the group was broken off before all of its ranks had connected")
                if time.monotonic() > until:
                    raise RuntimeError("Timed out")
                time.sleep(_LOOK_SECONDS)
        except _GLOO_ERRORS as error:
            try:
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            except _GLOO_ERRORS:
                missing = []
            who = f"rank {', '.join(missing)}" if missing else "the rendezvous service"
            raise PeerLost(f"{who} did not answer within {seconds:.0f} s ({_short(error)})") from error

    def _connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == 1:
            return None
        assert self._store is not None
        prefix = PrefixStore(name, self._store)
        before = _open_sockets()
        options = prefix, ranks.index(self.rank), len(ranks), timedelta(seconds=self._timeout)
        try:
            return _unless(self._over, lambda: ProcessGroupGloo(*options))
        except (*_GLOO_ERRORS, MemoryError) as error:  # gloo allocates as much memory as a damaged address says
            raise PeerLost(f"rank {self.rank} could not connect to all other ranks: {_short(error)}") from error
        finally:
            self._sockets |= _open_sockets() - before

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
        twin = Group(store, self.rank, self.world_size, self._timeout, hosts, over)
        if twin._world is not None:
            twin._world._set_default_timeout(timedelta(seconds=timeout))
        self._twins.append(twin)
        if self.is_over:  # which it became while the twin connected
            twin.abort()
        return twin

    @property
    def timeout(self) -> float:
        """Return the seconds that the group waits for a message."""
        return self._timeout

    @property
    def is_over(self) -> bool:
        """Return whether the group has been broken off."""
        return self._over.is_set()

    def on_one_host(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are known to share a machine."""
        return self._hosts_known and len({self.hosts[rank] for rank in ranks}) == 1

    @staticmethod
    def channel(name: str) -> Channel:
        """Return the tags for messages of one purpose, one of `_CHANNELS`."""
        return Channel(_CHANNELS.index(name) * _MESSAGES)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send a contiguous tensor; it must not change until the work is done."""
        if peer == self.rank:
            self._outbox[tag] = tensor
            return _Done()
        if self.log is not None:
            self.log.add(tensor, peer, tag)
        try:
            work: Work = self._world.send([tensor], peer, tag)
        except _GLOO_ERRORS as error:
            raise _lost(peer, error) from error
        return work

    def receive(self, into: Tensor, peer: int, tag: int) -> Work:
        """Begin to receive into a contiguous tensor of the size that was sent."""
        if peer == self.rank:
            return _FromItself(self._outbox, tag, into)
        try:
            work: Work = self._world.recv([into], peer, tag)
        except _GLOO_ERRORS as error:
            raise _lost(peer, error) from error
        return work

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], stage: int = 0) -> Work:
        """Begin to sum a tensor over `ranks` in place. All must make the same calls for a `stage` in the same order."""
        try:
            return _Collective(self.among(ranks, stage).allreduce([tensor]), self._over)
        except _GLOO_ERRORS as error:
            raise _lost(None, error) from error

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """Return the tensors of `ranks`, all of one shape, in their order. All of them must make the same calls."""
        tensors = [torch.empty_like(tensor) for _ in ranks]
        try:
            _Collective(self.among(ranks).allgather([tensors], [tensor]), self._over).wait()
        except _GLOO_ERRORS as error:
            raise _lost(None, error) from error
        return tensors

    def among(self, ranks: tuple[int, ...], stage: int = 0) -> Any:
        """Return the process group of the members of a stage; all of them must ask for it together the first time.

        Stages with the same members have one each, for their sums do not come in the same order on all members.
        """
        if (ranks, stage) not in self._subgroups:
            name = f"stage-{stage}-ranks-" + "-".join(map(str, ranks))
            self._subgroups[ranks, stage] = self._connect(name, ranks)
        return self._subgroups[ranks, stage]

    def wait(self, work: Work, peer: int | None = None) -> None:
        """Wait for a message from or to `peer`, or for a sum. Raises PeerLost."""
        try:
            work.wait()
        except _GLOO_ERRORS as error:
            raise _lost(peer, error) from error

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of ranks, on every rank.

        The values travel as JSON, so nothing that is received is ever executed.
        """
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        announced = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._gather(announced, torch.tensor([len(own)]))
        sizes = [int(size) for size in announced]
        for rank, size in enumerate(sizes):  # before memory is taken for them
            if not 0 <= size <= MOST_JSON:
                raise PeerLost(f"rank {rank} announced a message of {size} bytes; at most {MOST_JSON} are allowed")
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        self._gather(texts, padded)
        return [self._parse(rank, text[:size]) for rank, (text, size) in enumerate(zip(texts, sizes, strict=True))]

    def _gather(self, into: list[Tensor], own: Tensor) -> None:
        try:
            _Collective(self._world.allgather([into], [own]), self._over).wait()
        except _GLOO_ERRORS as error:
            raise _lost(None, error) from error

    def _parse(self, rank: int, text: Tensor) -> Any:
        try:
            return json.loads(text.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise PeerLost(f"rank {rank} sent a message that is not JSON ({error})") from error

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on every rank. It travels as JSON, as in `gather_json`."""
        if self.world_size == 1:
            return value
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(own)])
        self._broadcast(size, source)
        if not 0 <= int(size) <= MOST_JSON:
            raise PeerLost(f"rank {source} announced a message of {int(size)} bytes; at most {MOST_JSON} are allowed")
        text = own if self.rank == source else torch.zeros(int(size), dtype=torch.uint8)
        self._broadcast(text, source)
        return self._parse(source, text)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        try:
            _Collective(self._world.broadcast([tensor], options), self._over).wait()
        except _GLOO_ERRORS as error:
            raise _lost(source, error) from error

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; return the results, which are JSON values, in the order of ranks.

        If it raises a HorizonError on any rank, all ranks raise an error of that type, which names the first such rank.
        """
        value, failure = None, None
        try:
            value = action()
        except PeerLost:
            raise
        except HorizonError as error:
            failure = [type(error).__name__, str(error)]
        found = self.gather_json([value, failure])
        for rank, (_, problem) in enumerate(found):
            if problem is not None:
                text = str(problem[1]) if self.world_size == 1 else f"rank {rank}: {problem[1]}"
                raise of_kind(str(problem[0]), text)
        return [value for value, _ in found]

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
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        service = getattr(store, "port", None)
        while self._sockets:
            descriptor, inode = self._sockets.pop()
            # The descriptor may belong to another file by now; a socket that has lost its peer needs no shutdown.
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        # This fails for a listening socket, which gloo still polls. Another thread may have connected
                        # to the rendezvous service while the group connected; that socket does not belong to the group.
                        if connection.getpeername()[1] != service:
                            connection.shutdown(socket.SHUT_RDWR)

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


def _unless(over: threading.Event, connect: Callable[[], T]) -> T:
    """Return what `connect` returns. Raises PeerLost as soon as `over` is set; the connection is then left to itself.

    gloo notices nothing else while it connects: a rank that is lost meanwhile would hold it up as long as a step.
    """
    done: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((connect(), None))
        except Exception as error:  # noqa: BLE001 (it is raised below)
            done.put((None, error))

    threading.Thread(target=run, name="group-connect", daemon=True).start()
    while True:
        try:
            found, error = done.get(timeout=_WAIT.total_seconds())
            break
        except Empty:
            if over.is_set():
                raise PeerLost("the group was broken off before all of its ranks had connected") from None
    if error is not None:
        raise error
    return cast(T, found)


def _drop(groups: list[Any]) -> None:
    """Release process groups in a thread that nobody waits for.

    Their destructors wait for pending operations. Breaking the connections ends these, but occasionally an operation
    begins to wait at that very moment, and gloo wakes it only at its timeout (seen in about one of 30 kills).
    """
    groups.clear()


def _open_sockets() -> set[tuple[int, int]]:
    """Return this process's sockets, each as its descriptor and inode."""

    def sockets() -> Iterator[tuple[int, int]]:
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    yield int(name), status.st_ino

    return set(sockets())


# gloo raises these when a connection breaks, and when a message does not fit.
_GLOO_ERRORS = (RuntimeError, ValueError)


def _lost(peer: int | None, error: Exception) -> PeerLost:
    who = "a peer" if peer is None else f"rank {peer}"
    reason = "did not answer in time" if "Timed out" in str(error) else "closed its connection"
    return PeerLost(f"{who} {reason} ({_short(error)})")


def _short(error: Exception) -> str:
    """Return gloo's message without the place in its source and its advice."""
    line = str(error).strip().splitlines()[0]
    return (line.partition("] ")[2] if line.startswith("[/") else line).partition(". This is typically")[0]
