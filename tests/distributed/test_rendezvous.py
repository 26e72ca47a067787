"""The rendezvous with a real service, real ranks and real mistakes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

from horizonml import __version__
from horizonml.comm.group import Group
from horizonml.errors import PeerLost, RendezvousError
from horizonml.machine import network
from horizonml.machine.network import listen
from horizonml.machine.signals import Cancelled
from horizonml.rendezvous import roster
from horizonml.rendezvous.client import Client, Endpoint, ServiceError, Unwanted
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import RendezvousSettings, meet
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Departure, Ended, Fingerprint, Join
from horizonml.rendezvous.service import Service
from horizonml.rendezvous.wire import Fields, fields_of
from horizonml.security.tls import server_context
from horizonml.security.token import make_token
from tests.distributed.pool import Pool
from tests.distributed.processes import wait_for
from tests.rosters import Silent

PATIENCE = 1.5  # seconds; as usual, this is longer than any beat takes


class Running:
    """A service in a thread, which can be ended."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        service = Service(listen("127.0.0.1", port), tls)
        self.port, self._stop = service.port, threading.Event()
        self._thread = threading.Thread(target=service.run, args=(self._stop.is_set,))
        self._thread.start()

    def end(self) -> None:
        """Stop, and let go of the port."""
        self._stop.set()
        self._thread.join()


@pytest.fixture
def service() -> Iterator[int]:
    """The port of a service that runs in this process."""
    running = Running(0)
    yield running.port
    running.end()


