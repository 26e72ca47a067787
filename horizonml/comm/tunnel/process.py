"""The side process of a rank, which carries the connections between its machine's ranks and other machines.

Requests and replies are lines of JSON on the socket that is its standard input; the first one brings the token. When
the rank ends, the process lets go of the machine's port at once, and ends with the last connection that it carries.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from horizonml.comm.tunnel.addresses import (
    HEADER_BYTES,
    Target,
    TunnelAnswer,
    connected_from,
    is_portable,
    is_vouched_for,
    kernel_table,
    listener_of,
    probe_address,
    stand_in,
    vouch,
)
from horizonml.comm.tunnel.ends import Pipe, PlainEnd, SecureEnd
from horizonml.machine.relay import bound, connect, is_relayed
from horizonml.security.devices import REVOKED
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import Token, parse_token

MOST_CONNECTIONS = 2048  # each keeps up to 256 KiB, if its receiver is slow
MOST_HANDSHAKES = 64  # at a time
HANDSHAKE_SECONDS = 5.0
_REACH_SECONDS = 30.0  # in which another machine's tunnel must answer
_AGAIN_SECONDS = 0.25  # between two attempts to reach it, or to take over the machine's port
_MOST_WAITING = 16  # connections to a stand-in; the kernel keeps less


@dataclass
class Opening:
    """A socket that stands for a rank on another machine, until this machine's rank has connected to it."""

    listener: socket.socket
    at: tuple[str, int]
    target: Target
    where: tuple[str, int]  # the other machine's tunnel
    state: str = "waiting"  # then "connecting", and "connected" or "failed"
    reason: str = ""


Address = tuple[int, tuple[str, int]]  # the family, and what to connect to


