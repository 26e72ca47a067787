"""Runs the ranks of a job and their rendezvous service on this machine, and lets a test do anything to them.

Every rank is the same command that a container would run. A rank that dies is restarted by the supervisor, with its
number, like a StatefulSet. Whatever happens, nothing is left behind: what a fault has changed is undone first, then
ranks are asked to stop, and killed if they do not. If this process itself is killed, the ranks beneath it end.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.accounting import read_records
from benchmarks.chaos.network import Networks
from benchmarks.chaos.output import Output
from horizonml.errors import JobError
from horizonml.machine.code import python_module
from horizonml.machine.network import listen
from horizonml.machine.signals import LAUNCHER, explain_signal, launcher_name
from horizonml.runtime.forkserver import start
from horizonml.security.token import TOKEN, make_token

STOP_SECONDS = 15.0  # for ranks that were asked to stop, to finish their step and save a checkpoint
_ABORT_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_PORT = 29400
# What would make a rank believe that it is another's.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HORIZONML_TOGETHER", "HORIZONML_METRICS")


@dataclass(frozen=True)
class Exit:
    """Says when a rank's process ended, and why."""

    rank: int
    time: float  # Unix time at which it was noticed
    code: int  # negative for a signal
    killed: bool  # whether `Cluster.kill` did it

    @property
    def reason(self) -> str:
        """Return the reason in words."""
        if self.killed:
            return "was killed by this fault"
        return f"was killed by {explain_signal(-self.code)}" if self.code < 0 else f"ended with code {self.code}"


