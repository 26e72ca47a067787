"""Training through tunnels between two "machines", and on one machine beside strangers: bit for bit the same."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.comm.tunnel.addresses import is_ours, is_portable
from horizonml.comm.tunnel.client import AES, CHACHA, Links, Tunnel, TunnelPeer, TunnelUsage
from horizonml.engine.session import Wishes
from horizonml.errors import PeerLost
from horizonml.profiling.probe import probe_pairs
from horizonml.security.tls import client_context
from horizonml.security.token import make_token, parse_token
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, Case, RandomBatch, train

HERE = "127.0.0.1"
DDP, PIPELINE = Case("ddp", ((1.0,) * 3,)), Case("pipeline", ((1.0,),) * 3, 5, model="normed")
STRANGERS = 2000


def free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        probes = [opened.enter_context(socket.create_server((HERE, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def linked(rank: int, world_size: int, token: str, ports: Sequence[int], encrypt: bool) -> tuple[list[str], Links]:
    """Ranks alternate between as many "machines" as there are ports."""
    hosts = [f"machine {number % len(ports)}" for number in range(world_size)]
    tunnel = Tunnel(parse_token(token), HERE, ports[rank % len(ports)], encrypt)
    peers = [TunnelPeer(host, HERE, ports[number % len(ports)]) for number, host in enumerate(hosts)]
    return hosts, Links(peers, tunnel)


def tunnelled(
    rank: int, world_size: int, store: Store, case: Case, token: str, ports: Sequence[int], encrypt: bool
) -> tuple[dict[str, Tensor], TunnelUsage, list[tuple[str, int]]]:
    """Train through tunnels, with strangers who come after the first step; and where gloo listens then."""
    hosts, links = linked(rank, world_size, token, ports, encrypt)
    before = listening()
    group = Group(store, rank, world_size, 30.0, hosts, links=links)
    try:
        state = train_beside_strangers(rank, world_size, store, case, group, before)
        return state, links.tunnel.usage(), [at for at in listening() if at not in before]
    finally:
        group.close()
        links.tunnel.close()


def train_beside_strangers(
    rank: int, world_size: int, store: Store, case: Case, group: Group, earlier: list[tuple[str, int]]
) -> dict[str, Tensor]:
    """Train while strangers come to where this group listens, not to `earlier` tests' groups that are not gone yet."""
    model = built(f"tests.models:{case.model}")
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
    for step in range(3):
        session.step(RandomBatch(step), LR, Wishes(measure_divergence=True))
        if step == 0:
            store.set(f"ready/{rank}", json.dumps([at for at in listening() if at not in earlier]))
            before = len(os.listdir("/dev/fd"))
            store.wait(["attacked"], timedelta(seconds=100))
            # In the portable mode, gloo goes on to take connections, of this machine's processes only.
            assert is_portable() or len(os.listdir("/dev/fd")) <= before + 2, "strangers leave descriptors open"
    return state_of(session)


