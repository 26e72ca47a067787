"""Where the ranks of a job can meet when the rendezvous service is gone: at one that a member keeps in reserve.

Every rank keeps a `Standby`, a service that serves nobody as long as the one that the ranks were told of answers. When
that one is gone, each member of the group goes to the standby of the lowest rank that it reaches (`MeetingPlaces`), and
reports there as it would to a service that was started anew. All of them know each other's standbys since they met, so
nothing has to be agreed on. Members that were cut off from the others cannot form a group of their own: that takes more
than half of the last one (see `members`). When the service that the ranks were told of answers again, they go back to
it, because those who come later know only that one; a service that still has the state of an earlier generation refuses
them, and they stay. Who was told of a member's standby, and not of the service, learns there where that one is.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace

from horizonml.errors import RendezvousError
from horizonml.machine.network import Address, AddressProbe, is_loopback, listen
from horizonml.rendezvous.client import Client, Endpoint, ServiceError, ServiceRefuses, Unwanted
from horizonml.rendezvous.messages import Fingerprint, Nothing
from horizonml.rendezvous.roster import Roster
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.service import Handlers, Service, at_once

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 1.5  # for a service whose machine answers: its process may just be started anew
_SILENT_SECONDS = 0.7  # without an answer, after which its machine is taken for gone
_TRY_SECONDS = 0.75  # for a connection, once there are other places
_REACH_SECONDS = 0.5  # for standbys to answer
_AFTER_FIRST_SECONDS = 0.1  # for those of lower ranks, once one has answered
_LOOK_SECONDS = 0.01
_AT_ONCE = 8  # standbys that are tried at the same time
_AGAIN_SECONDS = 0.5  # between two looks whether the service answers again, so that newcomers there find the others
_REFUSED_SECONDS = 20.0  # the same once it has refused
_MOVE_SECONDS = 3.0  # in which all go back to it, once one has


class MeetingPlaces:
    """The services at which a rank can meet the others, and the one at which it does. Any thread may use it."""

    def __init__(self, endpoint: Endpoint, standby: Standby | None = None) -> None:
        """Begin at the service that this rank was told of; `standby` is this rank's own."""
        self.standby = standby
        self.reached: set[Address] = set()  # the standbys that have answered once
        self.returned = False  # whether this rank was elsewhere meanwhile
        self.told = self.now = endpoint  # where it was told to meet the others, and where it does
        self._refusal = ""  # why that one was of no use when it answered last
        self._serves = True  # whether that is a service, and not a member's standby
        self._standbys: list[Endpoint] = []
        self._lost_since: float | None = None
        self._lock = threading.Lock()
        self._look_at, self._answers = 0.0, False
        if standby is not None:
            standby.greeting = self._greeting

    def __str__(self) -> str:
        """Return for people the service at which this rank meets the others now."""
        return str(self.now)

    @property
    def away(self) -> bool:
        """Return whether this is not the service that this rank was told of."""
        return self.now is not self.told

    def know(self, members: Sequence[Fingerprint]) -> None:
        """Take note of the members of a group, in the order of ranks."""
        tls = self.told.tls
        with self._lock:
            self._standbys = [
                Endpoint(one.address, one.standby_port, tls, one.standby_key or None)
                for one in members
                if one.standby_port
            ]
        threading.Thread(target=self._reach_all, args=(self._standbys,), name="standbys", daemon=True).start()

    def connect(self, seconds: float = 5.0) -> Client:
        """Return a connection to the service, or to the standby that takes its place. Raises ServiceError."""
        with self._lock:
            begin = time.monotonic()
            try:
                client = self.now.connect(min(seconds, _TRY_SECONDS) if self._standbys else seconds, not self.away)
            except ServiceError as error:
                if isinstance(error, Unwanted) and not self.away:
                    raise
                self._lost_since = self._lost_since or begin
                now = time.monotonic()
                waits = now - begin < _SILENT_SECONDS and now - self._lost_since < _PATIENCE_SECONDS
                if not self.away and waits:
                    raise
                found = self._elsewhere()
                if found is None:
                    raise
                return found
            self._lost_since = None
            if not self.away:
                self._settle(client)
            return client

    def _settle(self, client: Client) -> None:
        """Take note of where the connection leads from where this rank was told to go, if that is a standby."""
        here = replace(self.now.at(client.address), key=client.key or "")
        if client.key is None:
            if self.now.key is None or here != self.now:  # a connection ends when this is another object
                self.told = self.now = here
            return
        service = None
        with suppress(ServiceError, ValueError):
            service = self.now.at(client.service) if client.service is not None else None
        self._serves = service is not None and is_loopback(service.host) <= is_loopback(here.host)
        if service is not None and self._serves:
            self.told = service
        self.now = here

    def answers_again(self) -> bool:
        """Return whether the service that this rank was told of answers, while it is elsewhere; never waits."""
        if self._answers:
            self._answers = False
            return self.away
        if self.away and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _AGAIN_SECONDS
            threading.Thread(target=self._look, name="service", daemon=True).start()  # names may take long to resolve
        return False

    def return_if_it_answers(self, it_does: bool) -> bool:
        """Go back to the service that this rank was told of, if it is known to answer again; return whether it is."""
        if not (it_does and self.away) and not self.answers_again():
            return False
        self._back()
        return True

    def go_back(self, report: Callable[[Client], object]) -> bool:
        """Go back to the service that this rank was told of, if `report` does not raise ServiceError there."""
        try:
            with closing(self.told.connect(_TRY_SECONDS)) as client:
                report(client)
        except (ServiceRefuses, Unwanted) as error:
            self._look_at = time.monotonic() + _REFUSED_SECONDS
            if self._refusal != (refusal := str(error)):
                _log.warning("the rendezvous service at %s is no use yet: %s", self.told, error)
            self._refusal = refusal
            return False
        except ServiceError:
            return False
        self._back()
        return True

    def stay_away(self) -> None:
        """Go to another place than the service that this rank was told of, which refuses it."""
        with self._lock:
            self._look_at = time.monotonic() + _REFUSED_SECONDS
            found = self._elsewhere()
            if found is not None:
                found.close()

    def follow(self) -> bool:
        """Go where a member of the last group meets the others, if that is elsewhere; return whether it is.

        A rank asks this that waits where no group runs, because it was cut off, and to which the others do not come.
        """
        with self._lock:
            for place in self._reached([one for one in self._standbys if one != self._own()] or self._standby_here()):
                with suppress(ServiceError, ValueError):
                    client = place.connect(_TRY_SECONDS, False)
                    client.close()
                    there = place if client.elsewhere is None else place.at(client.elsewhere)
                    if there == self.now or self._is_told(there):
                        continue
                    if there != place:
                        client = there.connect(_TRY_SECONDS, False)
                        client.close()
                    if client.runs or self._comes_before(there):
                        self._go(there, "the others do not come to")
                        return True
        return False

    def _standby_here(self) -> list[Endpoint]:
        """Return the standby at which a newcomer waits, whose rank may have gone elsewhere."""
        return [self.now] if self.away else []

    def _comes_before(self, place: Endpoint) -> bool:
        """Return whether a standby is that of a lower rank than the one here, so that two ranks never change places."""
        known = self._standbys
        return not (self.now in known and place in known) or known.index(place) < known.index(self.now)

    def _back(self) -> None:
        with self._lock:
            self.now, self._lost_since, self.returned = self.told, None, True

    def close(self) -> None:
        """End this rank's standby."""
        if self.standby is not None:
            self.standby.close()

    def _reach_all(self, places: Sequence[Endpoint]) -> None:
        """Find out to which of the standbys no firewall closes the way."""
        for place in self._reached(places, _TRY_SECONDS):
            self.reached.add((place.host, place.port))

    def _look(self) -> None:
        with suppress(ServiceError):
            client = self.told.connect(_TRY_SECONDS, False)
            client.close()
            self._answers = client.key is None

    def _elsewhere(self) -> Client | None:
        """Return a connection to the first of the standbys that answers, and stay there."""
        for place in self._reached(self._standbys):
            with suppress(ServiceError):
                client = place.connect(_TRY_SECONDS, False)
                with suppress(ServiceError, ValueError):  # where its rank says that the others are, if that is better
                    there = place.at(client.elsewhere) if client.elsewhere is not None else place
                    if there not in (place, self.now) and not self._is_told(there):
                        other = there.connect(_TRY_SECONDS, False)
                        client.close()
                        client, place = other, there
                self._go(place)
                return client
        return None

    def _is_told(self, place: Endpoint) -> bool:
        """Return whether a place is the service that this rank was told of, to which it goes back in another way."""
        return self._serves and place == self.told

    def _go(self, place: Endpoint, why: str = "no answer from") -> None:
        if place != self.now and self.away:
            _log.warning("%s the rank at %s; the ranks meet at %s now", why, self.now, place)
        elif place != self.now:
            _log.warning("%s the rendezvous service at %s; the ranks meet at %s until it is back", why, self.now, place)
        self.now = place
        self._look_at = max(self._look_at, time.monotonic() + _AGAIN_SECONDS)

    def _reached(self, places: Sequence[Endpoint], after_first: float = _AFTER_FIRST_SECONDS) -> Iterator[Endpoint]:
        """Yield those that accept a connection; those of lower ranks come first."""
        for start in range(0, len(places), _AT_ONCE):
            yield from self._reached_of(places[start : start + _AT_ONCE], after_first)

    def _reached_of(self, places: Sequence[Endpoint], after_first: float) -> list[Endpoint]:
        until = time.monotonic() + _REACH_SECONDS
        with closing(AddressProbe([(one.host, one.port) for one in places])) as probe:
            while probe.silent and time.monotonic() < until:
                probe.look()
                if probe.addresses - probe.silent - probe.refused:
                    until = min(until, time.monotonic() + after_first)
                time.sleep(_LOOK_SECONDS)
            return [one for one in places if (one.host, one.port) not in probe.silent | probe.refused]

    def _own(self) -> Endpoint | None:
        standby = self.standby
        return Endpoint(*standby.place, self.told.tls) if standby is not None and standby.place is not None else None

    def _greeting(self) -> dict[str, str | None]:
        """Return what newcomers learn at this rank's own standby: where the others are, and where the service was."""
        now, told = self.now, self.told
        return {
            "elsewhere": None if now == self._own() else str(now),
            "service": str(told) if self._serves else None,
        }


