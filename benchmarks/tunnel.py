"""What protected links cost: `python -m benchmarks.tunnel [--rate 100]`.

Two ranks in network namespaces of their own, with a cable between them, train by ddp and as a pipeline: by plain gloo,
through tunnels that only shake hands, and through tunnels that encrypt. All groups live at once and take turns, so that
a machine whose speed drifts drifts for all. Processor time counts that of ranks and tunnels. Linux, as root or where
users may create namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.chaos.network import Networks

WAYS = ("plain gloo", "tunnel, plain", "tunnel, TLS")
STRATEGIES = ("ddp", "pipeline")
_PORT, _LINK_PORT, _SIZE = 29500, 29600, 32 << 20
_TOKEN = "HORIZONML_TOKEN"  # the environment variable


@dataclass
class Arguments:
    """What to measure."""

    rate: float  # Mbit/s; 0 is as fast as the machine
    rounds: int
    steps: int  # of each round
    ddp_batch: int
    pipeline_batch: int


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s of the cable; 0 is as fast as the machine")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ddp-batch", type=int, default=64)
    parser.add_argument("--pipeline-batch", type=int, default=64)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    wanted = Arguments(given.rate, given.rounds, given.steps, given.ddp_batch, given.pipeline_batch)
    if given.rank is not None:
        print(json.dumps(measure(given.rank, given.hosts, wanted)), flush=True)
        os._exit(0)  # without ending the interpreter, at which threads of gloo may abort the process
    first, second = launch(sys.argv[1:], wanted)
    show(first, second, wanted)


def launch(options: list[str], wanted: Arguments) -> list[dict[str, Any]]:
    """Run the two ranks in networks of their own, and return what they measured."""
    from horizonml.security.token import make_token

    hosts = ["10.251.1.1", "10.251.1.2"]
    with Networks(2) as networks, ExitStack() as started:
        if wanted.rate:
            for rank in range(2):
                networks.slow_down(rank, wanted.rate * 1e6)
        env = {**os.environ, _TOKEN: make_token().text, "GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": os.getcwd()}
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-m", "benchmarks.tunnel", *options, "--rank", str(rank), "--hosts", *hosts]
            process = subprocess.Popen(networks.at_rank(rank, command), env=env, stdout=subprocess.PIPE, text=True)
            started.callback(process.kill)
            ranks.append(process)
        return [json.loads(process.communicate()[0]) for process in ranks]


def measure(rank: int, hosts: list[str], wanted: Arguments) -> dict[str, Any]:
    """Return one rank's seconds and processor seconds, by way and strategy."""
    import torch
    from torch.distributed import PrefixStore, TCPStore

    from horizonml.comm.group import Group
    from horizonml.comm.tunnel.client import Links, Tunnel, TunnelPeer
    from horizonml.security.token import find_token

    torch.set_num_threads(1)
    store = TCPStore(hosts[0], _PORT, None, rank == 0, wait_for_workers=False)
    token = find_token()
    assert token is not None
    groups, tunnels, found = {}, {}, {"setup": {}, "connect": {}, "steps": {}, "cpu": {}, "moved": {}, "carry": {}}
    for number, way in enumerate(WAYS):
        links, began = None, time.perf_counter()
        if number:
            tunnels[way] = Tunnel(token, hosts[rank], _LINK_PORT + number, encrypt=way.endswith("TLS"))
            links = Links([TunnelPeer(host, host, _LINK_PORT + number) for host in hosts], tunnels[way])
        found["setup"][way] = time.perf_counter() - began
        store.set(f"{way}/{rank}", "")
        store.wait([f"{way}/{other}" for other in range(2)])
        began = time.perf_counter()
        groups[way] = Group(PrefixStore(way, store), rank, 2, 300.0, hosts, links=links)
        found["connect"][way] = time.perf_counter() - began

    def used() -> float:
        """The processor's seconds of this rank and of its tunnels."""
        return time.process_time() + sum(tunnel.usage().seconds for tunnel in tunnels.values())

    sessions = {
        (way, strategy): session(group, strategy, wanted) for way, group in groups.items() for strategy in STRATEGIES
    }
    for turn in range(-1, wanted.rounds):  # the first one warms up
        for (way, strategy), step in sessions.items():
            groups[way].barrier()
            processor, sent = used(), network_bytes()
            for _ in range(wanted.steps):
                groups[way].barrier()
                began = time.perf_counter()
                step()
                if turn >= 0:
                    found["steps"].setdefault(f"{way}/{strategy}", []).append(time.perf_counter() - began)
            groups[way].barrier()
            if turn >= 0:
                found["cpu"].setdefault(f"{way}/{strategy}", []).append((used() - processor) / wanted.steps)
                found["moved"].setdefault(f"{way}/{strategy}", []).append((network_bytes() - sent) / wanted.steps)
        for way, group in groups.items():
            if turn >= 0:
                found["carry"].setdefault(way, []).append(carry(group, used, _SIZE >> 3 if wanted.rate else _SIZE))
    for group in groups.values():
        group.close()
    for tunnel in tunnels.values():
        tunnel.close()
    return found


