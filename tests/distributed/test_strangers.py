"""A real rendezvous service beside which strangers write to the store: the ranks that belong together still meet."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import Store, TCPStore

from horizonml.rendezvous.mailbox import peek, post
from tests.distributed.pool import Pool
from tests.distributed.processes import wait_for
from tests.distributed.test_rendezvous import join, service
from tests.unit.test_roster import rank

__all__ = ["service"]  # a fixture
GOOD = rank(0, world_size=2, job="digits", digest="d1").to_json()


def connect(port: int) -> Store:
    return TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def message(text: str | bytes) -> Callable[[int], None]:
    """Put this into the queue of events."""

    def send(port: int) -> None:
        connect(port).queue_push("events", text)

    return send


def value(key: str, text: str) -> Callable[[int], None]:
    """Overwrite a value that ranks and the service use."""

    def write(port: int) -> None:
        connect(port).set(key, text)

    return write


def said(**event: object) -> Callable[[int], None]:
    return message(json.dumps({"id": 7, **event}))


def number_that_is_none(port: int) -> None:
    """The store drops a client that adds to it."""
    store = connect(port)
    for key in ("events", "beat/7"):
        store.set(key, "rubbish")
    with pytest.raises(RuntimeError):
        store.add("events", 1)


def reset(port: int) -> None:
    """Connect and reset, in the middle of a message and before any."""
    for start in (b"", b"\x00", b"GET / HTTP/1.0\r\n\r\n"):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(start)


@pytest.mark.parametrize(
    ("attack", "log"),
    [
        (message("[" * 60_000), "nested too deeply"),
        (message('{"id": 7, "leave": ' + "[" * 20_000), "nested too deeply"),
        (said(leave=float("inf")), "Infinity is not a number"),
        (said(join=GOOD | {"replace_timeout": float("nan")}), "NaN is not a number"),
        (message("x" * (8 << 20)), "8388608 bytes are too long"),
        (said(join=GOOD | {"world_size": 30_000_000}), "world_size must be a whole number from 1 to 4096"),
        (said(join=GOOD | {"rank": -1}), "rank must be a whole number from 0 to 1, not -1"),
        (said(join=GOOD | {"hostname": "pi\nERROR: forged"}), r"not 'pi\nERROR: forged'"),
        (said(join=GOOD | {"hostname": "x" * (8 << 10)}), "hostname must be at most 255"),
        (said(leave="done\nERROR: forged"), ""),
        (said(resume=GOOD, beside=[1 << 40]), "beside must be a list of ranks"),
        (said(join=[]), "a fingerprint must be an object, not list"),
        (message(b"\xff{"), "can't decode"),
        (value("status", "[" * 60_000), ""),
        (number_that_is_none, ""),
        (reset, ""),
    ],
)
def test_a_malicious_client_does_no_harm(
    pool: Pool, service: int, caplog: pytest.LogCaptureFixture, attack: Callable[[int], None], log: str
) -> None:
    with caplog.at_level(logging.INFO, logger="horizonml"):
        attack(service)
        assert [result["ranks"] for result in pool.run(2, join, service)] == [[0, 1], [0, 1]]
        wait_for(lambda: log in caplog.text, f"a record of {log!r}", 20)  # the attack may be read after the ranks
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert all(len(record.getMessage()) < 500 for record in caplog.records)


def test_a_wrong_join_beside_ranks_that_wait_is_refused_alone(pool: Pool, service: int) -> None:
    verdicts: list[str] = []

    def intrude() -> None:
        store, number = connect(service), secrets.randbits(62)
        wait_for(lambda: json.loads(peek(store, "status") or b"{}").get("missing") == [2], "two ranks that wait")
        post(store, {"id": number, "join": rank(2, job="evil").to_json()})
        wait_for(lambda: peek(store, f"verdict/{number}") is not None, "the verdict on the stranger")
        verdicts.append(str(peek(store, f"verdict/{number}")))

    intruder = threading.Thread(target=intrude)
    intruder.start()
    calls = [(join, (number, 3), (service,)) for number in (0, 1)]
    late = (join_late, (2, 3), (service,))
    results = pool.run_each([*calls, late])
    intruder.join()
    assert [result for ok, result in results if ok and result.get("ranks") == [0, 1, 2]] == [r for _, r in results]
    assert "rank 2 has job evil" in verdicts[0]


def join_late(number: int, world_size: int, store: Store, port: int) -> object:
    """Join once the stranger has been refused."""
    watched = connect(port)
    deadline = time.monotonic() + 60
    while not json.loads(peek(watched, "status") or b"{}").get("refused"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return join(number, world_size, store, port)