@dataclass(frozen=True)
class Lobby:
    """What lets new devices come to a run of `horizonml up` at a standby."""

    handlers: Callable[[Roster], Handlers]  # of what they ask
    announce: Callable[[tuple[str, int]], AbstractContextManager[object]]  # that the run is at this address


class Standby(threading.Thread):
    """The service that a rank keeps in reserve, for as long as its process lives."""

    def __init__(self, tls: ssl.SSLContext | None, lobby: Lobby | None = None) -> None:
        """Protect connections as the service does; where that one took in devices, the `lobby` does."""
        super().__init__(name="standby", daemon=True)
        self._tls, self._lobby = tls, lobby
        self._announced: threading.Event | None = None  # which takes the announcement back
        self.place: tuple[str, int] | None = None
        self.key = secrets.token_hex(8)  # by which members know it: another process may have its port one day
        self.greeting: Callable[[], dict[str, str | None]] = dict
        self._listener: socket.socket | None = None
        self._anew, self._ended = threading.Event(), threading.Event()

    def listen(self, address: str, port: int) -> int:
        """Listen at this rank's address, and return the port: this one, if it is free; 0 if that is impossible."""
        if self.place is None or self.place[0] != address:
            before = self._listener
            try:
                self._listener = _listen(address, port)
            except RendezvousError as error:
                _log.warning("this rank could not take the service's place: %s", error)
                return 0
            self.place = (address, int(self._listener.getsockname()[1]))
            self._anew.set()
            if before is not None:
                before.close()
            if not self.is_alive():
                self.start()
        return self.place[1]

    def close(self) -> None:
        """End the service."""
        self._ended.set()
        if self.is_alive():
            self.join(1.0)
        if self._listener is not None:
            self._listener.close()

    def run(self) -> None:
        while not self._ended.is_set():
            self._anew.clear()
            self._until = float("inf")
            assert self._listener is not None
            self._roster = Roster(standby=True)
            handlers = self._lobby.handlers(self._roster) if self._lobby is not None else {}
            self._service = Service(
                self._listener.dup(),
                self._tls,
                handlers={**handlers, "moved": (Nothing, self._moved)},
                roster=self._roster,
                greeting=self._greeting,
            )
            self._service.run(self._is_over)
        self._announce(False)

    def _greeting(self) -> dict[str, object]:
        return {**self.greeting(), "key": self.key, "runs": bool(self._roster.running())}

    def _moved(self, peer: Peer, request: Nothing) -> Answer:
        """Let all go back to the service, because a member of the group has."""
        if peer.stays:  # as those do that have joined
            self._service.moves, self._until = True, min(self._until, time.monotonic() + _MOVE_SECONDS)
        return at_once()

    def _is_over(self) -> bool:
        """Return whether to end, or to begin anew: at another address, or once all have gone back."""
        gone = self._service.moves and (self._service.idle or time.monotonic() > self._until)
        self._announce(bool(self._roster.running()) and not gone)
        return self._ended.is_set() or self._anew.is_set() or gone

    def _announce(self, wanted: bool) -> None:
        """Let new devices find this service as long as a group meets here."""
        if self._lobby is None or self.place is None or wanted == (self._announced is not None):
            return
        if self._announced is not None:
            self._announced.set()
            self._announced = None
            return
        over = self._announced = threading.Event()
        announce, place = self._lobby.announce, self.place

        def work() -> None:
            with announce(place):
                over.wait()

        threading.Thread(target=work, name="announcement", daemon=True).start()


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except (RendezvousError, OverflowError):  # another rank of this machine has it, or there is none
        return listen(address, 0)