def session(group: Any, strategy: str, wanted: Arguments) -> Any:
    """Return a function that takes one step."""
    import torch

    from horizonml.data.dataset import Batch
    from horizonml.engine.session import Session
    from horizonml.models.spec import ModelSpec
    from horizonml.models.zoo import build
    from horizonml.plan.plan import Plan, Stage
    from horizonml.state.spec import Sgd
    from horizonml.state.train_state import TrainState
    from horizonml.tasks.classification import Classification
    from horizonml.tasks.task import InputSpec

    size = wanted.ddp_batch if strategy == "ddp" else wanted.pipeline_batch

    class Random(Batch):
        """Samples that cost nothing."""

        size = wanted.ddp_batch if strategy == "ddp" else wanted.pipeline_batch

        def inputs(self, start: int, stop: int) -> Any:
            return torch.full((stop - start, 3, 32, 32), 0.1)

        def targets(self, start: int, stop: int) -> Any:
            return torch.zeros(stop - start, dtype=torch.int64)

    model = build(ModelSpec(name="resnet18"), 0, 10, InputSpec.of((3, 32, 32)))
    layers = len(model.chain)
    if strategy == "ddp":
        plan = Plan((Stage(0, layers, (0, 1), (1.0, 1.0)),))
    else:
        plan = Plan((Stage(0, layers // 2, (0,), (1.0,)), Stage(layers // 2, layers, (1,), (1.0,))), "1f1b", 4)
    made = Session(plan, TrainState(model, Sgd()), group, Classification(), size)
    batch = Random()
    return lambda: made.step(batch, 0.01)


def carry(group: Any, used: Any, size: int) -> list[float]:
    """Return the seconds and the processor's seconds for a gigabyte from rank 0 to rank 1."""
    import torch

    content, tag = torch.zeros(size, dtype=torch.uint8), group.channel("probe").tag()
    group.barrier()
    processor, began = used(), time.perf_counter()
    for _ in range(8):
        work = group.send(content, 1, tag) if group.rank == 0 else group.receive(content, 0, tag)
        group.wait(work, 1 - group.rank)
    group.barrier()
    scale = 1e9 / (8 * size)
    return [(time.perf_counter() - began) * scale, (used() - processor) * scale]


def network_bytes() -> int:
    """Return the bytes that went over the cable so far, both ways."""
    counters = psutil.net_io_counters(pernic=True)["cable"]
    return int(counters.bytes_sent + counters.bytes_recv)


def show(first: dict[str, Any], second: dict[str, Any], wanted: Arguments) -> None:
    """Print what both ranks measured, compared with plain gloo."""
    print(f"\nat {wanted.rate:g} Mbit/s:" if wanted.rate else "\nas fast as the machine:")
    for strategy in STRATEGIES:
        base = None
        for way in WAYS:
            key = f"{way}/{strategy}"
            steps = statistics.median(map(max, zip(first["steps"][key], second["steps"][key], strict=True)))
            base = base or steps
            cpu = sum(statistics.median(one["cpu"][key]) for one in (first, second))
            moved = statistics.median(first["moved"][key]) / 1e6
            print(
                f"{strategy:9} {way:14} {steps * 1e3:8.1f} ms a step ({steps / base:.3f}x), "
                f"{cpu * 1e3:7.1f} ms of the processor (both ranks), {moved:6.1f} MB on the cable"
            )
    for way in WAYS:
        seconds = statistics.median(pair[0] for pair in first["carry"][way])
        cpu = [statistics.median(pair[1] for pair in one["carry"][way]) for one in (first, second)]
        print(
            f"{way:14} {1000 / seconds:6.1f} MB/s, seconds of the processor for a GB: {cpu[0]:.2f} to send, "
            f"{cpu[1]:.2f} to receive"
        )
        setup, connect = (max(one[name][way] for one in (first, second)) for name in ("setup", "connect"))
        print(f"{way:14} {setup * 1e3:5.0f} ms to set up, {connect * 1e3:5.0f} ms to connect a group")


if __name__ == "__main__":
    main()
