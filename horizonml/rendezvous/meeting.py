"""How a rank meets the others through the rendezvous service."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch

from horizonml import __version__
from horizonml.errors import RendezvousError
from horizonml.machine.host import device_name, machine_id, seconds_up
from horizonml.machine.network import Address, AddressProbe, route_to, use_interface
from horizonml.machine.signals import Cancelled
from horizonml.rendezvous.client import Client, Endpoint, ServiceError, ServiceRefuses, Unwanted
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.membership import Membership, take_place
from horizonml.rendezvous.messages import (
    Ask,
    Beat,
    BeatAnswer,
    Fingerprint,
    GroupStatus,
    HeldBack,
    Join,
    Nothing,
    Number,
    NumberRequest,
)
from horizonml.rendezvous.places import MeetingPlaces
from horizonml.rendezvous.wire import fields_of, read

_FIRST_SECONDS, _SAY_SECONDS = 2.0, 10.0  # until a rank first says what it waits for, and then between two times
_CONNECT_SECONDS = 5.0
_HOLD_SECONDS = 0.25  # that the service holds a heartbeat of a rank that waits, until there is a verdict
_ANSWER_SECONDS = 5.0
_AGAIN_SECONDS = 0.2  # until a rank joins at another standby
_FOLLOW_SECONDS = 3.0  # between two looks of a rank that waits whether the others meet elsewhere
_PROBE_SECONDS = 1.0  # between two looks at who is dead
_WITHDRAW_SECONDS = 5.0  # for the service to say whether a rank that withdraws still waits, or is a member already


class ServiceGone(RendezvousError):
    """Raised when the service goes while this rank waits, or serves other files; it may be started anew."""


class JobComplete(Exception):
    """Ends the wait for others that have trained the job to the end."""


class JobReplaced(Exception):
    """Ends the wait for others because another job has replaced the one that this process trained."""


@dataclass(frozen=True)
class RendezvousSettings:
    """What a rank joins for, and how long it waits for others."""

    job: str  # the job's name
    digest: str  # of the job
    timeout: float  # seconds to wait for the service and for all ranks
    replace_timeout: float = 0.0  # seconds that survivors wait for a lost rank's replacement
    min_world_size: int = 1  # ranks without which survivors do not go on
    max_world_size: int = 0  # ranks that may take part; 0 if no more than the world size
    begin_with: int = 0  # ranks with which a first meeting may begin when no others come; 0 if it takes all
    begin_after: float = 10.0  # seconds without a further rank, after which it does
    files: str = ""  # what identifies the job's files, where the service knows them, too
    link_port: int = 29401  # where this machine takes the data of ranks on other machines


class Observer(Protocol):
    """Is told what a rank that meets the others waits for."""

    def say_waiting(self, text: str) -> None:
        """Tell the user, on every rank, what is waited for; called now and then."""

    def waiting(self, ranks: Sequence[int], first: bool) -> None:
        """Take note that these ranks are waited for; called whenever they change.

        `first` says that no group has formed yet that this rank could have joined.
        """


def meet(
    identity: Identity,
    settings: RendezvousSettings,
    endpoint: Endpoint | MeetingPlaces,
    observer: Observer,
    before: Membership | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Membership:
    """Join the group of this job through the service at `endpoint`, or at the standby that takes its place.

    Chooses the network interface that leads to the service for the group's traffic, unless the user's
    GLOO_SOCKET_IFNAME names one. `before` is where this process was a member until now. Raises RendezvousError,
    JobComplete if the others have trained the job to the end, JobReplaced if another job has replaced that of `before`,
    and Cancelled when `cancelled` says so, unless the group has formed already, which needs all its members to begin.
    """
    deadline = time.monotonic() + settings.timeout
    places = endpoint if isinstance(endpoint, MeetingPlaces) else MeetingPlaces(endpoint)
    meeting = _Meeting(identity, settings, places, observer, before, cancelled, deadline, before is not None)
    reminder = _Reminder(observer)
    while True:
        try:
            return meeting.join()
        except ServiceGone as error:
            if cancelled():
                raise Cancelled from None
            if time.monotonic() >= meeting.deadline:
                raise
            reminder.say(f"waiting for the rendezvous service of this job: {error}")
            time.sleep(_AGAIN_SECONDS if places.away else 1.0)


def ask_rank(
    settings: RendezvousSettings,
    world_size: int,
    endpoint: Endpoint,
    observer: Observer,
    cancelled: Callable[[], bool] = lambda: False,
    own: int | None = None,
) -> Identity:
    """Let the service at `endpoint` give this process a rank number in the run of this job that meets there.

    `world_size` holds if no rank of the run is there yet, and the service knows no other. The number is kept for this
    process for a minute; a process that has its `own` asks for the world size alone. Raises RendezvousError, and
    Cancelled when `cancelled` says so.
    """
    deadline = time.monotonic() + settings.timeout
    admitted, reminder, number = False, _Reminder(observer), secrets.randbits(62)  # by which it is known again
    while True:
        client = connect(endpoint, settings.timeout, deadline, observer, cancelled, admitted)
        admitted = True
        try:
            host_id = f"{machine_id()}/{route_to(endpoint.host, endpoint.port)[0]}"
            most = max(world_size, settings.max_world_size)
            request = NumberRequest(host_id, os.getpid(), settings.digest, world_size, most, own)
            ask = fields_of(Ask(number, request), "ask")
            while (given := read(Number, client.ask(ask, _ANSWER_SECONDS)).number) is None:
                if cancelled():
                    raise Cancelled
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"gave up after {settings.timeout:.0f} s (rendezvous.timeout): the rendezvous service at "
                        f"{endpoint} gives this process no rank number"
                    )
                reminder.say(f"waiting for the rendezvous service at {endpoint} to give this process a rank number")
                time.sleep(0.1)
            return Identity(given.rank, given.world_size, "the rendezvous service")
        except ServiceRefuses as error:
            raise RendezvousError(f"refused: {error}") from error
        except (ServiceError, ValueError) as error:
            if cancelled():
                raise Cancelled from None
            if time.monotonic() >= deadline:
                raise RendezvousError(f"the rendezvous service at {endpoint} broke off: {error}") from error
            reminder.say(f"waiting for the rendezvous service at {endpoint}, which broke off: {error}")
            time.sleep(1.0)
        finally:
            client.close()


class _Reminder:
    """Tells an observer what is waited for: soon after it is made, and then at longer intervals."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._told = time.monotonic() - _SAY_SECONDS + _FIRST_SECONDS

    def say(self, text: str) -> None:
        """Tell the observer, if it is time to."""
        if time.monotonic() - self._told > _SAY_SECONDS:
            self._observer.say_waiting(text)
            self._told = time.monotonic()


