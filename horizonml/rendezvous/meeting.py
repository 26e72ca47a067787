"""How a rank meets the others through the rendezvous service, and what it knows of them afterwards."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from horizonml import __version__
from horizonml.errors import PeerLost, RendezvousError
from horizonml.machine.host import machine_id
from horizonml.machine.network import can_connect, route_to, use_interface
from horizonml.machine.signals import Cancelled
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.heartbeat import BEAT_SECONDS, Heartbeat, first_line, ranks_in, read_status
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.mailbox import parse, peek, post, printable

_log = logging.getLogger(__name__)
_BEAT_WAITING = 0.5
_WITHDRAW_SECONDS = 2.0  # for the service to say whether a rank that withdraws still waits, or is a member already
_AGAIN_SECONDS = 10.0  # for a service that was started anew to answer
_FIRST_SECONDS, _SAY_SECONDS = 2.0, 10.0  # until a rank first says what it waits for, and then between two times
_SHOWN_RANKS = 20  # in a message


# Why a rank leaves: it lost a peer; it failed for a reason that holds for all ranks; anything else.
Farewell = Literal["lost", "failed", "other"]


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
    _heartbeat: Heartbeat

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

    def name_lost(self, error: PeerLost, patience: float = 2.5 * BEAT_SECONDS) -> PeerLost:
        """Return the same error, naming the ranks whose heartbeats have stopped."""
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
                    farewell = parse(gone)
                    if farewell.get("kind") != "lost":  # who has only lost a peer is none
                        ends_job |= farewell.get("kind") == "failed"
                        lost.append(f"rank {member.rank} on {member.host} left: {printable(str(farewell['reason']))}")
                elif peek(store, f"beat/{join}") == before[rank]:
                    lost.append(f"rank {member.rank} on {member.host} gives no sign of life")
        except RuntimeError as problem:
            return PeerLost(f"{error}; the rendezvous service does not answer either ({first_line(problem)})")
        except (ValueError, KeyError) as problem:
            return PeerLost(f"{error}; what the rendezvous service says of the others is damaged ({problem})")
        return PeerLost(f"{'; '.join(lost)} ({error})", ends_job) if lost else error

    def leave(self, reason: str, kind: Farewell = "other") -> None:
        """Tell the service that this rank goes, and why."""
        self._heartbeat.end()
        try:
            post(self._heartbeat.store, {"id": self._joins[self.rank], "leave": {"reason": reason, "kind": kind}})
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

    Chooses the network interface that leads to the service for the group's traffic, unless the user's
    GLOO_SOCKET_IFNAME names one. `before` is where this process was a member until now. Raises RendezvousError;
    Cancelled when `cancelled` says so, unless the group has formed already, which needs all its members to begin.
    """
    deadline = time.monotonic() + terms.timeout
    while True:
        try:
            return _join(identity, terms, address, observer, before, cancelled, deadline)
        except _ServiceGone as error:
            if time.monotonic() >= deadline:
                raise
            observer.say(f"waiting for the rendezvous service to come back: {error}")
            time.sleep(1.0)


class _ServiceGone(RendezvousError):
    """The service has gone while this rank waited for the others; it may be started anew."""


def _join(
    identity: Identity,
    terms: Terms,
    address: tuple[str, int],
    observer: Observer,
    before: Membership | None,
    cancelled: Callable[[], bool],
    deadline: float,
) -> Membership:
    """Join through the service that is there now."""
    host, port = address
    _await_service(host, port, terms.timeout, deadline, observer, cancelled)
    try:
        own, interface = route_to(host, port)
    except OSError as error:
        raise RendezvousError(f"rank {identity.rank} finds no way to {host}:{port}: {error}") from error
    use_interface(interface)
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
    told, missing, asked = time.monotonic() - _SAY_SECONDS + _FIRST_SECONDS, None, False
    while talk.is_alive() and time.monotonic() < deadline and not asked:
        talk.join(0.1)
        asked = cancelled()
        if talk.missing != missing:
            missing = talk.missing
            observer.waiting(missing or [])
        if time.monotonic() - told > _SAY_SECONDS:
            observer.say(talk.waiting_for)
            told = time.monotonic()
    outcome = talk.withdraw()
    if isinstance(outcome, Membership):
        return outcome
    if asked:
        raise Cancelled
    if outcome is None:
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size} gave up after {terms.timeout:.0f} s (rendezvous.timeout): "
            f"{talk.waiting_for}"
        )
    raise outcome


