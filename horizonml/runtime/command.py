"""Runs the rendezvous service, alone or around a command that starts ranks; without PyTorch, in little memory.

The command may be anything: a script that starts ranks in the background, an mpirun, a torchrun. It stays in this
process's group, so it uses the terminal as if it had been started alone. Orphaned descendants become children of this
process, so that all its processes can be found, and end together.

A service, or a process that meets others at one, is not reached from other machines without a token, unless the user
accepts that.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from horizonml.errors import JobError, SecurityError
from horizonml.machine.code import python_module
from horizonml.machine.network import is_loopback, listen
from horizonml.machine.signals import LAUNCHER, StopRequest, handling, launcher_name
from horizonml.rendezvous.client import Endpoint
from horizonml.rendezvous.roster import Roster
from horizonml.rendezvous.service import SETTLE_SECONDS, Service
from horizonml.runtime.process import run_and_exit
from horizonml.security.token import INSECURE, TOKEN, Token, find_token, make_token

RENDEZVOUS = "HORIZONML_RENDEZVOUS"
JOB_FOLDER = "HORIZONML_JOB_FOLDER"  # the job's files, for a service and for ranks that are replaced with them
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


_CURES = (
    "run `horizonml token` on this machine and copy the file that it names to the others, "
    f"or accept that any stranger may take part: --insecure, or {INSECURE}=1"
)


def endpoint_for(address: tuple[str, int]) -> Endpoint:
    """Return how a rank reaches the rendezvous service at an address. Raises SecurityError."""
    host, port = address
    token = token_of_rank()
    if token is not None:
        from horizonml.security.tls import client_context

        return Endpoint(host, port, client_context(token))
    if not (insecure() or is_loopback(host)):
        raise SecurityError(
            f"the rendezvous service at {host}:{port} is on another machine, and this process has no token; get it "
            f"from the device that runs the service (`horizonml token` says where it is) into ${TOKEN} or the same "
            f"file here, or accept that any stranger may take part: {INSECURE}=1"
        )
    warn_of_strangers(f"{host}:{port}")
    return Endpoint(host, port)


def token_of_rank() -> Token | None:
    """Return the token with which this process takes part, None if the user accepts strangers. Raises SecurityError."""
    return None if insecure() else find_token()


def token_of_service(host: str, without: bool) -> Token | None:
    """Return the token of a service that listens at `host`, None if it may do without. Raises SecurityError.

    `without` says that the user accepts a service without a token.
    """
    if without or insecure():
        return None
    token = find_token()
    if token is None and not is_loopback(host):
        raise SecurityError(f"--host {host}: other machines reach this address, and there is no token; {_CURES}")
    return token


def insecure() -> bool:
    """Return whether the user accepts strangers."""
    return os.environ.get(INSECURE, "").lower() in ("1", "true", "yes")


def warn_of_strangers(address: str) -> None:
    """Say aloud that an address has no token, unless only this machine reaches it."""
    if not is_loopback(address.rpartition(":")[0].strip("[]")):
        words = f"warning: {address} has no token: any stranger who reaches it can take part, and read what is sent"
        print(words, file=sys.stderr, flush=True)


def job_files() -> str:
    """Return what identifies the files that this process was started with, or nothing if it does not matter.

    In Kubernetes the service and the workers are started with the same files. When those are replaced, the service is
    started anew and stops the ranks that run with the earlier ones (see `Service`). Raises JobError.
    """
    folder = os.environ.get(JOB_FOLDER)
    if not folder:
        return ""
    if not Path(folder).is_dir():
        raise JobError(f"{JOB_FOLDER}: there is no folder {folder}; mount the job's files there, or unset the variable")
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and not path.name.startswith("."):
            found.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def serve(host: str, port: int, inherited: int | None, without_token: bool, workers: int | None) -> None:
    """Serve the rendezvous on an address, or on an inherited listening socket, until SIGTERM or SIGINT.

    Ranks that ask for the world size learn that it is `workers`. Raises RendezvousError or SecurityError.
    """
    stop = StopRequest()
    with handling(stop.note):
        token = token_of_service(host if inherited is None else "localhost", without_token)
        if token is None:
            warn_of_strangers(f"{host}:{port}")
        listener = listen(host, port) if inherited is None else socket.socket(fileno=inherited)
        # If ranks have met earlier at a service at this address, the service waits for those.
        roster = Roster(time.monotonic() + (SETTLE_SECONDS if inherited is None else 0.0), workers)
        service = Service(listener, tls_of(token), roster=roster, files=job_files())
        print(f"rendezvous service on {host}:{service.port}", flush=True)
        service.run(lambda: stop.wanted)


def become_service(
    host: str, port: int, inherited: int | None, without_token: bool, workers: int | None = None
) -> NoReturn:
    """Let this process be one that does nothing but `serve`, in half the memory that the command line takes."""
    options = json.dumps([host, port, inherited, without_token, workers])
    sys.stdout.flush()
    os.execv(sys.executable, python_module(__name__, options))  # noqa: S606  (no shell is involved)


def serve_command(host: str, port: int, advertise: str | None, command: Sequence[str], without_token: bool) -> int:
    """Serve the rendezvous until a command that starts ranks has ended, and return its exit code.

    The command finds the service's address, with `advertise` as the host, in HORIZONML_RENDEZVOUS, and the token in
    HORIZONML_TOKEN, which is made for it if there is none. A signal asks the command, and all that it has started, to
    end. Raises RendezvousError, SecurityError or JobError.
    """
    stop = StopRequest()
    with handling(stop.note):
        token = None if without_token or insecure() else find_token() or make_token()
        if token is None:
            warn_of_strangers(f"{host}:{port}")
        listener = listen(host, port)
        wildcard = host in ("0.0.0.0", "::")  # noqa: S104
        address = f"{advertise or (socket.gethostname() if wildcard else host)}:{listener.getsockname()[1]}"
        print(f"rendezvous service at {address}", file=sys.stderr, flush=True)
        env = {**os.environ, RENDEZVOUS: address, **({TOKEN: token.text} if token is not None else {INSECURE: "1"})}
        # The socket listens already, so the ranks need not wait for the service.
        with Command(command, env, stop) as running:
            service, done = Service(listener, tls_of(token)), threading.Event()
            thread = threading.Thread(target=service.run, args=(done.is_set,), name="rendezvous", daemon=True)
            thread.start()
            code = running.wait()
            done.set()
            thread.join(5)
            return code


def tls_of(token: Token | None) -> ssl.SSLContext | None:
    """Return how a service protects its connections with a token, if it has one."""
    if token is None:
        return None
    from horizonml.security.tls import server_context

    return server_context(token)


if __name__ == "__main__":
    run_and_exit(lambda: serve(*json.loads(sys.argv[1])))
