"""How a rank meets the others through the rendezvous service, and what it knows of them afterwards."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from horizonml import __version__
from horizonml.cluster.device import machine_id
from horizonml.cluster.identity import Identity
from horizonml.cluster.network import can_connect, route_to
from horizonml.cluster.roster import Fingerprint
from horizonml.errors import PeerLost, RendezvousError
from horizonml.signals import Cancelled

_log = logging.getLogger(__name__)
_BEAT_WAITING, _BEAT_RUNNING = 0.5, 1.0


@dataclass(frozen=True)
class Terms:
    """On what terms a rank joins."""

    job: str  # the job's name
    digest: str  # of the job
    timeout: float  # seconds to wait for the service and for all ranks
    replace_timeout: float = 0.0  # seconds that survivors wait for a lost rank's replacement; 0: as long as it takes
    fewest: int = 1  # ranks without which survivors do not go on


class Observer(Protocol):
    """Is told what a rank that meets the others waits for."""

    def say(self, text: str) -> None:
        """In words, now and then."""

    def waiting(self, ranks: list[int]) -> None:
        """For these ranks; told whenever they change."""


@dataclass
class Membership:
    """This rank's place in a formed group. Its rank there may be lower than its own, if others are gone."""

    rank: int
    generation: int
    members: list[Fingerprint]
    _joins: list[int]
    _store: Store
    _heartbeat: _Heartbeat

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.members)

    @property
    def newcomers(self) -> list[int]:
        """Ranks that wait to be taken in, as far as this rank knows: only rank 0 asks."""
        return self._heartbeat.newcomers

    @property
    def store(self) -> Store:
        """Where this generation's ranks exchange their addresses."""
        return PrefixStore(f"generation-{self.generation}", self._store)

    def name_lost(self, error: PeerLost, patience: float = 2.5 * _BEAT_RUNNING) -> PeerLost:
        """The same error, naming the ranks whose heartbeats have stopped."""
        try:
            others = {rank: join for rank, join in enumerate(self._joins) if rank != self.rank}
            before = {rank: self._store.add(f"beat/{join}", 0) for rank, join in others.items()}
            time.sleep(patience)
            lost = []
            for rank, join in others.items():
                member = self.members[rank]
                if self._store.check([f"gone/{join}"]):
                    reason = self._store.get(f"gone/{join}").decode()
                    if not reason.startswith("lost a peer"):
                        lost.append(f"rank {member.rank} on {member.host} left: {reason}")
                elif self._store.add(f"beat/{join}", 0) == before[rank]:
                    lost.append(f"rank {member.rank} on {member.host} gives no sign of life")
        except RuntimeError as reason:
            return PeerLost(f"{error}; the rendezvous service does not answer either ({_first_line(reason)})")
        return PeerLost(f"{'; '.join(lost)} ({error})") if lost else error

    def leave(self, reason: str) -> None:
        """Tell the service that this rank goes."""
        self._heartbeat.stop.set()
        try:
            _post(self._store, {"leave": self._joins[self.rank], "reason": reason})
        except RuntimeError as error:
            _log.debug("could not say goodbye: %s", error)


def meet(
    identity: Identity,
    terms: Terms,
    address: tuple[str, int],
    observer: Observer,
    before: Membership | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Membership:
    """Join the group of this job through the service at `address`.

    Chooses the network interface that leads to the service for all later traffic, unless GLOO_SOCKET_IFNAME names
    one. `before` is where this process was a member until now. Raises RendezvousError; Cancelled when `cancelled`
    says so.
    """
    host, port = address
    deadline = time.monotonic() + terms.timeout
    _await_service(host, port, terms.timeout, deadline, observer, cancelled)
    try:
        own, interface = route_to(host, port)
    except OSError as error:
        raise RendezvousError(f"rank {identity.rank} finds no way to {host}:{port}: {error}") from error
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    fingerprint = Fingerprint(
        identity.rank,
        identity.world_size,
        terms.job,
        terms.digest,
        __version__,
        torch.__version__.partition("+")[0],
        socket.gethostname(),
        machine_id(),
        own,
        os.getpid(),
        before.generation if before else 0,
        before.world_size if before else 0,
        terms.replace_timeout,
        terms.fewest,
    )
    # A mute listener can hang a store's client for ever, whatever timeout it is given: so it talks in a thread.
    talk = _Conversation(fingerprint, host, port, deadline)
    talk.start()
    told, missing = time.monotonic(), None
    while talk.is_alive() and time.monotonic() < deadline:
        talk.join(0.1)
        if cancelled():
            talk.cancelled.set()
            talk.join(2)
            raise Cancelled
        if talk.missing != missing:
            missing = talk.missing
            observer.waiting(missing or [])
        if time.monotonic() - told > 10:
            observer.say(talk.waiting_for)
            told = time.monotonic()
    if talk.outcome is None:
        talk.cancelled.set()
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size} gave up after {terms.timeout:.0f} s (rendezvous.timeout): "
            f"{talk.waiting_for}"
        )
    if isinstance(talk.outcome, Exception):
        raise talk.outcome
    return talk.outcome


