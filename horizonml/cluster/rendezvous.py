"""The rendezvous service: it holds the store through which ranks meet (see `meeting` for their side).

The service is its own process, so losing any rank loses no state. It alone judges who belongs together (see
`roster`); ranks only post what they are and wait for its verdict. The store is PyTorch's TCPStore, which has no
authentication: keep its port inside a trusted network. Values are JSON, never pickle.

    rank     -> event/<i>    join with a fingerprint, or leave with a reason; <i> counts up and names the join
    rank     -> beat/<i>     counts up while the rank lives
    service  -> verdict/<i>  the group and its generation, or why not
    service  -> status       who is missing, and who waits to be taken in by the running group
    service  -> gone/<i>     the reason with which a rank left
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from horizonml.cluster.roster import Fingerprint, Formed, Roster

_log = logging.getLogger(__name__)
_STORE_TIMEOUT = timedelta(seconds=30)
_LOOK_SECONDS = 0.25  # how often heartbeats are looked at


class Service:
    """Holds the store and judges joins, until stopped."""

    def __init__(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which the service takes over (see `listen`)."""
        host, self.port = listener.getsockname()[:2]
        self._store = TCPStore(
            host, self.port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._roster = Roster()
        self._seen = 0

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop` says so."""
        beats_due = 0.0
        while not stop():
            time.sleep(0.05)
            changed = self._read_events()
            now = time.monotonic()
            if changed or now >= beats_due:
                for number in self._roster.joins():
                    self._roster.beat(number, self._store.add(f"beat/{number}", 0), now)
                beats_due = now + _LOOK_SECONDS
                self._announce(now)

    def _read_events(self) -> bool:
        changed = False
        last = self._store.add("events", 0)
        for number in range(self._seen + 1, last + 1):
            if not self._store.check([f"event/{number}"]):
                break  # counted, but not written yet
            self._seen = number
            try:
                event = json.loads(self._store.get(f"event/{number}"))
                if "leave" in event:
                    self._roster.leave(int(event["leave"]))
                    self._store.set(f"gone/{int(event['leave'])}", str(event["reason"]))
                else:
                    fingerprint = Fingerprint.from_json(event)
                    self._roster.join(number, fingerprint, time.monotonic())
                    _log.info(
                        "rank %d of %d joined from %s", fingerprint.rank, fingerprint.world_size, fingerprint.place
                    )
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("ignored a malformed message (%s)", error)
            self._store.delete_key(f"event/{number}")
            changed = True
        return changed

    def _announce(self, now: float) -> None:
        for verdict in self._roster.decide(now):
            if isinstance(verdict, Formed):
                _log.info("generation %d: %d ranks", verdict.generation, len(verdict.members))
                members = [member.to_json() for member in verdict.members]
                message = {"generation": verdict.generation, "joins": verdict.joins, "members": members}
            else:
                _log.warning("refused: %s", verdict.reason)
                message = {"refused": verdict.reason}
            for number in verdict.joins:
                self._store.set(f"verdict/{number}", json.dumps(message))
        status = {"missing": self._roster.missing(), "newcomers": self._roster.newcomers()}
        self._store.set("status", json.dumps(status))
