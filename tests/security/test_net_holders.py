"""A peer that has the token, or comes to a service that needs none, misbehaves: the others notice nothing."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from horizonml.machine.network import listen
from horizonml.rendezvous import server
from horizonml.rendezvous.service import MOST_VALUE, Service
from horizonml.rendezvous.wire import encode, hello
from horizonml.security.tls import server_context
from horizonml.security.token import make_token
from tests.distributed.processes import wait_for
from tests.rosters import rank
from tests.security.net import ENDED, LOCAL, Raw, Target, client_hello, connect, many_files, undisturbed

GOOD = asdict(rank(0, world_size=2, pid=4_000_000_000))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service without a token."""
    service = Target(tmp_path_factory.mktemp("service"), None)
    yield service
    service.end()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service with a token."""
    service = Target(tmp_path_factory.mktemp("service"), make_token())
    yield service
    service.end()


def number() -> int:
    return secrets.randbits(62)


def refused(line: bytes, words: str, greet: bool = True) -> Callable[[Target], None]:
    """A line that is refused in these words."""

    def attack(target: Target) -> None:
        with target.raw(greet) as peer:
            with suppress(*ENDED):
                peer.say(line)
            assert words in str(peer.hear().get("error", "the connection was closed"))

    return attack


def asked(words: str, **fields: Any) -> Callable[[Target], None]:
    return refused(json.dumps(fields).encode() + b"\n", words)


def before_joining(target: Target) -> None:
    """Who has not joined speaks for no rank."""
    with target.raw() as peer:
        for request in (
            {"do": "beat", "count": 1},
            {"do": "leave", "leave": {}},
            {"do": "withdraw"},
            {"do": "peers"},
            {"do": "set", "key": "k", "value": ""},
            {"do": "get", "keys": ["k"], "seconds": 0},
        ):
            assert "has to join first" in peer.ask(request)["error"]


def twice(target: Target) -> None:
    """One connection speaks for one join, and no join has another's number."""
    assert target.ranks is not None
    members = target.ranks.members[0]._heartbeat._resume.id
    with target.raw() as peer, target.raw() as other:
        assert peer.ask({"do": "join", "id": number(), "join": asdict(rank(0, job="mine"))}) == {}
        answer = peer.ask({"do": "join", "id": number(), "join": asdict(rank(1, job="mine"))})
        assert "speaks for another join" in answer["error"]
        answer = other.ask({"do": "join", "id": members, "join": asdict(rank(1, job="mine"))})
        assert "another's number" in answer["error"]
        answer = peer.ask({"do": "resume", "id": number(), "resume": GOOD, "beside": [0]})
        assert "speaks for another join" in answer["error"]
        assert "only the members" in peer.ask({"do": "set", "key": "k", "value": ""})["error"]
        assert peer.ask({"do": "withdraw"}) == {}


def forged_reports(target: Target) -> None:
    """A rank that says it is in the group that runs, or in a newer one, and then leaves for a bad reason."""
    assert target.ranks is not None
    real = target.ranks.members[1]
    generations, pids = (real.generation, real.generation + 1, 1 << 50), (1, real.members[1].pid)
    for which, name, pid in itertools.product(range(3), range(3), pids):
        generation, size = generations[which], 1 + (which + name) % 3  # every pair of them
        own = asdict(real.members[min(name, 1)])
        claim = {**own, "rank": name, "world_size": 3, "pid": pid, "generation": generation, "group_size": size}
        for kind, claimed in (("resume", claim), ("resume", {**claim, "machine": "m"}), ("join", {**claim, "pid": 1})):
            with target.raw() as peer:
                answer = peer.ask({"do": kind, "id": number(), kind: claimed, "beside": list(range(size))})
                if "error" not in answer:  # it is taken for the real one's second connection, and speaks for nobody
                    peer.ask({"do": "beat", "count": 1})
                    assert "error" in peer.ask({"do": "set", "key": "generation-1/key1", "value": ""})
                    peer.ask({"do": "leave", "leave": {"reason": "done", "kind": "failed"}})


