"""What `horizonml join --peer` says of a service that cannot be used: its token, its version, or that it is none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

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


def test_a_wrong_token_a_missing_one_and_another_version_are_told_apart() -> None:
    theirs, ours = make_token(), make_token()
    with serving(theirs) as port:
        assert diagnose(port, theirs) is None
        said = str(diagnose(port, ours))
        assert f"has another token than this device ({ours.id})" in said
        assert ours.text not in said
        assert "has a token, and this device has none" in str(diagnose(port, None))
    with serving(None) as port:
        assert diagnose(port, None) is None
        assert "has no token (--insecure), and this device has one" in str(diagnose(port, ours))
        assert "and this device runs 99.0: install the same version" in str(diagnose(port, None, version="99.0"))


def test_the_clocks_of_a_service_and_a_client_are_compared() -> None:
    for clock, words in ((time.time(), None), (time.time() + 7230, "is 2 hours ahead of this device's"), (1e300, None)):
        hello = {"protocol": wire.PROTOCOL, "version": "1.0", "time": clock}
        with answering(wire.encode(hello)) as port:
            client = Client(("127.0.0.1", port), None)
            client.close()
        assert (client.clock_ahead is None) == (clock == 1e300), "what is no time is not compared"
        said = explain_clocks(client.clock_ahead)
        assert said is None if words is None else words in str(said)


def test_a_refusal_is_passed_on_in_the_service_s_words() -> None:
    with answering(wire.encode({"error": "the service speaks protocol 99\x1b[31m"})) as port:
        assert diagnose(port, None) == f"127.0.0.1:{port} refuses this device: the service speaks protocol 99 [31m."


def test_something_else_is_recognised() -> None:
    for reply in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x01\x00\x01x"):
        for token in (make_token(), None):
            with answering(reply) as port:
                said = str(diagnose(port, token))
            assert said.startswith(f"127.0.0.1:{port} ")
            assert "another token" not in said
            assert "not a service of HorizonML" in said or "cannot be used" in said
    with answering(b"") as port:
        said = str(diagnose_peer("127.0.0.1", port, None, seconds=0.5))
    assert "accepts connections but does not answer" in said
    assert f"nothing listens on port {port}" in str(diagnose(port, None))