@pytest.fixture
def impatient(service: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a service that takes ranks for lost soon."""
    monkeypatch.setattr(roster, "LOST_SECONDS", PATIENCE)
    return service


def meeting(
    rank: int, world_size: int, port: int, timeout: float = 20.0, before: Membership | None = None, digest: str = "d1"
) -> Membership:
    """Meet the others at a service of this machine."""
    settings = RendezvousSettings("digits", digest, timeout)
    return meet(Identity(rank, world_size, "test"), settings, Endpoint("127.0.0.1", port), Silent(), before)


def join(
    rank: int, world_size: int, store: Store, port: int, digest: str = "d1", timeout: float = 20.0
) -> dict[str, Any]:
    """Meet the others and exchange something over gloo; or the error, and the seconds it took."""
    started = time.monotonic()
    try:
        membership = meeting(rank, world_size, port, timeout, digest=digest)
    except RendezvousError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    group = Group(membership.store, membership.rank, membership.world_size, 20.0)
    ranks = group.gather_json(rank)
    group.close()
    membership.leave("done")
    return {"ranks": ranks, "generation": membership.generation, "interface": os.environ["GLOO_SOCKET_IFNAME"]}


def test_ranks_meet_and_meet_again_in_the_next_generation(pool: Pool, service: int) -> None:
    for generation in (1, 2):
        for result in pool.run(3, join, service):
            assert result == {"ranks": [0, 1, 2], "generation": generation, "interface": "lo"}


def test_what_does_not_belong_together_is_refused_on_every_rank(pool: Pool, service: int) -> None:
    calls = [(join, (rank, 3), (service, digest)) for rank, digest in enumerate(("d1", "d2", "d1"))]
    for ok, result in pool.run_each(calls):
        assert ok, result
        assert result["seconds"] < 5
        assert all(word in result["error"] for word in ("job digest d1", "job digest d2", "rank 1"))


def test_missing_ranks_are_named_at_the_deadline(pool: Pool, service: int) -> None:
    calls = [(join, (rank, 4), (service, "d1", 1.0)) for rank in (0, 2)]
    results = [result for _, result in pool.run_each(calls)]
    for result in results:
        assert "gave up after 1 s" in result["error"]
        assert 0.9 < result["seconds"] < 6  # at most 5 s after its deadline
    # Who gives up last has lost the other one, if the machine was slow to start them.
    assert any("waiting for rank 1, 3 to join" in result["error"] for result in results)


def test_a_service_that_cannot_be_reached_is_a_clear_error_at_the_deadline() -> None:
    def fails(host: str, port: int, timeout: float) -> str:
        began = time.monotonic()
        settings = RendezvousSettings("digits", "d1", timeout)
        with pytest.raises(RendezvousError) as caught:
            meet(Identity(0, 2, "test"), settings, Endpoint(host, port), Silent())
        assert time.monotonic() - began < timeout + 2
        return str(caught.value)

    with listen("127.0.0.1", 0) as mute:
        port = mute.getsockname()[1]
        assert "accepts connections but does not answer" in fails("127.0.0.1", port, 0.6)
    said = fails("127.0.0.1", port, 0.6)
    assert f"no rendezvous service at 127.0.0.1:{port} within 1 s" in said
    assert "connection refused" in said
    assert "the name no-such-host.invalid does not resolve" in fails("no-such-host.invalid", 29400, 0.1)


def test_a_rank_waits_for_a_service_that_comes_late_and_for_one_that_is_started_anew(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    results: list[tuple[bool, Any]] = []
    waiting = threading.Thread(target=lambda: results.extend(pool.run_each([(join, (0, 2), (port,))])))
    waiting.start()
    time.sleep(0.3)  # in which the rank finds nobody
    first = Running(port)
    watching = Endpoint("127.0.0.1", port).connect()
    wait_for(lambda: watching.ask({"do": "status"})["missing"] == [1], "rank 0 waiting for rank 1")
    watching.close()
    first.end()
    imposter = Running(port, server_context(make_token()))  # what has the service's address for a moment
    with pytest.raises(Unwanted):
        Endpoint("127.0.0.1", port).connect()
    time.sleep(1.2)  # in which the rank tries it, too
    imposter.end()
    second = Running(port)
    assert join(1, 2, HashStore(), port)["ranks"] == [0, 1]
    waiting.join()
    assert results[0][1]["ranks"] == [0, 1]
    second.end()


def say_and_lose_the_service(rank: int, world_size: int, store: Store) -> bytes:
    """Rank 1 sets a key, and rank 0 gets it from a service that is started only then in the place of the first one."""
    if rank == 1:
        membership = meeting(rank, world_size, int(store.get("port")))
        membership.store.set("address", "here")
        store.set("said", "")
        found = store.get("found")
        membership.leave("done")
        return found
    first = Running(0)
    store.set("port", str(first.port))
    membership = meeting(rank, world_size, first.port)
    store.wait(["said"])
    first.end()
    second = Running(first.port)

    def there() -> bool:
        with suppress(ServiceError):  # once, as the connection has ended with the first service
            return membership.store.check(["address"])
        return False

    try:
        wait_for(there, "the other rank's key", 30.0)
        store.set("found", membership.store.get("address"))
    finally:
        membership.leave("done")
        second.end()
    return b""


def test_what_a_rank_has_said_before_all_have_connected_outlives_the_service(pool: Pool) -> None:
    assert pool.run(2, say_and_lose_the_service) == [b"", b"here"]


def lose_a_peer(rank: int, world_size: int, store: Store, port: int) -> str:
    """Rank 1 stops without a word; the others must learn its name."""
    membership = meeting(rank, world_size, port)
    group = Group(membership.store, rank, world_size, 5.0)
    try:
        group.gather_json(None)  # all are connected
        if rank == 1:
            membership._heartbeat.stop.set()  # its heart stops
            return "gone"
        group.gather_json(None)
    except PeerLost as error:
        named = membership.name_lost(error)
        membership.leave(f"lost a peer: {named}")
        return str(named)
    finally:
        group.close()
    return "nothing happened"


def test_a_lost_peer_is_named(pool: Pool, service: int) -> None:
    messages = pool.run(3, lose_a_peer, service)
    for message in (messages[0], messages[2]):
        assert "rank 1 on " in message
        assert "gives no sign of life" in message


def stop_a_peer(rank: int, world_size: int, store: Store, port: int) -> dict[str, Any]:
    """Rank 1's process is stopped, and goes on once the others have been told."""
    membership = meeting(rank, world_size, port)
    told = threading.Event()
    endings: list[Ended] = []
    membership.on_end(lambda ended: (endings.append(ended), told.set()))
    if rank == 1:
        store.set("pid", str(os.getpid()))
        assert told.wait(60)
    elif rank == 0:
        os.kill(int(store.get("pid")), signal.SIGSTOP)
        assert told.wait(60)
    else:
        assert told.wait(60)
    named = membership.name_lost(PeerLost("a wait was broken off"))
    membership.leave("lost a peer", Departure.LOST_PEER)
    if rank == 1:
        again = meeting(rank, world_size, port, 60.0, membership)
    else:
        pair = meeting(rank, world_size, port, 60.0, membership)
        assert [member.rank for member in pair.members] == [0, 2]
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        wait_for(lambda: pair.newcomers == [1] or pair.rank != 0, "rank 1 as a newcomer")
        store.set(f"seen{rank}", "")
        store.wait(["seen0"], timedelta(seconds=60))
        pair.leave("meets again", Departure.AGAIN)
        again = meeting(rank, world_size, port, 60.0, pair)
    again.leave("done", Departure.DONE)
    return {"ended": endings, "named": str(named), "last": (again.generation, again.world_size)}


def test_a_process_that_is_stopped_is_published_and_learns_of_it_when_it_wakes(pool: Pool, impatient: int) -> None:
    results = pool.run(3, stop_a_peer, impatient)
    for rank in (0, 2):
        (ended,) = results[rank]["ended"]
        (lost,) = ended.lost
        assert not ended.evicted
        assert (lost.rank, lost.hostname, lost.reason) == (1, socket.gethostname(), "gives no sign of life")
        assert PATIENCE < lost.silent < PATIENCE + 1
        assert "rank 1 on" in results[rank]["named"]
    assert [result["last"] for result in results] == [(3, 3)] * 3  # awake again, it is taken in as any newcomer is
    (evicted,) = results[1]["ended"]
    assert evicted.evicted
    assert "this rank gave no sign of life for too long" in results[1]["named"]


def outlive_the_service(rank: int, world_size: int, store: Store) -> dict[str, Any]:
    """Rank 2 is the service, which rank 0 stops for longer than a rank may be silent: nobody is lost, no call hangs."""
    if rank == 2:
        usual, roster.LOST_SECONDS = roster.LOST_SECONDS, PATIENCE
        try:
            serve_ranks(store)
        finally:
            roster.LOST_SECONDS = usual
        return {"ended": None}
    port, pid = int(store.get("port")), int(store.get("pid"))
    membership = meeting(rank, 2, port)
    named = None
    store.set(f"met {rank}", "")
    store.wait(["met 0", "met 1"], timedelta(seconds=60))
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PATIENCE + 0.5)
        named = str(membership.name_lost(PeerLost("a wait was broken off")))
        os.kill(pid, signal.SIGCONT)
        before = membership._peers().beats
        wait_for(lambda: membership._peers().beats != before, "a heartbeat")
        time.sleep(0.5)  # in which the service would have declared somebody lost
        store.set("awake", "")
    store.wait(["awake"], timedelta(seconds=60))
    ended = membership.ended
    membership.leave("done", Departure.DONE)
    store.set(f"left {rank}", "")
    return {"ended": ended, "named": named}


