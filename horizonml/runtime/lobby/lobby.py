"""Knows which devices are there before and during a run, and gives them their ranks.

It answers requests and asks nobody: the rendezvous service calls its handlers, from one thread, and `horizonml up`
looks at it from another. A device says `device` about once a second, which is its sign of life. The reply comes at once
if there is news for it, and else about a second later. It says what goes on, and from the start on which rank the
device has in a world of which size.

The lobby gives all numbers of ranks itself, those of devices that come later, too. The rendezvous service could do that
for latecomers, but it knows only the ranks that have joined already, and would give a number again that the lobby has
given a moment ago.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.server import Handler, Peer
from horizonml.runtime.lobby.messages import MOST_CHUNK, News, Outcome, Phase, Sign, Standing
from horizonml.runtime.lobby.sharing import Offer, Shelf
from horizonml.text import count

HOLD_SECONDS = 1.0  # for which a reply without news is held back
LOST_SECONDS = 5.0  # without a sign of life, after which a device is gone
_KEPT_SECONDS = 15.0  # for which a number is kept for a device that is gone
MOST_DEVICES = 256


@dataclass
class Guest:
    """Describes a device that has come. Times are seconds of the lobby's clock."""

    sign: Sign
    address: str
    came: float
    seen: float
    connection: int  # of which it speaks now
    rank: int | None = None
    told: Phase | None = None  # the phase that it knows of

    def gone(self, now: float) -> bool:
        """Return whether it gives no sign of life any more."""
        return now - self.seen > LOST_SECONDS or self.sign.standing is Standing.LEAVING


