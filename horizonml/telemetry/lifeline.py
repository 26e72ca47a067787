"""Leaves a trace of a process that trains, so that the next one can explain an end that nobody could announce.

A process that the kernel kills for its memory, that somebody kills, or whose device loses its power says nothing. While
it trains, it therefore keeps a small file in the run's folder, which it removes when it ends by itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from horizonml.machine.host import (
    killed_in_container,
    killed_on_machine,
    machine_id,
    memory_left,
    memory_limit,
    peak_rss_bytes,
)
from horizonml.machine.signals import LAUNCHER, process_space, running, started_at
from horizonml.text import human_bytes

_log = logging.getLogger(__name__)
_FOLDER = ".places"  # of the run's folder; it stays where it is when `--fresh` moves the rest away
_CGROUP = Path("/sys/fs/cgroup")
_LOOK_SECONDS = 0.25
_WRITE_SECONDS = 1.0
_GROWN = 1.05  # a peak that has grown by this factor is written at once: memory may run out within a second
_NEAR = 0.9  # of the limit, from where memory counts as the likely reason
# Where the kernel has killed some process of the machine, these make it likely that it was this one.
_MUCH = 0.5  # of the limit, held by this process
_SCARCE = 0.1  # of the limit, left for all


@dataclass(frozen=True)
class Trace:
    """Holds what the file of a process says."""

    pid: int
    started: str  # when the process was started, as the kernel counts it
    space: str  # within which the process id is unique
    machine: str  # which changes when the machine is started anew
    generation: int
    step: int | None  # the newest one that has ended in this process
    peak: int  # bytes of memory that the process has held at most
    limit: float  # bytes that it and others in its container, or on its machine, may use
    left: float  # bytes that were left of them at the least
    expected: float | None  # bytes that the plan expects it to need
    killed_here: int | None  # processes of the container that were killed for their memory before
    killed_anywhere: int | None  # likewise, on the machine
    launcher: str = ""  # the process above it that ends it, by its `launcher_name`; empty without one

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file. Raises OSError, or ValueError if it is damaged."""
        return _traces().validate_json(path.read_bytes(), strict=True)


@cache
def _traces() -> TypeAdapter[Trace]:
    return TypeAdapter(Trace)


