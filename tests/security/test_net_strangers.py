"""Strangers attack a service that has a token: they get no further than the handshake, and ranks notice nothing."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from horizonml.rendezvous.client import Client, Unwanted
from horizonml.rendezvous.wire import encode, hello
from horizonml.security.tls import _pair, client_context
from horizonml.security.token import make_token
from tests.distributed.processes import wait_for
from tests.security.net import LOCAL, Raw, Target, careless, client_hello, connect, many_files, undisturbed

TOKEN = make_token()
ALERT = b"\x15\x03\x03\x00\x02\x01\x00"
CHANGE_CIPHER = b"\x14\x03\x03\x00\x01\x01"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service with a token."""
    service = Target(tmp_path_factory.mktemp("service"), TOKEN)
    yield service
    service.end()


def send(*contents: bytes, times: int = 1) -> Callable[[Target], None]:
    """Connect and say this, in so many pieces; nothing but a refusal is heard."""

    def attack(target: Target) -> None:
        for _ in range(times):
            with connect(target.port) as stranger:
                heard = b""
                with suppress(OSError):
                    for content in contents:
                        stranger.sendall(content)
                    stranger.shutdown(socket.SHUT_WR)
                    while more := stranger.recv(1 << 16):
                        heard += more
                assert b"protocol" not in heard
                assert len(heard) < 4096

    return attack


def shown(context: Callable[[], ssl.SSLContext]) -> Callable[[Target], None]:
    """Shake hands in some way, and talk if that should succeed."""

    def attack(target: Target) -> None:
        with connect(target.port) as plain:
            answer: dict[str, object] = {}
            with suppress(OSError), context().wrap_socket(plain) as secure:
                answer = Raw(secure, greet=False).ask(dict(hello()))
            assert answer == {}

    return attack


def old_version() -> ssl.SSLContext:
    context = client_context(TOKEN)  # the token alone is not enough
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def another_token() -> ssl.SSLContext:
    context = client_context(make_token())
    context.verify_mode = ssl.CERT_NONE
    return context


def certificate(days: int = 10, public: bool = False) -> Callable[[], ssl.SSLContext]:
    """A certificate with the names of the real one, valid until so many days from now.

    It is signed by itself, or says that it was signed by the real one; `public` shows the certificate of the real one
    that everyone can fetch from the service, with another key.
    """

    def make() -> ssl.SSLContext:
        key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "horizonml")])
        now = datetime.datetime.now(datetime.UTC)
        until = now + datetime.timedelta(days=days)
        built = x509.CertificateBuilder(name, name, key.public_key(), 1, until - datetime.timedelta(days=30), until)
        chain = built.sign(key, None).public_bytes(serialization.Encoding.PEM)
        if public:
            chain += _pair(TOKEN)[1]  # the real one beside it, as if it had signed this one
        context = careless()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "pair.pem")
            private = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            file.write_bytes(private + chain)
            context.load_cert_chain(file)
        return context

    return make


def reset(target: Target) -> None:
    """Connect and reset, in the middle of a record and before any."""
    for start in (b"", b"\x16\x03\x01", client_hello(), client_hello()[:100], b"GET / HTTP/1.0\r\n\r\n"):
        for _ in range(20):
            with connect(target.port) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.sendall(start)


def half_open(target: Target) -> None:
    """Many connections at once that say half of something, and stay."""
    many_files()
    strangers = [connect(target.port) for _ in range(400)]
    for number, stranger in enumerate(strangers):
        with suppress(OSError):
            stranger.sendall((b"", b"\x16", client_hello()[:50], client_hello())[number % 4])
    with target.raw() as rank:  # who has the token comes in between them
        assert "missing" in rank.ask({"do": "status"})
    for stranger in strangers:
        stranger.close()


