"""How a process learns that it should end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Cancelled(Exception):
    """A wait was ended because the process was asked to end."""


class StopRequest:
    """Set by a signal: the run is to end after the current step."""

    def __init__(self) -> None:
        self.wanted = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a request to stop after the current step; a second one ends the process."""
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.wanted = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_parent() -> None:
    """End this process when the launcher that started it is gone, however it went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(143)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
