"""What a rank knows of the group that it is a member of: its heartbeat at the service, and the group's store.

`GroupStore` is the store through which PyTorch's process groups exchange addresses, backed by the rendezvous service.

`Heartbeat` is a thread with a connection of its own, which does nothing but beat and hear how the group is: a step that
computes, a disk that blocks or a collective that waits does not hold it up, because all of them release the
interpreter's lock. A garbage collection does not release it, but takes seconds only beyond tens of millions of objects.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from horizonml.errors import PeerLost
from horizonml.rendezvous.client import Client, Contact, ServiceError, ServiceRefuses
from horizonml.rendezvous.messages import (
    Beat,
    BeatAnswer,
    Departure,
    Ended,
    Farewell,
    Fingerprint,
    GetKeys,
    JoinVerdict,
    Leave,
    Lost,
    Nothing,
    Peers,
    Resume,
    Resumed,
    SetKey,
    Unreached,
)
from horizonml.rendezvous.places import MeetingPlaces
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.text import printable

_CONNECT_SECONDS = 1.0
BEAT_SECONDS = 0.25
_BEAT_ANSWER_SECONDS = 1.5  # for the answer to a heartbeat, after which the connection is made anew

OnEnd = Callable[[Ended], object]


class Heartbeat(threading.Thread):
    """Shows that this rank lives, also to a service that was started anew, and learns when its generation is over.

    The lead looks for newcomers, too.
    """

    def __init__(self, contact: Contact, places: MeetingPlaces, resume: Resume, beats: int, lead: bool) -> None:
        """Beat at the service, in one of the `places`; `beats` were given before.

        `resume` tells a service that does not know this rank where it is a member.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._contact, self._places, self._resume, self._beats, self._lead = contact, places, resume, beats, lead
        self._telling = threading.Lock()
        self._callbacks: list[OnEnd] = []
        self._said: set[str] = set()  # why ranks are held back, as far as it was reported
        self.on_replaced: Callable[[], object] = lambda: None
        self.stop = threading.Event()
        self.newcomers: Sequence[int] = ()
        self.ended: Ended | None = None

    def on_end(self, callback: OnEnd) -> None:
        """Call this once when the generation is over; at once if it is already."""
        with self._telling:
            if self.ended is None:
                self._callbacks.append(callback)
                return
        callback(self.ended)

    def end(self) -> None:
        """Stop: once this returns, the service hears nothing more, and nothing is called."""
        with self._telling:
            self.stop.set()
            self._callbacks.clear()

    def run(self) -> None:
        connected = True
        while not self.stop.is_set():
            try:
                self._beats += 1
                if self._places.answers_again():
                    self._go_back()
                answer = read(BeatAnswer, self._contact.ask(fields_of(Beat(self._beats), "beat"), _BEAT_ANSWER_SECONDS))
                if not connected:
                    connected = True
                    if not self._places.away:
                        _log.warning("the rendezvous service is back")
                if answer.status.moves:
                    self._go_back()
                else:
                    self._act(answer)
            except (ServiceError, ValueError) as error:
                if connected and not self.stop.is_set():
                    _log.warning(
                        "the rendezvous service does not answer; training goes on without it until it is back (%s)",
                        first_line(error),
                    )
                    connected = False
                    continue  # at once, on a new connection
            self.stop.wait(BEAT_SECONDS)
        self._contact.close()

    def _go_back(self) -> None:
        """Go back to the service that this rank was told of, if that takes it; the standby then begins anew."""
        if self._places.go_back(lambda client: client.ask(fields_of(self._resume, "resume"))):
            with suppress(ServiceError):
                self._contact.tell_last(fields_of(Nothing(), "moved"))
            _log.warning("the ranks meet at %s again", self._places.now)

    def _act(self, answer: BeatAnswer) -> None:
        if self._lead:
            self.newcomers = list(answer.status.newcomers)
            for held in answer.status.held:
                if held.reason not in self._said:
                    self._said.add(held.reason)
                    _log.warning("%s", held.reason)
        if answer.ended is not None:
            self._tell(answer.ended)
        elif self.ended is None and not answer.status.member:
            with self._telling:
                if self.stop.is_set():
                    return
                resumed = read(Resumed, self._contact.ask(fields_of(self._resume, "resume")))
            if resumed.replaced:
                self.on_replaced()

    def _tell(self, ended: Ended) -> None:
        with self._telling:
            if self.stop.is_set() or self.ended is not None:
                return
            self.ended = ended
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(ended)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, because PyTorch appends its stack."""
    return printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__


_HOLD_SECONDS = 0.2  # that the service holds a request; meanwhile no other thread can use the connection


class GroupStore(Store):
    """The keys of one generation. A key belongs to the rank that sets it; what cannot be done raises RuntimeError."""

    def __init__(self, contact: Contact, ports: Iterable[int], own: dict[str, str], timeout: float = 300.0) -> None:
        """Ask through `contact`; a key that is not there is awaited for `timeout` seconds.

        `ports` are those of rendezvous services, whose connections do not belong to the group. In `own` the keys are
        kept that this rank sets, because it has to set them anew where the ranks meet next.
        """
        super().__init__()
        self._contact, self.ports, self._own, self._seconds = contact, frozenset(ports), own, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key of this rank."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._own[key] = base64.b64encode(content).decode()
        self._contact.ask(fields_of(SetKey(key, self._own[key]), "set"))

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is there."""
        (value,) = self._await([key], self._seconds)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values as soon as they are there."""
        return self._await(keys, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are there."""
        self._await(keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        answer = self._ask(keys, 0.0, check=True).get("there")
        return isinstance(answer, list) and len(answer) == len(keys) and all(one is True for one in answer)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long keys are awaited."""
        self._seconds = timeout.total_seconds()

    def _await(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            values = self._ask(keys, max(0.0, min(_HOLD_SECONDS, left))).get("values")
            if not isinstance(values, list) or len(values) != len(keys):
                raise ServiceError("the rendezvous service sent other keys than were asked for")
            missing = [key for key, value in zip(keys, values, strict=True) if not isinstance(value, str)]
            if not missing:
                return [base64.b64decode(value) for value in values]
            if left <= 0:
                raise ServiceError(f"{missing[0]} was not set by any rank within {seconds:.0f} s")

    def _ask(self, keys: Sequence[str], hold: float, check: bool = False) -> Fields:
        return self._contact.ask(fields_of(GetKeys(list(keys), hold, check), "get"))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectedGroup:
    """A group in which all ranks had connected, so that it could train."""

    generation: int
    members: Sequence[Fingerprint]


@dataclass
class Membership:
    """This rank's place in a formed group. Its rank there may be lower than its own, if others are gone."""

    rank: int
    generation: int
    members: list[Fingerprint]
    _contact: Contact
    _heartbeat: Heartbeat
    _ports: frozenset[int]  # of rendezvous services
    trained: ConnectedGroup  # the last group that it was in and whose ranks had all connected; at first the first one
    _keys: dict[str, str]  # that this rank has set, with their values in base64
    _store: GroupStore | None = None
    lost: tuple[Lost, ...] = ()  # whom the service has declared lost, once `name_lost` has asked

    @property
    def world_size(self) -> int:
        """Return how many ranks are in the group."""
        return len(self.members)

    def connected(self) -> None:
        """Take note that all ranks have connected, so that a majority of this group decides how to go on."""
        self.trained = ConnectedGroup(self.generation, self.members)

    @property
    def newcomers(self) -> Sequence[int]:
        """Return the ranks that wait to be taken in, as far as this rank knows: only rank 0 asks."""
        return self._heartbeat.newcomers

    @property
    def store(self) -> Store:
        """Return the store in which this generation's ranks exchange their addresses."""
        if self._store is None:  # PyTorch calls it as long as the group lives, so its Python part must live, too
            self._store = GroupStore(self._contact, self._ports, self._keys)
        return PrefixStore(f"generation-{self.generation}", self._store)

    @property
    def ended(self) -> Ended | None:
        """Return how this generation has ended, or None as long as the service has not declared it over."""
        return self._heartbeat.ended

    def on_end(self, callback: OnEnd) -> None:
        """Call this once, from the heartbeat's thread, when the service declares this generation over.

        The thread beats no more while the callback runs, so it must return soon. If the generation is over already,
        it is called at once, from this thread. After `leave` it is not called any more.
        """
        self._heartbeat.on_end(callback)

    def on_replaced(self, callback: Callable[[], object]) -> None:
        """Call this, from the heartbeat's thread, when another job has replaced the one that this group trains."""
        self._heartbeat.on_replaced = callback

    def name_lost(self, error: PeerLost, patience: float = 2.4 * BEAT_SECONDS) -> PeerLost:
        """Return the same error, naming the ranks that are lost, as soon as the service knows them.

        If it does not within `patience` seconds, those are named whose heartbeats have stopped meanwhile.
        """
        until = time.monotonic() + patience
        try:
            before = self._peers().beats
            while True:
                peers = self._peers()
                lost, ends_job = self._named_by(peers)
                left = until - time.monotonic()
                if lost or left <= 0:
                    break
                time.sleep(min(0.1, left))
            if not lost:
                # A rank that has left has lost a peer, too, and meets the others again.
                others = [one for one in self.members if one is not self.members[self.rank]]
                lost = [
                    f"{_place(one)} gives no sign of life"
                    for one in others
                    if before.get(one.rank, -1) == peers.beats.get(one.rank) and one.rank not in peers.gone
                ]
        except ServiceError as problem:
            return PeerLost(f"{error}; the rendezvous service does not answer either ({first_line(problem)})")
        except ValueError as problem:
            return PeerLost(f"{error}; what the rendezvous service says of the others is damaged ({problem})")
        finally:
            if self._heartbeat.stop.is_set():  # this rank has left, and this was its last question
                self._contact.close()
        return PeerLost(f"{'; '.join(lost)} ({error})", ends_job) if lost else error

    def _peers(self) -> Peers:
        return read(Peers, self._contact.ask(fields_of(Nothing(), "peers")))

    def _named_by(self, peers: Peers) -> tuple[list[str], bool]:
        """Return whom the service knows to be lost, for people, and whether that ends the job."""
        self.lost = peers.ended.lost if peers.ended is not None else ()
        evicted = self.ended is not None and self.ended.evicted
        own = self.members[self.rank].rank
        if evicted or any(one.silent for one in self.lost if one.rank == own):
            return ["this rank gave no sign of life for too long, and its group goes on without it"], False
        known = {one.rank: str(one) for one in self.lost}
        ends_job = False
        for member in self.members:
            farewell = peers.gone.get(member.rank)
            if farewell is None or member.rank == own:
                continue
            ends_job |= farewell.kind is Departure.FAILED
            if farewell.kind not in (Departure.LOST_PEER, Departure.AGAIN, Departure.SILENT):
                known.setdefault(member.rank, f"{_place(member)} left: {farewell.reason}")
        return [words for _, words in sorted(known.items())], ends_job

    def report_unreached(self, ranks: Sequence[int]) -> None:
        """Tell the service which members this rank does not reach; the service decides what follows from that."""
        try:
            self._contact.ask(fields_of(Unreached(list(ranks)), "unreached"))
        except ServiceError as error:
            _log.warning("rank %s is not reached, and neither is the rendezvous service (%s)", ranks, first_line(error))

    def leave(self, reason: str, departure: Departure = Departure.OTHER) -> None:
        """Tell the service that this rank leaves, and why."""
        self._heartbeat.end()
        try:
            self._contact.ask(fields_of(Leave(Farewell(reason, departure)), "leave"))
        except ServiceError as error:
            _log.debug("could not say goodbye: %s", error)
        if departure is not Departure.LOST_PEER:  # or `name_lost` still has a question
            self._contact.close()


def take_place(
    number: int,
    own: Fingerprint,
    found: JoinVerdict,
    places: MeetingPlaces,
    client: Client,
    beats: int,
    before: Membership | None = None,
) -> Membership:
    """Return the membership of the rank of a join that has become a member, and start its heartbeat."""
    now_in = replace(own, generation=found.generation, group_size=len(found.members))
    resume = Resume(number, now_in, [member.rank for member in found.members])
    members = list(found.members)
    places.know(members)

    keys = dict[str, str]()

    def reconnect() -> Client:
        client = places.connect(_CONNECT_SECONDS)
        try:
            client.ask(fields_of(resume, "resume"))
            with suppress(ServiceRefuses):  # where the group is over, as the next heartbeat says
                for key, value in list(keys.items()):  # which others may still need in order to connect
                    client.ask(fields_of(SetKey(key, value), "set"))
        except ServiceError:
            client.close()
            raise
        return client

    heartbeat = Heartbeat(Contact(reconnect, place=lambda: places.now), places, resume, beats, lead=found.rank == 0)
    heartbeat.start()
    contact, ports = Contact(reconnect, client, lambda: places.now), {places.now.port, places.told.port}
    ports |= {member.standby_port for member in members}
    trained = before.trained if before is not None else ConnectedGroup(found.generation, members)
    return Membership(found.rank, found.generation, members, contact, heartbeat, frozenset(ports), trained, keys)


def _place(member: Fingerprint) -> str:
    return f"rank {member.rank} on {member.hostname}"