def listening() -> list[tuple[str, int]]:
    """The addresses at which gloo listens in this process."""
    found = psutil.Process().net_connections("tcp")
    return sorted({(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN})


@contextmanager
def strangers(pool: Pool, world_size: int, ports: Sequence[int] = ()) -> Iterator[None]:
    """Let strangers come to everything that ranks listen at, while they train."""
    done = threading.Event()
    attack = threading.Thread(target=attack_ranks, args=(pool, world_size, ports, done))
    attack.start()
    try:
        yield
    finally:
        done.set()
        attack.join(60)


def attack_ranks(pool: Pool, world_size: int, ports: Sequence[int], done: threading.Event) -> None:
    store = PrefixStore(f"run{pool._runs + 1}", pool.store)
    store.wait([f"ready/{rank}" for rank in range(world_size)], timedelta(seconds=60))
    gloo = [(at[0], at[1]) for rank in range(world_size) for at in json.loads(store.get(f"ready/{rank}"))]
    wrong = client_context(make_token())
    with ExitStack() as kept:
        for count in range(STRANGERS):
            at = gloo[count % len(gloo)]
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(at)
            if count % 2:
                stranger.close()
            elif count < 600:
                kept.enter_context(stranger)
            else:
                stranger.close()
        for port in ports:
            for count in range(150):
                stranger = kept.enter_context(socket.create_connection((HERE, port), timeout=10))
                stranger.sendall(secrets.token_bytes(100) if count % 2 else b"\x16\x03\x01")
            raw = kept.enter_context(socket.create_connection((HERE, port), timeout=10))
            with suppress(OSError), wrong.wrap_socket(raw) as line:
                assert not line.recv(1)
        store.set("attacked", "")
        assert done.wait(60)


def on_one_machine(rank: int, world_size: int, store: Store, case: Case) -> dict[str, Tensor]:
    earlier = listening()
    group = Group(store, rank, world_size, 30.0, ["here"] * world_size)
    try:
        return train_beside_strangers(rank, world_size, store, case, group, earlier)
    finally:
        group.close()


@pytest.mark.parametrize(("case", "encrypt"), [(DDP, True), (PIPELINE, False)], ids=["encrypted", "plain"])
def test_through_tunnels_and_beside_strangers_the_result_is_the_same(pool: Pool, case: Case, encrypt: bool) -> None:
    token, ports = make_token().text, free_ports(2)
    expected = pool.run(case.world_size, train, case)
    with strangers(pool, case.world_size, ports):
        found = pool.run(case.world_size, tunnelled, case, token, ports, encrypt)
    for (state, _), (through, used, _) in zip(expected, found, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in through.items())
        assert through.keys() == state.keys()
        assert used.cipher in (("", AES, CHACHA) if encrypt else ("none",))
    assert sum(used.sent for _, used, _ in found) > 10_000
    assert sum(used.received for _, used, _ in found) > 10_000
    assert sum(used.refused for _, used, _ in found) >= 150  # the others still shake hands
    assert all(is_ours(at) for _, _, listeners in found for at, _ in listeners), "gloo listens on loopback only"
    assert all(listeners for _, _, listeners in found)
    if encrypt:  # and on one machine, without any tunnel
        with strangers(pool, case.world_size):
            states = pool.run(case.world_size, on_one_machine, case)
        for (state, _), here in zip(expected, states, strict=True):
            assert all(torch.equal(value, state[key]) for key, value in here.items())


def broken_off(rank: int, world_size: int, store: Store, token: str, ports: Sequence[int]) -> list[Any]:
    """Lose rank 2 in the middle of a message, meet again without it, with a twin and smaller groups."""
    hosts, links = linked(rank, world_size, token, ports, True)
    first = Group(PrefixStore("first", store), rank, world_size, 30.0, hosts, links=links)
    began, waited = time.monotonic(), ""
    try:
        first.gather_json(rank)  # all have connected
        if rank == 2:
            first.abort()
        else:
            first.wait(first.receive(torch.zeros(10), 2, 7), 2)
    except PeerLost as error:
        waited = str(error)
    first.close()
    took = time.monotonic() - began
    if rank == 2:
        links.tunnel.close()
        return [took]
    again = Group(PrefixStore("second", store), rank, 2, 30.0, hosts[:2], links=links)
    twin = again.twin("beside", 10.0)
    found = [again.gather_json(rank), twin.gather_json(10 * rank)]
    total = torch.ones(3) * (rank + 1)
    again.wait(again.all_reduce(total, (0, 1), 1))
    twin.close()
    again.close()
    links.tunnel.close()
    return [took, waited != "", *found, total.tolist()]


def test_a_group_that_was_broken_off_is_followed_by_another_through_the_same_tunnel(pool: Pool) -> None:
    results = pool.run(3, broken_off, make_token().text, free_ports(3))
    assert all(result[0] < 10 for result in results), "the others learn at once that it is over"
    assert [result[1:] for result in results[:2]] == [[True, [0, 1], [0, 10], [3.0] * 3]] * 2


def without_a_way(rank: int, world_size: int, store: Store, token: str, ports: Sequence[int]) -> str:
    """Rank 1 has another token than rank 0, whom it connects to."""
    hosts, links = linked(rank, world_size, token if rank == 0 else make_token().text, ports, True)
    try:
        Group(store, rank, world_size, 5.0, hosts, links=links)
    except PeerLost as error:
        return str(error)
    finally:
        links.tunnel.close()
    return "connected"


def test_a_machine_that_is_not_reached_is_named_with_the_reason(pool: Pool) -> None:
    token, ports = make_token().text, free_ports(2)
    results = pool.run(2, without_a_way, token, ports)
    assert results[0].startswith("rank 0 could not connect to all other ranks: ")
    assert f"rank 0 is not reached at 127.0.0.1:{ports[0]}: it does not have this job's token" in results[1]


def probed(rank: int, world_size: int, store: Store, token: str, ports: Sequence[int]) -> list[float]:
    """What each rank's processor takes for a byte that crosses machines, as the planner learns it."""
    hosts, links = linked(rank, world_size, token, ports, True)
    group = Group(store, rank, world_size, 30.0, hosts, links=links)
    try:
        return [cost.crossing for cost in probe_pairs(group)[1]]
    finally:
        group.close()
        links.tunnel.close()


def test_ranks_measure_what_links_cost_their_processors(pool: Pool) -> None:
    results = pool.run(3, probed, make_token().text, free_ports(2))
    assert results[0] == results[1] == results[2]
    assert all(1e-10 < seconds < 1e-6 for seconds in results[0])
    assert results[0][0] == results[0][2], "ranks of one machine share its tunnel"
