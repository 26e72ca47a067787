"""Real ranks for tests: processes that are started once and run one function after another.

Importing torch takes a second of processor time, so these are forked, and all tests share them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import PrefixStore, TCPStore

TIMEOUT = 120.0
PRELOAD = [
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "horizonml.runtime.worker",
    "horizonml.models.zoo",
    "tests.distributed.sessions",
]


class Pool:
    """`size` processes that can be asked to be the ranks of a group."""

    def __init__(self, size: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._runs = 0
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.store.port))  # which may start workers
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, world_size, store, *arguments)` on each rank; its results, in the order of ranks.

        An exception on a rank fails the test, with that rank's traceback.
        """
        results = self.run_each([(function, (rank, world_size), arguments) for rank in range(world_size)])
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in results]

    def run_each(
        self, calls: list[tuple[Callable[..., Any], tuple[int, int], tuple[Any, ...]]]
    ) -> list[tuple[bool, Any]]:
        """Different calls on different ranks; for each (True, result) or (False, traceback)."""
        self._runs += 1
        used = self._connections[: len(calls)]
        for connection, call in zip(used, calls, strict=True):
            connection.send((f"run{self._runs}", *call))
        answers = []
        for number, connection in enumerate(used):
            assert connection.poll(TIMEOUT), f"process {number} of the pool did not answer within {TIMEOUT:.0f} s"
            answers.append(connection.recv())
        return answers

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()


def _serve(connection: Connection, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    while True:
        try:
            name, function, place, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*place, PrefixStore(name, store), *arguments)))
        except BaseException:  # noqa: BLE001  (reported to the test, whatever it is)
            connection.send((False, traceback.format_exc()))
