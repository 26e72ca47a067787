"""Starts the ranks of a job on this machine one by one, so that each can be killed, stopped and started again alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from benchmarks.faults_read import Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
JOB = """
name: faults
folder: {folder}
epochs: 100000
batch_size: {batch_size}
model: {{name: resnet18}}
data: {{name: digits, image_size: 32, channels: 3, holdout: 0.02}}
optimizer: {{name: sgd, lr: 0.001}}
lr_schedule: {{name: constant}}
parallel: {{strategy: {plan}, threads: 1}}
telemetry: {{timeline_every: 0}}
"""
BATCH_SIZE = 64
MARK = "HORIZONML_BENCHMARK"  # in the environment of all that a cluster has started


class Cluster(ABC):
    """The ranks of one job, each with all processes that it starts."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []  # which no fault hits
        self._logs: list[IO[bytes]] = []

    @abstractmethod
    def command(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """The command that starts a rank, and what its environment has more."""

    @abstractmethod
    def records(self, rank: int) -> Path:
        """The file of a rank's records."""

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def __enter__(self) -> Self:
        for rank in self.ranks:
            self.start(rank)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for rank in self._processes:
            self.kill(rank)
        for helper in self._helpers:
            _signal(helper, signal.SIGKILL)
        for process in [*self._processes.values(), *self._helpers]:
            process.wait()
        for left in _marked(self.folder):  # what outlived the process that had started it
            left.kill()
        for log in self._logs:
            log.close()

    def run(self, name: str, command: Sequence[str], **extra: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a file of that name."""
        self._logs.append((self.folder / f"{name}.log").open("ab"))
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}
        env[MARK] = str(self.folder)
        log = self._logs[-1]
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def help(self, name: str, command: Sequence[str], **extra: str) -> None:
        """Start a process that lives as long as the cluster, and that no fault hits."""
        self._helpers.append(self.run(name, command, **extra))

    def start(self, rank: int) -> None:
        """Start a rank, again if it was started before."""
        command, extra = self.command(rank)
        self._processes[rank] = self.run(f"rank-{rank}", command, **extra)

    def kill(self, rank: int) -> None:
        """End a rank and all that it has started, by kill -9."""
        _signal(self._processes[rank], signal.SIGKILL)
        self._processes[rank].wait()

    def stop(self, rank: int) -> None:
        """Stop a rank and all that it has started, by SIGSTOP: it is silent, and its connections stay."""
        _signal(self._processes[rank], signal.SIGSTOP)

    def alive(self, rank: int) -> bool:
        """Whether a rank runs."""
        return self._processes[rank].poll() is None

    def trace(self, rank: int) -> Trace:
        """What a rank has recorded by now."""
        return read_trace(self.records(rank))

    def traces(self) -> list[Trace]:
        """What all ranks have recorded by now."""
        return [self.trace(rank) for rank in self.ranks]

    def said(self, rank: int) -> str:
        """The last lines that a rank has printed."""
        text = (self.folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-8:])


class HorizonML(Cluster):
    """`horizonml train` by one plan, with its rendezvous service."""

    def __init__(self, folder: Path, world_size: int, plan: str, settings: Sequence[str] = ()) -> None:
        super().__init__(folder, world_size)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(JOB.format(folder=folder / "run", batch_size=BATCH_SIZE, plan=plan))
        self._settings = [part for setting in settings for part in ("--set", setting)]
        port = free_port()
        self._address = f"127.0.0.1:{port}"
        self.help("rendezvous", [sys.executable, "-m", "horizonml", "rendezvous", "--port", str(port)])

    def command(self, rank: int) -> tuple[list[str], dict[str, str]]:
        train = [sys.executable, "-m", "horizonml", "train", str(self.folder / "job.yaml"), *self._settings]
        return train, {"RANK": str(rank), "WORLD_SIZE": str(self.world_size), "HORIZONML_RENDEZVOUS": self._address}

    def records(self, rank: int) -> Path:
        return self.folder / "run" / f"rank-{rank}.jsonl"


class NeverHappened(Exception):
    """Says what was waited for in vain."""


def wait_for(what: str, condition: Callable[[], bool], deadline: float) -> None:
    """Wait until the condition holds. Raises NeverHappened after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise NeverHappened(f"{what}: not within {deadline:.0f} s")
        time.sleep(0.25)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and all beneath it, whatever sessions they have made."""
    if process.poll() is not None:
        return
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _marked(folder: Path) -> list[psutil.Process]:
    """The processes of a cluster that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
