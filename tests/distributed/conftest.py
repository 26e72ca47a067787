from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed import processes
from tests.distributed.pool import Pool
from tests.distributed.processes import Service, environment, ours

JOB = """
name: test
epochs: 2
batch_size: 32
data: {name: digits, samples: 300}
parallel: {strategy: ddp, workers: 3}
"""


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Five processes, shared by all tests."""
    shared = Pool(5)
    yield shared
    shared.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small job."""
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command in the background; whatever it leaves behind is ended and fails the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **extra: str) -> subprocess.Popen[str]:
        env = environment(HORIZONML_TEST=str(folder), **extra)
        process = processes.begin(folder, *arguments, env=env, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        print(process.communicate()[0])  # pytest shows it where the test has failed
    left = ours(folder)
    for other in left:
        other.kill()
    assert not left


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def service(start: Callable[..., subprocess.Popen[str]]) -> Iterator[Service]:
    """A rendezvous service."""
    process = start("rendezvous", "--port", "0")
    assert process.stdout is not None
    yield Service(process, process.stdout.readline().split()[-1])
    process.terminate()
    process.communicate(timeout=10)
