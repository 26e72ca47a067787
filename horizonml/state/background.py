"""Runs one piece of work at a time in a thread, which ends with its group, or with the object that gives it work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from horizonml.comm.group import Group
from horizonml.errors import PeerLost

_END_SECONDS = 1.0  # that the end of a group waits for the thread; a call of a broken disk cannot be interrupted


class _Worker:
    """Does the work. It knows nothing of the `Background` that it works for, whose end is to be noticed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.idle = threading.Event()
        self.idle.set()
        self.broken = False

    def run(self) -> None:
        """Work until `end` is called, or until work fails; then drop the connections."""
        try:
            while (work := self.work.get()) is not None:
                self.broken = True  # unless the work comes to its end
                try:
                    with suppress(PeerLost):  # which the group notices by itself, if it is lost as well
                        work()
                        self.broken = False
                finally:
                    del work  # which may hold the last reference to whoever gave it
                    if self.broken:
                        self.group.abort()  # so that the other ranks' threads do not wait for this one
                    self.idle.set()
                if self.group.is_over:
                    return
        finally:
            self.group.close()

    def end(self) -> None:
        """Break the connections, and let the thread end as soon as it can."""
        self.broken = True
        self.group.abort()
        self.work.put(None)


class Background:
    """Runs work beside a group, with connections of its own, which are a twin of the group's.

    The thread ends when the group closes. It also ends when nothing refers to this object any more, once it has done
    the work that is under way, so that a group that is never closed leaves no thread behind.
    """

    def __init__(self, group: Group, name: str, timeout: float) -> None:
        """Connect; all ranks of the group call this. Raises PeerLost.

        The work waits for other ranks up to `timeout` seconds, since theirs may take long.
        """
        self._worker = worker = _Worker(group.twin(name, timeout))
        # It waits for work from the beginning: when memory is short, a thread that is started then may never begin.
        thread = threading.Thread(target=worker.run, name=name, daemon=True)
        thread.start()
        weakref.finalize(self, worker.end).atexit = False  # nothing is to wait for a daemon when the process ends

        def end_with_group() -> None:
            worker.end()
            thread.join(_END_SECONDS)  # one that is held up drops the connections when it goes on

        group.at_close(end_with_group)

    @property
    def group(self) -> Group:
        """Return the group that the work communicates in."""
        return self._worker.group

    @property
    def busy(self) -> bool:
        """Return whether work is still under way."""
        return not self._worker.idle.is_set()

    @property
    def broken(self) -> bool:
        """Return whether the connections are lost, when no work is under way."""
        return self._worker.broken

    def start(self, work: Callable[[], None]) -> None:
        """Begin with work; there must be none under way. If it raises PeerLost or anything else, that was the last."""
        assert not self.busy
        self._worker.idle.clear()
        self._worker.work.put(work)

    def wait(self, seconds: float) -> None:
        """Wait for the work that is under way, but not for longer."""
        self._worker.idle.wait(seconds)
