"""What a group does with what peers and strangers send."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import Store, TCPStore

from horizonml.comm.group import MOST_JSON, Group
from horizonml.errors import PeerLost
from horizonml.rendezvous.client import Endpoint
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import meet
from tests.distributed.pool import Pool
from tests.distributed.test_rendezvous import Listener, settings


def announces(rank: int, world_size: int, store: Store, size: int) -> str:
    """Gather a value, of which rank 1 announces another size than it has."""
    from horizonml.comm import group as module

    group = Group(store, rank, world_size, 30.0)
    original = module._framed
    if rank == 1:
        lie = torch.frombuffer(bytearray(size.to_bytes(8, "little", signed=True)), dtype=torch.uint8)
        module._framed = lambda value: lie
    try:
        group.gather_json("a value")
    except PeerLost as error:
        return str(error)
    finally:
        module._framed = original
        group.close()
    return "nothing"


@pytest.mark.parametrize("size", [1 << 40, -1])
def test_a_size_that_a_peer_announces_is_checked_before_memory_is_taken(pool: Pool, size: int) -> None:
    for text in pool.run(2, announces, size):
        assert text == f"rank 1 announced a message of {size} bytes; at most {MOST_JSON // 2} are allowed"


def alone(rank: int, world_size: int, store: Store, garbage: bytes) -> str:
    """Connect to a peer in whose name a stranger has published something."""
    strangers = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    strangers.set("arrived/1", "")
    strangers.set("world/0/1", garbage)
    try:
        Group(strangers, 0, 2, 5.0)
    except PeerLost as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "garbage",
    [b"x" * 24, struct.pack("<q", 1 << 50), struct.pack("<q", -1), bytes(range(256)) * 100],
    ids=["text", "a huge size", "a negative size", "binary"],
)
def test_a_damaged_address_is_a_lost_peer_and_not_a_crash(pool: Pool, garbage: bytes) -> None:
    (text,) = pool.run(1, alone, garbage)
    assert text.startswith("rank 0 could not connect to all other ranks: ")


def test_a_rank_that_does_not_come_to_connect_is_named(pool: Pool) -> None:
    ((ok, text),) = pool.run_each([(connects, (0, 3), ())])
    assert ok
    assert text.startswith("rank 1, 2 did not answer within 1 s")


def connects(rank: int, world_size: int, store: Store) -> str:
    try:
        Group(store, rank, world_size, 1.0)
    except PeerLost as error:
        return str(error)
    return "nothing"


def with_a_mute_service(
    rank: int, world_size: int, store: Store, port: int, pid: int, connected: bool
) -> tuple[str, float]:
    """Connect through a service that is stopped; at once, or when the ranks have connected to make further groups."""
    membership = meet(Identity(rank, world_size, "test"), settings(20.0), Endpoint("127.0.0.1", port), Listener())
    theirs = membership.store
    group = Group(theirs, rank, world_size, 3.0) if connected else None
    store.set(f"there/{rank}", "")
    store.wait([f"there/{other}" for other in range(world_size)], timedelta(seconds=60))
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        store.set("mute", "")
    store.wait(["mute"], timedelta(seconds=60))
    began = time.monotonic()
    try:
        if group is None:
            Group(theirs, rank, world_size, 3.0)
        else:
            group.all_gather(torch.zeros(1), (0, 1))
    except PeerLost as error:
        return str(error), time.monotonic() - began
    finally:
        membership._heartbeat.end()
    return "nothing", 0.0


@pytest.mark.parametrize("connected", [False, True])
def test_a_mute_service_holds_nobody_up_while_ranks_connect(
    pool: Pool, start: Callable[..., subprocess.Popen[str]], connected: bool
) -> None:
    service = start("rendezvous", "--port", "0")
    assert service.stdout is not None
    port = int(service.stdout.readline().rpartition(":")[2])
    for rank, (text, seconds) in enumerate(pool.run(2, with_a_mute_service, port, service.pid, connected)):
        if connected:
            assert text.startswith(f"rank {rank} could not connect to all other ranks: ")
            assert "no answer within 2.0 s" in text
        else:
            assert text == "the rendezvous service did not answer within 3 s (no answer within 2.0 s)"
        assert seconds < 3 + 5  # as for every wait that has a deadline