class Carrier:
    """Holds the connections of one rank's tunnel."""

    def __init__(self, token: Token) -> None:
        """Prepare to carry, in the running loop, between processes that have this token."""
        self._loop, self._token = asyncio.get_running_loop(), token
        self._server, self._client = server_context(token), client_context(token)
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.serving, self.reason = "no", ""  # then "standby", "yes" or "failed"
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself would forget them
        self._arriving: dict[asyncio.Task[None], str] = {}  # who has not shown the token yet, the oldest first
        self._pipes: set[Pipe] = set()
        self._openings: dict[int, Opening] = {}
        self._opened = 0
        self._ended = False
        self._sent = self._received = self.refused = 0
        self.cipher = ""

    @property
    def pipes(self) -> int:
        """Return how many connections are carried now."""
        return len(self._pipes)

    @property
    def sent(self) -> int:
        """Return the bytes sent to other machines so far."""
        return self._sent + sum(pipe.sent for pipe in self._pipes)

    @property
    def received(self) -> int:
        """Return the bytes received from other machines so far."""
        return self._received + sum(pipe.received for pipe in self._pipes)

    def serve(self, address: str, port: int) -> None:
        """Accept connections for this machine's ranks at an address, as soon as no other rank's tunnel does."""
        self.stop_serving()
        self.serving, self.reason = "no", ""
        self._serving = self._start(self._take_port(address, port))

    def stop_serving(self) -> None:
        """Accept no more connections, so that another rank's tunnel may."""
        if self._serving is not None:
            self._serving.cancel()
        if self._listener is not None:
            self._close(self._listener)
            self._listener = None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close(self, listener: socket.socket) -> None:
        """Listen no more. This may have happened already."""
        if listener.fileno() >= 0:
            self._loop.remove_reader(listener)
            listener.close()

    @property
    def busy(self) -> bool:
        """Return whether connections are carried, or about to be: a rank's own, or one that arrives."""
        connecting = any(opening.state == "connecting" for opening in self._openings.values())
        return connecting or bool(self._pipes) or bool(self._arriving)

    def end(self) -> None:
        """Accept no more, because the rank has ended; what belongs to other ranks of this machine goes on."""
        self._ended = True
        self.stop_serving()
        for opening in self._openings.values():
            if opening.state == "waiting":
                self._depart(opening)  # if its rank has connected at the last moment
        for pipe in list(self._pipes):
            pipe.hurry()

    async def _take_port(self, address: str, port: int) -> None:
        """Listen at the machine's port, or stand by until whoever does so now is gone."""
        try:
            where = _resolve(bound(address), port)
        except OSError as error:
            self.serving, self.reason = "failed", error.strerror or str(error)
            return
        while True:
            try:
                listener = socket.create_server(where[1], family=where[0], backlog=512)
            except OSError as error:
                # Whoever stands by goes on trying: the machine's address may be gone for a moment.
                if error.errno != errno.EADDRINUSE and self.serving != "standby":
                    self.serving, self.reason = "failed", os.strerror(error.errno or errno.EIO)
                    return
            else:
                listener.setblocking(False)
                self._listener, self.serving = listener, "yes"
                self._loop.add_reader(listener, self._accept)
                return
            if self.serving == "no":
                try:
                    found = await self._carried_by_another(where)
                except (ConnectionRefusedError, ConnectionResetError):
                    continue  # it has just ended
                except OSError as error:
                    self.serving, self.reason = "failed", f"the port belongs to no tunnel with this token ({error})"
                    return
                if not found:
                    self.serving, self.reason = "failed", "another user's tunnel listens there"
                    return
                self.serving = "standby"
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _carried_by_another(self, where: Address) -> bool:
        """Return whether the tunnel that has the port would carry to this one's user. Raises OSError."""
        with (
            await self._connect(where) as connection,
            socket.create_server((probe_address(), 0)) as probe,
            vouch(self._token, probe_address(), probe.getsockname()[1]),
        ):
            target = Target(probe_address(), probe.getsockname()[1], plain=False)
            far = await self._reach_tunnel(connection, target)
            return await far.receive(1) == bytes([TunnelAnswer.CONNECTED])

    async def _connect(self, where: Address) -> socket.socket:
        """Return a connection to another machine. Raises OSError."""
        if is_relayed(where[1][0]):
            return await asyncio.to_thread(connect, *where[1][:2], HANDSHAKE_SECONDS)
        connection = socket.socket(where[0], socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await self._loop.sock_connect(connection, where[1])
        except BaseException:
            connection.close()
            raise
        return connection

    async def _reach_tunnel(self, connection: socket.socket, target: Target) -> SecureEnd:
        """Name the target to another machine's tunnel; the answer is to come. Raises OSError."""
        connection.setblocking(False)
        REVOKED.refresh()
        far = SecureEnd(connection, self._client, False)
        await far.handshake()
        await far.send(target.to_bytes())
        return far

    def _accept(self) -> None:
        assert self._listener is not None
        REVOKED.refresh()
        for _ in range(16):
            try:
                connection, source = self._listener.accept()
            except OSError:  # nobody is left, or who was there has gone, or there are no descriptors for a moment
                return
            connection.setblocking(False)
            while len(self._arriving) >= MOST_HANDSHAKES:
                # Whoever has most unfinished ones loses the oldest: a stranger, not a rank, whose handshake is short.
                greedy = Counter(self._arriving.values()).most_common(1)[0][0]
                given_up = next(task for task, source in self._arriving.items() if source == greedy)
                del self._arriving[given_up]
                given_up.cancel()
                self.refused += 1
            task = self._start(self._arrive(connection))
            self._arriving[task] = str(source[0])
            task.add_done_callback(lambda task: self._arriving.pop(task, None))

    async def _arrive(self, connection: socket.socket) -> None:
        """Shake hands with another machine, and connect it with the rank that it asks for."""
        with ExitStack() as held:
            held.enter_context(connection)
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    far = SecureEnd(connection, self._server, True)
                    await far.handshake()
                    target = Target.from_bytes(await far.receive(HEADER_BYTES))
                    answer, near = await self._reach(target)
                    if near is not None:
                        held.enter_context(near)
                    await far.send(bytes([answer]))
                    if near is not None and target.plain:
                        await far.leave_tls()
            except (OSError, ValueError) as error:
                # A rank that only looks whether it reaches this machine says nothing, and is no stranger.
                self.refused += not isinstance(error, ConnectionResetError)
                return
            if near is not None:
                held.pop_all()
                self._carry(near, far)

    async def _reach(self, target: Target) -> tuple[TunnelAnswer, socket.socket | None]:
        """Connect to one of this user's ranks on this machine that has this token, and to nothing else."""
        if len(self._pipes) >= MOST_CONNECTIONS:
            return TunnelAnswer.FULL, None
        is_own = is_portable() or listener_of(kernel_table(), target.address, target.port) == os.geteuid()
        if not is_own or not is_vouched_for(self._token, target.address, target.port):
            return TunnelAnswer.NOBODY, None
        try:
            return TunnelAnswer.CONNECTED, await self._connect((socket.AF_INET, (target.address, target.port)))
        except OSError:
            return TunnelAnswer.NOBODY, None

    def _carry(self, near: socket.socket, far: SecureEnd) -> None:
        self.cipher = far.cipher
        pipe = Pipe(PlainEnd(near), far, self._forget)
        self._pipes.add(pipe)
        pipe.begin()
        if self._ended:
            pipe.hurry()

    def _forget(self, pipe: Pipe) -> None:
        self._pipes.discard(pipe)
        self._sent += pipe.sent
        self._received += pipe.received

    def open(self, listener: socket.socket, where: tuple[str, int], target: Target) -> tuple[int, tuple[str, int]]:
        """Listen in another machine's stead for one connection of this user's; return its number and address."""
        listener.setblocking(False)
        at = listener.getsockname()
        opening = Opening(listener, (at[0], at[1]), target, where)
        self._opened += 1
        self._openings[self._opened] = opening
        self._loop.add_reader(listener, self._depart, opening)
        return self._opened, opening.at

    def state_of(self, number: int) -> tuple[str, str]:
        """Return how far an opening has come, and why it has failed."""
        opening = self._openings.get(number)
        return (opening.state, opening.reason) if opening is not None else ("failed", "it was closed")

    def close(self, number: int) -> None:
        """Wait no longer for a rank to connect; what is connected stays."""
        opening = self._openings.pop(number, None)
        if opening is not None:
            self._close(opening.listener)

    def _depart(self, opening: Opening) -> None:
        """Take the connection of this machine's rank, if it is its, and begin to connect it with the other machine."""
        for _ in range(_MOST_WAITING):
            try:
                near, source = opening.listener.accept()
            except OSError:  # nobody is left, or who was there has gone
                return
            near.setblocking(False)
            try:
                own = is_portable() or connected_from(kernel_table(), source, opening.at) == os.geteuid()
            except OSError as error:  # nobody can say who it is
                near.close()
                self._close(opening.listener)
                opening.state, opening.reason = "failed", f"the kernel does not say who connects ({_words(error)})"
                return
            if own:
                self._close(opening.listener)
                opening.state = "connecting"
                self._start(self._go_out(opening, near))
                return
            near.close()  # another user of this machine

    async def _go_out(self, opening: Opening, near: socket.socket) -> None:
        """Connect a rank with the other machine, whose tunnel may be about to be taken over by another rank's."""
        far: SecureEnd | None = None
        try:
            where = _resolve(*opening.where)
            async with asyncio.timeout(_REACH_SECONDS):
                while far is None:
                    try:
                        far = await self._attempt(opening.target, where)
                    except ConnectionError as error:
                        opening.reason = _words(error)
                        await asyncio.sleep(_AGAIN_SECONDS)
        except TimeoutError as error:
            opening.reason = opening.reason or str(error) or "no answer in time"
        except (OSError, ValueError) as error:
            opening.reason = _words(error)
        if far is None:
            opening.state = "failed"
            near.close()
        else:
            opening.state, opening.reason = "connected", ""
            self._carry(near, far)

    async def _attempt(self, target: Target, where: Address) -> SecureEnd:
        """Return the connection to a rank on another machine. Raises OSError, ValueError if the other side refuses."""
        connection = await self._connect(where)
        try:
            far = await self._reach_tunnel(connection, target)
            (answer,) = await far.receive(1)
            if answer != TunnelAnswer.CONNECTED:
                raise ValueError(TunnelAnswer(answer).words)
            if target.plain:
                await far.leave_tls()
        except BaseException:
            connection.close()
            raise
        return far


def _resolve(host: str, port: int) -> Address:
    """Return the family and the target of a numeric address. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return int(family), target  # type: ignore[return-value]


def _words(error: Exception) -> str:
    """Return why another machine was not reached, for people."""
    if isinstance(error, ssl.SSLError):
        return f"it does not have this job's token, or is not a tunnel ({error.reason or error})"
    return (getattr(error, "strerror", None) or str(error)).lower()


_MOST_LINE = 64 << 10  # bytes
_LOOK_SECONDS = 0.25  # between two looks at whether the rank, or the last connection, has ended
Fields = dict[str, Any]


class Control:
    """Does what the rank asks for."""

    def __init__(self) -> None:
        self._carrier: Carrier | None = None
        self._encrypt, self._rank = True, 0

    @property
    def busy(self) -> bool:
        """Return whether connections are carried, of which other ranks of this machine may have one end."""
        return self._carrier is not None and self._carrier.busy

    async def obey(self, line: socket.socket) -> None:
        """Answer the rank's requests on a connected socket until the rank has ended."""
        reader, writer = await asyncio.open_connection(sock=line, limit=_MOST_LINE)
        watching = asyncio.create_task(self._watch_rank(reader))
        try:
            while request := await reader.readline():
                writer.write(json.dumps(self._reply(json.loads(request))).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # the rank is gone, or the line is too long
            pass
        finally:
            watching.cancel()
            writer.close()
            if self._carrier is not None:
                self._carrier.end()

    async def _watch_rank(self, reader: asyncio.StreamReader) -> None:
        """Notice that the rank has ended, although processes that it has left behind may hold its end of the line."""
        while not self._rank or os.getppid() == self._rank:
            await asyncio.sleep(_LOOK_SECONDS)
        reader.feed_eof()

    def _reply(self, request: Fields) -> Fields:
        """Do what a request says, and return the answer."""
        if request["do"] == "begin":
            self._encrypt, self._rank = bool(request["encrypt"]), int(request["rank"])
            self._carrier = Carrier(parse_token(request["token"]))
            return {}
        carrier = self._carrier
        assert carrier is not None, "the first request brings the token"
        try:
            match request["do"]:
                case "serve":
                    carrier.serve(request["address"], request["port"])
                    return {}
                case "open":
                    address, port = request["target"]
                    target = Target(address, port, not self._encrypt)
                    listener = stand_in(request["stand_in"], request["own_port"])
                    number, at = carrier.open(listener, (request["host"], request["port"]), target)
                    return {"number": number, "at": at}
                case "state":
                    states = [carrier.state_of(number) for number in request["numbers"]]
                    return {"serving": [carrier.serving, carrier.reason], "states": states}
                case "close":
                    for number in request["numbers"]:
                        carrier.close(number)
                    return {}
                case "stats":
                    return {
                        "sent": carrier.sent,
                        "received": carrier.received,
                        "seconds": time.process_time(),
                        "connections": carrier.pipes,
                        "refused": carrier.refused,
                        "cipher": carrier.cipher if self._encrypt else "none",
                    }
        except OSError as error:
            return {"error": error.strerror or str(error)}
        raise ValueError(f"the rank asks for {request['do']}")


async def serve(line: socket.socket) -> None:
    """Run until the rank has ended, and all connections with it."""
    control = Control()
    await control.obey(line)
    while control.busy:
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> None:
    """Serve the rank that has started this process."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="tunnel: %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(socket.socket(fileno=os.dup(0))))


if __name__ == "__main__":
    main()
