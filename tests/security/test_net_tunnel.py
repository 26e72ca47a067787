"""The port of the links between machines under the same attacks: what it carries arrives, and strangers get nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from horizonml.comm.tunnel import process
from horizonml.comm.tunnel.addresses import HEADER_BYTES, Target, TunnelAnswer, own_address
from horizonml.comm.tunnel.client import Tunnel
from horizonml.comm.tunnel.process import MOST_HANDSHAKES
from horizonml.security.tls import client_context
from tests.distributed.processes import wait_for
from tests.security.net import LOCAL, client_hello, many_files
from tests.security.test_net_strangers import ATTACKS, TOKEN
from tests.unit.test_tunnel_process import VOUCHERS, connect, exactly, free_port, rank

# These talk to the service in its own protocol.
OTHERS = {"many that stay", "replay"}


class Link:
    """A connection of two ranks through two tunnels."""

    def __init__(self) -> None:
        self.port, self.token = free_port(), TOKEN
        self._tunnels = [Tunnel(TOKEN, LOCAL, port) for port in (self.port, free_port())]
        there = self._tunnels[0]._process
        assert there is not None
        self.process = psutil.Process(there.pid)
        self._listener = rank(0, TOKEN)
        self._near, _ = connect(self._tunnels[1], self.port, self._listener)
        self._far, _ = self._listener.accept()
        self.check()
        self._files, self._memory = self.process.num_fds(), self.process.memory_info().rss

    def check(self) -> None:
        """What is sent arrives in both directions."""
        for source, sink in ((self._near, self._far), (self._far, self._near)):
            source.sendall(b"x" * 100_000)
            assert exactly(sink, 100_000) == b"x" * 100_000

    def check_bounds(self) -> None:
        """Nothing is left of strangers, once their time is over."""
        assert self.process.num_fds() <= self._files + MOST_HANDSHAKES
        wait_for(lambda: self.process.num_fds() <= self._files, "the descriptors of strangers", 20)
        assert self.process.memory_info().rss < self._memory + (24 << 20)

    def refused(self) -> int:
        return self._tunnels[0].usage().refused

    def close(self) -> None:
        for one in (self._near, self._far, self._listener):
            one.close()
        for tunnel in self._tunnels:
            tunnel.close(10.0)
        while VOUCHERS:
            VOUCHERS.popitem()[1].close()


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    found = Link()
    yield found
    found.close()


def test_a_stranger_at_the_port_of_links_does_no_harm(link: Link, subtests: pytest.Subtests) -> None:
    target: Any = SimpleNamespace(port=link.port, token=TOKEN)
    for name in ATTACKS.keys() - OTHERS:
        with subtests.test(name):
            ATTACKS[name](target)
            link.check()


def test_hundreds_of_connections_leave_nothing_behind(link: Link) -> None:
    many_files()
    strangers = []
    for number in range(800):
        strangers.append(socket.create_connection((LOCAL, link.port), timeout=80))
        if number % 200 == 199:
            link.check()
            assert ask(link, Target(own_address(0), 1, False).to_bytes()) == [TunnelAnswer.NOBODY]
    for stranger in strangers:
        stranger.close()
    link.check()
    link.check_bounds()
    assert link.refused() >= 300


def header(address: str, port: int, magic: bytes = b"hzml", version: int = 1, flags: int = 0) -> bytes:
    return struct.pack(">4sBB4sH", magic, version, flags, socket.inet_aton(address), port)


def ask(link: Link, content: bytes) -> list[int]:
    """What the tunnel answers to somebody with the token: nothing if it ends the connection."""
    with secured(link) as line:
        try:
            line.sendall(content)
            return list(line.recv(1))
        except (ConnectionError, ssl.SSLError):
            return []


def secured(link: Link) -> ssl.SSLSocket:
    """A connection of somebody with the token."""
    return client_context(TOKEN).wrap_socket(socket.create_connection((LOCAL, link.port), timeout=80))


def own_machine() -> str:
    """An address of this machine that others reach, or else any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "192.0.2.1"
        return str(probe.getsockname()[0])


HEADERS: dict[str, Callable[[Link], bytes]] = {
    "this machine's SSH": lambda link: header("127.0.0.1", 22),
    "the tunnel itself": lambda link: header("127.0.0.1", link.port),
    "this machine's address": lambda link: header(own_machine(), link.port),
    "another machine": lambda link: header("192.0.2.1", 80),
    "port 0": lambda link: header(own_address(0), 0),
    "another version": lambda link: header(own_address(0), 80, version=9),
    "unknown flags": lambda link: header(own_address(0), 80, flags=0xFE),
    "a rank where nobody listens": lambda link: header(own_address(0), 1),
    "a long header": lambda link: b"hzml" + bytes(1 << 20),
    "the tunnel's port at a rank's address": lambda link: header(own_address(0), link.port),
}


def test_a_header_that_names_another_target_leads_nowhere(link: Link, subtests: pytest.Subtests) -> None:
    for name, made in HEADERS.items():
        with subtests.test(name):
            assert ask(link, made(link)) in ([], [TunnelAnswer.NOBODY])
            link.check()


def test_a_handshake_and_a_header_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HANDSHAKE_SECONDS", 0.3)

    async def attack() -> tuple[bytes, bytes]:
        carries, port = process.Carrier(TOKEN), free_port()
        carries.serve(LOCAL, port)
        while carries.serving != "yes":
            await asyncio.sleep(0.01)
        stranger, said = await asyncio.open_connection(LOCAL, port)
        said.write(client_hello()[:-1])
        line, asked = await asyncio.open_connection(LOCAL, port, ssl=client_context(TOKEN))
        asked.write(header(own_address(0), 1)[: HEADER_BYTES - 1])
        async with asyncio.timeout(5):
            heard = await stranger.read(), await line.read()
        for writer in (said, asked):
            writer.close()
        assert carries.refused == 2
        assert not carries.busy
        carries.end()
        return heard

    assert asyncio.run(attack()) == (b"", b"")
