"""A training beside strangers that attack all of its ports all the time: the same parameters come out, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from horizonml.rendezvous.wire import encode, hello
from tests.distributed.conftest import folder, start
from tests.distributed.processes import ours
from tests.security.net import LOCAL, client_hello

__all__ = ["folder", "start"]  # fixtures
pytestmark = pytest.mark.slow
MOST_AT_A_RANK = 150  # connections: gloo keeps a descriptor for each, as long as its listener is open
TRAIN = ("train", "job.yaml", "--fresh", "--set", "epochs=40", "--set", "seed=3")


class Storm:
    """Attacks whatever listens among the processes of a test, until it is ended."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop = folder, threading.Event()
        self.attacks: Counter[int] = Counter()  # by port
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._kept:
            connection.close()

    def _run(self) -> None:
        draw, looked, ports = random.Random(7), 0.0, dict[int, bool]()
        for number in itertools.count():
            if self._stop.is_set():
                return
            if time.monotonic() - looked > 0.2:
                looked, ports = time.monotonic(), self._ports()
            for port, of_a_rank in ports.items():
                if not (of_a_rank and self.attacks[port] >= MOST_AT_A_RANK):
                    self.attacks[port] += 1
                    with suppress(OSError):
                        self._attack(port, number, draw)
            time.sleep(0.002)

    def _ports(self) -> dict[int, bool]:
        """Which ports are open, and whether a rank has opened them."""
        found = {}
        for process in ours(self._folder):
            with suppress(psutil.Error):
                of_a_rank = "RANK" in process.environ()
                listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
                found |= {int(one.laddr.port): of_a_rank for one in listening}
        return found

    def _attack(self, port: int, number: int, draw: random.Random) -> None:
        connection = socket.create_connection((LOCAL, port), timeout=1.0)
        said = (b"", client_hello(), draw.randbytes(500), encode(hello()), b"GET / HTTP/1.0\r\n\r\n", bytes(5000))
        try:
            connection.sendall(said[number % len(said)])
        except OSError:  # whoever listened there has gone
            connection.close()
            return
        match draw.randrange(3):
            case 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            case 1:
                connection.close()
            case _:
                self._kept.append(connection)
                if len(self._kept) > 100:
                    self._kept.pop(0).close()


def parameters(folder: Path) -> dict[str, str]:
    """What is in each tensor of the last checkpoint, wherever the plan has cut the model."""
    last = max((folder / "runs" / "test" / "checkpoints").glob("step-*"))
    tensors = {name: tensor for file in last.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {
        f"{last.name}/{name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()
    }


def test_a_training_under_a_storm_of_strangers_ends_bit_for_bit_the_same(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    settings = ("strategy=pipeline", "micro_batches=2", "schedule=1f1b", "workers=3")
    command = (*TRAIN, *(word for setting in settings for word in ("--set", f"parallel.{setting}")))
    quiet = start(*command)
    output, _ = quiet.communicate(timeout=200)
    assert quiet.returncode == 0, output
    expected = parameters(folder)
    assert expected
    attacked = start(*command)
    storm = Storm(folder)
    try:
        output, _ = attacked.communicate(timeout=300)
    finally:
        storm.end()
    assert attacked.returncode == 0, output
    assert "lost" not in output
    assert parameters(folder) == expected
    assert sum(storm.attacks.values()) > 100, storm.attacks  # a busy machine trains as fast, but attacks less
    assert len(storm.attacks) >= 3, "the service and gloo's listeners"
    assert all(len(line) < 500 for line in output.splitlines())
    assert os.environ.get("HORIZONML_TOKEN", "hml-") not in output
