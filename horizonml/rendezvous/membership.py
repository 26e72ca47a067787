"""What a rank knows of the group that it is a member of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from horizonml.errors import PeerLost
from horizonml.rendezvous.checks import parse
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.heartbeat import BEAT_SECONDS, Heartbeat, first_line
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.messages import Departure, Ended, Farewell, Leave, Lost, read_ended

T = TypeVar("T")
_ANSWER_SECONDS = 2.0
_log = logging.getLogger(__name__)


@dataclass
class Membership:
    """This rank's place in a formed group. Its rank there may be lower than its own, if others are gone."""

    rank: int
    generation: int
    members: list[Fingerprint]
    _joins: list[int]
    _store: Store
    _heartbeat: Heartbeat
    lost: tuple[Lost, ...] = ()  # whom the service has declared lost, once `name_lost` has asked

    @property
    def world_size(self) -> int:
        """Return how many ranks are in the group."""
        return len(self.members)

    @property
    def newcomers(self) -> Sequence[int]:
        """Return the ranks that wait to be taken in, as far as this rank knows: only rank 0 asks."""
        return self._heartbeat.newcomers

    @property
    def store(self) -> Store:
        """Return the store in which this generation's ranks exchange their addresses."""
        return PrefixStore(f"generation-{self.generation}", self._store)

    @property
    def ended(self) -> Ended | None:
        """Return how this generation has ended, or None as long as the service has not declared it over."""
        return self._heartbeat.ended

    def on_end(self, callback: Callable[[Ended], object]) -> None:
        """Call this once, from the heartbeat's thread, when the service declares this generation over.

        The thread beats no more while the callback runs, so it must return soon. If the generation is over already,
        it is called at once, from this thread. After `leave` it is not called any more.
        """
        self._heartbeat.on_end(callback)

    def name_lost(self, error: PeerLost, patience: float = 2.4 * BEAT_SECONDS) -> PeerLost:
        """Return the same error, naming the ranks that are lost, as soon as the service knows them.

        If it does not within `patience` seconds, those are named whose heartbeats have stopped meanwhile.
        """
        others = {rank: join for rank, join in enumerate(self._joins) if rank != self.rank}
        until = time.monotonic() + patience
        try:
            before = self._ask(lambda store: _beats(store, others))
            while True:
                lost, ends_job = self._ask(lambda store: self._published(store, others))
                left = until - time.monotonic()
                if lost or left <= 0:
                    break
                time.sleep(min(0.1, left))
            if not lost:
                after = self._ask(lambda store: _beats(store, others))
                # A rank that has left has lost a peer, too, and meets the others again.
                left_too = self._ask(lambda store: [r for r, join in others.items() if peek(store, f"gone/{join}")])
                quiet = [rank for rank in others if before.get(rank) == after.get(rank) and rank not in left_too]
                lost = [f"{_place(self.members[rank])} gives no sign of life" for rank in quiet]
        except RuntimeError as problem:
            return PeerLost(f"{error}; the rendezvous service does not answer either ({first_line(problem)})")
        except ValueError as problem:
            return PeerLost(f"{error}; what the rendezvous service says of the others is damaged ({problem})")
        finally:
            if self._heartbeat.stop.is_set():  # this rank has left, and this was its last question
                self._heartbeat.line.close()
        return PeerLost(f"{'; '.join(lost)} ({error})", ends_job) if lost else error

    def _published(self, store: Store, others: dict[int, int]) -> tuple[list[str], bool]:
        """Return whom the service knows to be lost, for people, and whether that ends the job. Raises ValueError."""
        over = peek(store, f"over/{self.generation}")
        self.lost = read_ended(over).lost if over is not None else ()
        evicted = self.ended is not None and self.ended.evicted
        if evicted or self.members[self.rank].rank in [one.rank for one in self.lost]:
            return ["this rank gave no sign of life for too long, and its group goes on without it"], False
        known = {one.rank: str(one) for one in self.lost}
        ends_job = False
        for rank, join in others.items():
            gone, member = peek(store, f"gone/{join}"), self.members[rank]
            if gone is None:
                continue
            farewell = Farewell.from_json(parse(gone))
            ends_job |= farewell.departure is Departure.FAILED
            if farewell.departure not in (Departure.LOST_PEER, Departure.AGAIN, Departure.SILENT):
                known.setdefault(member.rank, f"{_place(member)} left: {farewell.reason}")
        return [words for _, words in sorted(known.items())], ends_job

    def leave(self, reason: str, departure: Departure = Departure.OTHER) -> None:
        """Tell the service that this rank leaves, and why."""
        self._heartbeat.end()
        try:
            farewell = Leave(self._joins[self.rank], Farewell(reason, departure)).to_json()
            self._ask(lambda store: post(store, farewell))
        except RuntimeError as error:
            _log.debug("could not say goodbye: %s", error)
        if departure is not Departure.LOST_PEER:  # or `name_lost` still has a question
            self._heartbeat.line.close()

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Return the service's answer. Raises RuntimeError if there is none soon."""
        return self._heartbeat.line.ask(question, _ANSWER_SECONDS)


def _beats(store: Store, joins: dict[int, int]) -> dict[int, bytes | None]:
    """Return where the heartbeats of these joins stand, by the rank in the group."""
    return {rank: peek(store, f"beat/{join}") for rank, join in joins.items()}


def _place(member: Fingerprint) -> str:
    """Return a rank and its machine, for people."""
    return f"rank {member.rank} on {member.hostname}"
