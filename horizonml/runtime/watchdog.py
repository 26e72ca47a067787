"""Notices that this rank's main thread hangs, in the user's code or anywhere else, while the other ranks wait for it.

The heartbeat is a thread of its own and goes on while the main thread hangs, so the rendezvous service takes such a
rank for alive. The others give up after `rendezvous.step_timeout`, meet again, and should not wait for a rank whose
main thread has not returned from the group by then. If it goes on after all, the rank meets the others again, as after
a pause; otherwise its process ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from horizonml.comm.group import Group
from horizonml.runtime.process import own_place, report
from horizonml.text import plain_lines

HUNG = 4  # the exit code of a process that ends because its main thread hangs
LEAVE_SECONDS = 2.0  # for the main thread to return from a group that is over; threads look every 0.2 s
_LOOK_SECONDS = 0.25
_TIDY_SECONDS = 1.0
_LONGEST_LOOK = 1.0  # counted between two looks: this process may have been stopped meanwhile


@dataclass
class Stillness:
    """Counts the seconds for which a group has seen no call, and those since it is over. Times are of any clock."""

    seen: float  # when it was last looked
    calls: int = 0
    still: float = 0.0
    over: float = 0.0

    def look(self, calls: int, over: bool, now: float) -> None:
        """Count the time since the last look, in which this process may have been stopped: that is not counted."""
        passed = min(now - self.seen, _LONGEST_LOOK)
        self.still = self.still + passed if calls == self.calls else 0.0
        self.over = self.over + passed if over else 0.0
        self.seen, self.calls = now, calls


class Watchdog:
    """Watches the thread that makes it, from `with` to its end, as a member of a group."""

    def __init__(
        self,
        group: Group,
        timeout: float,
        patient: bool,
        leave: Callable[[str], object],
        tidy: Callable[[], object] = lambda: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Allow the thread `timeout` seconds without a call of the group, once that is over.

        Then call `leave` with the reason. If the watchdog is `patient`, the thread has as long again to go on; else,
        and after that, call `tidy`, for which it waits briefly, and `end` with the exit code.
        """
        self._group, self._timeout, self._patient, self._leave = group, timeout, patient, leave
        self._tidy, self._end = tidy, end
        self._thread, self._done = threading.get_ident(), threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __exit__(self, *details: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        stillness, left = Stillness(time.monotonic()), False
        while not self._done.wait(_LOOK_SECONDS):
            stillness.look(self._group.calls, self._group.is_over, time.monotonic())
            if stillness.over < LEAVE_SECONDS or stillness.still < self._timeout:
                continue
            reason = self._reason(stillness.still)
            if not left:
                left = True
                self._leave(reason)  # first, since even a terminal that has stopped may be what holds up this process
                faulthandler.dump_traceback(all_threads=True)
                if self._patient:
                    print(f"WARNING: the other ranks go on without this one: {reason}", file=sys.stderr, flush=True)
            if not self._patient or stillness.still >= 2 * self._timeout + LEAVE_SECONDS:
                report(f"{reason}; this process ends with exit code {HUNG}")
                tidying = threading.Thread(target=self._tidy, name="tidying", daemon=True)
                tidying.start()
                tidying.join(_TIDY_SECONDS)  # the disk may be what hangs
                self._end(HUNG)
                return

    def _reason(self, still: float) -> str:
        frames = sys._current_frames()
        stacks = [frames.pop(self._thread, None), *frames.values()]  # perhaps it waits for a thread that loads samples
        places = (own_place(traceback.extract_stack(frame)) for frame in stacks if frame is not None)
        place = next((place for place in places if place is not None), None)
        where = f"; it is at {plain_lines(place)}" if place is not None else ""
        return (
            f"its main thread has made no progress for {still:.0f} s while the other ranks waited for it, longer than "
            f"rendezvous.step_timeout ({self._timeout:g} s){where}"
        )
