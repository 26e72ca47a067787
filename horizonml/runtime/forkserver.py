"""Starts processes of this package that have PyTorch loaded from their first moment: one process loads it, and forks.

Loading PyTorch takes a second or two of a processor, and more than ten on a small board. Ranks that share a machine
share what was loaded, and most of its memory. A forked process runs the same command as one that is started by itself,
with its own environment, folder, streams and session, and `ps` shows that command.

The server does no arithmetic and starts no threads, so that there is nothing that a fork could tear apart. It ends with
the process that started it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import hmac
import importlib
import json
import logging
import os
import platform
import random
import runpy
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

from horizonml.machine.code import python_module
from horizonml.machine.signals import LAUNCHER
from horizonml.runtime.process import run_and_exit

SERVER = "HORIZONML_FORKSERVER"  # the address of a server, for processes whose children it forks
# What a rank needs. Names, because this room must not know the command line.
PRELOAD = (
    "horizonml.cli.app",
    "horizonml.api.training",
    "horizonml.rendezvous.meeting",
    "horizonml.runtime.launch",
    "horizonml.runtime.worker",
    "horizonml.security.tls",
    "horizonml.telemetry.http",
)
_ROOM = "HORIZONML_ROOM"  # makes room in the server's environment for those of its children
_SECRET, _LENGTH = 32, 8  # bytes of the secret, and of a request's length, with which it begins
_FIRST = 100  # received descriptors are moved here, out of the way of the numbers that they get
_REQUEST_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # see prctl(2)


class ForkServer:
    """Represents a server that this process has started. Used as a context manager, it ends the server."""

    def __init__(self, env: Mapping[str, str], output: IO[bytes] | int, preload: Sequence[str] = PRELOAD) -> None:
        """Start the server, whose modules are loaded meanwhile; its errors go to `output`."""
        # Who shares this machine's network, from within a container too, can list the names of such sockets: so whoever
        # asks has to know a secret, which is in no list and on no command line.
        name, secret = f"horizonml-{secrets.token_hex(8)}", secrets.token_hex(_SECRET // 2)
        self.address = f"{name}:{secret}"
        self.errors: IO[bytes] | None = None  # the file that they go to, of a server that was started ahead
        self._lifeline, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener, theirs:
            listener.bind(f"\0{name}")  # a name without a file, so that nothing is left behind
            listener.listen(128)
            fds = (listener.fileno(), theirs.fileno())
            self.process = subprocess.Popen(
                python_module("horizonml.runtime.forkserver", *map(str, fds), *preload),
                env={**{name: value for name, value in env.items() if name != LAUNCHER}, _ROOM: " " * 4096},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the process that started it
                pass_fds=fds,
            )
        self._lifeline.sendall(secret.encode())
        self._lifeline.settimeout(0.05)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def loaded(self) -> bool:
        """Wait a moment; return whether the server has loaded everything. That it has ended counts, too."""
        try:
            if self._lifeline.recv(1):
                return True
        except TimeoutError:
            return False
        except ConnectionResetError:  # as it ends without having read the secret
            pass
        self.process.wait()
        return True

    def repeat(self, output: IO[bytes]) -> None:
        """Write to `output` what a server that was started ahead has said."""
        if self.errors is not None:
            self.errors.seek(0)
            output.write(self.errors.read())
            output.flush()

    def close(self) -> None:
        """End the server; processes that it has started go on, but can no longer be waited for."""
        self._lifeline.close()
        if self.errors is not None:
            self.errors.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:  # it is still loading
            self.process.kill()
            self.process.wait()


_ahead: list[ForkServer] = []


def start_ahead() -> None:
    """Start a server whose modules are loaded while this process still finds out what it is to do."""
    if can_fork() and not os.environ.get(SERVER):
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (the server closes it)
        _ahead.append(ForkServer({"OMP_NUM_THREADS": "1", **os.environ}, errors))
        _ahead[-1].errors = errors


def started_ahead() -> ForkServer | None:
    """Return the server that was started ahead, if there is one that nobody uses."""
    return _ahead.pop() if _ahead else None


def can_fork() -> bool:
    """Return whether processes can be forked here once PyTorch is loaded.

    On Arm, convolutions of PyTorch 2.9 end in a segmentation fault in a process that was forked.
    """
    if sys.platform != "linux":
        return False
    return platform.machine() != "aarch64" or not version("torch").startswith("2.9.")


def start(command: Sequence[str], server: str | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Start a command with the options of `subprocess.Popen`, in a session of its own.

    A module of this package is forked by `server`, or by the server that has forked this process; anything else, or
    without a server, is started as usual.
    """
    address = server or os.environ.get(SERVER)
    if not address or _module(command) is None:
        return subprocess.Popen(command, start_new_session=True, **options)
    return Forked(address, command, **options)


