"""Lets a device that joins runs wait while its owner needs it."""

from __future__ import annotations

import sys
import time

from horizonml.machine.signals import StopRequest
from horizonml.machine.yielding import Yielding

_LOOK_SECONDS = 2.0  # between two looks at the device


class Courtesy:
    """Says now and then whether this device may train, and waits until it may. Used as a context manager."""

    def __init__(self, when_idle: bool, max_temperature: float | None, on_mains: bool, stop: StopRequest) -> None:
        """Begin to watch the device. Raises JobError if it cannot measure what a condition needs."""
        self._yielding, self._stop = Yielding(when_idle, max_temperature, on_mains), stop
        self._looked, self._reason = -_LOOK_SECONDS, self._yielding.reason()
        advice = self._yielding.advice()
        if advice is not None:
            print(advice, file=sys.stderr, flush=True)

    def __enter__(self) -> Courtesy:
        return self

    def __exit__(self, *details: object) -> None:
        self._yielding.close()

    def reason(self) -> str | None:
        """Return why this device may not train now, or None if it may."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked, self._reason = time.monotonic(), self._yielding.reason()
        return self._reason

    def wait(self) -> bool:
        """Wait until this device may train, and return False if this process is asked to end before."""
        said = False
        while (reason := self.reason()) is not None and not self._stop.wanted:
            if not said:
                said = True
                print(f"waiting: {reason}", flush=True)
            time.sleep(0.1)
        return not self._stop.wanted

    def sleep(self, seconds: float) -> None:
        """Wait for so long, or until this process is asked to end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop.wanted:
            time.sleep(0.1)
