"""Measures how many devices a run takes in, and how fast: python -m benchmarks.joins [--devices 100].

One process serves over TLS, as `horizonml up` does. The devices are threads of a second process, each with a
connection of its own, that say what `horizonml join` says: that they are there, twice a round trip to get the job, then
that they are ready, and a sign of life every second. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from horizonml.job.jobfile import from_values
from horizonml.machine.host import cpu_seconds, rss_bytes
from horizonml.machine.network import listen
from horizonml.rendezvous.client import Client
from horizonml.rendezvous.device_messages import DeviceBeat, DeviceInfo, DeviceState, Phase, RunOutcome
from horizonml.rendezvous.devices import DeviceHeartbeat
from horizonml.rendezvous.service import Service
from horizonml.runtime.lobby.offer import offer
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import make_token, parse_token

_DEADLINE_SECONDS = 120.0
_STILL_SECONDS = 5.0  # in which nothing happens but signs of life


@dataclass(frozen=True)
class Result:
    """What was measured."""

    devices: int
    ready_seconds: float  # until all were there and ready, from the first connection
    median_seconds: float  # of one join: the handshake, the first heartbeat, and the job
    slowest_seconds: float
    started_seconds: float  # until all knew their ranks, from the start
    ranks: int  # different ones that were given
    service_cpu: float  # seconds of processor time that the service took until all were ready
    waiting_cpu: float  # share of a core that it takes while all wait
    service_memory: int  # bytes that its process has grown by


def measure(devices: int, still_seconds: float = _STILL_SECONDS) -> Result:
    """Let so many devices join a run in this process, start it, and return what was measured."""
    token, over = make_token(), threading.Event()
    job = from_values({"name": "joins", "parallel": {"strategy": "ddp", "max_workers": devices + 1}}, "the benchmark")
    run = offer(job, secrets.token_hex(16)).devices()
    before = rss_bytes()
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        service = Service(listener, server_context(token), roster=run.roster, handlers=run.handlers())
        thread = threading.Thread(target=service.run, args=(over.is_set,), daemon=True)
        thread.start()
        stack.callback(thread.join, 5.0)
        stack.callback(over.set)
        cpu = cpu_seconds()
        command = [sys.executable, "-m", "benchmarks.joins", "--devices", str(devices), "--port", str(service.port)]
        env = {**os.environ, "HORIZONML_TOKEN": token.text}
        others = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        stack.callback(others.kill)
        _wait(lambda: run.ready() == devices + 1, "all devices to be ready")
        joined, cpu = time.time(), cpu_seconds() - cpu
        memory = rss_bytes() - before
        still = cpu_seconds()
        time.sleep(still_seconds)
        still = (cpu_seconds() - still) / still_seconds
        started = time.time()
        run.start()
        _wait(lambda: all(one.beat.state is DeviceState.TRAINING for one in run.present()), "all to know it")
        run.end(RunOutcome.COMPLETE)
        assert others.stdout is not None
        said = json.loads(others.stdout.readline())
    return Result(
        devices,
        joined - said["began"],
        statistics.median(said["joins"]),
        max(said["joins"]),
        max(said["told"]) - started,
        len(set(said["ranks"])),
        cpu,
        still,
        memory,
    )


def join(devices: int, port: int) -> dict[str, object]:
    """Be so many devices, and return when each of them was where."""
    tls = client_context(parse_token(os.environ["HORIZONML_TOKEN"]))
    began, joins, told, ranks = time.time(), list[float](), list[float](), list[int]()

    def one(number: int) -> None:
        start = time.monotonic()
        beat = DeviceBeat(secrets.token_hex(16), DeviceInfo(f"device-{number}", 4.0, 8 << 30, torch="2"))
        with DeviceHeartbeat(lambda: Client(("127.0.0.1", port), tls, 60.0), beat) as own:
            _wait(lambda: own.status is not None, "the first answer")
            own.ask({"do": "job"})
            joins.append(time.monotonic() - start)
            own.say(DeviceState.READY)
            _wait(lambda: own.status is not None and own.status.rank is not None, "the rank")
            assert own.status is not None
            told.append(time.time())
            ranks.append(own.status.rank or 0)
            own.say(DeviceState.TRAINING)
            _wait(lambda: own.status is not None and own.status.phase is Phase.OVER, "the end")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"began": began, "joins": joins, "told": told, "ranks": ranks}


def _wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {what}, but not for more than {_DEADLINE_SECONDS:.0f} s")
        time.sleep(0.01)


def main() -> None:
    """Measure and print, or be the devices of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port:
        print(json.dumps(join(arguments.devices, arguments.port)), flush=True)
        return
    for name, value in asdict(measure(arguments.devices)).items():
        print(f"{name:16} {value:,.3f}" if isinstance(value, float) else f"{name:16} {value:,}")


if __name__ == "__main__":
    main()
