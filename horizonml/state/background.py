"""Runs one piece of work at a time in a thread, which is given up when its group ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from horizonml.comm.group import Group
from horizonml.errors import PeerLost

_END_SECONDS = 1.0  # that the end of a group waits for the thread; a call of a broken disk cannot be interrupted


class Background:
    """Runs work beside a group, with connections of its own, which are a twin of the group's."""

    def __init__(self, group: Group, name: str, timeout: float) -> None:
        """Connect; all ranks of the group call this. Raises PeerLost.

        The work waits for other ranks up to `timeout` seconds, since theirs may take long; it ends with the group.
        """
        self.group = group.twin(name, timeout)
        self._broken = False
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # It waits for work from the beginning: when memory is short, a thread that is started then may never begin.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        group.at_close(self._end)

    @property
    def busy(self) -> bool:
        """Return whether work is still under way."""
        return not self._idle.is_set()

    @property
    def broken(self) -> bool:
        """Return whether the connections are lost, when no work is under way."""
        return self._broken

    def start(self, work: Callable[[], None]) -> None:
        """Begin with work; there must be none under way. If it raises PeerLost or anything else, that was the last."""
        assert not self.busy
        self._idle.clear()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._broken = True  # unless the work comes to its end
            try:
                with suppress(PeerLost):  # which the group notices by itself, if it is lost as well
                    work()
                    self._broken = False
            finally:
                if self._broken:
                    self.group.abort()  # so that the other ranks' threads do not wait for this one
                if self.group.is_over:
                    self.group.close()
                self._idle.set()

    def wait(self, seconds: float) -> None:
        """Wait for the work that is under way, but not for longer."""
        self._idle.wait(seconds)

    def _end(self) -> None:
        """Break the connections, and wait a moment for the thread; one that is held up closes them when it goes on."""
        self._broken = True
        self.group.abort()
        self._work.put(None)
        self._thread.join(_END_SECONDS)
        if not self.busy:
            self.group.close()
