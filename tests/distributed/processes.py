"""Commands run as a user would, and what becomes of them."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from horizonml.runtime.forkserver import PRELOAD, SERVER, ForkServer
from horizonml.runtime.forkserver import start as fork

ROOT = Path(__file__).parents[2]


@dataclass
class Service:
    """A rendezvous service in a process of its own."""

    process: subprocess.Popen[str]
    address: str


@cache
def server() -> ForkServer:
    """The process that all commands of these tests, and the ranks that they start, are forked from."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    made = ForkServer(env, 2, (*PRELOAD, "tests.distributed.preload"))
    atexit.register(made.close)
    while not made.loaded():
        continue
    assert made.process.poll() is None
    return made


def environment(**extra: str) -> dict[str, str]:
    """The environment of a command; the ranks that it starts are forked from the tests' own server."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {**kept, "PYTHONPATH": str(Path.cwd()), SERVER: server().address, **extra}


def begin(folder: Path, *arguments: str, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start a command whose output is text: one of `horizonml`, or one of `benchmarks` by its name."""
    if arguments[0].startswith("benchmarks."):
        command = [sys.executable, "-m", *arguments]
        return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, **options)
    command = [sys.executable, "-m", "horizonml", *arguments]
    return fork(command, server().address, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, **options)


def horizonml(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with begin(folder, *arguments, env=environment(**extra), stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def ours(folder: Path) -> list[psutil.Process]:
    """The living processes that were started for this test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HORIZONML_TEST") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def rank_process(folder: Path, rank: int) -> psutil.Process:
    """The process of a rank."""
    for process in ours(folder):
        with suppress(psutil.NoSuchProcess):  # one that has ended this moment
            if process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"rank {rank} is not there")


def steps(folder: Path, rank: int = 0) -> int:
    """How many steps a rank has recorded."""
    path = folder / "runs" / "test" / f"rank-{rank}.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