@dataclass
class _Meeting:
    """A rank's attempts to join a group, until a deadline in `monotonic` time."""

    identity: Identity
    settings: RendezvousSettings
    places: MeetingPlaces
    observer: Observer
    before: Membership | None
    cancelled: Callable[[], bool]
    deadline: float
    admitted: bool  # whether a service of this job has let this process in, so that its token is the right one

    def join(self) -> Membership:
        """Join through the service that is there now. Raises RendezvousError, JobComplete, JobReplaced, Cancelled."""
        timeout, admitted = self.settings.timeout, self.admitted
        client = connect(self.places, timeout, self.deadline, self.observer, self.cancelled, admitted)
        self.admitted = True
        number, own, membership = secrets.randbits(62), self._fingerprint(), None
        dead = _Dead(self.before, self.identity.world_size, self.places.reached)
        try:
            client.ask(fields_of(Join(number, own), "join"), _ANSWER_SECONDS)
            with closing(_Links()) as links, closing(dead):
                membership = self._wait(links, dead, client, number, own)
            return membership
        except ServiceRefuses as error:
            if self.places.returned:  # it has the state of an earlier generation
                self.places.stay_away()
                raise ServiceGone(f"that at {self.places.told} is no use yet: {error}") from error
            raise RendezvousError(f"refused: the rendezvous service cannot read its join: {error}") from error
        except (ServiceError, ValueError) as error:
            raise ServiceGone(f"the rendezvous service at {self.places.now} broke off: {error}") from error
        finally:
            if membership is None:
                client.close()

    def _wait(self, links: _Links, dead: _Dead, client: Client, number: int, own: Fingerprint) -> Membership:
        """Wait for the verdict on this rank's join, and tell the service when broken links work again, and who is dead.

        Raises RendezvousError, JobComplete, JobReplaced, Cancelled, ServiceError and ValueError.
        """
        reminder, missing, waiting_for, beats, status = _Reminder(self.observer), None, "", 0, GroupStatus()
        withdrawn, asked, moves, follow_at = None, False, False, time.monotonic() + _FOLLOW_SECONDS
        while True:
            beats += 1
            beat = fields_of(Beat(beats, links.work(), True, _HOLD_SECONDS, dead.ranks(status)), "beat")
            answer = read(BeatAnswer, client.ask(beat, _ANSWER_SECONDS))
            verdict, status = answer.verdict, answer.status
            if verdict is not None:
                if verdict.complete:
                    raise JobComplete
                if verdict.refused is None:
                    return take_place(number, own, verdict, self.places, client, beats, self.before)
                if verdict.replaced and self.before is not None:
                    raise JobReplaced
                if verdict.replaced and withdrawn is None:  # either this pod or the service is about to be replaced
                    raise ServiceGone(f"that at {self.places.now} has other files than this rank: {verdict.refused}")
                if withdrawn is None:
                    raise RendezvousError(f"refused: {verdict.refused}")
            # The group may be formed at this very moment. The others would then wait for this rank for as long as a
            # step may take, so the service has the last word on whether it may go.
            if verdict is not None or (withdrawn is not None and time.monotonic() - withdrawn > _WITHDRAW_SECONDS):
                if asked:
                    raise Cancelled
                if moves:
                    raise ServiceGone("the ranks meet elsewhere now")
                raise RendezvousError(
                    f"rank {self.identity.rank} of {self.identity.world_size} gave up after "
                    f"{self.settings.timeout:.0f} s (rendezvous.timeout): {waiting_for}"
                )
            if withdrawn is None:
                waiting_for = _in_words(status)
                links.are_asked(status)
                first = self.before is None and not status.running
                if (status.missing, first) != missing:
                    missing = status.missing, first
                    self.observer.waiting(list(status.missing), first)
                reminder.say(waiting_for)
                asked = self.cancelled()
                moves = self.places.return_if_it_answers(status.moves)
                if not (moves or status.running) and time.monotonic() >= follow_at:
                    follow_at = time.monotonic() + _FOLLOW_SECONDS
                    moves = self.places.follow()
                if asked or moves or time.monotonic() >= self.deadline:
                    withdrawn = time.monotonic()
                    client.ask(fields_of(Nothing(), "withdraw"), _ANSWER_SECONDS)

    def _fingerprint(self) -> Fingerprint:
        """Return what this rank says of itself, and make gloo use the interface that leads to the service."""
        try:
            own, interface = route_to(self.places.now.host, self.places.now.port)
        except OSError as error:
            raise RendezvousError(f"rank {self.identity.rank} finds no way to {self.places.now}: {error}") from error
        use_interface(interface)
        standby, before = self.places.standby, self.before
        return Fingerprint(
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            job=self.settings.job,
            digest=self.settings.digest,
            code=__version__,
            torch=torch.__version__.partition("+")[0],
            hostname=device_name(),
            machine=machine_id(),
            address=own,
            pid=os.getpid(),
            generation=self.before.generation if self.before else 0,
            group_size=self.before.world_size if self.before else 0,
            replace_timeout=self.settings.replace_timeout,
            min_world_size=self.settings.min_world_size,
            max_world_size=self.settings.max_world_size,
            begin_with=self.settings.begin_with,
            begin_after=self.settings.begin_after,
            files=self.settings.files,
            up=seconds_up(),
            link_port=self.settings.link_port,
            standby_port=standby.listen(own, self.settings.link_port + 1) if standby is not None else 0,
            standby_key=standby.key if standby is not None else "",
            trained=before.trained.generation if before is not None else 0,
            trained_size=len(before.trained.members) if before is not None else 0,
        )


