"""Runs many connections in one thread: callbacks for sockets that are ready, and tasks that wait for them."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_TICK = 0.25  # seconds between two looks at deadlines
_log = logging.getLogger(__name__)

Wait = tuple[socket.socket, int] | float  # for a socket to be ready, or for some seconds
Task = Generator[Wait, None, Any]


@dataclass(eq=False)
class Running:
    """A task that has begun, and what it waits for."""

    task: Task
    deadline: float
    socket: socket.socket | None = None
    until: float = 0.0


class Loop:
    """Waits for sockets, and goes on with whatever waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, tuple[int, Callable[[int], None]]] = {}
        self._running: dict[Running, None] = {}
        self._looked = 0.0

    def watch(self, watched: socket.socket, mask: int, callback: Callable[[int], None]) -> None:
        """Call `callback` whenever a socket can be read or written, as the mask says; 0 forgets the socket."""
        before = self._watched.get(watched)
        if mask and before is None:
            self._selector.register(watched, mask)
        elif mask and before is not None and before[0] != mask:
            self._selector.modify(watched, mask)
        elif not mask and before is not None:
            self._selector.unregister(watched)
        if mask:
            self._watched[watched] = mask, callback
        else:
            self._watched.pop(watched, None)

    def close(self, watched: socket.socket) -> None:
        """Forget and close a socket."""
        if watched in self._watched:
            self.watch(watched, 0, lambda _: None)
        watched.close()

    def start(self, task: Task, seconds: float = float("inf")) -> Running:
        """Begin a task, into which TimeoutError is thrown if it takes longer than `seconds`."""
        running = Running(task, time.monotonic() + seconds)
        self._running[running] = None
        self._resume(running)
        return running

    def end(self, running: Running) -> None:
        """Throw a task out that is not done yet."""
        self._resume(running, TimeoutError("given up"))

    def turn(self) -> None:
        """Wait for something to do, no longer than until the next look at deadlines, and do it."""
        for key, mask in self._selector.select(_TICK):
            entry = self._watched.get(cast(socket.socket, key.fileobj))
            if entry is not None:  # which another callback may have closed
                entry[1](mask)
        now = time.monotonic()
        if now - self._looked < _TICK:
            return
        self._looked = now
        for running in list(self._running):
            if now > running.deadline:
                self._resume(running, TimeoutError("no answer in time"))
            elif running.socket is None and now >= running.until:
                self._resume(running)

    def _resume(self, running: Running, error: Exception | None = None) -> None:
        """Let a task go on to its next wait, or to its end."""
        if running not in self._running:
            return
        if running.socket is not None:
            self.watch(running.socket, 0, lambda _: None)
            running.socket = None
        try:
            wait = running.task.throw(error) if error is not None else next(running.task)
        except StopIteration:
            del self._running[running]
        except Exception as problem:  # noqa: BLE001  (one connection's trouble is not the others')
            del self._running[running]
            if not isinstance(problem, OSError):
                _log.exception("a connection of the tunnel failed")
        else:
            if isinstance(wait, float):
                running.until = time.monotonic() + wait
            else:
                running.socket = wait[0]
                self.watch(wait[0], wait[1], lambda _: self._resume(running))
