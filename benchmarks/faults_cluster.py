"""Starts the ranks of a job on this machine one by one, so that each can be killed, stopped and started again alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

import benchmarks.chaos.cluster as chaos
from benchmarks.faults_read import Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
JOB = """
name: faults
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
    """The ranks of one job, by whatever library. Used as a context manager, it starts and ends them all."""

    def __init__(self, folder: Path, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.world_size = folder, world_size

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    @abstractmethod
    def __enter__(self) -> Self:
        """Start all ranks."""

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all ranks."""

    @abstractmethod
    def start(self, rank: int) -> None:
        """Start a rank again."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a rank and all that it has started, by kill -9."""

    @abstractmethod
    def pause(self, rank: int) -> None:
        """Stop a rank and all that it has started, by SIGSTOP: it is silent, and its connections stay."""

    @abstractmethod
    def alive(self, rank: int) -> bool:
        """Whether a rank runs."""

    @abstractmethod
    def records(self, rank: int) -> Path:
        """The file of a rank's records."""

    @abstractmethod
    def log(self, rank: int) -> Path:
        """The file of what a rank prints."""

    def add(self) -> None:
        """Start one more rank than there were at first."""
        raise SystemExit("only HorizonML's clusters grow here")

    def cut(self, rank: int) -> None:
        """Cut a rank off from the network, without a trace."""
        raise SystemExit("only HorizonML's ranks have networks that can be cut here")

    def slow(self, rank: int, bits_per_second: float) -> None:
        """Slow a rank's network down."""
        raise SystemExit("only HorizonML's ranks have networks that can be slowed down here")

    def trace(self, rank: int) -> Trace:
        """What a rank has recorded by now."""
        return read_trace(self.records(rank))

    def traces(self) -> list[Trace]:
        """What all ranks have recorded by now."""
        return [self.trace(rank) for rank in self.ranks]

    def said(self, rank: int) -> str:
        """The last lines that a rank has printed."""
        text = self.log(rank).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-8:])


class HorizonML(Cluster):
    """`horizonml train` by one plan, with its rendezvous service."""

    def __init__(
        self, folder: Path, world_size: int, plan: str, settings: Sequence[str] = (), isolated: bool = False
    ) -> None:
        super().__init__(folder, world_size)
        job = folder / "job.yaml"
        job.write_text(JOB.format(batch_size=BATCH_SIZE, plan=plan))
        options = [part for setting in settings for part in ("--set", setting)]
        self._ranks = chaos.Cluster(job, world_size, folder, options=options, isolated=isolated)
        self._added: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._ranks.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._added is not None:
            self._added.kill()
            self._added.wait()
        self._ranks.stop()

    def start(self, rank: int) -> None:
        self._ranks.start_rank(rank)

    def kill(self, rank: int) -> None:
        self._ranks.kill(rank)

    def pause(self, rank: int) -> None:
        self._ranks.pause(rank)

    def add(self) -> None:
        rank = self._ranks.process(0)
        env = {key: value for key, value in rank.environ().items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        command = [*rank.cmdline(), "--join", env["HORIZONML_RENDEZVOUS"]]
        with self.log(self.world_size).open("ab") as log:
            self._added = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def cut(self, rank: int) -> None:
        self._ranks.partition(rank)

    def slow(self, rank: int, bits_per_second: float) -> None:
        self._ranks.slow(rank, bits_per_second)

    def alive(self, rank: int) -> bool:
        return rank in self._ranks.alive

    def records(self, rank: int) -> Path:
        return self._ranks.run_folder / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self._ranks.log(rank)


class Processes(Cluster):
    """Ranks that are commands, whatever they run."""

    def __init__(self, folder: Path, world_size: int) -> None:
        super().__init__(folder, world_size)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []

    @abstractmethod
    def command(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """The command that starts a rank, and what its environment has more."""

    def __enter__(self) -> Self:
        for rank in self.ranks:
            self.start(rank)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in [*self._processes.values(), *self._helpers]:
            _signal(process, signal.SIGKILL)
            process.wait()
        for left in _marked(self.folder):  # what outlived the process that had started it
            left.kill()
        for log in self._logs:
            log.close()

    def help(self, name: str, command: Sequence[str], **extra: str) -> None:
        """Start a process that lives as long as the cluster, and that no fault hits."""
        self._helpers.append(self._run(name, command, **extra))

    def start(self, rank: int) -> None:
        command, extra = self.command(rank)
        self._processes[rank] = self._run(f"rank-{rank}", command, **extra)

    def kill(self, rank: int) -> None:
        _signal(self._processes[rank], signal.SIGKILL)
        self._processes[rank].wait()

    def pause(self, rank: int) -> None:
        _signal(self._processes[rank], signal.SIGSTOP)

    def alive(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def records(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _run(self, name: str, command: Sequence[str], **extra: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a file of that name."""
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}
        env[MARK] = str(self.folder)
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


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