def replayed(target: Target) -> None:
    """What a rank has sent is sent again, by somebody who has recorded it."""
    recorded = record(target)
    assert len(recorded) > 500
    for content in (recorded, recorded[: len(recorded) // 2]):
        with connect(target.port) as stranger:
            stranger.sendall(content)
            with suppress(OSError):  # it has been turned away already
                stranger.shutdown(socket.SHUT_WR)
            heard = b""
            with suppress(OSError):
                while more := stranger.recv(1 << 16):
                    heard += more
            assert len(heard) < 4096  # a handshake, and nothing that was asked


def record(target: Target) -> bytes:
    """The bytes of a whole session of a client with the token."""
    assert target.token is not None
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls, said = client_context(target.token).wrap_bio(arrived, leaving), b""
    with connect(target.port) as connection:

        def go_on(action: Callable[[], object]) -> None:
            nonlocal said
            while True:
                try:
                    action()
                except ssl.SSLWantReadError:
                    done = False
                else:
                    done = True
                content = leaving.read()
                said += content
                connection.sendall(content)
                if done:
                    return
                arrived.write(connection.recv(1 << 16))

        go_on(tls.do_handshake)
        for fields in (dict(hello()), {"do": "join", "id": 4711, "join": {}}, {"do": "status"}):
            go_on(lambda fields=fields: tls.write(encode(fields)))
            go_on(lambda: tls.read(1 << 16))
    return said


HELLO = client_hello()
ATTACKS: dict[str, Callable[[Target], None]] = {
    "random bytes": send(os.urandom(5000), times=5),
    "ten megabytes of nothing": send(bytes(10 << 20)),
    "a truncated record": send(HELLO[:-7]),
    "the first message alone": send(HELLO),
    "the first message twice": send(HELLO, HELLO),  # a renegotiation, which TLS 1.3 does not have
    "a huge record": send(b"\x16\x03\x01\xff\xff" + bytes(1 << 17)),
    "a handshake that announces 16 MiB": send(
        *[b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(16380)], *[b"\x16\x03\x01\x40\x00" + bytes(16384)] * 100
    ),
    "early data": send(HELLO, b"\x17\x03\x03\x01\x00" + os.urandom(256), encode(hello())),
    "alerts": send(*[ALERT] * 1000),
    "changes of the cipher": send(HELLO, *[CHANGE_CIPHER] * 1000),
    "empty records": send(*[b"\x16\x03\x01\x00\x00"] * 1000),
    "plain HTTP": send(b"GET /status HTTP/1.1\r\nHost: pi\r\n\r\n"),
    "a forged line of a log": send(b'{"do": "hello\\nforged: all is well"}\nforged\n'),
    "a port scan": send(times=300),
    "resets": reset,
    "many that stay": half_open,
    "TLS 1.2": shown(old_version),
    "no certificate": shown(careless),
    "another token's certificate": shown(another_token),
    "a certificate of the same name": shown(certificate()),
    "an expired certificate": shown(certificate(days=-5)),
    "a certificate beside the real one": shown(certificate(public=True)),
    "replay": replayed,
}


def test_a_stranger_without_the_token_does_no_harm(target: Target, subtests: pytest.Subtests) -> None:
    for name, attack in ATTACKS.items():
        with subtests.test(name), undisturbed(target):
            attack(target)


def test_hundreds_of_connections_leave_nothing_behind(target: Target) -> None:
    """One after the other, and then all at once, with a rank that comes meanwhile."""
    many_files()
    with undisturbed(target):
        files, memory = target.descriptors(), target.megabytes()
        for number in range(500):
            with connect(target.port) as stranger:
                stranger.sendall((b"", HELLO, b"GET / HTTP/1.0\r\n\r\n", HELLO[:20])[number % 4])
        strangers = []
        for number in range(800):
            strangers.append(connect(target.port))
            with suppress(OSError):
                strangers[-1].sendall(HELLO if number % 2 else b"")
            if number % 200 == 199:
                assert target.descriptors() < files + 140
                with target.raw() as rank:
                    assert "missing" in rank.ask({"do": "status"})
        for stranger in strangers:
            stranger.close()
        wait_for(lambda: target.descriptors() <= files, "the descriptors of strangers", 20)
        assert target.megabytes() < memory + 25


def test_each_is_told_what_is_wrong_and_no_more(target: Target) -> None:
    """The owner who mixed tokens up finds out; the error holds no token, and neither does the log."""
    for tls, words in ((client_context(make_token()), "another token"), (None, "encrypts, and this process has no")):
        with pytest.raises(Unwanted, match=words) as caught:
            Client((LOCAL, target.port), tls)
        assert TOKEN.text not in str(caught.value)
    assert TOKEN.text not in target.log()
    assert TOKEN.id not in target.log()


def test_no_session_is_resumed(target: Target) -> None:
    """A ticket would let somebody in who has lost the token meanwhile."""
    with target.raw() as first:
        assert isinstance(first.socket, ssl.SSLSocket)
        session = first.socket.session
        assert session is None or not session.has_ticket
        context = first.socket.context
    with connect(target.port) as plain, suppress(OSError), context.wrap_socket(plain, session=session) as again:
        assert not again.session_reused