class Lifeline:
    """Keeps the file of this process. A full or broken disk is a warning, and never disturbs training.

    A thread writes the file, so that a slow disk does not hold up a step, and a peak within a long step is not missed.
    """

    def __init__(self, folder: Path, rank: int, root: Path = _CGROUP) -> None:
        """Prepare to keep the file of this rank in the run's `folder`; the process's cgroup is mounted at `root`."""
        self._path, self._root = _path(folder, rank), root
        self._trace: Trace | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False

    def begin(self, generation: int) -> None:
        """Keep the file from now on, or note that the process is a member of another group now."""
        if self._trace is not None:
            self._trace = replace(self._trace, generation=generation)
            return
        self._trace = Trace(
            pid=os.getpid(),
            started=started_at(os.getpid()) or "",
            space=process_space(),
            machine=machine_id(),
            generation=generation,
            step=None,
            peak=peak_rss_bytes(),
            limit=memory_limit(self._root),
            left=memory_left(self._root),
            expected=None,
            killed_here=killed_in_container(self._root),
            killed_anywhere=killed_on_machine(),
            launcher=os.environ.get(LAUNCHER, ""),
        )
        self._write(self._trace)
        thread = threading.Thread(target=self._keep, name="lifeline", daemon=True)
        thread.start()
        self._thread = thread  # only now, since `end` cannot wait for one that could not be started

    def expected(self, memory: float | None) -> None:
        """Note the bytes of memory that the plan expects this process to need, if it says so."""
        if self._trace is not None:
            self._trace = replace(self._trace, expected=memory)

    def beat(self, step: int, rss: int) -> None:
        """Note that a step has ended, with so many bytes of resident memory. The file follows within a second."""
        if self._trace is not None:
            self._trace = replace(self._trace, step=step, peak=max(rss, self._trace.peak))

    def end(self) -> None:
        """Remove the file, because the process ends by itself."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(5.0)  # a disk that hangs must not keep the process
        self._trace = self._thread = None
        with suppress(OSError):  # then the next process explains an end that was none, which is only a message
            self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        """Write the file when there is something new, until the end."""
        written, when, left = self._trace, time.monotonic(), math.inf
        while not self._over.wait(_LOOK_SECONDS):
            now = self._trace
            if now is None or written is None:
                return
            now = replace(now, peak=max(now.peak, peak_rss_bytes()))
            due, grown = time.monotonic() - when >= _WRITE_SECONDS, now.peak > _GROWN * written.peak
            if not due and not grown:
                continue
            left = min(left, memory_left(self._root))  # which reads several files, so that it costs most here
            now, when = replace(now, left=min(now.left, left)), time.monotonic()
            if now != written:
                self._write(now)
                written = now

    def _write(self, trace: Trace) -> None:
        """Replace the file. It is not made durable, which would cost a slow card much: see `explain_last`."""
        beside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(asdict(trace)))
            os.replace(beside, self._path)
        except OSError as error:
            if not self._warned:
                _log.warning("%s cannot be written: %s", self._path, error.strerror or error)
            self._warned = True


def is_alive(folder: Path, rank: int) -> bool | None:
    """Return whether the process that keeps a rank's file is there; None if that cannot be seen from here.

    It cannot be seen if the process has said nothing yet, or has ended by itself, or is elsewhere.
    """
    try:
        trace = Trace.read(_path(folder, rank))
    except (OSError, ValueError):
        return None
    if not trace.started or trace.space != process_space():
        return None
    return started_at(trace.pid) == trace.started


def living_ranks(folder: Path) -> dict[int, int] | None:
    """Return the process that stops each rank that trains in a run's folder, by the number that it was started with.

    It is the launcher above the rank, such as `horizonml up`, or else the rank itself.

    Return None if nobody trains there, or if some of them cannot be seen from here.
    """
    found = {}
    for path in (folder / _FOLDER).glob("rank-*.lifeline"):
        try:
            trace = Trace.read(path)
        except (OSError, ValueError):  # it has ended this moment, or nobody can say where it is
            return None
        if trace.space != process_space() or started_at(trace.pid) != trace.started:
            return None
        above = running(trace.launcher)
        found[int(path.stem.partition("-")[2])] = trace.pid if above is None else above
    return found or None


def explain_last(folder: Path, rank: int, root: Path = _CGROUP, vmstat: Path = Path("/proc/vmstat")) -> str | None:
    """Return why the process that was this rank before ended, if it could not say so itself. It is explained once.

    Call this before `Lifeline.begin`, when this process has the rank's place in the run's folder.
    """
    path = _path(folder, rank)
    try:
        trace = Trace.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s cannot be read: %s", path, error.strerror or error)
        return None
    except ValueError:  # what had not reached the disk when the power failed
        _forget(path)
        return (
            f"the process before this one (rank {rank}) ended without a word, and {path.name} is damaged: its device "
            "most likely lost its power"
        )
    if trace.started and trace.space == process_space() and started_at(trace.pid) == trace.started:
        return None
    _forget(path)
    return _story(trace, rank, root, vmstat)


def _story(trace: Trace, rank: int, root: Path, vmstat: Path) -> str:
    """Return how a process ended, by the evidence that there is."""
    who = f"the process before this one (rank {rank})"
    when = "before its first step" if trace.step is None else f"at step {trace.step}"
    facts = f"it used {human_bytes(trace.peak)} of {human_bytes(trace.limit)}"
    if trace.expected is not None:
        facts += f"; the plan expected {human_bytes(trace.expected)}"
    fix = (
        "Lower batch_size, raise parallel.micro_batches, let more ranks share the layers (parallel.strategy: pipeline "
        "or auto), or raise the memory limit"
    )
    same = trace.machine == machine_id()
    if same and _rose(trace.killed_here, killed_in_container(root)):
        return f"the kernel ended {who} {when}, because memory ran out (exit code 137): {facts}. {fix}"
    short = trace.peak >= _MUCH * trace.limit or trace.left <= _SCARCE * trace.limit
    if same and short and _rose(trace.killed_anywhere, killed_on_machine(vmstat)):
        return (
            f"{who} ended without a word {when}, and the kernel's out-of-memory killer has ended a process on this "
            f"machine since, most likely this one (exit code 137): {facts}; {human_bytes(trace.left)} were left. {fix}"
        )
    if trace.peak >= _NEAR * trace.limit:
        return (
            f"{who} ended without a word {when}, as the kernel's out-of-memory killer ends processes (exit code 137): "
            f"{facts}. {fix}"
        )
    if not same:
        return (
            f"{who} ended without a word {when}, on another machine or before this one was started anew: its device "
            f"lost its power, or was switched off ({facts})"
        )
    return f"{who} ended without a word {when}: it was killed, or its container was removed ({facts})"


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _path(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"rank-{rank}.lifeline"


def _forget(path: Path) -> None:
    with suppress(OSError):  # it is then explained a second time
        path.unlink(missing_ok=True)