def _await_service(
    host: str, port: int, timeout: float, deadline: float, observer: Observer, cancelled: Callable[[], bool]
) -> None:
    told = time.monotonic()
    while (problem := can_connect(host, port, min(5.0, max(0.1, deadline - time.monotonic())))) is not None:
        if cancelled():
            raise Cancelled
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"no rendezvous service at {host}:{port} within {timeout:.0f} s (rendezvous.timeout): {problem}; "
                "start `horizonml rendezvous` there, or correct rendezvous.address"
            )
        if time.monotonic() - told > 10:
            observer.say(f"waiting for the rendezvous service at {host}:{port}: {problem}")
            told = time.monotonic()
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


class _Conversation(threading.Thread):
    """Joins, beats, and waits for the verdict."""

    def __init__(self, fingerprint: Fingerprint, host: str, port: int, deadline: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._fingerprint, self._host, self._port, self._deadline = fingerprint, host, port, deadline
        self.outcome: Membership | Exception | None = None
        self.missing: list[int] | None = None
        self.cancelled = threading.Event()
        self.waiting_for = f"{host}:{port} accepts connections but does not answer; is it a rendezvous service?"

    def run(self) -> None:
        try:
            self.outcome = self._talk()
        except RendezvousError as error:
            self.outcome = error
        except (RuntimeError, ValueError, KeyError) as error:
            self.outcome = RendezvousError(
                f"the rendezvous service at {self._host}:{self._port} broke off: {_first_line(error)}"
            )

    def _connect(self) -> Store:
        left = timedelta(seconds=max(1.0, self._deadline - time.monotonic()))
        return TCPStore(self._host, self._port, None, False, left, wait_for_workers=False)

    def _talk(self) -> Membership | None:
        store = self._connect()
        number = _post(store, self._fingerprint.to_json())
        verdict, beaten = f"verdict/{number}", 0.0
        while not store.check([verdict]):
            if self.cancelled.is_set():
                _post(store, {"leave": number, "reason": "gave up waiting"})
                return None
            if time.monotonic() - beaten > _BEAT_WAITING:
                store.add(f"beat/{number}", 1)
                beaten = time.monotonic()
                if store.check(["status"]):
                    self.missing = [int(rank) for rank in json.loads(store.get("status"))["missing"]]
                    self.waiting_for = _words(self.missing)
            time.sleep(0.05)
        message = json.loads(store.get(verdict))
        if "refused" in message:
            raise RendezvousError(f"refused: {message['refused']}")
        members = [Fingerprint.from_json(member) for member in message["members"]]
        joins = [int(join) for join in message["joins"]]
        rank = joins.index(number)
        heartbeat = _Heartbeat(self._connect(), number, lead=rank == 0)
        heartbeat.start()
        return Membership(rank, int(message["generation"]), members, joins, store, heartbeat)


class _Heartbeat(threading.Thread):
    """Shows that this rank lives, for as long as there is a service to show it to; the lead looks for newcomers."""

    def __init__(self, store: Store, number: int, lead: bool) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._number, self._lead = store, number, lead
        self.stop = threading.Event()
        self.newcomers: list[int] = []

    def run(self) -> None:
        while not self.stop.wait(_BEAT_RUNNING):
            try:
                self._store.add(f"beat/{self._number}", 1)
                if self._lead:
                    self.newcomers = [int(rank) for rank in json.loads(self._store.get("status"))["newcomers"]]
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                _log.warning("the rendezvous service is gone; training goes on without it (%s)", _first_line(error))
                return


def _post(store: Store, event: dict[str, Any]) -> int:
    number = int(store.add("events", 1))
    store.set(f"event/{number}", json.dumps(event))
    return number


def _words(missing: list[int]) -> str:
    names = ", ".join(map(str, missing))
    return f"waiting for rank {names} to join" if names else "waiting for the group to form"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
