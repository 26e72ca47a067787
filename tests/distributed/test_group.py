"""What a group does with what peers and strangers send."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from horizonml.comm.group import MOST_JSON, Group
from horizonml.errors import PeerLost
from tests.distributed.pool import Pool
from tests.distributed.test_rendezvous import meeting, serve_ranks


def announces(rank: int, world_size: int, store: Store) -> list[str]:
    """Gather a value, of which rank 1 announces another size than it has."""
    from horizonml.comm import group as module

    original, said = module._framed, list[str]()
    for number, size in enumerate((1 << 40, -1)):
        group = Group(PrefixStore(str(number), store), rank, world_size, 30.0, started_as=[2, 4])
        if rank == 1:
            lie = torch.frombuffer(bytearray(size.to_bytes(8, "little", signed=True)), dtype=torch.uint8)
            module._framed = lambda value, lie=lie: lie
        try:
            group.gather_json("a value")
        except PeerLost as error:
            said.append(str(error))
        finally:
            module._framed = original
            group.close()
    return said


def test_a_size_that_a_peer_announces_is_checked_before_memory_is_taken(pool: Pool) -> None:
    words = "rank 4 announced a message of {} bytes; at most {} are allowed"
    expected = [words.format(size, MOST_JSON // 2) for size in (1 << 40, -1)]
    assert pool.run(2, announces) == [expected, expected]


def alone(rank: int, world_size: int, store: Store, garbage: list[bytes]) -> list[str]:
    """Connect to a peer in whose name a stranger has published something."""
    said = []
    for content in garbage:
        strangers = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        strangers.set("arrived/1", "")
        strangers.set("world/0/1", content)
        with pytest.raises(PeerLost) as caught:
            Group(strangers, 0, 2, 5.0, started_as=[3, 4])
        said.append(str(caught.value))
    return said


def test_a_damaged_address_is_a_lost_peer_and_not_a_crash(pool: Pool) -> None:
    garbage = [b"x" * 24, struct.pack("<q", 1 << 50), struct.pack("<q", -1), bytes(range(256)) * 100]
    (said,) = pool.run(1, alone, garbage)
    assert all(text.startswith("rank 3 could not connect to all other ranks: ") for text in said)


def test_a_rank_that_does_not_come_to_connect_is_named(pool: Pool) -> None:
    (text,) = pool.run(1, connects)
    assert text.startswith("rank 3, 4 did not answer within 1 s")


def connects(rank: int, world_size: int, store: Store) -> str:
    with pytest.raises(PeerLost) as caught:
        Group(store, rank, 3, 0.6, started_as=[1, 3, 4])
    return str(caught.value)


def leaves(rank: int, world_size: int, store: Store) -> str:
    """Let rank 1 of a group leave while rank 0 waits for its message."""
    group = Group(store, rank, world_size, 30.0, started_as=[2, 4])
    said = ""
    if rank == 0:
        into, tag = torch.zeros(1), group.channel("boundaries").tag(0)
        with pytest.raises(PeerLost) as caught:
            group.wait(group.receive(into, 1, tag), 1)
        said = str(caught.value)
    group.close()
    return said


def test_an_error_names_a_lost_peer_by_the_number_that_it_was_started_as(pool: Pool) -> None:
    assert pool.run(2, leaves)[0].startswith("rank 4 closed its connection")


SECONDS = 5.0  # which a rank may be late on a busy machine


def with_a_mute_service(rank: int, world_size: int, store: Store) -> list[tuple[str, float]]:
    """Connect further groups, and another first one, through a service (rank 2) that is stopped once a group exists."""
    if rank == 2:
        serve_ranks(store)
        return []
    port, pid, found = int(store.get("port")), int(store.get("pid")), list[tuple[str, float]]()
    membership = meeting(rank, 2, port)
    group = Group(membership.store, rank, 2, SECONDS)
    store.set(f"there/{rank}", "")
    store.wait(["there/0", "there/1"], timedelta(seconds=60))
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        store.set("mute", "")
    store.wait(["mute"], timedelta(seconds=60))
    for connect in (
        lambda: group.all_gather(torch.zeros(1), (0, 1)),
        lambda: Group(PrefixStore("second", membership.store), rank, 2, SECONDS),
    ):
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            connect()
        found.append((str(caught.value), time.monotonic() - began))
    membership._heartbeat.end()
    group.close()
    store.set(f"over/{rank}", "")
    store.wait(["over/0", "over/1"], timedelta(seconds=60))
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    store.set(f"left {rank}", "")
    return found


def test_a_mute_service_holds_nobody_up_while_ranks_connect(pool: Pool) -> None:
    both = pool.run(3, with_a_mute_service)[:2]
    reasons = [further[0] for further, _ in both]
    said = [f"rank {rank} could not connect to all other ranks: " in text for rank, text in enumerate(reasons)]
    assert any(said), reasons
    for known, found in zip(said, both, strict=True):
        (further, first) = found
        # On a busy machine, one of them may give up, and close its connections, just before the other would.
        assert "no answer within 2.0 s" in further[0] if known else "a peer closed its connection" in further[0]
        assert first[0].startswith("the rendezvous service did not answer ("), first
        assert all(seconds < SECONDS + 5 for _, seconds in found)  # as for every wait that has a deadline


def half_a_message(rank: int, world_size: int, store: Store, sending: bool) -> tuple[str, float]:
    """Lose rank 1 in the middle of a message of 256 MiB from it, or to it; the group is broken off a moment later."""
    group = Group(store, rank, world_size, 60.0)
    tensor, tag = torch.zeros(1 << 26), group.channel("boundaries").tag(0)
    if rank == 1:
        group.send(tensor, 0, tag) if sending else group.receive(tensor, 0, tag)
        time.sleep(0.01)
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        group.close()
        return "", 0.0
    work = group.receive(tensor, 1, tag) if sending else group.send(tensor, 1, tag)
    other, said = int(store.get("pid")), ""
    threading.Timer(0.5, group.abort).start()
    began = time.monotonic()
    try:
        group.wait(work, 1)
    except PeerLost as error:
        said = str(error)
    seconds = time.monotonic() - began
    os.kill(other, signal.SIGCONT)
    group.close()
    return said, seconds


@pytest.mark.parametrize("sending", [True, False])
def test_a_peer_that_is_lost_in_the_middle_of_a_message_holds_nobody_up(pool: Pool, sending: bool) -> None:
    said, seconds = pool.run(2, half_a_message, sending)[0]
    assert said
    assert seconds < 30.0  # and not until the group's timeout