class Forked(subprocess.Popen[Any]):
    """Represents a process that was forked by a server and is otherwise handled like any other."""

    def __init__(self, server: str, command: Sequence[str], **options: Any) -> None:
        """Let the server fork a process. Raises OSError if it cannot."""
        self._server = server
        self._connection: socket.socket | None = None
        self._unread = b""
        super().__init__(command, **options)

    def _execute_child(self, args: Sequence[str], executable: Any, preexec_fn: Any, *more: Any) -> None:
        """Ask the server for the process; this stands in the place of the standard library's fork and exec."""
        _, pass_fds, cwd, env, _, _, _, *streams = more[:13]
        given = [number if number >= 0 else own for own, number in enumerate((streams[0], streams[3], streams[5]))]
        name, _, secret = self._server.partition(":")
        request = {
            "command": list(args),
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "env": dict(os.environ if env is None else env),
            "numbers": [0, 1, 2, *pass_fds],
        }
        connection = self._connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{name}")
            content = json.dumps(request).encode()
            header = secret.encode().ljust(_SECRET) + len(content).to_bytes(_LENGTH, "big")
            socket.send_fds(connection, [header], [*given, *pass_fds])
            with suppress(ConnectionError):  # the server has refused it without reading it, and says so
                connection.sendall(content)
            answer = self._answer()
            if "error" in answer:
                raise OSError(answer["number"], answer["error"])
        except BaseException:
            connection.close()
            raise
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        self.pid = answer["pid"]
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Return the process's id, and its status as `os.waitpid` would, once it has ended; an id of 0 until then."""
        try:
            answer = self._answer(socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        assert self._connection is not None
        self._connection.close()
        if "error" in answer:  # the server is gone, and nobody could wait for what it has started
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return self.pid, answer.get("status", int(signal.SIGKILL))

    def _answer(self, flags: int = 0) -> dict[str, Any]:
        """Return the next answer of the server, or an error if the server has ended."""
        assert self._connection is not None
        while b"\n" not in self._unread:
            received = b""
            with suppress(ConnectionResetError):
                received = self._connection.recv(1 << 10, flags)
            if not received:
                return {"error": "the process that forks ranks has ended", "number": errno.ECONNRESET}
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        """Return the exit code if the process has ended; the standard library does it, with another `waitpid`."""
        wait = {"_waitpid": lambda _, flags: self._try_wait(flags)}
        return super()._internal_poll(_deadstate, **wait)  # type: ignore[misc, no-any-return]


def serve(listener: socket.socket, lifeline: socket.socket) -> None:
    """Fork a process for each request, and tell who asked for it how it ended, until `lifeline` is closed."""
    asked: dict[int, socket.socket] = {}
    woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as ready:
        for source in (listener, lifeline, woken):
            ready.register(source, selectors.EVENT_READ)
        secret = lifeline.recv(_SECRET, socket.MSG_WAITALL).decode()
        lifeline.send(b"1")
        while True:
            found = [key.fileobj for key, _ in ready.select()]
            if lifeline in found:
                return
            if woken in found:
                os.read(woken, 1 << 10)
                _reap(asked)
            if listener in found:
                connection, _ = listener.accept()
                connection.settimeout(_REQUEST_SECONDS)
                try:
                    pid = _fork(connection, secret)
                except (OSError, ValueError) as error:  # a stranger, or who asked is gone, or no memory is left
                    number = error.errno if isinstance(error, OSError) else errno.EPERM
                    with suppress(OSError):
                        connection.sendall(_line({"error": f"cannot fork: {error}", "number": number}))
                    connection.close()
                    continue
                asked[pid] = connection
                with suppress(OSError):
                    connection.sendall(_line({"pid": pid}))


def _reap(asked: dict[int, socket.socket]) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with asked.pop(pid) as connection, suppress(OSError):
            connection.sendall(_line({"status": status}))


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _fork(connection: socket.socket, secret: str) -> int:
    """Read a request, and return the id of the process that was forked for it, which does not return."""
    header, fds, _, _ = socket.recv_fds(connection, _SECRET + _LENGTH, 253)
    try:
        if not hmac.compare_digest(header[:_SECRET], secret.encode()):
            _refuse("who asked for it does not know the secret")
        content = bytearray()
        while len(content) < int.from_bytes(header[_SECRET:], "big"):
            content += connection.recv(1 << 16) or _refuse("who asked for it has ended")
        request = json.loads(content)
        pid = os.fork()
        if pid == 0:
            try:
                _become(request, fds)
            except BaseException:  # noqa: BLE001  (it ends here, and must say why)
                traceback.print_exc()
            finally:
                os._exit(1)  # nothing may return into the server
        return pid
    finally:
        for number in fds:
            os.close(number)


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _become(request: Mapping[str, Any], fds: list[int]) -> None:
    """Let this process be what was asked for, as if it had been started by itself, and run it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    high = [_move(number) for number in fds]
    os.closerange(0, _FIRST)
    for number, target in zip(high, request["numbers"], strict=True):
        os.dup2(number, target)
    os.closerange(_FIRST, max(high) + 1)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "strict"), _stream(1, "strict"), _stream(2, "backslashreplace")
    os.chdir(request["folder"])
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ.clear()  # before its memory is written to
    os.environ.update(request["env"])
    _show(request["command"], request["env"])
    safe, module, arguments = _module(request["command"]) or _refuse("it is no module of this package")
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    installed = [entry for entry in sys.path if entry not in own and entry not in ("", _HERE)]
    sys.path[:] = [*([] if safe else [os.getcwd()]), *paths, *installed]
    sys.argv = [module, *arguments]
    logging.getLogger().handlers.clear()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (this process is another, which ends with it)
        traceback.print_exc()
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _move(number: int) -> int:
    """Return a copy of a descriptor whose number is in nobody's way."""
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST)


