"""Runs a command that starts ranks, and ends all its processes together.

The command may be anything: a script that starts ranks in the background, an mpirun, a torchrun. It stays in this
process's group, so it uses the terminal as if it had been started alone. Orphaned descendants become children of this
process, so that all of them can be found.
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

STOP_SECONDS = 60.0  # for ranks that were asked to stop, to finish their step and save a checkpoint
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Command:
    """Represents a running command. Used as a context manager, it ends whatever the command has started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stop: StopRequest) -> None:
        """Start the command, which ends when `stop` is set. Raises JobError if it cannot be started.

        If this process dies, the ranks beneath it end, and the command itself is asked to end.
        """
        self._stop, self._launcher = stop, os.getpid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            # Only one system call runs before exec, so another thread cannot block it.
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
        """Wait until the command has ended or a signal has asked to stop, end the rest, and return the exit code."""
        while self._process.poll() is None and not self._stop.wanted:
            time.sleep(0.05)
        self._end()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _end(self) -> None:
        """Ask all processes to end; kill those that do not, or all of them if they are to end at once."""
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
        self._process.poll()  # reaps the process
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _asks(self, process: psutil.Process) -> bool:
        """Return whether this process must ask `process` to end.

        Otherwise a launcher between the two, which leads a process group, asks it.
        """
        try:
            return process.ppid() == self._launcher or os.getpgid(process.pid) == os.getpgrp()
        except ProcessLookupError:
            return False

    def _end_with_launcher(self) -> None:
        """Make the command end with the launcher; the ranks that it starts watch the launcher themselves."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._launcher:  # the launcher was gone before the call
            os._exit(128 + signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux; do nothing on other systems."""
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)