def _await_service(
    host: str, port: int, timeout: float, deadline: float, observer: Observer, cancelled: Callable[[], bool]
) -> None:
    told = time.monotonic() - _SAY_SECONDS + _FIRST_SECONDS
    while (problem := can_connect(host, port, min(5.0, max(0.1, deadline - time.monotonic())))) is not None:
        if cancelled():
            raise Cancelled
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"no rendezvous service at {host}:{port} within {timeout:.0f} s (rendezvous.timeout): {problem}; "
                "start `horizonml rendezvous` there, or correct rendezvous.address"
            )
        if time.monotonic() - told > _SAY_SECONDS:
            observer.say(f"waiting for the rendezvous service at {host}:{port}: {problem}")
            told = time.monotonic()
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


class _Conversation(threading.Thread):
    """Joins, beats, and waits for the verdict."""

    def __init__(self, fingerprint: Fingerprint, host: str, port: int, deadline: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._fingerprint, self._host, self._port, self._deadline = fingerprint, host, port, deadline
        self._number = secrets.randbits(62)
        self._outcome: Membership | RendezvousError | None = None
        self._joined, self._withdrawn = False, threading.Event()
        self.missing: list[int] | None = None
        self.waiting_for = f"{host}:{port} accepts connections but does not answer; is it a rendezvous service?"

    def withdraw(self) -> Membership | RendezvousError | None:
        """Stop waiting, and return what has come of it; None if nothing.

        The group may be formed at this very moment. The others would then wait for this rank for as long as a step
        may take, so the service has the last word.
        """
        self._withdrawn.set()
        if self._joined:
            self.join(_WITHDRAW_SECONDS)
        return self._outcome

    def run(self) -> None:
        try:
            self._outcome = self._talk()
        except RendezvousError as error:
            self._outcome = error
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            kind = _ServiceGone if self._joined else RendezvousError
            self._outcome = kind(f"the rendezvous service at {self._host}:{self._port} broke off: {first_line(error)}")

    def _connect(self, seconds: float) -> Store:
        return TCPStore(self._host, self._port, None, False, timedelta(seconds=seconds), wait_for_workers=False)

    def _talk(self) -> Membership | None:
        store = self._connect(max(1.0, self._deadline - time.monotonic()))
        number, beats, beaten, withdrawn = self._number, 0, 0.0, None
        post(store, {"id": number, "join": self._fingerprint.to_json()})
        self._joined = True
        while (verdict := peek(store, f"verdict/{number}")) is None:
            now = time.monotonic()
            if withdrawn is None and self._withdrawn.is_set():
                post(store, {"id": number, "withdraw": True})
                withdrawn = now
            if withdrawn is not None and now - withdrawn > _WITHDRAW_SECONDS:
                return None
            if now - beaten > _BEAT_WAITING:
                beats, beaten = beats + 1, now
                store.set(f"beat/{number}", str(beats))
                status = read_status(store)
                self.missing = ranks_in(status.get("missing"))
                self.waiting_for = _words(self.missing, status.get("refused"))
            time.sleep(0.05)
        message = json.loads(verdict)
        if "refused" in message:
            if withdrawn is not None:
                return None
            raise RendezvousError(f"refused: {printable(str(message['refused']), 2000)}")
        members = [Fingerprint.from_json(member) for member in message["members"]]
        joins, generation = [int(join) for join in message["joins"]], int(message["generation"])
        rank = joins.index(number)
        now_in = replace(self._fingerprint, generation=generation, group_size=len(members))
        resume = {"id": number, "resume": now_in.to_json(), "beside": [member.rank for member in members]}
        address = (self._host, self._port)
        heartbeat = Heartbeat(address, lambda: self._connect(_AGAIN_SECONDS), resume, beats, lead=rank == 0)
        heartbeat.start()
        return Membership(rank, generation, members, joins, store, heartbeat)


def _words(missing: list[int], refused: object) -> str:
    names = ", ".join(map(str, missing[:_SHOWN_RANKS]))
    if len(missing) > _SHOWN_RANKS:
        names += f" and {len(missing) - _SHOWN_RANKS} more"
    waiting = f"waiting for rank {names} to join" if names else "waiting for the group to form"
    reasons = refused[-1:] if isinstance(refused, list) else []
    return waiting + "".join(f" (refused meanwhile: {printable(str(reason))})" for reason in reasons)
