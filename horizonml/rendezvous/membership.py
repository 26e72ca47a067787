"""What a rank knows of the group that it is a member of."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from horizonml.errors import PeerLost
from horizonml.rendezvous.checks import parse
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.heartbeat import BEAT_SECONDS, Heartbeat, first_line
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.messages import Departure, Farewell, Leave

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

    def name_lost(self, error: PeerLost, patience: float = 2.5 * BEAT_SECONDS) -> PeerLost:
        """Return the same error, naming the ranks that have left, or whose heartbeats stop for `patience` seconds."""
        store = self._heartbeat.store
        try:
            others = {rank: join for rank, join in enumerate(self._joins) if rank != self.rank}
            before = {rank: peek(store, f"beat/{join}") for rank, join in others.items()}
            time.sleep(patience)
            lost, ends_job = [], False
            for rank, join in others.items():
                member = self.members[rank]
                gone = peek(store, f"gone/{join}")
                if gone is not None:
                    farewell = Farewell.from_json(parse(gone))
                    if farewell.departure is not Departure.LOST_PEER:
                        ends_job |= farewell.departure is Departure.FAILED
                        lost.append(f"rank {member.rank} on {member.hostname} left: {farewell.reason}")
                elif peek(store, f"beat/{join}") == before[rank]:
                    lost.append(f"rank {member.rank} on {member.hostname} gives no sign of life")
        except RuntimeError as problem:
            return PeerLost(f"{error}; the rendezvous service does not answer either ({first_line(problem)})")
        except ValueError as problem:
            return PeerLost(f"{error}; what the rendezvous service says of the others is damaged ({problem})")
        return PeerLost(f"{'; '.join(lost)} ({error})", ends_job) if lost else error

    def leave(self, reason: str, departure: Departure = Departure.OTHER) -> None:
        """Tell the service that this rank leaves, and why."""
        self._heartbeat.end()
        try:
            post(self._heartbeat.store, Leave(self._joins[self.rank], Farewell(reason, departure)).to_json())
        except RuntimeError as error:
            _log.debug("could not say goodbye: %s", error)
