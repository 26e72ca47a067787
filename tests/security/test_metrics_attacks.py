"""Requests that the server of metrics was not made for: an answer or a closed connection, and nothing is left behind.

Slow and many clients are in tests/unit/test_metrics.py.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from horizonml.telemetry.http import MetricsServer
from tests.security.bounds import bounded
from tests.web import get

GOOD = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n"


@pytest.fixture
def port() -> Iterator[int]:
    """A server with one metric."""
    registry = CollectorRegistry()
    Gauge("steps", "Steps.", ["host"], registry=registry).labels('\x1b[2J"\n').set(3)
    server = MetricsServer(registry, ("127.0.0.1", 0), lambda: None)
    assert server.port is not None
    yield server.port
    server.close()


def answer(port: int, request: bytes, reset: bool = False) -> bytes:
    """Send a request and return what comes back; with `reset`, go away without reading it."""
    with socket.create_connection(("127.0.0.1", port), timeout=80) as client:
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(request)
            return b""
        parts = []
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                parts.append(part)
        except OSError:  # it was refused before all of it was sent
            pass
        return b"".join(parts)


def test_any_request_is_answered_or_refused(port: int) -> None:
    dice = random.Random(5)
    get(port, "/metrics")
    with bounded(50):
        for _ in range(150):
            content = bytearray(GOOD)
            for _ in range(dice.choice((1, 3, 10))):
                content[dice.randrange(len(content))] = dice.randrange(256)
            found = answer(port, bytes(content))
            assert not found or found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), (bytes(content), found[:80])
        assert get(port, "/healthz") == (200, "alive\n")


ATTACKS = (
    b"A" * 100_000,
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5_000,
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET http://169.254.169.254/ HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: " + b"," * 7_000 + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=\xff;q=x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"",
)


def test_a_request_that_is_an_attack_takes_nothing(port: int) -> None:
    get(port, "/metrics")
    with bounded(30):
        for request in ATTACKS * 10:
            found = answer(port, request)
            assert not found or found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4"))
            assert b"root:" not in found
        assert get(port, "/healthz") == (200, "alive\n")


def test_clients_that_reset_their_connection_leave_no_descriptor(port: int) -> None:
    get(port, "/metrics")
    with bounded(30):
        for number in range(500):
            answer(port, (GOOD, GOOD[:20], b"")[number % 3], reset=True)
        for _ in range(3):
            assert get(port, "/healthz") == (200, "alive\n")


def test_a_label_from_elsewhere_cannot_forge_a_metric(port: int) -> None:
    _, text = get(port, "/metrics")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith("steps{") for line in lines)