def another_job(target: Target) -> None:
    """Ranks of another run that come to this service are refused alone."""
    with target.raw() as peer:
        assert peer.ask({"do": "join", "id": number(), "join": asdict(rank(0, job="other", digest="d7"))}) == {}
        # It is the other rank 0, or none of the group, depending on which of the two that run beats first.
        assert "job other" in str(until_verdict(peer)["refused"])


def until_verdict(peer: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 20.0
    for count in itertools.count():
        assert time.monotonic() < deadline, "no verdict within 20 s"
        answer = peer.ask({"do": "beat", "count": count, "verdict": True, "seconds": 0.2})
        if "verdict" in answer:
            found: dict[str, Any] = answer["verdict"]
            return found
    raise AssertionError


def forged_lines(target: Target) -> None:
    """Names and reasons that would be lines of a log."""
    bad = "pi\nforged: all is well\x1b[2K"
    with target.raw() as peer:
        assert "error" in peer.ask({"do": "join", "id": 5, "join": {**GOOD, "hostname": bad}})
        assert "error" in peer.ask({"do": bad})
        assert (
            peer.ask({"do": "join", "id": number(), "join": asdict(rank(0, job="x" * 255, hostname="h" * 255))}) == {}
        )
        peer.ask({"do": "leave", "leave": {"reason": bad * 100, "kind": bad}})
    with target.raw(greet=False) as peer:
        assert "error" in peer.ask({"do": "hello", "protocol": 99, "version": bad * 100})
    time.sleep(0.5)  # in which it would be logged


DEEP = b"[" * 200_000
ATTACKS: dict[str, Callable[[Target], None]] = {
    "no hello": refused(encode({"do": "status"}), "says hello first", greet=False),
    "an older protocol": refused(encode({**hello(), "protocol": 0}), "install the same version", greet=False),
    "a long hello": refused(b"x" * 5000, "too long", greet=False),
    "a long line": refused(b"x" * (1 << 20), ""),
    "deep nesting": refused(b'{"do": ' + DEEP + b"\n", "nested too deeply"),
    "no JSON": refused(b"\xff\xfe{\n", "decode"),
    "no object": refused(b"[1]\n", "not an object"),
    "Infinity": refused(b'{"do": "beat", "count": Infinity}\n', "Infinity is not a number"),
    "a number of 100,000 digits": refused(b'{"do": ' + b"9" * 100_000 + b"}\n", ""),
    "an endless time": refused(
        b'{"do": "join", "id": 1, "join": ' + json.dumps({**GOOD, "up": 0.5}).replace("0.5", "1e999").encode() + b"}\n",
        "up must be seconds",
    ),
    "a key twice": refused(b'{"do": "beat", "do": "nothing"}\n', "knows no request 'nothing'"),
    "two requests at once": refused(encode({"do": "status"}) * 2, "waits for the answer"),
    "an unknown request": asked("knows no request", do="exec"),
    "a world of 30,000,000": asked("world_size must be", do="join", id=7, join={**GOOD, "world_size": 30_000_000}),
    "ranks beyond all worlds": asked("beside must be", do="resume", id=7, resume=GOOD, beside=[1 << 40]),
    "a join of the far future": asked("of another run", do="join", id=7, join={**GOOD, "generation": 1 << 52}),
    "requests before a join": before_joining,
    "two joins on one connection": twice,
    "forged reports": forged_reports,
    "another job's rank": another_job,
    "lines of a log": forged_lines,
}


def test_a_peer_that_misbehaves_does_no_harm(target: Target, subtests: pytest.Subtests) -> None:
    for name, attack in ATTACKS.items():
        with subtests.test(name), undisturbed(target):
            attack(target)


def test_a_peer_with_the_token_that_misbehaves_does_no_harm(secured: Target, subtests: pytest.Subtests) -> None:
    """The service gets the same once it has decrypted it, but in other pieces."""
    for name in ("a long hello", "a long line", "two requests at once", "forged reports"):
        with subtests.test(name), undisturbed(secured):
            ATTACKS[name](secured)


def test_who_is_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that comes byte by byte and is never finished, and a request that is none in the end."""
    for name in ("_HELLO_SECONDS", "_REQUEST_SECONDS"):
        monkeypatch.setattr(server, name, 1.5)
    token = make_token()
    for tls, said in ((server_context(token), client_hello()[:-1]), (None, encode(hello())[:-1])):
        with running(tls) as port, connect(port) as stranger:
            stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.monotonic()
            for byte in said:
                stranger.sendall(bytes([byte]))
            with suppress(ConnectionError):
                assert not stranger.recv(100)
            assert 1.4 < time.monotonic() - began < 6.0
    with running(None) as port, Raw(connect(port), greet=True) as peer, Raw(connect(port), greet=True) as endless:
        for byte in encode({"do": "status"}):
            peer.say(bytes([byte]))
        assert "missing" in peer.hear(), "a request may come in many pieces"
        endless.say(b"{")
        began = time.monotonic()
        assert endless.hear() == {}
        assert time.monotonic() - began < 6.0


@contextmanager
def running(tls: ssl.SSLContext | None) -> Iterator[int]:
    """Yield the port of a service in this process."""
    over, service = threading.Event(), Service(listen(LOCAL, 0), tls)
    thread = threading.Thread(target=service.run, args=(over.is_set,))
    thread.start()
    yield service.port
    over.set()
    thread.join()


def test_no_rank_writes_what_belongs_to_another(target: Target) -> None:
    with undisturbed(target) as ranks:
        ranks.members[0].store.set("own", "right")
        with pytest.raises(RuntimeError, match="belongs to another rank"):
            ranks.members[1].store.set("own", "wrong")
        assert ranks.members[1].store.get("own") == b"right"


def test_many_connections_of_one_peer_leave_nothing_behind(secured: Target) -> None:
    many_files()
    with undisturbed(secured) as ranks:
        files = secured.descriptors()
        peers = [secured.raw() for _ in range(100)]
        assert "missing" in ranks.members[0]._contact.ask({"do": "status"})
        for peer in peers:
            peer.close()
        wait_for(lambda: secured.descriptors() <= files, "the descriptors of peers", 20)


def test_what_a_rank_keeps_at_the_service_and_asks_for_is_bounded(tmp_path: Path) -> None:
    """60 connections of one member ask for 3 MB each, and read nothing."""
    target = Target(tmp_path, None)
    one, fingerprint = number(), rank(0, world_size=1, pid=77)
    with target.raw() as peer:
        assert peer.ask({"do": "join", "id": one, "join": asdict(fingerprint)}) == {}
        verdict = until_verdict(peer)
        member = asdict(replace(fingerprint, generation=verdict["generation"], group_size=1))
        names = [f"k{each}" for each in range(16)]
        for name in names:
            content = base64.b64encode(bytes(MOST_VALUE)).decode()
            assert peer.ask({"do": "set", "key": name, "value": content}) == {}
        assert "more than" in peer.ask({"do": "get", "keys": ["k1"] * 10_000, "seconds": 0})["error"]
        assert len(peer.ask({"do": "get", "keys": names, "seconds": 0})["values"]) == len(names)
        memory = target.megabytes()
        others = [target.raw() for _ in range(60)]
        for beat, other in enumerate(others):
            assert peer.ask({"do": "beat", "count": beat}).get("ended") is None  # this takes seconds on a busy machine
            other.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            assert other.ask({"do": "resume", "id": one, "resume": member, "beside": [0]}) == {}
            other.say(encode({"do": "get", "keys": names, "seconds": 0}))
        assert peer.ask({"do": "peers"})["ended"] is None
        assert target.megabytes() < memory + 100  # all of them would take 240
        for other in others:
            other.close()
    target.end()
