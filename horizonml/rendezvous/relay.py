"""Passes sealed bytes between devices that cannot reach each other: `horizonml relay`, and a device's side of it.

A relay has no token and can read nothing but who speaks with whom, and how much. The first line of each connection is
a request as JSON; its answer is a line, too:

    register  {room, as, near, port}   a device is there under an address; the connection stays, and brings what comes
    dial      {room, to, port}         connects with a port of a device: what follows is its own
    accept    {number}                 a device takes over what was dialled
    where     {room, of}               whether a device is behind the same address as this one, and where on its network
    members   {room}                   the addresses that are registered there

What anyone can take is bounded: connections for each address that they come from, devices in a room, and the bytes that
wait for a slower side. A connection that says nothing, and a call that is not taken, end after some seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from horizonml import __version__
from horizonml.errors import RendezvousError
from horizonml.machine.network import listen
from horizonml.machine.relay import MOST_LINE, Fields, Relay, address_in, is_relayed, query, through
from horizonml.rendezvous.discovery.finding import SECONDS, Prover, ServiceAddress
from horizonml.rendezvous.discovery.multicast import usable
from horizonml.rendezvous.discovery.records import PORT, STANDBY_PORT, FoundService
from horizonml.security.tls import trusted
from horizonml.security.token import Token
from horizonml.text import printable

_log = logging.getLogger(__name__)
MOST_FROM = 256  # connections from one address
_MOST = 4096  # of all
_MOST_DEVICES = 256  # in a room
_LINE_SECONDS = 10.0
_TAKE_SECONDS = 10.0  # in which a device takes what was dialled
_BEAT_SECONDS = 15.0  # between two signs of life of a device, so that its router keeps the connection
_CHUNK = 64 << 10
_AGAIN_SECONDS = 2.0
_START_SECONDS, _END_SECONDS = 10.0, 2.0
_TAKEN = "that name is taken"
_LOOK_SECONDS = 0.5
OPEN_PORTS = {PORT, PORT + 1, STANDBY_PORT}  # the ports of this device at which the others may connect
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class _Device:
    """A device that is registered."""

    writer: asyncio.StreamWriter
    seen: str  # the address that it comes from
    near: list[str]  # its addresses on its own network
    port: int  # at which it says there who it is


@dataclass
class RelayServer:
    """Passes on what devices say to each other."""

    rooms: dict[tuple[str, str], _Device] = field(default_factory=dict)
    _calls: dict[str, asyncio.Future[Streams]] = field(default_factory=dict)
    _from: Counter[str] = field(default_factory=Counter)

    async def serve(self, listener: socket.socket) -> None:
        """Serve until this is cancelled."""
        server = await asyncio.start_server(self._meet, sock=listener, limit=MOST_LINE)
        async with server:
            await server.serve_forever()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str(writer.get_extra_info("peername")[0])
        self._from[host] += 1
        try:
            if self._from[host] > MOST_FROM or self._from.total() > _MOST:
                raise ValueError("there are too many connections")
            async with asyncio.timeout(_LINE_SECONDS):
                request = json.loads(await reader.readline())
            await self._answer(host, request, reader, writer)
        except (ValueError, TypeError, KeyError, TimeoutError) as error:
            with suppress(OSError):
                await _say(writer, {"error": printable(str(error) or "no request came", 200)})
        except OSError as error:
            _log.debug("%s went away: %s", host, error)
        finally:
            self._from[host] -= 1
            if not self._from[host]:
                del self._from[host]  # or every address that has ever come would be kept
            writer.close()

    async def _answer(
        self, host: str, request: Fields, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Do what is asked for. Raises ValueError in words, OSError and TimeoutError."""
        do, room = request["do"], str(request.get("room", ""))[:64]
        if do == "register":
            await self._register(host, room, request, reader, writer)
        elif do == "dial":
            device = self.rooms.get((room, str(request["to"])))
            if device is None:
                raise ValueError("that device is not here")
            await self._dial(device, int(str(request["port"])), reader, writer)
        elif do == "accept":
            call = self._calls.pop(str(request["number"]), None)
            if call is None or call.done():
                raise ValueError("nobody waits for that")
            call.set_result((reader, writer))
            with suppress(OSError):
                await writer.wait_closed()  # by the one that has dialled
        elif do == "where":
            device = self.rooms.get((room, str(request["of"])))
            if device is None:
                raise ValueError("that device is not here")
            beside = device.seen == host
            await _say(writer, {"beside": beside, "near": device.near if beside else [], "port": device.port})
        elif do == "members":
            await _say(writer, {"members": [name for other, name in self.rooms if other == room]})
        else:
            raise ValueError("a relay does not know that request")

    async def _register(
        self, host: str, room: str, request: Fields, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name, near, port = str(request["as"])[:64], request.get("near"), request.get("port")
        if (room, name) in self.rooms:
            raise ValueError(_TAKEN)
        if sum(other == room for other, _ in self.rooms) >= _MOST_DEVICES:
            raise ValueError(f"a room has at most {_MOST_DEVICES} devices")
        addresses = [str(ipaddress.ip_address(str(one))) for one in near[:8]] if isinstance(near, list) else []
        self.rooms[room, name] = _Device(writer, host, addresses, port if isinstance(port, int) else 0)
        try:
            await _say(writer, {"ok": True})
            while True:
                async with asyncio.timeout(3 * _BEAT_SECONDS):
                    if not await reader.readline():
                        return
        finally:
            del self.rooms[room, name]

    async def _dial(
        self, device: _Device, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = secrets.token_hex(16)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await _say(device.writer, {"number": number, "port": port})
            async with asyncio.timeout(_TAKE_SECONDS):
                there = await call
        except TimeoutError:
            raise ValueError("that device does not take the call") from None
        finally:
            self._calls.pop(number, None)
        try:
            await _say(there[1], {"ok": True})
            await _say(writer, {"ok": True})
            await carry((reader, writer), there)
        finally:
            there[1].close()


async def carry(one: Streams, other: Streams) -> None:
    """Carry bytes both ways until both have ended, and close both."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while content := await reader.read(_CHUNK):
                writer.write(content)
                await writer.drain()  # waits for a slower side
            if writer.can_write_eof():
                writer.write_eof()

    try:
        await asyncio.gather(pump(one[0], other[1]), pump(other[0], one[1]))
    finally:
        for _, writer in (one, other):
            writer.close()


async def _beat(writer: asyncio.StreamWriter) -> None:
    """Give signs of life."""
    with suppress(OSError):
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            writer.write(b"\n")
            await writer.drain()


async def _say(writer: asyncio.StreamWriter, fields: Fields) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")
    await writer.drain()


class Registration(threading.Thread):
    """Keeps this device registered at a relay, and passes on what comes for the ports that are `OPEN_PORTS`."""

    def __init__(self, at: tuple[str, int], room: str, name: str | None = None) -> None:
        """Register in a room, under a name or else an address that is drawn."""
        super().__init__(name="relay", daemon=True)
        self._at, self._room, self._name = at, room, name
        self.relay: Relay | None = None  # once this device is registered
        self.problem = ""
        self._ready = threading.Event()
        self._main: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Registration:
        """Register. Raises RendezvousError if the relay cannot be used."""
        self.start()
        self._ready.wait(_START_SECONDS)
        if self.relay is None:
            place = f"{self._at[0]}:{self._at[1]}"
            raise RendezvousError(f"the relay at {place} cannot be used: {self.problem or 'no answer'}")
        return self

    def __exit__(self, *details: object) -> None:
        """End the registration, and what is connected."""
        if self._loop is not None and self._main is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._main.cancel)
            self.join(_END_SECONDS)

    def run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._stay())

    async def _stay(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        identity = await asyncio.start_server(self._say_who, "0.0.0.0", 0)  # noqa: S104  (tells an address at the relay)
        try:
            await self._register(identity.sockets[0].getsockname()[1])
        finally:
            identity.close()

    async def _register(self, port: int) -> None:
        """Stay registered, and say once when the relay is gone; give up if this device was never registered."""
        said = ""
        while True:
            try:
                await self._once(port)
            except (OSError, ValueError, LookupError, TypeError) as error:
                self.problem = str(error) or "no answer"
                if self.relay is None and (self.problem != _TAKEN or self._name is not None):
                    self._ready.set()
                    return
                if self.relay is not None and self.problem != said:
                    said = self.problem
                    _log.warning("the relay at %s:%d is gone: %s; trying again", *self._at, said)
            await asyncio.sleep(_AGAIN_SECONDS if self.relay is not None else 0)

    async def _once(self, port: int) -> None:
        """Register, and take calls as long as the connection lasts. Raises OSError, and more for what is no call."""
        name = self.relay.own if self.relay is not None else self._name or address_in(secrets.randbelow(1 << 17))
        near = [address for one in usable() if not one.virtual for address in one.ipv4]
        request: Fields = {"do": "register", "room": self._room, "as": name, "near": near, "port": port}
        reader, writer = await _ask(self._at, request)
        beating = self._start(_beat(writer))
        try:
            self.relay = Relay(*self._at, self._room, name)
            self._ready.set()
            while line := await reader.readline():
                call = json.loads(line)
                self._start(self._take(str(call["number"]), int(call["port"])))
            raise ConnectionResetError("it closed the connection")
        finally:
            beating.cancel()
            writer.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _take(self, number: str, port: int) -> None:
        """Connect a call with a port of this device."""
        if port not in OPEN_PORTS:
            return
        with suppress(OSError, ValueError, TimeoutError):
            near = await asyncio.open_connection("127.0.0.1", port)
            try:
                far = await _ask(self._at, {"do": "accept", "number": number})
            except BaseException:
                near[1].close()
                raise
            await carry(near, far)

    async def _say_who(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell who is on this device's network which address it has at the relay."""
        with suppress(OSError):
            if self.relay is not None:
                writer.write(self.relay.own.encode() + b"\n")
                await writer.drain()
        writer.close()


def room_of(token: Token) -> str:
    """Return the room of the devices of a token, which nobody can find without it."""
    return hashlib.sha256(b"horizonml relay room\0" + trusted(token)).hexdigest()[:32]


@contextmanager
def registered(at: tuple[str, int], room: str) -> Iterator[Relay]:
    """Let this process, and those that it starts, use a relay. Raises RendezvousError."""
    with Registration(at, room) as registration:
        assert registration.relay is not None
        with through(registration.relay):
            yield registration.relay


def find_at_relay(
    relay: Relay,
    token: Token,
    choose: Callable[[Sequence[FoundService]], FoundService | None],
    stop: Callable[[], bool],
) -> ServiceAddress | None:
    """Return a run of the devices in this room, or None if `stop` says so. Raises RendezvousError."""
    deadline = time.monotonic() + SECONDS
    while not stop() and time.monotonic() < deadline:
        try:
            answer = query((relay.host, relay.port), {"do": "members", "room": relay.room}, SECONDS)
        except OSError as error:
            raise RendezvousError(f"the relay at {relay.host}:{relay.port} cannot be used: {error}") from None
        members = answer.get("members")
        names = [str(one) for one in members if one != relay.own] if isinstance(members, list) else []
        seen = [FoundService(one, one, PORT, token.id, __version__, "", (one,)) for one in names if is_relayed(one)]
        runs = Prover(token).prove(seen, stop) if seen else []
        if runs:
            chosen = runs[0] if len(runs) == 1 else choose(runs)
            return ServiceAddress(chosen.name, chosen.addresses, chosen.port) if chosen is not None else None
        time.sleep(_LOOK_SECONDS)
    if stop():
        return None
    raise RendezvousError(
        f"no run was found at the relay {relay.host}:{relay.port} within {SECONDS:.0f} s; start "
        f"`horizonml up JOB --relay {relay.host}` on a device with this one's token"
    )


def serve_relay(host: str, port: int, stop: Callable[[], bool]) -> None:
    """Serve until `stop` says so. Raises RendezvousError if the address cannot be had."""
    with listen(host, port) as listener:
        listener.setblocking(False)
        print(f"the relay listens on {host}:{listener.getsockname()[1]}", flush=True)

        async def work() -> None:
            serving = asyncio.create_task(RelayServer().serve(listener))
            while not stop():
                await asyncio.sleep(_LOOK_SECONDS)
            serving.cancel()

        asyncio.run(work())


async def _ask(at: tuple[str, int], request: Fields) -> Streams:
    """Return a connection to a relay that has agreed to a request. Raises OSError, ValueError, TimeoutError."""
    async with asyncio.timeout(_LINE_SECONDS):
        reader, writer = await asyncio.open_connection(*at, limit=1 << 16)
        try:
            await _say(writer, request)
            answer = json.loads(await reader.readline())
            if "error" in answer:
                raise ValueError(printable(str(answer["error"]), 200))
        except BaseException:
            writer.close()
            raise
    return reader, writer
