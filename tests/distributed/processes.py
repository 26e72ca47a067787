"""Commands run as a user would, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Service:
    """A rendezvous service in a process of its own."""

    process: subprocess.Popen[str]
    address: str


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {**kept, "PYTHONPATH": str(Path.cwd()), **extra}


def horizonml(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "horizonml", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=120, check=False
    )


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
    return next(process for process in ours(folder) if process.environ().get("RANK") == str(rank))


def steps(folder: Path, rank: int = 0) -> int:
    """How many steps a rank has recorded."""
    path = folder / "runs" / "test" / f"rank-{rank}.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
