"""Somebody between a rank and the service: bytes that are altered on the way, and services that are none."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import psutil
import pytest

from horizonml.errors import RendezvousError
from horizonml.rendezvous.client import Client, Endpoint, ServiceError, Unwanted
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import RendezvousSettings, meet
from horizonml.rendezvous.wire import PROTOCOL
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import make_token
from tests.rosters import Silent
from tests.security.net import LOCAL, Target, undisturbed

TOKEN = make_token()
Answer = Callable[[socket.socket], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service with a token."""
    service = Target(tmp_path_factory.mktemp("service"), TOKEN)
    yield service
    service.end()


@contextmanager
def listening(answer: Answer) -> Iterator[int]:
    """Yield the port of a listener that answers each connection in this way."""
    stop = threading.Event()
    with socket.create_server((LOCAL, 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not stop.is_set():
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threads.append(threading.Thread(target=one, args=(connection,)))
                    threads[-1].start()

        def one(connection: socket.socket) -> None:
            connection.settimeout(5.0)
            with connection, suppress(OSError):
                answer(connection)

        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)


def flipping(target: Target, at: int) -> Answer:
    """Pass everything on to the service, and flip one bit of what the client says, or of what the service answers."""

    def answer(client: socket.socket) -> None:
        with socket.create_connection((LOCAL, target.port), timeout=5.0) as service:
            back = threading.Thread(target=passing, args=(service, client, -at))
            back.start()
            passing(client, service, at)
            back.join(20)

    def passing(source: socket.socket, sink: socket.socket, at: int) -> None:
        passed = 0
        with suppress(OSError):
            while content := bytearray(source.recv(1 << 16)):
                if passed <= at < passed + len(content):
                    content[at - passed] ^= 1
                passed += len(content)
                sink.sendall(content)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    return answer


def test_a_bit_that_is_flipped_on_the_way_breaks_the_connection_and_nothing_else(
    target: Target, subtests: pytest.Subtests
) -> None:
    for at in (3, 9, 100, 400, 1200, 1400, -3, -100, -400, -800, -1150, -1300):
        with subtests.test(at=at), undisturbed(target), listening(flipping(target, at)) as port:
            try:
                with closing(Client((LOCAL, port), client_context(TOKEN), 1.0)) as client:
                    for _ in range(20):
                        assert "missing" in client.ask({"do": "status"}, 1.0)
            except ServiceError:
                continue
            # A few bytes do not matter to TLS: the length of a record that comes in parts does.
            raise AssertionError("nobody noticed")


def test_a_handshake_that_is_cut_off_is_not_taken_for_one_with_another_token(target: Target) -> None:
    """A service that ends just then may have sent any part of its answers."""

    def answer(client: socket.socket) -> None:
        with socket.create_connection((LOCAL, target.port), timeout=5.0) as service:
            service.sendall(client.recv(1 << 16))
            left = cut
            while left and (content := service.recv(left)):
                client.sendall(content)
                left -= len(content)

    with listening(answer) as port:
        for cut in range(0, 600, 30):
            with pytest.raises(ServiceError) as caught:
                Client((LOCAL, port), client_context(TOKEN), 3.0)
            assert not isinstance(caught.value, Unwanted), f"{cut} bytes: {caught.value}"


def wait(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def rubbish(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 100)
    wait(connection)


def endless(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * (1 << 20))


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"{")
        time.sleep(0.05)


def lines(*said: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        for line in said:
            connection.recv(1 << 16)
            connection.sendall(line)
        wait(connection)

    return answer


def secured(answer: Answer, own: bool) -> Answer:
    """Answer so in TLS, with the right token or another one."""

    def secure(connection: socket.socket) -> None:
        context = server_context(TOKEN if own else make_token())
        with context.wrap_socket(connection, server_side=True) as inside:
            answer(inside)

    return secure


OK = b'{"protocol": %d, "version": "0"}\n' % PROTOCOL
FALSE: dict[str, tuple[Answer, bool, type[ServiceError], str]] = {
    # What answers, whether the rank has a token, the error, and its words
    "no token": (lines(b'{"error": "x"}\n'), True, Unwanted, "it does not encrypt, so it has no token"),
    "another token": (secured(wait, own=False), True, Unwanted, "another token"),
    "closes": (lambda _: None, True, ServiceError, " "),
    "rubbish": (rubbish, True, Unwanted, "something else"),
    "never answers": (wait, True, ServiceError, "does not answer"),
    "drips": (drip, True, ServiceError, " "),
    "endless in TLS": (secured(endless, own=True), True, ServiceError, "more than 8388608 bytes"),
    "rubbish in TLS": (secured(lines(b"\xff\n"), own=True), True, ServiceError, "cannot be read"),
    "deep nesting": (lines(b"[" * 100_000 + b"\n"), False, ServiceError, "nested too deeply"),
    "endless": (endless, False, ServiceError, "more than 8388608 bytes"),
    "drips without TLS": (drip, False, ServiceError, "does not answer"),
    "says more than asked": (lines(OK + OK), False, ServiceError, "more than it was asked"),
    "a forged error": (lines(b'{"error": "no\\nforged: \\u001b[2K"}\n'), False, Unwanted, "no forged:  [2K"),
    "a number": (lines(b"7\n"), False, ServiceError, "not an object"),
    "encrypts": (secured(wait, own=True), False, ServiceError, " "),
}


def test_a_false_service_is_told_by_its_answers(subtests: pytest.Subtests) -> None:
    never = ("never answers", "drips", "drips without TLS", "encrypts")  # those that only a deadline ends
    for name, (answer, token, kind, words) in FALSE.items():
        with subtests.test(name):
            files, began = psutil.Process().num_fds(), time.monotonic()
            with listening(answer) as port:
                with pytest.raises(kind, match=re.escape(words)) as caught:
                    Client((LOCAL, port), client_context(TOKEN) if token else None, 0.5 if name in never else 20.0)
                assert str(caught.value).isprintable()
                assert len(str(caught.value)) < 500
            assert time.monotonic() - began < 30  # the deadline holds, also on a busy machine
            assert psutil.Process().num_fds() <= files


def test_a_verdict_that_is_none_ends_in_an_error_of_ours() -> None:
    verdict = b'{"rank": 0, "generation": 1, "members": [{"rank": 0}]}'
    answer = lines(OK, b"{}\n", b'{"status": {}, "verdict": ' + verdict + b"}\n")
    with listening(answer) as port, pytest.raises(RendezvousError, match="world_size must be"):
        meet(Identity(0, 2, "test"), RendezvousSettings("digits", "d1", 0.1), Endpoint(LOCAL, port), Silent())
