"""What `horizonml join --peer` says of a service that cannot be used: its token, its version, or that it is none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from horizonml.rendezvous import wire
from horizonml.rendezvous.client import Client
from horizonml.rendezvous.discovery.diagnosis import diagnose_peer, explain_clocks
from horizonml.rendezvous.service import Service
from horizonml.security.tls import server_context
from horizonml.security.token import Token, make_token


@contextlib.contextmanager
def serving(token: Token | None) -> Iterator[int]:
    """Run a rendezvous service and yield its port."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    service = Service(listener, server_context(token) if token is not None else None)
    thread = threading.Thread(target=service.run, args=(ended.is_set,))
    thread.start()
    yield listener.getsockname()[1]
    ended.set()
    thread.join(20)
    listener.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """Run something else: it answers whatever it is sent with the same bytes; without any, it is silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                kept.append(connection)
                connection.settimeout(2.0)
                if reply:
                    with contextlib.suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(reply)
                        connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=work)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    for connection in (*kept, listener):
        connection.close()
    assert not thread.is_alive()


def diagnose(port: int, token: Token | None, **given: str) -> str | None:
    return diagnose_peer("127.0.0.1", port, token, seconds=3.0, **given)


def test_a_service_with_the_same_token_or_without_one_can_be_used() -> None:
    token = make_token()
    with serving(token) as port:
        assert diagnose(port, token) is None
    with serving(None) as port:
        assert diagnose(port, None) is None


def test_a_wrong_token_and_a_missing_one_are_told_apart() -> None:
    theirs, ours = make_token(), make_token()
    with serving(theirs) as port:
        said = diagnose(port, ours)
        assert said is not None
        assert f"has another token than this device ({ours.id})" in said
        assert ours.text not in said
        said = diagnose(port, None)
        assert said is not None
        assert "has a token, and this device has none" in said
    with serving(None) as port:
        said = diagnose(port, ours)
        assert said is not None
        assert "has no token (--insecure), and this device has one" in said


def test_another_version_is_named() -> None:
    with serving(None) as port:
        said = diagnose(port, None, version="99.0")
    assert said is not None
    assert "and this device runs 99.0: install the same version" in said


def test_the_clocks_of_a_service_and_a_client_are_compared() -> None:
    with serving(None) as port:
        client = Client(("127.0.0.1", port), None)
        client.close()
        assert client.clock_ahead is not None
        assert explain_clocks(client.clock_ahead) is None
    with answering(wire.encode({"protocol": wire.PROTOCOL, "version": "1.0", "time": time.time() + 7230})) as other:
        client = Client(("127.0.0.1", other), None)
        client.close()
    assert client.clock_ahead is not None
    assert "The service's clock is 2 hours ahead of this device's" in str(explain_clocks(client.clock_ahead))
    for nonsense in ("soon", -1.0, 1e300, None):
        with answering(wire.encode({"protocol": wire.PROTOCOL, "version": "1.0", "time": nonsense})) as other:
            client = Client(("127.0.0.1", other), None)
            client.close()
        assert client.clock_ahead is None


def test_a_refusal_is_passed_on_in_the_service_s_words() -> None:
    with answering(wire.encode({"error": "the service speaks protocol 99\x1b[31m"})) as port:
        assert diagnose(port, None) == f"127.0.0.1:{port} refuses this device: the service speaks protocol 99 [31m."


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x16\x03\x01\x00\x01x"]
)
def test_something_else_is_recognised(reply: bytes) -> None:
    for token in (make_token(), None):
        with answering(reply) as port:
            said = diagnose(port, token)
        assert said is not None
        assert said.startswith(f"127.0.0.1:{port} ")
        assert "another token" not in said
        assert "not a service of HorizonML" in said or "cannot be used" in said


def test_what_is_silent_and_what_is_closed_are_told_apart() -> None:
    with answering(b"") as port:
        said = diagnose_peer("127.0.0.1", port, None, seconds=0.5)
        assert said is not None
        assert "accepts connections but does not answer" in said
    said = diagnose(port, None)
    assert said is not None
    assert f"nothing listens on port {port}" in said
