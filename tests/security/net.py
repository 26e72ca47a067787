"""A service to attack, ranks that meet there meanwhile, and what a stranger needs."""

from __future__ import annotations

import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from horizonml.machine.network import listen, use_interface
from horizonml.rendezvous import membership
from horizonml.rendezvous.client import Endpoint
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import RendezvousSettings, meet
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Departure
from horizonml.rendezvous.wire import encode, hello
from horizonml.security.tls import client_context
from horizonml.security.token import INSECURE, TOKEN, Token
from tests.distributed.processes import begin, environment, wait_for
from tests.rosters import Silent

LOCAL = "127.0.0.1"
SETTINGS = RendezvousSettings("digits", "d1", 20.0)


class Target:
    """A rendezvous service in a process of its own."""

    def __init__(self, folder: Path, token: Token | None) -> None:
        self.token, self._log = token, folder / "service.log"
        secret = {TOKEN: token.text} if token is not None else {INSECURE: "1"}
        with self._log.open("wb") as log, listen(LOCAL, 0) as listener:
            # As launchers start it: so it does not wait for ranks of a service before it.
            command = ("rendezvous", "--inherited", str(listener.fileno()))
            files = {"stderr": log, "pass_fds": (listener.fileno(),)}
            self._process = begin(folder, *command, env=environment(**secret), **files)
            self.port = int(listener.getsockname()[1])
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        assert line.startswith("rendezvous service on"), f"the service said {line!r}: {self.log()}"
        self.process = psutil.Process(self._process.pid)
        self.ranks: Ranks | None = None  # who go on during all attacks

    @property
    def endpoint(self) -> Endpoint:
        tls = client_context(self.token) if self.token is not None else None
        return Endpoint(LOCAL, self.port, tls)

    def raw(self, greet: bool = True) -> Raw:
        """A connection that says whatever a test likes, also one that has the token."""
        plain = connect(self.port)
        tls = self.endpoint.tls
        return Raw(tls.wrap_socket(plain) if tls is not None else plain, greet)

    def log(self) -> str:
        return self._log.read_text(errors="strict")

    def check_log(self) -> None:
        """Every line is short, plain, and the service's own."""
        for line in self.log().splitlines():
            assert len(line) < 500, line
            assert line.isprintable(), ascii(line)
            assert not line.startswith("forged"), line
            assert "Traceback" not in line, self.log()

    def descriptors(self) -> int:
        return self.process.num_fds()

    def megabytes(self) -> float:
        return float(self.process.memory_info().rss) / 1e6

    def end(self) -> None:
        assert self._process.poll() is None, f"the service has ended by itself: {self.log()}"
        if self.ranks is not None:
            self.ranks.close()
            others = Ranks(self)
            others.check()
            others.close()
        self._process.terminate()
        with self._process:
            assert self._process.wait(20) == 0, self.log()
        self.check_log()


ENDED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)  # what a connection that was ended says


class Raw:
    """The client's side of a connection, byte by byte."""

    def __init__(self, connection: socket.socket, greet: bool) -> None:
        self.socket, self._received = connection, b""
        connection.settimeout(20.0)
        if greet:
            assert "protocol" in self.ask(dict(hello()))

    def say(self, content: bytes) -> None:
        self.socket.sendall(content)

    def hear(self) -> dict[str, Any]:
        """The next answer; an empty one if the connection was ended."""
        with suppress(*ENDED):
            while b"\n" not in self._received and (more := self.socket.recv(1 << 16)):
                self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.say(encode(fields))
        return self.hear()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ranks:
    """Two ranks in this process that meet by the real client, and show that they go on undisturbed."""

    def __init__(self, target: Target) -> None:
        use_interface("lo")
        self._often = patch.object(membership, "BEAT_SECONDS", 0.02)  # so that a check takes no second
        self._often.start()
        found: list[Membership | None] = [None, None]

        def one(rank: int) -> None:
            found[rank] = meet(Identity(rank, 2, "test"), SETTINGS, target.endpoint, Silent())

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.members = [member for member in found if member is not None]
        assert len(self.members) == 2, "two ranks did not meet"
        self._exchanged = 0

    def check(self) -> None:
        """Their hearts beat and are answered, they exchange keys, and nobody has declared anything."""
        before = [member._heartbeat._beats for member in self.members]
        self._exchanged += 1
        self.members[0].store.set(f"key{self._exchanged}", "value")
        assert self.members[1].store.get(f"key{self._exchanged}") == b"value"
        for member, beats in zip(self.members, before, strict=True):
            wait_for(lambda m=member, b=beats: m._heartbeat._beats > b + 1, "heartbeats", 20)  # type: ignore[misc]
            assert member.ended is None
            peers = member._contact.ask({"do": "peers"})
            assert peers["ended"] is None
            assert peers["gone"] == {}
            assert set(peers["beats"]) == {"0", "1"}  # type: ignore[call-overload]

    def close(self) -> None:
        for member in self.members:
            member.leave("done", Departure.DONE)
        for member in self.members:
            member._heartbeat.join(20)
        self._often.stop()


@contextmanager
def undisturbed(target: Target) -> Iterator[Ranks]:
    """Two ranks that met before an attack go on during it and after it; at the end of all, two others meet."""
    if target.ranks is None:
        target.ranks = Ranks(target)
        target.ranks.check()  # all their connections are made
    yield target.ranks
    target.ranks.check()
    target.check_log()


def connect(port: int) -> socket.socket:
    """A connection, tried again for as long as the service has no room for it."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            connection = socket.create_connection((LOCAL, port), timeout=20.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except (ConnectionResetError, TimeoutError):
            assert time.monotonic() < deadline


def client_hello(context: ssl.SSLContext | None = None) -> bytes:
    """The first bytes that a client of TLS sends."""
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = (context or careless()).wrap_bio(arrived, leaving)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return leaving.read()


def careless() -> ssl.SSLContext:
    """Trusts everyone, and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def many_files(wanted: int = 4096) -> None:
    """Let this process have many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
