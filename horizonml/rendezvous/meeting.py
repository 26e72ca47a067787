"""How a rank meets the others through the rendezvous service."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from horizonml import __version__
from horizonml.errors import RendezvousError
from horizonml.machine.host import machine_id
from horizonml.machine.network import can_connect, route_to, use_interface
from horizonml.machine.signals import Cancelled
from horizonml.machine.usage import seconds_up
from horizonml.rendezvous.conversation import Conversation, ServiceGone
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Ask
from horizonml.rendezvous.numbers import Asking, Given

_FIRST_SECONDS, _SAY_SECONDS = 2.0, 10.0  # until a rank first says what it waits for, and then between two times


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


class Observer(Protocol):
    """Is told what a rank that meets the others waits for."""

    def say_waiting(self, text: str) -> None:
        """Tell the user, on every rank, what is waited for; called now and then."""

    def waiting(self, ranks: Sequence[int]) -> None:
        """Take note that these ranks are waited for; called whenever they change."""


def meet(
    identity: Identity,
    settings: RendezvousSettings,
    address: tuple[str, int],
    observer: Observer,
    before: Membership | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Membership:
    """Join the group of this job through the service at `address`.

    Chooses the network interface that leads to the service for the group's traffic, unless the user's
    GLOO_SOCKET_IFNAME names one. `before` is where this process was a member until now. Raises RendezvousError,
    JobComplete if the others have trained the job to the end, and Cancelled when `cancelled` says so, unless the group
    has formed already, which needs all its members to begin.
    """
    meeting = _Meeting(identity, settings, address, observer, before, cancelled, time.monotonic() + settings.timeout)
    while True:
        try:
            return meeting.join()
        except ServiceGone as error:
            if time.monotonic() >= meeting.deadline:
                raise
            observer.say_waiting(f"waiting for the rendezvous service to come back: {error}")
            time.sleep(1.0)


def ask_rank(
    settings: RendezvousSettings,
    world_size: int,
    address: tuple[str, int],
    observer: Observer,
    cancelled: Callable[[], bool] = lambda: False,
) -> Identity:
    """Let the service at `address` give this process a rank number in the run of this job that meets there.

    `world_size` holds if no rank of the run is there yet. The number is kept for this process for a minute. Raises
    RendezvousError, and Cancelled when `cancelled` says so.
    """
    deadline = time.monotonic() + settings.timeout
    host, port = address
    await_service(address, settings.timeout, deadline, observer, cancelled)
    host_id = f"{machine_id()}/{route_to(host, port)[0]}"
    most = max(world_size, settings.max_world_size)
    ask = Ask(secrets.randbits(62), host_id, os.getpid(), settings.digest, world_size, most)
    asking, reminder = Asking(ask, host, port, deadline - time.monotonic()), _Reminder(observer)
    asking.start()
    while asking.is_alive() and time.monotonic() < deadline:
        asking.join(0.1)
        if cancelled():
            asking.give_up()
            raise Cancelled
        reminder.say(f"waiting for the rendezvous service at {host}:{port} to give this process a rank number")
    asking.give_up()
    if isinstance(asking.outcome, Given):
        return Identity(asking.outcome.rank, asking.outcome.world_size, "the rendezvous service")
    raise asking.outcome or RendezvousError(
        f"gave up after {settings.timeout:.0f} s (rendezvous.timeout): {host}:{port} accepts connections but gives "
        "this process no rank number; is it a rendezvous service of this version?"
    )


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


@dataclass(frozen=True)
class _Meeting:
    """A rank's attempts to join a group, until a deadline in `monotonic` time."""

    identity: Identity
    settings: RendezvousSettings
    address: tuple[str, int]
    observer: Observer
    before: Membership | None
    cancelled: Callable[[], bool]
    deadline: float

    def join(self) -> Membership:
        """Join through the service that is there now. Raises RendezvousError, JobComplete, Cancelled."""
        host, port = self.address
        await_service(self.address, self.settings.timeout, self.deadline, self.observer, self.cancelled)
        conversation = Conversation(self._fingerprint(), host, port, self.deadline)
        conversation.start()
        reminder, missing, asked = _Reminder(self.observer), None, False
        while conversation.is_alive() and time.monotonic() < self.deadline and not asked:
            conversation.join(0.1)
            asked = self.cancelled()
            if conversation.missing != missing:
                missing = conversation.missing
                self.observer.waiting(missing or [])
            reminder.say(conversation.waiting_for)
        outcome = conversation.withdraw()
        if isinstance(outcome, Membership):
            return outcome
        if asked:
            raise Cancelled
        if outcome is None:
            raise RendezvousError(
                f"rank {self.identity.rank} of {self.identity.world_size} gave up after "
                f"{self.settings.timeout:.0f} s (rendezvous.timeout): {conversation.waiting_for}"
            )
        raise outcome

    def _fingerprint(self) -> Fingerprint:
        """Return what this rank says of itself, and make gloo use the interface that leads to the service."""
        host, port = self.address
        try:
            own, interface = route_to(host, port)
        except OSError as error:
            raise RendezvousError(f"rank {self.identity.rank} finds no way to {host}:{port}: {error}") from error
        use_interface(interface)
        return Fingerprint(
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            job=self.settings.job,
            digest=self.settings.digest,
            code=__version__,
            torch=torch.__version__.partition("+")[0],
            hostname=socket.gethostname(),
            machine=machine_id(),
            address=own,
            pid=os.getpid(),
            generation=self.before.generation if self.before else 0,
            group_size=self.before.world_size if self.before else 0,
            replace_timeout=self.settings.replace_timeout,
            min_world_size=self.settings.min_world_size,
            max_world_size=self.settings.max_world_size,
            begin_with=self.settings.begin_with,
            up=seconds_up(),
        )


def await_service(
    address: tuple[str, int], timeout: float, deadline: float, observer: Observer, cancelled: Callable[[], bool]
) -> None:
    """Return when something listens at the address, until a deadline in `monotonic` time.

    Raises RendezvousError, Cancelled.
    """
    host, port = address
    reminder = _Reminder(observer)
    while (problem := can_connect(host, port, min(5.0, max(0.1, deadline - time.monotonic())))) is not None:
        if cancelled():
            raise Cancelled
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"no rendezvous service at {host}:{port} within {timeout:.0f} s "
                f"(rendezvous.timeout): {problem}; start `horizonml rendezvous` there, or correct "
                "rendezvous.address"
            )
        reminder.say(f"waiting for the rendezvous service at {host}:{port}: {problem}")
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
