"""One rank's conversation with the rendezvous service, from its join to the verdict."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from torch.distributed import Store, TCPStore

from horizonml.errors import RendezvousError
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.heartbeat import Heartbeat, first_line
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import (
    Complete,
    Formed,
    Join,
    Refused,
    Resume,
    Status,
    Withdraw,
    read_status,
    read_verdict,
)

_BEAT_WAITING = 0.25
_WITHDRAW_SECONDS = 5.0  # for the service to say whether a rank that withdraws still waits, or is a member already
_AGAIN_SECONDS = 10.0  # for a service that was started anew to answer


class ServiceGone(RendezvousError):
    """Raised when the service goes while this rank waits for the others; it may be started anew."""


class JobComplete(Exception):
    """Ends the wait for others that have trained the job to the end."""


class Conversation(threading.Thread):
    """Joins, beats, and waits for the verdict.

    It is a thread because a listener that stays mute can hang a store's client for ever, whatever timeout it is given.
    """

    def __init__(self, fingerprint: Fingerprint, host: str, port: int, deadline: float) -> None:
        """Talk to the service at `host` and `port`, and give up connecting at `deadline`, a time of `monotonic`."""
        super().__init__(name="rendezvous", daemon=True)
        self._fingerprint, self._host, self._port, self._deadline = fingerprint, host, port, deadline
        self._number = secrets.randbits(62)
        self._outcome: Membership | RendezvousError | JobComplete | None = None
        self._joined, self._withdrawn = False, threading.Event()
        self.missing: Sequence[int] | None = None
        self.waiting_for = f"{host}:{port} accepts connections but does not answer; is it a rendezvous service?"

    def withdraw(self) -> Membership | RendezvousError | JobComplete | None:
        """Stop waiting, and return what has come of it, or None if nothing has.

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
        except (RendezvousError, JobComplete) as error:
            self._outcome = error
        except (RuntimeError, ValueError) as error:
            kind = ServiceGone if self._joined else RendezvousError
            self._outcome = kind(f"the rendezvous service at {self._host}:{self._port} broke off: {first_line(error)}")

    def _connect(self, seconds: float) -> Store:
        return TCPStore(self._host, self._port, None, False, timedelta(seconds=seconds), wait_for_workers=False)

    def _talk(self) -> Membership | None:
        """Return this rank's place in the group, or None if it withdrew. Raises RendezvousError, JobComplete."""
        store = self._connect(max(1.0, self._deadline - time.monotonic()))
        number, beats, beaten, withdrawn = self._number, 0, 0.0, None
        post(store, Join(number, self._fingerprint).to_json())
        self._joined = True
        while (message := peek(store, f"verdict/{number}")) is None:
            now = time.monotonic()
            if withdrawn is None and self._withdrawn.is_set():
                post(store, Withdraw(number).to_json())
                withdrawn = now
            if withdrawn is not None and now - withdrawn > _WITHDRAW_SECONDS:
                return None
            if now - beaten > _BEAT_WAITING:
                beats, beaten = beats + 1, now
                store.set(f"beat/{number}", str(beats))
                status = read_status(peek(store, "status"))
                self.missing, self.waiting_for = status.missing, _in_words(status, number)
            time.sleep(0.05)
        verdict = read_verdict(message, number)
        if isinstance(verdict, Complete):
            raise JobComplete
        if isinstance(verdict, Refused):
            if withdrawn is not None:
                return None
            raise RendezvousError(f"refused: {verdict.reason}")
        return self._begin(verdict, store, beats)

    def _begin(self, formed: Formed, store: Store, beats: int) -> Membership:
        """Start the heartbeat of a member, and return its membership."""
        rank = formed.joins.index(self._number)
        now_in = replace(self._fingerprint, generation=formed.generation, group_size=len(formed.members))
        resume = Resume(self._number, now_in, tuple(member.rank for member in formed.members))
        address = (self._host, self._port)
        heartbeat = Heartbeat(address, lambda: self._connect(_AGAIN_SECONDS), resume, beats, lead=rank == 0)
        heartbeat.start()
        return Membership(rank, formed.generation, formed.members, formed.joins, store, heartbeat)


def _in_words(status: Status, number: int) -> str:
    """Return what the rank of this join waits for, for people."""
    own = next((one for one in status.held if one.number == number), None)
    if own is not None:
        return f"{own.reason}; {own.left:.0f} s are left"
    words = status.short or "waiting for the group to form"
    words += "".join(f" ({one.reason}; {one.left:.0f} s are left)" for one in status.held[:1])
    return words + "".join(f" (refused meanwhile: {reason})" for reason in status.refused)
