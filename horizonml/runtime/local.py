"""Runs all ranks on this machine, with their rendezvous service, and leaves none of them behind.

Every rank is the same command that a container would run; on Linux, several of them are forked from one process that
has loaded PyTorch. The first rank shares this terminal. The output of the others, and all errors and warnings, go to
`rank-N.log` in the run's folder; warnings are also shown here, once. Ctrl-C and SIGTERM reach all ranks as a request to
stop after the step, and a rank that fails ends the others.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from horizonml.errors import HorizonError, JobError, PeerLost
from horizonml.files import scratch_folder
from horizonml.machine.code import python_module
from horizonml.machine.emulation import emulated_devices, of_rank, too_many
from horizonml.machine.network import listen
from horizonml.machine.signals import LAUNCHER, StopRequest, handling, launcher_name
from horizonml.runtime.command import STOP_SECONDS
from horizonml.runtime.forkserver import SERVER, ForkServer, can_fork, start, started_ahead
from horizonml.runtime.process import ENDING, how_ended, why_it_failed
from horizonml.security.token import INSECURE, TOKEN, make_token
from horizonml.text import escaped, plain_lines

_MOST_TEXT = 1 << 20  # bytes of a log that are looked at at once


class RankLog:
    """Represents the log of one rank, which may begin with the output of earlier runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("a+b")  # which is also read, as somebody may delete the folder meanwhile
        self._start = self._shown = self.file.tell()

    def text(self) -> str:
        """Return everything that the rank has printed in this run."""
        end = os.fstat(self.file.fileno()).st_size
        content = self._read(max(self._start, end - _MOST_TEXT)).decode(errors="replace")
        return plain_lines(content).strip()

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        content = self._read(self._shown)
        whole = content[: content.rfind(b"\n") + 1] or (content if len(content) == _MOST_TEXT else b"")
        self._shown += len(whole)
        return [escaped(line) for line in whole.decode(errors="replace").split("\n")[:-1]]

    def _read(self, start: int) -> bytes:
        return os.pread(self.file.fileno(), _MOST_TEXT, start)  # where others write does not change


class Warnings:
    """Shows the warnings of all ranks on standard error, each of them once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def show(self, rank: int, lines: list[str]) -> None:
        """Show those of a rank's lines that are warnings and were not shown before."""
        for line in lines:
            # These are the formats of logging and of the warnings module.
            if re.match(r"WARNING: |warning: |rank \d+: warning: |\S.*:\d+: \w*Warning: ", line):
                text = line.partition("WARNING: ")[2] or line
                if text not in self._seen:
                    self._seen.add(text)
                    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # clears the progress bar's line
                    prefix = "" if text.startswith("rank ") else f"rank {rank}: "
                    print(f"{clear}{prefix}{text}", file=sys.stderr, flush=True)


_GRACE_SECONDS = 5.0  # for the other ranks, once one has failed
TOGETHER = "HORIZONML_TOGETHER"  # set for ranks that all end when one is lost, instead of waiting for its replacement


