"""Announces a service on the local network, and finds those that others announce: mDNS and DNS-SD by `zeroconf`.

A browse never proves anything, since anyone on the network can answer it; the TLS connection that follows does. What
zeroconf keeps of other devices' packets is bounded since its version 0.149.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horizonml import __version__
from horizonml.machine.host import device_name
from horizonml.rendezvous.discovery import records
from horizonml.rendezvous.discovery.multicast import Interface, usable
from horizonml.rendezvous.discovery.records import TYPE, FoundService, distinct

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

_MOST_FOUND = 256  # services
_MOST_QUESTIONS = 64  # at a time, about services whose port and addresses did not come with their names
_ANSWER_SECONDS = 3.0  # for each of these questions
_LOOK_SECONDS = 0.05  # the interval between checks whether to stop
_INTERFACES_SECONDS = 2.0  # the interval between checks whether there are other interfaces
_START_SECONDS = 3.0
_END_SECONDS = 5.0


def browse(
    seconds: float,
    enough: Callable[[FoundService], bool] = lambda found: False,
    stop: Callable[[], bool] = lambda: False,
    wanted: Callable[[FoundService], bool] = lambda found: False,
) -> list[FoundService]:
    """Return the services that announce themselves within some seconds, by name.

    It returns as soon as `enough` is true of one of them, or `stop` says so. It returns 256 at most, and those that are
    `wanted` rather than others. Where it finds nothing, `checkup.explain_silence` says why.
    """
    return asyncio.run(_Search(enough, wanted).run(seconds, stop))


class Announcement:
    """Announces a service on all usable interfaces, also on those that appear later. Used as a context manager.

    If it cannot announce anything at the moment, `problem` says why, and it keeps trying.
    """

    def __init__(
        self,
        port: int,
        token_id: str,
        job: str = "",
        name: str | None = None,
        version: str = __version__,
        host: str = "::",
        pairing: int = 0,
    ) -> None:
        """Prepare to announce a service with this name, which is the host's unless given.

        Only addresses are announced at which a service is reached that listens at `host`.
        """
        self.name = name or device_name()
        self.problem: str | None = None
        self._port, self._host = port, host
        self._text = records.text(self.name, token_id, version, job, pairing)
        self._instance = records.instance(self.name)
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._announce()), name="announcement", daemon=True)

    def __enter__(self) -> Announcement:
        """Announce the service; the others know it when this returns, unless there is a `problem`."""
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            self.problem = f"the announcement was not made within {_START_SECONDS:.0f} s"
        return self

    def __exit__(self, *details: object) -> None:
        """Take the announcement back, so that nobody tries to connect any more."""
        self._end.set()
        self._thread.join(_END_SECONDS)

    async def _announce(self) -> None:
        """Announce the service until the end, anew whenever the interfaces have changed."""
        from zeroconf import Error

        while not self._end.is_set():
            chosen = usable()
            async with _zeroconf(chosen) as (zeroconf, failure):
                if zeroconf is not None and not self._addresses(chosen):
                    failure = f"it listens at {self._host}, which is no address of {', '.join(map(str, chosen))}"
                elif zeroconf is not None:
                    try:
                        await zeroconf.async_register_service(self._info(chosen), cooperating_responders=True)
                    except (OSError, Error) as error:
                        failure = f"mDNS does not work: {error or type(error).__name__}"
                self.problem = failure or _only_virtual(chosen)
                self._ready.set()
                while not await _wait(_INTERFACES_SECONDS, self._end.is_set):
                    if failure is not None or usable() != chosen:
                        break  # it may work by now

    def _info(self, chosen: Sequence[Interface]) -> Any:
        from zeroconf.asyncio import AsyncServiceInfo

        return AsyncServiceInfo(
            TYPE,
            f"{self._instance}.{TYPE}",
            port=self._port,
            properties=self._text,
            server=f"{self._instance}.local.",
            parsed_addresses=self._addresses(chosen),
        )

    def _addresses(self, chosen: Sequence[Interface]) -> list[str]:
        found = [address.partition("%")[0] for interface in chosen for address in interface.listening(self._host)]
        return list(dict.fromkeys(found))[: records.MOST_ADDRESSES]


@dataclass
class _Search:
    enough: Callable[[FoundService], bool]
    wanted: Callable[[FoundService], bool]
    own: list[Interface] = field(default_factory=list)
    found: dict[str, FoundService] = field(default_factory=dict)  # by the name in DNS
    asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    done: bool = False

    async def run(self, seconds: float, stop: Callable[[], bool]) -> list[FoundService]:
        """Return what is found, also on interfaces that appear meanwhile."""
        deadline = time.monotonic() + seconds

        def ended() -> bool:
            return self.done or time.monotonic() >= deadline or stop()

        while not ended():
            self.own = usable()
            async with _zeroconf(self.own) as (zeroconf, _):
                if zeroconf is None:
                    await _wait(_INTERFACES_SECONDS, ended)
                else:
                    await self.listen(zeroconf.zeroconf, ended)
        return distinct(self.found.values())

    async def listen(self, zeroconf: Zeroconf, ended: Callable[[], bool]) -> None:
        """Look for services until the end, or until the interfaces are others."""
        from zeroconf.asyncio import AsyncServiceBrowser

        def changed(**change: Any) -> None:
            self.note(zeroconf, change["name"], change["state_change"])

        # It asks for answers to this machine alone, and a second later for answers to all: the former come at once, but
        # could reach another program on this machine that uses mDNS.
        async with AsyncServiceBrowser(zeroconf, TYPE, [changed]):
            while not await _wait(_INTERFACES_SECONDS, ended) and usable() == self.own:
                pass
        waiting = list(self.asking.values())
        self.asking.clear()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def note(self, zeroconf: Zeroconf, name: str, change: ServiceStateChange) -> None:
        """Look at a service that has appeared or changed, or forget one that is gone."""
        from zeroconf import BadTypeInNameException, ServiceStateChange
        from zeroconf.asyncio import AsyncServiceInfo

        if name in self.asking:
            self.asking.pop(name).cancel()
        self.found.pop(name, None)
        if change is ServiceStateChange.Removed:
            return
        try:
            info = AsyncServiceInfo(TYPE, name)
        except BadTypeInNameException:
            return  # a stranger's
        if info.load_from_cache(zeroconf):  # the rest came with the name
            self.take(name, info)
        elif len(self.asking) < _MOST_QUESTIONS:
            self.asking[name] = asyncio.get_running_loop().create_task(self.ask(zeroconf, name, info))

    async def ask(self, zeroconf: Zeroconf, name: str, info: AsyncServiceInfo) -> None:
        """Ask for the rest about a service."""
        known = await info.async_request(zeroconf, int(_ANSWER_SECONDS * 1000))
        self.asking.pop(name, None)
        if known:
            self.take(name, info)

    def take(self, name: str, info: AsyncServiceInfo) -> None:
        """Remember a service if it is one of ours, as long as there are not too many."""
        addresses = [_named(address) for address in info.parsed_scoped_addresses()]
        try:
            service = records.read(info.properties, info.port, addresses, self.own)
        except ValueError:
            return
        enough = self.enough(service) and not self.done
        self.done = self.done or enough
        if len(self.found) >= _MOST_FOUND and name not in self.found:
            unwanted = (other for other, known in self.found.items() if not self.wanted(known))
            other = next(unwanted, None) if enough or self.wanted(service) else None
            if other is None:
                return
            del self.found[other]
        self.found[name] = service


async def _wait(seconds: float, ended: Callable[[], bool]) -> bool:
    """Wait for an end, but only so long, and return whether it has come."""
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
    return ended()


@asynccontextmanager
async def _zeroconf(chosen: Sequence[Interface]) -> AsyncIterator[tuple[AsyncZeroconf | None, str | None]]:
    """Yield what speaks mDNS on some interfaces; or None and the reason why nothing can."""
    zeroconf, problem = _open(chosen)
    try:
        yield zeroconf, problem
    finally:
        if zeroconf is not None:
            await zeroconf.async_close()


def _open(chosen: Sequence[Interface]) -> tuple[AsyncZeroconf | None, str | None]:
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # it warns of what other devices do wrong
    if not chosen:
        return None, "no network interface is up, except the loopback interface"
    ipv4 = [address for interface in chosen for address in interface.ipv4]
    ipv6 = [address.partition("%")[0] for interface in chosen for address in interface.link_local]
    attempts = [(ipv4 + ipv6, IPVersion.All)] if ipv6 else []
    attempts += [(ipv4, IPVersion.V4Only)] if ipv4 else []
    attempts += [([address], IPVersion.V4Only) for address in ipv4 if len(ipv4) > 1]
    problem = "no network interface has an address that mDNS can use"
    for addresses, version in attempts:
        try:
            return AsyncZeroconf(interfaces=list(addresses), ip_version=version), None
        except (OSError, RuntimeError) as error:  # an interface that is going down, or that has no multicast
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problem = f"mDNS cannot be used on {', '.join(map(str, chosen))}: {reason}"
    return None, problem


def _only_virtual(chosen: Sequence[Interface]) -> str | None:
    if not all(interface.virtual for interface in chosen):
        return None
    return f"only {', '.join(interface.name for interface in chosen)} is up, where only this device's containers are"


def _named(address: str) -> str:
    """Return an address with the name of its interface, where zeroconf gives the interface's number."""
    bare, _, scope = address.partition("%")
    try:
        return f"{bare}%{socket.if_indextoname(int(scope))}" if scope.isdigit() else address
    except OSError:
        return bare