def _stream(number: int, errors: str) -> TextIO:
    """Return the stream of text that Python opens for a descriptor when it starts."""
    lines = number == 2 or os.isatty(number)
    return open(number, "w" if number else "r", 1 if lines else -1, "utf-8", errors, closefd=False)


def _show(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Let `ps` and /proc show the command and the environment of this process instead of the server's.

    The kernel shows the memory in which a process was given them, whose place it names in /proc/self/stat, see proc(5).
    An emulated processor (qemu) has no such place.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = list(map(int, fields[45:49]))  # where the arguments start and end, and the environment
    if len(places) < 4:
        return
    texts = ["\0".join(command), "\0".join(f"{name}={value}" for name, value in env.items())]
    for start, end, text in zip(places[::2], places[1::2], texts, strict=True):
        content = text.encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _module(command: Sequence[str]) -> tuple[bool, str, list[str]] | None:
    """Return whether a command leaves the working directory out, the module of this package that it runs, and the rest.

    Return None if it runs anything else.
    """
    if not command or command[0] != sys.executable:
        return None
    safe = command[1:2] == ["-P"]
    rest = list(command[2 if safe else 1 :])
    if rest[:1] != ["-m"] or rest[1].partition(".")[0] != "horizonml":
        return None
    return safe, rest[1], rest[2:]


_HERE = os.getcwd()


def main() -> None:
    """Serve on inherited sockets, with the modules named by the other arguments loaded."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores, and its children would
    listener, lifeline = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who has started it may end before all is loaded
    gone = select.poll()
    gone.register(lifeline, 0)
    if gone.poll(0):  # it has ended before that was asked for
        return
    gc.disable()  # which would look for garbage among what is loaded, for a tenth of the time
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()  # or the first collection in a child would write to all that it shares
    gc.enable()
    # A child is told of Ctrl-C when it runs its command: Python swallows exceptions in what it does right after a fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    serve(listener, lifeline)


if __name__ == "__main__":
    run_and_exit(main)