class RankFailed(HorizonError):
    """Reports that a rank of a local run has failed; the exit code is 2 if the job was wrong, and 1 otherwise."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class _Rank:
    """Holds the process of one rank, its log, and the file in which it says why it fails."""

    number: int
    process: subprocess.Popen[bytes]
    log: RankLog
    ending: Path
    ended: float | None = None  # when the process was found to have ended

    def error(self) -> str:
        """Return why the rank failed."""
        if self.process.returncode < 0:
            return f"rank {self.number} {how_ended(self.process.returncode)}"
        text = why_it_failed(self.process.returncode, self.ending, self.log.text().splitlines())
        whose = re.match(rf"rank (?:{self.number}\b|\d+: )", text)  # another rank's error has its number already
        return text if whose else f"rank {self.number}: {text}"


class LocalRun:
    """Runs the processes of one local run. Used as a context manager, it ends them all."""

    def __init__(
        self,
        world_size: int,
        command: list[str],
        logs: Path,
        extra_env: Mapping[str, str],
        kept: bool = True,
        output: int | None = None,
        inherited: Sequence[int] = (),
        patience: float = STOP_SECONDS,
    ) -> None:
        """Prepare to run `command` once per rank, with RANK and WORLD_SIZE set.

        The output of the ranks goes to the folder `logs`; `kept` says that the folder outlasts the run. That of the
        first rank goes to the file descriptor `output` instead, by default to this process's own output. The ranks
        inherit the file descriptors `inherited`. Once asked to stop, they have `patience` seconds.
        """
        self._patience = patience
        self._kept, self._output, self._inherited = kept, output, tuple(inherited)
        self._world_size, self._command, self._logs, self._env = world_size, command, logs, dict(extra_env)
        self._service: subprocess.Popen[bytes] | None = None
        self._forks: ForkServer | None = None
        self._ranks: list[_Rank] = []
        self._warnings = Warnings()
        self._stop = StopRequest()
        self._used = ExitStack()

    @property
    def signal(self) -> int | None:
        """Return the signal that has asked the run to stop, if one has."""
        return self._stop.number

    def __enter__(self) -> LocalRun:
        if threading.current_thread() is threading.main_thread():  # only there, Python handles signals
            self._used.enter_context(handling(self._stop.note))
        try:
            self._start(self._used.enter_context(scratch_folder()))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self._end()

    def _start(self, endings: Path) -> None:
        devices = emulated_devices(self._world_size)
        if (warning := too_many(devices)) is not None:
            print(warning, file=sys.stderr, flush=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self._env, "WORLD_SIZE": str(self._world_size), TOGETHER: "1", LAUNCHER: launcher_name()}
        env.setdefault("OMP_NUM_THREADS", "1")  # until the rank knows its share of the cores
        if self._world_size > 1:
            env[TOKEN] = make_token().text  # for this run alone, so that no other user of the machine takes part
            env.pop(INSECURE, None)
            env["HORIZONML_RENDEZVOUS"] = self._start_service(env)
        logs = [self._log(f"rank-{rank}") for rank in range(self._world_size)]
        # One rank by itself would only wait for a second process.
        if self._world_size > 1 and can_fork() and not env.get(SERVER):
            forks = started_ahead() or ForkServer({**env, ENDING: str(endings / "0")}, logs[0].file)
            self._forks = self._used.enter_context(forks)
            while not self._forks.loaded():
                if self._stop.wanted:
                    print("stopped as asked, before the training began", flush=True)
                    return
            if self._forks.process.poll() is not None:
                self._forks.repeat(logs[0].file)
                raise RankFailed(_Rank(0, self._forks.process, logs[0], endings / "0").error())
        for rank, log in enumerate(logs):
            ending = endings / f"{rank}"
            process = start(
                self._command,
                self._forks.address if self._forks is not None else None,
                env={**env, **of_rank(devices, rank), "RANK": str(rank), "LOCAL_RANK": str(rank), ENDING: str(ending)},
                stdin=subprocess.DEVNULL,
                stdout=self._output if rank == 0 else log.file,
                stderr=log.file,
                pass_fds=self._inherited,
            )
            self._ranks.append(_Rank(rank, process, log, ending))

    def _log(self, name: str) -> RankLog:
        log = RankLog(self._logs / f"{name}.log")
        self._used.callback(log.file.close)
        return log

    def _start_service(self, env: dict[str, str]) -> str:
        """Start the rendezvous service on a socket that listens already, so that no rank need wait for it."""
        self._service_log = self._log("rendezvous")
        with listen("127.0.0.1", 0) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            self._service = subprocess.Popen(
                python_module("horizonml", "rendezvous", "--inherited", str(listener.fileno())),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._service_log.file,
                stderr=self._service_log.file,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
        return address

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have ended, and call `meanwhile` again and again.

        Raises RankFailed with the reason of the rank that failed first.
        """
        asked, ending = math.inf, False
        while not all(rank.ended for rank in self._ranks):
            time.sleep(0.05)
            meanwhile()
            now = time.monotonic()
            for rank in self._ranks:
                if rank.ended is None and rank.process.poll() is not None:
                    rank.ended = now
                self._warnings.show(rank.number, rank.log.new_lines())
            failed = [rank for rank in self._ranks if rank.ended and rank.process.returncode != 0]
            if self._service is not None and self._service.poll() is not None:
                code = self._service.returncode
                said = f": {self._service_log.text()[-1000:]}" if code >= 0 else ""
                raise RankFailed(f"the rendezvous service {how_ended(code)}{said}")
            if self._forks is not None and (code := self._forks.process.poll()) is not None:
                raise RankFailed(f"the process from which the ranks are forked {how_ended(code)}")
            if failed and now - min(rank.ended or now for rank in failed) > _GRACE_SECONDS:
                break
            if self._stop.wanted and asked == math.inf:
                asked = now
                for rank in self._ranks:
                    rank.process.send_signal(signal.SIGTERM)
            if self._stop.at_once or now - asked > self._patience:
                if not ending:
                    why = "as asked" if self._stop.at_once else f"as they did not stop within {self._patience:.0f} s"
                    print(f"all ranks end at once, {why}; what came after the newest checkpoint is lost", flush=True)
                ending = True
                for rank in self._ranks:
                    rank.process.send_signal(signal.SIGKILL)
        failed = [rank for rank in self._ranks if rank.ended and rank.process.returncode != 0]
        # Ranks that were asked to stop, or killed because they did not, have not failed.
        if self._stop.wanted:
            by_itself = (HorizonError.exit_code, JobError.exit_code)
            failed = [rank for rank in failed if rank.process.returncode in by_itself]
        if failed:
            rank = self._blame(failed)
            where = f"\n(all that it printed is in {rank.log.path})" if self._kept else ""
            code = JobError.exit_code if rank.process.returncode == JobError.exit_code else 1
            raise RankFailed(rank.error() + where, code)

    def _blame(self, failed: list[_Rank]) -> _Rank:
        """Return the rank that failed by itself and not because another was lost."""
        by_itself = [rank for rank in failed if rank.process.returncode != PeerLost.exit_code]
        return min(by_itself or failed, key=lambda rank: rank.ended or 0.0)

    def _end(self) -> None:
        processes = [rank.process for rank in self._ranks]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._service is not None:
            processes.append(self._service)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._used.close()
