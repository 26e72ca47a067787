"""Connects the ranks of a group with gloo, and breaks their connections.

Ranks find each other through the rendezvous service's store. Its client waits for ever for a service that accepts
connections but does not answer, and gloo notices nothing else while it connects. So both work in a thread, for which a
rank waits no longer than it may take, and no longer than its group lasts. Between gloo and the store stands a class
that puts tunnels in the place of other machines' addresses.

gloo listens as long as a process group lasts, and every connection of a stranger costs the process a descriptor, until
it has none left and is aborted. So gloo is made to ignore further connections once the group has connected.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from horizonml.comm.tunnel.addresses import (
    Published,
    is_address_of,
    is_portable,
    kernel_table,
    others_connected,
    own_address,
    read_blob,
    stand_in_address,
)
from horizonml.comm.tunnel.client import Links, TunnelGone
from horizonml.comm.work import GLOO_ERRORS, WAIT_SECONDS, in_thread, short
from horizonml.errors import PeerLost, TooManyFiles, is_out_of_files

_UNUSED = 1  # a port, of a rank that connects to this one


class PublishedAddresses(Store):
    """Passes on what gloo publishes and asks for, where it leads through a tunnel with another address."""

    def __init__(
        self, store: Store, rank: int, ranks: tuple[int, ...], links: Links | None, started_as: Sequence[int]
    ) -> None:
        """Pass on to `store` what `rank` says, as one of the `ranks` of a process group; errors say `started_as[r]`."""
        super().__init__()
        self._started_as = started_as
        self._store, self._rank, self._ranks, self._links = store, rank, ranks, links
        self._openings: dict[int, int] = {}  # the number of each opening in the tunnel, by rank
        self.own: list[Published] = []  # what this rank has published, for each network interface
        self._vouchers: list[ExitStack] = []

    def set(self, key: str, value: Any) -> None:
        """Publish this rank's address."""
        content = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        if self._member(key) == self._rank:
            try:
                self.own.append(read_blob(content))
            except ValueError:
                if self._links is not None:
                    raise
            else:
                if self._links is not None:
                    self._vouchers.append(self._links.tunnel.vouch(own_address(self._rank), self.own[-1].port))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a rank's address, as it is to be reached from here. Raises RuntimeError if it is damaged."""
        blob = bytes(self._store.get(key))
        rank = self._member(key)
        if self._links is None or rank is None or rank == self._rank:
            return blob
        try:
            return self._reachable(rank, read_blob(blob), self._links)
        except ValueError as error:
            raise RuntimeError(
                f"rank {self._started_as[rank]} has published no address that it may have: {error}"
            ) from error

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until ranks have published their addresses."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether ranks have published their addresses."""
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        """Count."""
        return int(self._store.add(key, value))

    def has_extended_api(self) -> bool:
        """Return False, so that gloo asks for one address at a time."""
        return False

    def failures(self, seconds: float) -> str:
        """Return which ranks could not be reached through the tunnel, and why; empty if all were within `seconds`."""
        if self._links is None or not self._openings:
            return ""
        ranks = {number: rank for rank, number in self._openings.items()}
        try:
            found = self._links.tunnel.failures(list(ranks), seconds)
        except TunnelGone as error:
            return str(error)
        peers = self._links.peers
        return "; ".join(
            f"rank {self._started_as[rank]} is not reached at {peers[rank].address}:{peers[rank].port}: {why}"
            for rank, why in ((ranks[number], why) for number, why in found.items())
        )

    def forget(self) -> None:
        """Close what nobody has connected to, and let nobody connect any more."""
        while self._vouchers:
            self._vouchers.pop().close()
        if self._links is not None and self._openings:
            self._links.tunnel.forget(list(self._openings.values()))

    def _member(self, key: str) -> int | None:
        """Return the rank whose address a key holds; gloo numbers the ranks of a process group from 0."""
        last = key.rpartition("/")[2]
        return self._ranks[int(last)] if last.isdecimal() and int(last) < len(self._ranks) else None

    def _reachable(self, rank: int, published: Published, links: Links) -> bytes:
        """Return a rank's address as gloo is to see it. Raises ValueError if it is not that rank's."""
        far, found = links.far(rank, self._rank), published.address
        if not (is_address_of(found, rank) if far else found == own_address(rank)) or not published.port:
            raise ValueError(f"{found}:{published.port}")
        if not far:
            return published.blob
        assert found is not None
        peer, stand_in = links.peers[rank], stand_in_address(rank, rank > self._rank)
        if rank > self._rank:  # it connects to this one
            return published.moved(stand_in, _UNUSED)
        links.tunnel.ensure()
        target, own_port = (found, published.port), self.own[-1].port
        self._openings[rank], (address, port) = links.tunnel.open(peer.address, peer.port, stand_in, target, own_port)
        return published.moved(address, port)


