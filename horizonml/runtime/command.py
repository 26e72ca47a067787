"""Runs a command that starts ranks, and ends everything beneath it together.

The command may be anything: a script that starts ranks in its background, an mpirun, a torchrun. It stays in this
process's group, so a terminal serves it as if it had been started alone. Whatever it starts and loses becomes a child
of this process, which is how all of it is found again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from horizonml.errors import JobError
from horizonml.machine.signals import LAUNCHER, StopRequest, launcher_name

STOP_SECONDS = 60.0  # for ranks that were asked to stop: they finish their step and save a checkpoint
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Command:
    """A running command. Use it as a context manager: leaving it ends whatever the command has started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stop: StopRequest) -> None:
        """Start the command, to end it when `stop` says so. Raises JobError if it cannot be started.

        When this process is gone, the ranks beneath it end, and the command itself is asked to.
        """
        self._stop, self._launcher = stop, os.getpid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            # What runs before exec is one system call: nothing that another thread could hold up.
            self._process = subprocess.Popen(
                command, env={**env, LAUNCHER: launcher_name()}, preexec_fn=self._end_with_launcher
            )
        except OSError as error:
            raise JobError(f"cannot start {command[0]}: {error.strerror or error}") from error

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *details: object) -> None:
        self._end()

    def wait(self) -> int:
        """Wait until the command has ended or a signal has asked to stop, end the rest, and return its exit code."""
        while self._process.poll() is None and not self._stop.wanted:
            time.sleep(0.05)
        self._end()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _end(self) -> None:
        """Ask all processes to end, and kill those that do not, or all if that is wanted at once."""
        asked: set[int] = set()
        deadline = time.monotonic() + STOP_SECONDS
        while left := self._left():
            kill = self._stop.at_once or time.monotonic() > deadline
            for process in left:
                try:
                    if kill:
                        process.kill()
                    elif process.pid not in asked and self._asks(process):
                        asked.add(process.pid)
                        process.terminate()
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)

    def _left(self) -> list[psutil.Process]:
        """Return the processes beneath this one that still run."""
        self._process.poll()  # collects it
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _asks(self, process: psutil.Process) -> bool:
        """Return whether it is for us to ask this process, rather than for a launcher above it that leads its group."""
        try:
            return process.ppid() == self._launcher or os.getpgid(process.pid) == os.getpgrp()
        except ProcessLookupError:
            return False

    def _end_with_launcher(self) -> None:
        """Make the command end with the launcher; what it starts watches the launcher by itself."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._launcher:  # it went before
            os._exit(128 + signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, where the kernel is Linux."""
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)