@dataclass
class Lobby:
    """Holds who is there. `take_part` says that this device has rank 0, and so is one of those who train."""

    offer: Offer
    take_part: bool = True
    wanted: int | None = None
    shelf: Shelf | None = None  # the data that this device shares
    torch: str = ""  # the version of PyTorch that all need; empty if any will do
    clock: Callable[[], float] = time.monotonic
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    phase: Phase = Phase.WAITING
    world_size: int | None = None
    _outcome: Outcome | None = None
    _words: str = ""
    _guests: dict[str, Guest] = field(default_factory=dict)
    _connections: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers which kind of request."""
        return {"device": self._device, "job": self._job, "data": self._data, "echo": self._echo}

    def guests(self) -> list[Guest]:
        """Return the devices that are there, in the order in which they came."""
        with self._lock:
            now = self.clock()
            return [guest for guest in self._guests.values() if not guest.gone(now)]

    def present(self) -> int:
        """Return how many devices could train now."""
        ready = [guest for guest in self.guests() if guest.sign.standing in (Standing.READY, Standing.TRAINING)]
        return len(ready) + self.take_part

    def start(self) -> int:
        """Fix the world size to the devices that are ready, give them their ranks, and return the world size.

        The ranks go by the order in which the devices came, after rank 0, if that is this device.
        """
        with self._lock:
            ready = [guest for guest in self.guests() if guest.sign.standing is Standing.READY]
            ready = ready[: self.offer.most - self.take_part]
            for rank, guest in enumerate(ready, int(self.take_part)):
                guest.rank = rank
            self.world_size = len(ready) + self.take_part
            self.phase = Phase.STARTED
            return self.world_size

    def end(self, outcome: Outcome, words: str = "") -> None:
        """Let the run be over."""
        with self._lock:
            self.phase, self._outcome, self._words = Phase.OVER, outcome, words[:200]

    def all_told(self) -> bool:
        """Return whether all devices that are there know what goes on."""
        return all(guest.told is self.phase for guest in self.guests())

    def _device(self, peer: Peer, request: Fields) -> Fields | None:
        """Take note of a sign of life, and answer when there is news, or about a second later."""
        with self._lock:
            now = self.clock()
            since = peer.state.get("lobby-since")
            if not isinstance(since, float):  # it has not been looked at before
                sign = Sign.from_json(request)
                if sign.run not in (None, self.run) and sign.standing is not Standing.LEAVING:
                    sign = replace(sign, standing=Standing.PREPARING, words="is ready for an earlier run", rank=None)
                refusal = self._welcome(peer, sign, now)
                if refusal is not None:
                    return refusal.to_json()
                peer.state["lobby-since"] = since = now
            guest = self._guests.get(str(request.get("id")))
            if guest is None or guest.connection != peer.state.get("lobby-connection"):
                peer.state.pop("lobby-since", None)
                raise ValueError("another connection speaks for this device by now")
            self._give_late(guest, now)
            begins = self.phase is Phase.STARTED and guest.rank is not None and guest.sign.standing is Standing.READY
            nothing_new = self.phase is guest.sign.knows and self.phase is not Phase.OVER and not begins
            if nothing_new and now - since < HOLD_SECONDS:
                return None
            news = self._news(guest)
            peer.state.pop("lobby-since", None)
            guest.seen = now
            guest.told = news.phase
            return news.to_json()

    def _welcome(self, peer: Peer, sign: Sign, now: float) -> News | None:
        """Take note of a sign of life; return why the device cannot take part, if it cannot. Raises ValueError."""
        spoken_for = peer.state.setdefault("lobby-id", sign.id)
        if spoken_for != sign.id:
            raise ValueError("this connection speaks for another device already")
        theirs = sign.device.torch.partition("+")[0]
        if self.torch and theirs != self.torch:
            words = f"it has PyTorch {theirs or 'not at all'}, and the others have {self.torch}; install that one"
            return News(self.run, self.phase, self.offer.name, words=words, refused=True)
        if "lobby-connection" not in peer.state:
            self._connections += 1
            peer.state["lobby-connection"] = self._connections
        own = peer.state["lobby-connection"]
        assert isinstance(own, int)
        guest = self._guests.get(sign.id)
        if guest is None:
            self._forget(now)
            if len(self._guests) >= MOST_DEVICES:
                words = f"{count(MOST_DEVICES, 'device')} are here already, which is the most that a lobby takes"
                return News(self.run, self.phase, self.offer.name, words=words, refused=True)
            taken = {other.rank for other in self._guests.values()} | ({0} if self.take_part else set())
            rank = sign.rank if sign.rank not in taken else None  # it was away, and trains
            self._guests[sign.id] = Guest(sign, peer.address, now, now, own, rank)
            return None
        if own < guest.connection:
            raise ValueError("another connection speaks for this device by now")
        guest.sign, guest.address, guest.seen, guest.connection = sign, peer.address, now, own
        return None

    def _give_late(self, guest: Guest, now: float) -> None:
        """Give a rank to a device that is ready after the start, if one is left."""
        if self.phase is not Phase.STARTED or guest.rank is not None or guest.sign.standing is not Standing.READY:
            return
        self._forget(now)
        taken = {other.rank for other in self._guests.values()} | ({0} if self.take_part else set())
        guest.rank = next((rank for rank in range(self.offer.most) if rank not in taken), None)

    def _forget(self, now: float) -> None:
        """Drop devices that are gone, and before the start at once: nobody waits for their numbers."""
        kept = _KEPT_SECONDS if self.phase is Phase.STARTED else 0.0
        gone = [id for id, guest in self._guests.items() if guest.gone(now) and now - guest.seen >= kept]
        for id in gone:
            del self._guests[id]

    def _news(self, guest: Guest) -> News:
        """Return what a device is told."""
        there = self.guests()
        full = self.phase is Phase.STARTED and guest.rank is None and guest.sign.standing is Standing.READY
        most = f"the run takes at most {count(self.offer.most, 'device')} (parallel.max_workers), and all are taken"
        return News(
            run=self.run,
            phase=self.phase,
            job=self.offer.name,
            position=there.index(guest) + 1 + self.take_part if guest in there else 0,
            count=len(there) + self.take_part,
            wanted=self.wanted,
            rank=guest.rank if self.phase is Phase.STARTED else None,
            world_size=self.world_size if self.phase is Phase.STARTED else None,
            outcome=self._outcome,
            words=self._words or (most if full else ""),
        )

    def _job(self, peer: Peer, request: Fields) -> Fields:
        """Hand out the job."""
        return {
            "job": self.offer.text,
            "name": self.offer.name,
            "lineage": self.offer.lineage,
            "run": self.run,
            "shared": self.shelf is not None,
        }

    def _data(self, peer: Peer, request: Fields) -> Fields:
        """Hand out a part of the list of files, or of a file."""
        if self.shelf is None:
            raise ValueError("the data is not shared; `horizonml up --share-data` would share it")
        return self.shelf.answer(request)

    def _echo(self, peer: Peer, request: Fields) -> Fields:
        """Answer with as many characters as are asked for, so that the device can measure its link."""
        payload, back = request.get("payload", ""), request.get("back", 0)
        if not isinstance(payload, str) or len(payload) > 2 * MOST_CHUNK:
            raise ValueError(f"payload must be a text of at most {2 * MOST_CHUNK} characters")
        if type(back) is not int or not 0 <= back <= 2 * MOST_CHUNK:
            raise ValueError(f"back must be a whole number from 0 to {2 * MOST_CHUNK}")
        return {"payload": "0" * back}