def serve_ranks(store: Store) -> None:
    """Be the service, until the ranks 0 and 1 have left."""
    running = Running(0)
    store.set("pid", str(os.getpid()))
    store.set("port", str(running.port))
    store.wait(["left 0", "left 1"], timedelta(seconds=60))
    running.end()


def test_a_service_that_was_stopped_takes_nobody_for_lost(pool: Pool) -> None:
    results = pool.run(3, outlive_the_service)
    assert [result["ended"] for result in results] == [None] * 3
    assert "the rendezvous service does not answer either (no answer within 2.0 s)" in results[0]["named"]


def be_busy(rank: int, world_size: int, store: Store, port: int) -> tuple[Ended | None, int]:
    """Rank 0 collects garbage among many objects for longer than silence.

    A heartbeat gets to run between two collections, several times until it is sent, so each of them is to be short
    beside the patience on any machine, however busy: where one is not, the objects become fewer.
    """
    membership = meeting(rank, world_size, port)
    collections = 0
    if rank == 0:
        objects: list[object] = [[] for _ in range(300_000)]
        until = time.monotonic() + PATIENCE + 0.5
        while (begun := time.monotonic()) < until:
            gc.collect()
            collections += 1
            if time.monotonic() - begun > PATIENCE / 15:
                del objects[len(objects) // 2 :]
        del objects
        store.set("rested", "")
    store.wait(["rested"], timedelta(seconds=100))
    ended = membership.ended
    membership.leave("done", Departure.DONE)
    return ended, collections


def test_a_busy_rank_is_no_lost_rank(pool: Pool, impatient: int) -> None:
    (ended, collections), (other, _) = pool.run(2, be_busy, impatient)
    assert ended is other is None
    assert collections > 1


@pytest.mark.parametrize("formed", [True, False])
def test_a_rank_that_is_stopped_while_its_group_forms_is_a_member_or_told_to_all(formed: bool) -> None:
    """Otherwise the others would wait for it for as long as a step may take."""
    service = Running(0)
    fingerprint = Fingerprint(
        1, 2, "digits", "d1", __version__, torch.__version__.partition("+")[0], "pi", "m1", "127.0.0.1", os.getpid() + 1
    )
    other = Endpoint("127.0.0.1", service.port).connect()

    def stopped() -> bool:
        """Asked to stop while this rank waits; the other one comes at this very moment, or never."""
        if formed:
            other.ask(fields_of(Join(1, fingerprint), "join"))
            wait_for(lambda: "verdict" in beat(other), "the verdict")
        return True

    identity, settings = Identity(0, 2, "test"), RendezvousSettings("digits", "d1", 30.0)
    try:
        membership = meet(identity, settings, Endpoint("127.0.0.1", service.port), Silent(), None, stopped)
    except Cancelled:
        assert not formed
    else:
        assert formed
        assert (membership.rank, membership.world_size) == (0, 2)
        membership.leave("done")
    other.close()
    service.end()


def beat(client: Client) -> Fields:
    return client.ask({"do": "beat", "count": 1, "verdict": True, "seconds": 0})


def test_the_interface_is_chosen_anew_for_each_group_unless_the_user_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_chosen", None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert [network.use_interface(name) for name in ("eth0", "wlan0")] == ["eth0", "wlan0"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "wlan0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wg0")
    assert network.use_interface("eth0") == "wg0"
    assert network.use_interface("wlan0") == "wg0"


def test_a_taken_port_is_a_clear_error() -> None:
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(RendezvousError, match=r"in use; perhaps .* or choose another --host or --port"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
