"""Tells a process when it should end: after a signal, or because the launcher that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from horizonml.machine.host import machine_id

LAUNCHER = "HORIZONML_LAUNCHER"  # names the launcher that a process must not outlive (see `launcher_name`)
_LOOK_SECONDS = 0.5  # the interval between checks whether the launcher lives
_SAVE_SECONDS = 5.0  # for a rank whose launcher is gone, to finish its step and save


_CAUSES = {
    signal.SIGKILL: "the machine may be out of memory (see dmesg)",
    signal.SIGABRT: "a library gave up, most often for lack of memory; the log says which",
    signal.SIGILL: "its processor lacks an instruction that this build of PyTorch uses. PyTorch 2.10 ends so on "
    "Arm boards with Armv8.0 (Raspberry Pi 3 and 4, Jetson Nano), and 2.11 and later run there, except that builds for "
    "CUDA end so when several threads compute: install one of those, built for the CPU (docs/quickstart.md)",
}


class Cancelled(Exception):
    """Ends a wait because the process was asked to end."""


class StopRequest:
    """Notes that a signal asked for the run to end after the current step.

    SIGTERM only ever asks, however often it arrives: one Ctrl-C reaches a rank through the terminal and through every
    launcher above it. To end a process at once, kill it or send a second SIGINT, which only a person does.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.at_once = False
        self.number: int | None = None  # the signal that came last
        self.is_replaced = False  # whether another job takes the place of this one
        self._interrupted = False

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal; this is the signal's handler."""
        if number == signal.SIGINT:
            self.at_once, self._interrupted = self._interrupted, True
        self.wanted, self.number = True, number

    def replace(self) -> None:
        """Note that another job takes the place of this one."""
        if not self.is_replaced:
            self.wanted = self.is_replaced = True
            print("another job replaces this one: it stops after this step", flush=True)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request to stop after the current step; a second SIGINT ends the process."""
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.note(number)
        if stop.at_once:
            os.write(2, b"ended at once, as asked; what came after the newest checkpoint is lost\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with handling(handle):
        yield stop


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at once; this handles signals as long as a rank has nothing to finish or to save."""
    print("stopped as asked, before the training began", flush=True)
    os._exit(0)


@contextmanager
def handling(handle: signal._HANDLER) -> Iterator[None]:
    """Handle SIGTERM and SIGINT with `handle` within the context."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_signal(number: int) -> str:
    """Return the name of the signal that ended a process, and its most likely cause."""
    try:
        name, cause = signal.Signals(number).name, _CAUSES.get(signal.Signals(number))
    except ValueError:  # a signal without a name, such as a real-time signal
        return f"signal {number}"
    return f"{name}; {cause}" if cause else name


def launcher_name() -> str:
    """Return an identifier of this process for those that must not outlive it: its id, its start, and its place."""
    return f"{os.getpid()} {started_at(os.getpid())} {process_space()}"


def running(launcher: str) -> int | None:
    """Return the process id of the launcher with this name, or None if it is gone or cannot be seen from here."""
    pid, _, rest = launcher.partition(" ")
    started, _, place = rest.partition(" ")
    seen = pid.isdigit() and place == process_space()
    return int(pid) if seen and started_at(int(pid)) == started else None


def watch_launcher() -> None:
    """End this process when the launcher above it is gone for any reason, or at once if it is gone already.

    The launcher is found by its id and start, because it need not be the parent: a script or an mpirun may stand
    between the two. A launcher on another machine or in another container is not visible, and is not watched.
    """
    name = os.environ.get(LAUNCHER, "")
    if not name.endswith(f" {process_space()}"):
        return
    if running(name) is None:
        os._exit(128 + signal.SIGTERM)

    def watch() -> None:
        while running(name) is not None:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVE_SECONDS)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def started_at(pid: int) -> str | None:
    """Return when a process started, or None if it does not exist or is a zombie.

    On Linux, the start is in the kernel's ticks, which do not change when the clock of a small board is set later.
    """
    try:
        # The name is in brackets and may contain anything. After it come the state and, as the 20th field, the start.
        # It is that of the first thread, because emulators of other processors (qemu-user) make up a process's own one.
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:  # not Linux
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def process_space() -> str:
    """Return the machine and, on Linux, the process namespace, within which a process id identifies one process."""
    namespace = Path("/proc/self/ns/pid")
    return f"{machine_id()} {os.readlink(namespace) if namespace.exists() else ''}".strip()