_log = logging.getLogger(__name__)
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def guard(own: Sequence[Published]) -> None:
    """Make gloo deaf at all the sockets that it has published, and check who has connected to them by now.

    The portable mode has no means to do so. Raises PeerLost.
    """
    if is_portable():
        return
    deaf = [silence(one) for one in own]
    if not all(deaf):
        _warn()
    if any(others_there(one) for one in own):  # who may have taken a rank's place
        raise PeerLost("another user of this machine has connected to this rank while its group connected")


@cache
def _warn() -> None:
    """Say it once in the life of this process, and not for each group."""
    _log.warning(
        "gloo's listening sockets cannot be found in /proc/self (fd, fdinfo), so they stay open to every process of "
        "this machine: many connections to them would use up this rank's file descriptors and end it. Let this "
        "process read /proc, and train beside nobody else until then"
    )


def silence(own: Published) -> bool:
    """Let gloo take no more notice of connections to the socket that it has published; return whether that worked.

    The socket stays open, and watched for nothing, because gloo itself takes it from its list when it closes it.
    """
    listener = next((number for number, _ in _sockets() if _is(number, own)), None)
    if listener is None:
        return False
    for number, watched in _watchers():
        if listener in watched:
            with select.epoll.fromfd(os.dup(number)) as poll, suppress(OSError):
                poll.modify(listener, 0)
                return True
    return False


