"""Serves the rendezvous: holds the store through which ranks meet (see `meeting` for their side).

The service is its own process, so losing any rank loses no state. It alone judges who belongs together (see
`roster`); ranks only post what they are and wait for its verdict. The store is PyTorch's TCPStore, which has no
authentication: keep its port inside a trusted network. Values are JSON, never pickle. Every join has an id that the
rank draws at random, so that it stays the same when the service is started anew.

    rank     -> events        a queue: join with a fingerprint, withdraw while waiting, leave with a reason, or resume
                              (a member of a group that runs already, which a new service must learn of), or ask for a
                              rank number
    rank     -> beat/<id>     counts up while the rank lives
    service  -> verdict/<id>  the group and its generation, or why not, or that the job is complete
    service  -> number/<id>   the rank number that was asked for, or why there is none
    service  -> status        who is missing, who runs, who waits to be taken in, and who was refused lately
    service  -> gone/<id>     why a rank left, or was declared lost: a reason for people, and what kind of reason it is
    service  -> over/<n>      that generation n is over, why, and whom it has lost
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store, TCPStore

from horizonml.rendezvous.checks import printable
from horizonml.rendezvous.mailbox import peek, take
from horizonml.rendezvous.messages import (
    Ask,
    Complete,
    Event,
    Formed,
    Join,
    Leave,
    Refused,
    Resume,
    Status,
    UnreadableJoin,
    Verdict,
    Withdraw,
    read_event,
)
from horizonml.rendezvous.roster import Roster

_log = logging.getLogger(__name__)
_STORE_TIMEOUT = timedelta(seconds=30)
_LOOK_SECONDS = 0.25  # how often heartbeats are looked at
_MOST_EVENTS = 200  # read before heartbeats and verdicts have their turn
_MOST_DIGITS = 18  # of a heartbeat
_MOST_ASKS, _ASK_SECONDS = 4096, 120.0  # questions for rank numbers that wait, and for how long
_AWAY_SECONDS = 1.0  # between two looks: the service was stopped, or its machine asleep, and no rank was silent
SETTLE_SECONDS = 4.0  # in which a group that ran before the service was started anew reports


class Service:
    """Holds the store and judges joins until it is stopped."""

    def __init__(self, listener: socket.socket, settle: float = 0.0) -> None:
        """Serve on a listening socket, which the service takes over (see `listen`).

        No first meeting is held for `settle` seconds: a group may run here that met at the service before this one.
        """
        self._host, self.port = listener.getsockname()[:2]
        self._server = TCPStore(
            self._host, self.port, None, True, _STORE_TIMEOUT, False, master_listen_fd=listener.detach()
        )
        self._store: Store = self._server
        self._roster = Roster(time.monotonic() + settle)
        self._over = 0  # the generation whose end was logged last
        self._asks: deque[tuple[Ask, float]] = deque(maxlen=_MOST_ASKS)  # and when they came

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop` says so."""
        beats_due, looked = 0.0, time.monotonic()
        while not stop():
            try:
                changed = self._read_events()
                now = time.monotonic()
                if changed or now >= beats_due:
                    if now - looked > _AWAY_SECONDS:
                        self._roster.slept(now - looked)
                    looked = now
                    self._read_beats(now)
                    beats_due = now + _LOOK_SECONDS
                    self._announce(now)
                    self._answer(now)
            except RuntimeError as error:
                # The store still serves the ranks: only this process's own connection to it was dropped.
                _log.warning("connecting to the store again (%s)", printable(str(error), 200))
                with suppress(RuntimeError):  # then the next round comes here again
                    self._store = TCPStore(self._host, self.port, None, False, _STORE_TIMEOUT, False)
            time.sleep(0.05)

    def _read_events(self) -> bool:
        """Handle the events that have come, and return whether there were any."""
        for count in range(_MOST_EVENTS):
            message = take(self._store)
            if message is None:
                return count > 0
            try:
                self._handle(read_event(message))
            except ValueError as error:
                _log.warning("ignored a malformed message: %s", error)
                if isinstance(error, UnreadableJoin):
                    reason = f"the rendezvous service cannot read its join: {error}"
                    self._tell(Refused([error.number], reason))
        return True

    def _handle(self, event: Event) -> None:
        """Do what an event asks for. Raises ValueError."""
        now = time.monotonic()
        match event:
            case Leave(number, farewell):
                if self._roster.leave(number, farewell, now):
                    self._store.set(f"gone/{number}", json.dumps(farewell.to_json()))
            case Ask():
                self._asks.append((event, now))
            case Withdraw(number):
                if self._roster.withdraw(number):
                    self._tell(Refused([number], "it has withdrawn"))
            case Resume(number, fingerprint, beside):
                self._roster.resume(number, fingerprint, beside, now)
                _log.info("rank %d runs in generation %d", fingerprint.rank, fingerprint.generation)
            case Join(number, fingerprint):
                try:
                    self._roster.join(number, fingerprint, now)
                except ValueError as error:
                    raise UnreadableJoin(number, str(error)) from None
                _log.info("rank %d of %d joined from %s", fingerprint.rank, fingerprint.world_size, fingerprint.place)

    def _read_beats(self, now: float) -> None:
        """Let the roster know which heartbeats have moved."""
        for number in self._roster.joins():
            beat = peek(self._store, f"beat/{number}")
            if beat is not None and len(beat) <= _MOST_DIGITS and beat.isdigit():
                self._roster.beat(number, int(beat), now)

    def _answer(self, now: float) -> None:
        """Give rank numbers to those who have asked for one."""
        for _ in range(len(self._asks)):
            ask, came = self._asks.popleft()
            given = self._roster.give_number(ask, now)
            if given is not None:
                values = given.to_json() if isinstance(given, Refused) else asdict(given)
                self._store.set(f"number/{ask.number}", json.dumps(values))
            elif now - came < _ASK_SECONDS:
                self._asks.append((ask, came))

    def _announce(self, now: float) -> None:
        """Post what has been decided, and the status."""
        verdicts = self._roster.decide(now)
        for number, farewell in self._roster.farewells().items():
            self._store.set(f"gone/{number}", json.dumps(farewell.to_json()))
        # Before the verdicts and the status: who learns that it is no member any more must find out why.
        for generation, ended in self._roster.endings().items():
            known = "; ".join(map(str, ended.lost)) if generation == self._over else ended.reason
            _log.warning("generation %d is over: %s", generation, known)
            self._over = generation
            self._store.set(f"over/{generation}", json.dumps(ended.to_json()))
        for verdict in verdicts:
            if isinstance(verdict, Formed):
                _log.info("generation %d: %d ranks", verdict.generation, len(verdict.members))
            elif isinstance(verdict, Complete):
                _log.info("told %d late ranks that the job is complete", len(verdict.joins))
            else:
                _log.warning("refused: %s", verdict.reason)
            self._tell(verdict)
        roster = self._roster
        status = Status(
            roster.missing(),
            roster.running(),
            roster.newcomers(now),
            roster.refused(now),
            roster.short(now),
            roster.held_back(now),
        )
        self._store.set("status", json.dumps(status.to_json()))

    def _tell(self, verdict: Verdict) -> None:
        """Post a verdict for those whom it concerns."""
        message = json.dumps(verdict.to_json())
        for number in verdict.joins:
            self._store.set(f"verdict/{number}", message)
