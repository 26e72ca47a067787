"""Ranks that are killed at any moment of a step: the others notice within seconds and can meet again.

The first survivor that notices tells the others, as the rendezvous service does: gloo itself misses a closed connection
now and then. Every kill needs processes of its own; they are forked from one that has torch loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from horizonml.comm.group import Group
from horizonml.errors import PeerLost
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.state.spec import Sgd
from horizonml.tasks.task import InputSpec
from tests.distributed.pool import PRELOAD
from tests.distributed.sessions import session_for

RANKS, PATIENCE = 4, 30.0
STEP_TIMEOUT = 300.0  # which nobody may wait for


class Noise:
    size = 64

    def inputs(self, start: int, stop: int) -> Tensor:
        return torch.randn(stop - start, 1, 8, 8)

    def targets(self, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start, dtype=torch.int64)


def plan_for(ranks: int, kind: str, layers: int) -> Plan:
    if kind == "ddp":
        return Plan((Stage(0, layers, tuple(range(ranks)), (1.0,) * ranks),))
    half = ranks // 2
    front = Stage(0, 3, tuple(range(half)), (1.0,) * half)
    return Plan((front, Stage(3, layers, tuple(range(half, ranks)), (1.0,) * (ranks - half))), micro_batches=4)


def rank_of_two_groups(rank: int, port: int, name: str, kind: str, pipe: Connection, over: Connection) -> None:
    """Train until a peer is lost; say how long it took to let go of the group; train with the ones that are left."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store: Any = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    model = build(
        ModelSpec(name="tests.models:wide"), 0, 10, InputSpec.of((1, 8, 8))
    )  # 10 MB: several buckets on a ring
    layers = len(model.chain)
    group = Group(PrefixStore(f"{name}-1", store), rank, RANKS, STEP_TIMEOUT)
    session = session_for(plan_for(RANKS, kind, layers), model, group, Sgd(), Noise.size)
    threading.Thread(target=lambda lost: over.recv() or lost.abort(), args=(group,), daemon=True).start()
    pipe.send("trains")
    step = 0
    try:
        while True:
            session.step(Noise(), 0.1)
            step += 1
    except PeerLost:
        begin = time.monotonic()
    group.close()
    pipe.send(time.monotonic() - begin)
    survivors: list[int] = pipe.recv()
    ranks = len(survivors)
    group = Group(PrefixStore(f"{name}-2", store), survivors.index(rank), ranks, STEP_TIMEOUT)
    session = session_for(plan_for(ranks, kind, layers), model, group, Sgd(), Noise.size)
    session.step(Noise(), 0.1)
    group.close()
    pipe.send("goes on")


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [("ddp", 3), ("hybrid", 3), *(pytest.param(kind, 20, marks=pytest.mark.slow) for kind in ("ddp", "hybrid"))],
)
@pytest.mark.longest
def test_no_survivor_waits_for_a_time_out_whenever_a_rank_is_killed(kind: str, rounds: int) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.models", __name__])
    dice = random.Random(0)
    for number in range(rounds):
        ends, over = ([context.Pipe() for _ in range(RANKS)] for _ in range(2))
        ranks = [
            context.Process(
                target=rank_of_two_groups, args=(rank, store.port, f"{kind}{number}", kind, theirs, over[rank][1])
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        pipes = [ours for ours, _ in ends]
        try:
            for process in ranks:
                process.start()
            assert answers(pipes, range(RANKS)) == dict.fromkeys(range(RANKS), "trains")
            time.sleep(0.2 * dice.random())
            victim = dice.randrange(RANKS)
            ranks[victim].kill()
            survivors = [rank for rank in range(RANKS) if rank != victim]
            wait([pipes[rank] for rank in survivors], PATIENCE)
            for rank in survivors:
                over[rank][0].send(None)
            closing = answers(pipes, survivors)
            assert sorted(closing) == survivors, f"round {number}: only {sorted(closing)} noticed that {victim} is gone"
            assert max(closing.values()) < 5
            for rank in survivors:
                pipes[rank].send(survivors)
            assert answers(pipes, survivors) == dict.fromkeys(survivors, "goes on")
        finally:
            for process in ranks:
                process.kill()
                process.join()


def answers(pipes: list[Connection], ranks: Any) -> dict[int, Any]:
    """What these ranks say next, as far as they say it in time."""
    deadline, found = time.monotonic() + PATIENCE, {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        waiting = {pipes[rank]: rank for rank in ranks if rank not in found}
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            found[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
    return found