class _Probing:
    """Tries addresses, and others later."""

    _probe: AddressProbe | None = None

    def close(self) -> None:
        """Try no more."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


class _Links(_Probing):
    """Tries the links for which this rank is left out, as long as the service says that it is."""

    def are_asked(self, status: GroupStatus) -> None:
        """Try those that the service names, and no others."""
        addresses = {address for one in status.held if one.own for address in one.probe}
        if self._probe is None or self._probe.addresses != addresses or not self._probe.silent:
            self.close()
            self._probe = AddressProbe(addresses) if addresses else None

    def work(self) -> bool:
        """Return whether all of them have answered."""
        if self._probe is None:
            return False
        self._probe.look()
        return not self._probe.silent


class _Dead(_Probing):
    """Finds out which members of the last group are certain to be dead: their machines answer, but they do not."""

    def __init__(self, before: Membership | None, world_size: int, reached: Collection[Address]) -> None:
        self._world_size = world_size
        trained = before.trained.members if before is not None else ()
        # Where a firewall refuses, that says nothing; so only those count that have answered before.
        self._ranks = {
            (one.address, one.standby_port): one.rank for one in trained if (one.address, one.standby_port) in reached
        }
        self._found: frozenset[int] = frozenset()
        self._until = 0.0

    def ranks(self, status: GroupStatus) -> tuple[int, ...]:
        """Return them, as far as they are known, and look at those who are missing; never waits."""
        if time.monotonic() > self._until and status.short:
            self.close()
            # Of those beyond the first world nobody says who is missing.
            there = set(range(self._world_size)) - set(status.missing)
            looked_at = [address for address, rank in self._ranks.items() if rank not in there]
            self._probe, self._until = AddressProbe(looked_at), time.monotonic() + _PROBE_SECONDS
        if self._probe is not None:
            self._probe.look()
            answered = self._probe.addresses - self._probe.silent
            still = {rank for address, rank in self._ranks.items() if rank in self._found and address not in answered}
            self._found = frozenset(still | {self._ranks[address] for address in self._probe.refused})
        return tuple(sorted(self._found))


def connect(
    endpoint: Endpoint | MeetingPlaces,
    timeout: float,
    deadline: float,
    observer: Observer,
    cancelled: Callable[[], bool],
    admitted: bool = False,
) -> Client:
    """Return a connection to the service as soon as it answers, until a deadline in `monotonic` time.

    A service that will not talk to this process ends the wait, unless an earlier one has `admitted` it: while a service
    is replaced, something else may have its address for a moment. Raises RendezvousError, Cancelled.
    """
    reminder = _Reminder(observer)
    while True:
        try:
            return endpoint.connect(min(_CONNECT_SECONDS, max(0.1, deadline - time.monotonic())))
        except ServiceError as error:
            if isinstance(error, Unwanted) and not admitted:
                raise RendezvousError(str(error)) from error
            problem = str(error)
        if cancelled():
            raise Cancelled
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"no rendezvous service at {endpoint} within {timeout:.0f} s (rendezvous.timeout): {problem}; start "
                "`horizonml rendezvous` there, or correct rendezvous.address"
            )
        reminder.say(f"waiting for the rendezvous service at {endpoint}: {problem}")
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _held_in_words(held: HeldBack) -> str:
    return f"{held.reason}; {held.left:.0f} s are left" if held.left else held.reason


def _in_words(status: GroupStatus) -> str:
    own = next((one for one in status.held if one.own), None)
    if own is not None:
        return _held_in_words(own)
    words = status.short or "waiting for the group to form"
    words += "".join(f" ({_held_in_words(one)})" for one in status.held[:1])
    return words + "".join(f" (refused meanwhile: {reason})" for reason in status.refused)