def others_there(own: Published) -> bool:
    """Return whether another user of this machine is connected to a loopback socket that gloo has published."""
    if own.address is None or not own.address.startswith("127."):
        return False
    with suppress(OSError):  # a container may hide the kernel's list
        return others_connected(kernel_table(), (own.address, own.port), os.geteuid())
    return False


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield this process's sockets, each as its descriptor and inode."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _is(number: int, own: Published) -> bool:
    """Return whether a descriptor is the listening socket that was published."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family != own.family or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        name = one.getsockname()
        return name[1] == own.port and (own.address is None or name[0] == own.address)
    return False


def _watchers() -> Iterator[tuple[int, list[int]]]:
    """Yield each epoll descriptor of this process, and those that it watches."""
    try:
        names = os.listdir("/proc/self/fdinfo")
    except OSError:  # hidden
        return
    for name in names:
        with suppress(OSError):
            found = _WATCHED.findall(Path(f"/proc/self/fdinfo/{name}").read_text())
            if found:
                yield int(name), [int(number) for number in found]


T = TypeVar("T")
_ARRIVE_SECONDS = 60.0  # for the ranks of a group that has just formed
_LOOK_SECONDS = 0.02  # between two looks at who has arrived
_MANY = 16  # ranks, beyond which each of them looks less often
_BROKEN_OFF = "the group was broken off before all of its ranks had connected"
_MARGIN_SECONDS = 2.0  # in which gloo, or the store, says by itself that its time is up


class Connections:
    """Holds all of this rank's connections to the others of its group."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        over: threading.Event,
        address: str | None = None,
        links: Links | None = None,
        started_as: Sequence[int] | None = None,
    ) -> None:
        """Connect through `store`, within `timeout` seconds each time; give up when `over` is set.

        With `links`, gloo listens at a loopback address only, and the tunnel carries what goes to other machines. Else
        it listens at `address`, or at that of the network interface that GLOO_SOCKET_IFNAME names.
        Errors name rank r as `started_as[r]`.
        """
        self._started_as = started_as if started_as is not None else range(world_size)
        self._links, self._address = links, own_address(rank) if links is not None else address
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._over = over
        self._sockets: set[tuple[int, int]] = set()

    def arrive(self) -> None:
        """Check that all ranks are about to connect; gloo would wait for a lost rank as long as for a step.

        Raises PeerLost.
        """
        if self._world_size == 1:
            return
        store, seconds = self._store, min(self._timeout, _ARRIVE_SECONDS)
        assert store is not None
        keys = [f"arrived/{rank}" for rank in range(self._world_size)]
        until = time.monotonic() + seconds
        pause = _LOOK_SECONDS * max(1.0, self._world_size / _MANY)  # all of them ask one service

        def missing() -> list[str]:
            """Return the ranks that have not come in time; in the thread."""
            store.set(keys[self._rank], "")
            while not store.check(keys) and not self._over.is_set():
                if time.monotonic() > until:
                    return [str(self._started_as[rank]) for rank, key in enumerate(keys) if not store.check([key])]
                time.sleep(pause)
            return []

        try:
            absent = self._soon(missing, seconds)
        except GLOO_ERRORS as error:
            raise PeerLost(f"the rendezvous service did not answer ({short(error)})") from error
        if absent:
            raise PeerLost(f"rank {', '.join(absent)} did not answer within {seconds:.0f} s")
        if self._over.is_set():
            raise PeerLost(_BROKEN_OFF)

    def connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        """Return a process group of some ranks, all of which call this; None for a single one. Raises PeerLost."""
        if len(ranks) == 1:
            return None
        assert self._store is not None
        store = PublishedAddresses(PrefixStore(name, self._store), self._rank, ranks, self._links, self._started_as)
        before = set(_sockets())
        try:
            group = self._soon(lambda: self._make(store, ranks), self._timeout)
        except (*GLOO_ERRORS, MemoryError) as error:  # gloo allocates as much memory as a damaged address says
            if is_out_of_files(error):  # a fault of this rank, and not of those that it cannot connect to
                raise TooManyFiles(
                    f"too many open files: rank {self._started_as[self._rank]} cannot connect to the others"
                ) from error
            reason = store.failures(0.0) or short(error)
            raise PeerLost(
                f"rank {self._started_as[self._rank]} could not connect to all other ranks: {reason}"
            ) from error
        finally:
            self._sockets |= set(_sockets()) - before
            store.forget()
        guard(store.own)
        return group

    def _make(self, store: PublishedAddresses, ranks: tuple[int, ...]) -> Any:
        """Return a process group once all of its ranks have connected; in the thread."""
        options = cast(Any, ProcessGroupGloo)._Options()
        options._timeout = timedelta(seconds=self._timeout)
        # All ranks connect now, not when they first talk, so that nobody is listened to later.
        if self._address is not None:
            devices = [ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        else:
            names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names if name]
        options._devices = devices or [ProcessGroupGloo.create_default_device(lazy_init=False)]
        group = ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)
        reason = store.failures(self._timeout)
        if reason:
            raise RuntimeError(reason)
        return group

    def cut(self) -> None:
        """Break every connection at once. Any thread may call this."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        others: frozenset[int] = getattr(store, "ports", frozenset())
        while self._sockets:
            descriptor, inode = self._sockets.pop()
            # The descriptor may belong to another file by now; a socket that has lost its peer needs no shutdown.
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        # This fails for a listening socket, which gloo still polls. Other threads may have opened
                        # sockets while the group connected: to a rendezvous service, at this rank's own, or local ones.
                        local, peer = connection.getsockname(), connection.getpeername()
                        if isinstance(peer, tuple) and not {local[1], peer[1]} & others:
                            connection.shutdown(socket.SHUT_RDWR)

    def _soon(self, action: Callable[[], T], seconds: float) -> T:
        """Return what `action` returns, and raise what it raises.

        Raises PeerLost as soon as the group is over, and RuntimeError if `action` takes longer than it may; the thread
        is then left to itself.
        """
        done = in_thread(action, "group-connect")
        until = time.monotonic() + seconds + _MARGIN_SECONDS
        while not wait([done], WAIT_SECONDS).done:
            if self._over.is_set():
                raise PeerLost(_BROKEN_OFF)
            if time.monotonic() > until:
                raise RuntimeError("no answer from the rendezvous service")
        return done.result()
