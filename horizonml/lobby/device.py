"""Describes this device to the lobby."""

from __future__ import annotations

import platform
import socket
import time
from importlib.metadata import version
from pathlib import Path

import numpy

from horizonml.lobby.messages import MOST_WORDS, Card
from horizonml.machine.host import processor_name
from horizonml.machine.resources import available_cores, memory_limit

_SIZE, _ROUNDS = 256, 4  # of the matrices that are multiplied to measure a device's speed


def this_device(name: str | None = None) -> Card:
    """Return the description of this device, whose speed is measured in a moment."""
    return Card(
        name=(name or socket.gethostname() or "device")[:63],
        model=_model()[:MOST_WORDS],
        cores=available_cores(),
        memory=int(memory_limit()),
        architecture=platform.machine(),
        speed=_speed(),
    )


def torch_version() -> str:
    """Return the version of PyTorch, without importing it and without its local part."""
    return version("torch").partition("+")[0]


def _model() -> str:
    """Return what the board is, or else its processor."""
    try:
        return Path("/proc/device-tree/model").read_text().strip("\0 \n")
    except OSError:
        return processor_name().rpartition(" (")[0]


def _speed() -> float:
    """Return the floating-point operations per second of matrix products."""
    matrix = numpy.ones((_SIZE, _SIZE), dtype=numpy.float32)
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - begin)
    return 2 * _SIZE**3 / min(times)
