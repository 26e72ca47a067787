"""Gives rank numbers to processes whose environment names none: the lowest that no living rank holds."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore

from horizonml.errors import RendezvousError
from horizonml.rendezvous.checks import MOST_RANKS, parse, printable, whole
from horizonml.rendezvous.heartbeat import first_line
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.messages import Ask

RESERVE_SECONDS = 60.0  # in which a process that was given a number joins with it


@dataclass(frozen=True)
class Given:
    """A rank number that a process was given, and the world size of the run that it joins."""

    rank: int
    world_size: int


@dataclass
class Numbers:
    """Remembers which number was reserved for which process. Times are seconds of any clock."""

    _reserved: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)

    def give(self, ask: Ask, held: Mapping[int, tuple[str, int]], closed: Iterable[int], now: float) -> int | None:
        """Return a number for a process, or None if there is none left.

        `held` says which process holds a number; those in `closed` are not given for now.
        """
        process = ask.host_id, ask.pid
        self._reserved = {rank: entry for rank, entry in self._reserved.items() if now < entry[1]}
        taken = {rank for rank, holder in held.items() if holder != process}
        taken |= {rank for rank, (holder, _) in self._reserved.items() if holder != process}
        own = [rank for rank, (holder, _) in self._reserved.items() if holder == process and rank not in taken]
        own += [rank for rank, holder in held.items() if holder == process]
        free = set(range(ask.most)) - taken - set(closed)
        if not (free := set(own) & set(range(ask.most)) or free):
            return None
        rank = min(free)
        self._reserved[rank] = process, now + RESERVE_SECONDS
        return rank


class Asking(threading.Thread):
    """Asks the service for a number; a thread, because a mute listener can hang a store's client for ever."""

    def __init__(self, ask: Ask, host: str, port: int, seconds: float) -> None:
        """Ask the service at `host` and `port`, to which it connects within so many seconds."""
        super().__init__(name="rank number", daemon=True)
        self._ask, self._host, self._port, self._seconds = ask, host, port, seconds
        self._given_up = threading.Event()
        self.outcome: Given | RendezvousError | None = None

    def give_up(self) -> None:
        """Wait no more."""
        self._given_up.set()

    def run(self) -> None:
        try:
            timeout = timedelta(seconds=max(1.0, self._seconds))
            store = TCPStore(self._host, self._port, None, False, timeout, wait_for_workers=False)
            post(store, self._ask.to_json())
            while (answer := peek(store, f"number/{self._ask.number}")) is None:
                if self._given_up.wait(0.1):
                    return
            self.outcome = _read(answer)
        except (RuntimeError, ValueError) as error:
            self.outcome = RendezvousError(
                f"the rendezvous service at {self._host}:{self._port} broke off: {first_line(error)}"
            )


def _read(answer: bytes) -> Given | RendezvousError:
    """Return what the service has answered. Raises ValueError."""
    values = parse(answer)
    if "refused" in values:
        return RendezvousError(f"refused: {printable(str(values['refused']))}")
    return Given(whole(values, "rank", 0, MOST_RANKS - 1), whole(values, "world_size", 1, MOST_RANKS))