class Cluster:
    """Runs `ranks` ranks of a job and their rendezvous service. Used as a context manager, it ends them all.

    Records are in `folder/run`, and what the processes print in `folder/logs`. `options` are options of `horizonml
    train`. With `restart_after`, ranks that die are started again so many seconds later. `isolated` gives every rank a
    network of its own, which `partition` needs.
    """

    def __init__(
        self,
        job_path: Path | str,
        ranks: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        restart_after: float | None = None,
        isolated: bool = False,
    ) -> None:
        self.ranks, self.folder = ranks, folder.absolute()
        self.run_folder, self.log_folder = self.folder / "run", self.folder / "logs"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.exits: list[Exit] = []
        self.hung: list[int] = []  # ranks that had to be killed because they did not stop when they were asked to
        self._job, self._options = str(job_path), list(options)
        self._restart_after, self._isolated = restart_after, isolated
        # Where each rank has a network of its own, no interface of this machine is among its own.
        foreign = {*_FOREIGN, *(["GLOO_SOCKET_IFNAME"] if isolated else [])}
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        own = {TOKEN: make_token().text}  # links between networks are protected as those between machines are
        self._env = {**kept, "OMP_NUM_THREADS": "1", LAUNCHER: launcher_name(), **own, **(env or {})}
        self._undo = ExitStack()
        self._lock = threading.RLock()
        self._paused: dict[int, subprocess.Popen[bytes]] = {}  # the process that continues each paused rank
        self._due: dict[int, float] = {}  # when a dead rank is to be started again
        self._cut: set[int] = set()  # ranks without a network
        self._killed: set[int] = set()  # process ids
        self._noted: set[int] = set()  # process ids of the dead that `exits` has
        self._stopping = threading.Event()
        self._networks: Networks | None = None
        self._service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.stop()

    def start(self) -> Cluster:
        """Start the rendezvous service and all ranks. Raises HorizonError, and leaves nothing behind if it does."""
        try:
            if (self.run_folder / "rank-0.jsonl").exists():
                raise JobError(f"{self.folder} holds a run already; choose another folder, or delete it")
            self.log_folder.mkdir(parents=True, exist_ok=True)
            self._output = Output()
            self._undo.callback(self._output.close)
            if self._isolated:
                self._networks = self._undo.enter_context(Networks(self.ranks))
            self._start_service()
            self._undo.callback(self._end_ranks)
            for rank in range(self.ranks):
                self.start_rank(rank)
            supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
            supervisor.start()
            self._undo.callback(supervisor.join)
            self._undo.callback(self._stopping.set)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End everything: undo what faults have changed, ask the ranks to stop, and kill those that do not."""
        self._stopping.set()
        self._undo.close()

    def start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        """Start a rank, which does not run, and return its process."""
        with self._lock:
            assert self.exit_code(rank) is not None or rank not in self.processes, f"rank {rank} runs already"
            command = python_module("horizonml", "train", self._job, *self._options)
            command += ["--workers", str(self.ranks), "--set", f"folder={self.run_folder}"]
            if self._networks is not None:
                command = self._networks.at_rank(rank, command)
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            process = self._launch(command, self.log(rank), {**places, "HORIZONML_RENDEZVOUS": self._address})
            self.processes[rank] = process
            self._due.pop(rank, None)
            return process

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, and wait until it is gone."""
        with self._lock:
            process = self.processes[rank]
            self._killed.add(process.pid)
            process.kill()
            process.wait()
            self._continue(rank)

    def pause(self, rank: int) -> None:
        """Stop a rank in its tracks with SIGSTOP, until `resume`.

        It is continued by a process of its own, which does so, too, if this process is killed.
        """
        with self._lock:
            pid = self.processes[rank].pid
            self._paused[rank] = subprocess.Popen(
                ["sh", "-c", f"cat; kill -CONT {pid}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.kill(pid, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a paused rank go on."""
        with self._lock:
            self._continue(rank)

    @property
    def networks(self) -> Networks:
        """Return the networks of the ranks. Needs `isolated=True`."""
        assert self._networks is not None, "Cluster(..., isolated=True) gives ranks networks that can be cut"
        return self._networks

    def partition(self, rank: int) -> None:
        """Cut a rank off from the network until `heal`. Needs `isolated=True`."""
        self.networks.cut(rank)
        self._cut.add(rank)

    def heal(self, rank: int) -> None:
        """Connect a rank to the network again."""
        self.networks.mend(rank)
        self._cut.discard(rank)

    def slow(self, rank: int, bits_per_second: float) -> None:
        """Slow a rank's network down. Needs `isolated=True`."""
        assert self._networks is not None, "Cluster(..., isolated=True) gives ranks networks that can be slowed down"
        self._networks.slow_down(rank, bits_per_second)

    def process(self, rank: int) -> psutil.Process:
        """Return a rank's process, to look at it or to limit it. Raises psutil.NoSuchProcess if it has ended."""
        return psutil.Process(self.processes[rank].pid)

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of a rank, negative for a signal, or None while it runs."""
        process = self.processes.get(rank)
        return process.poll() if process is not None else None

    @property
    def service_exit(self) -> int | None:
        """Return the exit code of the rendezvous service, or None while it runs."""
        return self._service.poll() if self._service is not None else None

    @property
    def alive(self) -> list[int]:
        """Return the ranks that run now, paused ones, too."""
        with self._lock:
            return [rank for rank, process in self.processes.items() if process.poll() is None]

    def records(self, rank: int) -> list[dict[str, Any]]:
        """Return all that a rank has recorded, over all its processes."""
        return read_records(self.run_folder / f"rank-{rank}.jsonl")

    def log(self, rank: int) -> Path:
        """Return the file with all that a rank has printed."""
        return self.log_folder / f"rank-{rank}.log"

    def _launch(self, command: list[str], log: Path, env: Mapping[str, str], **extra: Any) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a log."""
        process = start(
            command,
            env={**self._env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **extra,
        )
        self._output.take(process, log)
        return process

    def _start_service(self) -> None:
        """Start the rendezvous service, and note its address."""
        log = self.log_folder / "rendezvous.log"
        command = python_module("horizonml", "rendezvous")
        self._undo.callback(self._end_service)
        if self._networks is not None:
            self._address = f"{self._networks.address}:{_PORT}"
            at_switch = self._networks.at_switch([*command, "--host", self._networks.address, "--port", str(_PORT)])
            self._service = self._launch(at_switch, log, {})
            return
        with listen("127.0.0.1", 0) as listener:
            self._address = f"127.0.0.1:{listener.getsockname()[1]}"
            inherited = [*command, "--inherited", str(listener.fileno())]
            self._service = self._launch(inherited, log, {}, pass_fds=[listener.fileno()])

    def _supervise(self) -> None:
        """Note which ranks have died, and start them again when it is time."""
        while not self._stopping.wait(_LOOK_SECONDS):
            with self._lock:
                for rank, process in list(self.processes.items()):
                    if process.poll() is not None and process.pid not in self._noted:
                        self._note(rank, process)
                    elif time.monotonic() >= self._due.get(rank, math.inf):
                        self.start_rank(rank)

    def _note(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Note that a rank has died."""
        self._noted.add(process.pid)
        self._continue(rank)
        self.exits.append(Exit(rank, time.time(), process.returncode, process.pid in self._killed))
        if self._restart_after is not None:
            self._due[rank] = time.monotonic() + self._restart_after

    def _continue(self, rank: int) -> None:
        """End the process that continues a paused rank when it ends."""
        waiting = self._paused.pop(rank, None)
        if waiting is not None:
            assert waiting.stdin is not None
            waiting.stdin.close()
            waiting.wait()

    def _end_ranks(self) -> None:
        """Ask all ranks to stop, and kill those that do not, which are noted in `hung`."""
        with self._lock:
            for rank in list(self._paused):
                self._continue(rank)
            for rank in list(self._cut):
                self.heal(rank)
            for process in self.processes.values():
                if process.poll() is None:
                    process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            while self.alive and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            self.hung = self.alive
            for rank in self.hung:
                self._abort(rank)
            for process in self.processes.values():
                process.kill()
                process.wait()

    def _abort(self, rank: int) -> None:
        """Make a rank that hangs print where it hangs, as far as it can."""
        process = self.process(rank)
        if hasattr(psutil, "RLIMIT_CORE"):
            process.rlimit(psutil.RLIMIT_CORE, (0, 0))  # the stacks in the log are enough
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(_ABORT_SECONDS)

    def _end_service(self) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.wait()
