"""Measures the rendezvous service: its connections, what they cost, and how long ranks take to meet there.

`python -m benchmarks.rendezvous [--ranks 100] [--clients 200]` starts services with a token of their own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from horizonml.rendezvous.client import Client, Endpoint
from horizonml.rendezvous.messages import Fingerprint, Join
from horizonml.rendezvous.service import SETTLE_SECONDS
from horizonml.rendezvous.wire import fields_of
from horizonml.security.tls import _pair, client_context
from horizonml.security.token import TOKEN, Token, make_token

_HOST = "127.0.0.1"


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=100, help="ranks that meet")
    parser.add_argument("--clients", type=int, default=200, help="clients that stay connected")
    options = parser.parse_args()
    token = make_token()
    print(f"context from a token: {1000 * _context_seconds():.1f} ms")
    for words, measure in (
        ("one after the other", _one_by_one),
        ("all at once", _together),
    ):
        with _Service(token) as service:
            endpoint = Endpoint(_HOST, service.port, client_context(token))
            time.sleep(SETTLE_SECONDS)  # in which a service that has just been started holds no meeting
            seconds = measure(endpoint, options.ranks)
            print(f"{options.ranks} ranks that join {words}: {seconds:.2f} s until the last has its verdict")
    with _Service(token) as service:
        endpoint = Endpoint(_HOST, service.port, client_context(token))
        alone = service.megabytes()
        began, used = time.monotonic(), service.seconds()
        for _ in range(options.clients):
            endpoint.connect().close()
        took, own = time.monotonic() - began, service.seconds() - used
        print(f"connections one after the other: {options.clients / took:.0f} a second")
        print(f"of the service's processor: {1000 * own / options.clients:.1f} ms each")
        clients = [endpoint.connect() for _ in range(options.clients)]
        many = service.megabytes()
        for client in clients:
            client.close()
        time.sleep(1.0)
        after = service.megabytes()
        print(f"memory: {alone:.1f} MB alone, {many:.1f} MB with {options.clients} clients, {after:.1f} MB after them")


class _Service:
    """A service in a process of its own."""

    def __init__(self, token: Token) -> None:
        command = [sys.executable, "-m", "horizonml", "rendezvous", "--port", "0"]
        self._process = subprocess.Popen(
            command, env={**os.environ, TOKEN: token.text}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        found = re.search(r":(\d+)$", self._process.stdout.readline().strip())
        if found is None:
            raise SystemExit("the rendezvous service has not started")
        self.port = int(found[1])
        self._watched = psutil.Process(self._process.pid)

    def megabytes(self) -> float:
        """Return the memory that it holds."""
        return float(self._watched.memory_info().rss) / 1e6

    def seconds(self) -> float:
        """Return the processor time that it took."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with self._process:
            self._process.wait(20)


def _context_seconds(times: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(times):
        _pair.cache_clear()
        client_context(make_token())
    return (time.perf_counter() - began) / times


def _one_by_one(endpoint: Endpoint, ranks: int) -> float:
    began = time.monotonic()
    clients = [_join(endpoint, rank, ranks) for rank in range(ranks)]
    return _verdicts(clients, began)


def _together(endpoint: Endpoint, ranks: int) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(ranks) as threads:
        clients = list(threads.map(lambda rank: _join(endpoint, rank, ranks), range(ranks)))
    return _verdicts(clients, began)


def _verdicts(clients: list[Client], began: float) -> float:
    """Wait for every client's verdict; return the seconds since `began`."""

    def wait(client: Client) -> None:
        until = time.monotonic() + 60
        count = 0
        while "verdict" not in client.ask({"do": "beat", "count": count, "verdict": True, "seconds": 0.25}, 10.0):
            count += 1
            if time.monotonic() > until:
                raise SystemExit("no verdict within 60 s")

    _each(clients, wait)
    seconds = time.monotonic() - began
    _each(clients, lambda client: client.close())
    return seconds


def _each(clients: list[Client], action: Callable[[Client], object]) -> None:
    with ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(action, clients))


def _join(endpoint: Endpoint, rank: int, ranks: int) -> Client:
    one = Fingerprint(rank, ranks, "bench", "d1", "0", "0", f"pi{rank}", f"m{rank}", f"10.0.0.{rank}", 100)
    client = endpoint.connect(20.0)
    client.ask(fields_of(Join(rank + 1, replace(one, pid=100 + rank)), "join"), 10.0)
    return client


if __name__ == "__main__":
    main()
