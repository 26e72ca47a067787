"""Knows the devices that wait for a rank before and during a run of `horizonml up`, as members without a number.

A device sends `device` about once a second, which is its heartbeat. The answer comes at once if something has changed
for it, and else about a second later: it says how far the run is, and from the start on which rank the device has. All
numbers of ranks are those of the roster, so that no device and no rank that joins by itself gets one that is in use.

The rendezvous service calls the handlers from one thread, and `horizonml up` calls the rest from another.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from horizonml import __version__
from horizonml.rendezvous.client import Client, Contact, ServiceError
from horizonml.rendezvous.device_messages import (
    MOST_CHUNK,
    DeviceBeat,
    DeviceState,
    Echo,
    FilesRequest,
    JobOffer,
    LinkRates,
    Phase,
    RunOutcome,
    RunProgress,
    RunStatus,
)
from horizonml.rendezvous.messages import Nothing, NumberRequest
from horizonml.rendezvous.roster import Roster
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.service import Handlers, at_once
from horizonml.rendezvous.shared_files import FileServer
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.text import count

HOLD_SECONDS = 1.0  # for which an answer is held back where nothing has changed
LOST_SECONDS = 5.0  # without a heartbeat, after which a device is gone
KEPT_SECONDS = 15.0  # for which a number is kept for a device that is gone
MOST_DEVICES = 256
_OWN = ("this device", 1)


@dataclass
class Device:
    """A device that has come. Times are seconds of the roster's clock."""

    beat: DeviceBeat
    host: str  # its address
    seen: float
    connection: int  # by which it speaks now
    rank: int | None = None
    full: bool = False  # whether there is no rank left for it
    told: Phase | None = None  # the phase that it knows of

    def gone(self, now: float) -> bool:
        """Return whether it gives no sign of life any more."""
        return now - self.seen > LOST_SECONDS or self.beat.state is DeviceState.LEAVING


@dataclass
class Devices:
    """The devices of one run of `horizonml up`."""

    job: str  # as text
    name: str  # of the job
    digest: str
    lineage: str
    most: int  # devices that may take part
    take_part: bool = True  # whether this device has rank 0, and so is one of those who train
    wanted: int | None = None  # devices with which the training starts
    files: FileServer | None = None  # which this device shares
    torch: str = ""  # the version of PyTorch that all need; empty if any will do
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[], RunProgress] = RunProgress
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    phase: Phase = Phase.WAITING
    world_size: int | None = None
    roster: Roster = field(default_factory=Roster)
    _outcome: RunOutcome | None = None
    _words: str = ""
    _devices: dict[str, Device] = field(default_factory=dict)
    _connections: int = 0

    def __post_init__(self) -> None:
        """Keep rank 0 for this device, if it takes part."""
        if self.take_part:
            self.roster.keep_number(0, _OWN, 0.0, float("inf"))

    def handlers(self) -> Handlers:
        """Return what answers which kind of request."""
        return {
            "device": (DeviceBeat, self._beat),
            "job": (Nothing, self._job),
            "data": (FilesRequest, self._data),
            "echo": (Echo, lambda peer, request: at_once({"payload": "0" * request.back})),
        }

    def present(self) -> list[Device]:
        """Return the devices that are there, in the order in which they came."""
        with self.roster.lock:
            now = self.clock()
            return [device for device in self._devices.values() if not device.gone(now)]

    def ready(self) -> int:
        """Return how many devices could train now."""
        states = [device.beat.state for device in self.present()]
        return sum(state in (DeviceState.READY, DeviceState.TRAINING) for state in states) + self.take_part

    def start(self) -> int:
        """Fix the world size to the devices that are ready, give them their ranks, and return the world size.

        The ranks go by the order in which the devices came, after rank 0, if that is this device.
        """
        with self.roster.lock:
            self.phase = Phase.STARTED
            ready = [device for device in self.present() if device.beat.state is DeviceState.READY]
            ready = ready[: self.most - self.take_part]
            self.world_size = len(ready) + self.take_part
            for device in ready:
                self._give_number(device)
            return self.world_size

    def end(self, outcome: RunOutcome, words: str = "") -> None:
        """End the run."""
        with self.roster.lock:
            self.phase, self._outcome, self._words = Phase.OVER, outcome, words[:200]

    def all_told(self) -> bool:
        """Return whether all devices that are there know how far the run is."""
        return all(device.told is self.phase for device in self.present())

    def _beat(self, peer: Peer, beat: DeviceBeat) -> Answer:
        """Take note of a heartbeat, and answer when something has changed, or about a second later."""
        since = self.clock()
        if beat.run not in (None, self.run) and beat.state is not DeviceState.LEAVING:
            beat = replace(beat, state=DeviceState.PREPARING, words="is ready for an earlier run", rank=None)
        if peer.state.setdefault("device", beat.id) != beat.id:
            raise ValueError("this connection speaks for another device already")
        refusal = self._refusal(beat, since)
        if refusal is not None:
            return at_once(RunStatus(self.run, self.phase, self.name, words=refusal, refused=True))
        device = self._take(peer, beat, since)

        def answer() -> Fields | None:
            now = self.clock()
            if self._devices.get(beat.id) is not device or device.connection != peer.state["connection"]:
                raise ValueError("another connection speaks for this device by now")
            ready = device.beat.state is DeviceState.READY
            if self.phase is Phase.STARTED and ready and device.rank is None:
                self._give_number(device)
            begins = self.phase is Phase.STARTED and ready and device.rank is not None
            unchanged = self.phase is device.beat.knows and self.phase is not Phase.OVER and not begins
            if unchanged and now - since < HOLD_SECONDS:
                return None
            device.seen, device.told = now, self.phase
            return fields_of(self._status(device))

        return answer

    def _refusal(self, beat: DeviceBeat, now: float) -> str | None:
        theirs = beat.device.horizonml
        if theirs and theirs != __version__:
            return f"it has HorizonML {theirs}, and the others have {__version__}; install the same version"
        torch = beat.device.torch.partition("+")[0]
        if self.torch and torch != self.torch:
            return f"it has PyTorch {torch or 'not at all'}, and the others have {self.torch}; install that one"
        if beat.id in self._devices:
            return None
        self._forget(now)
        if len(self._devices) >= MOST_DEVICES:
            return f"{count(MOST_DEVICES, 'device')} are here already, which is the most that a run takes"
        return None

    def _take(self, peer: Peer, beat: DeviceBeat, now: float) -> Device:
        """Return the device that a heartbeat is of. Raises ValueError if it speaks by a newer connection."""
        if "connection" not in peer.state:
            self._connections += 1
            peer.state["connection"] = self._connections
        own = peer.state["connection"]
        assert isinstance(own, int)
        device = self._devices.get(beat.id)
        if device is None:
            device = self._devices[beat.id] = Device(beat, peer.host, now, own, beat.rank)  # it may train already
        if own < device.connection:
            raise ValueError("another connection speaks for this device by now")
        device.beat, device.host, device.seen, device.connection = beat, peer.host, now, own
        if device.rank is not None and not self.roster.keep_number(device.rank, (beat.id, 1), now, KEPT_SECONDS):
            device.rank = None  # it was away, and another one has it by now
        return device

    def _give_number(self, device: Device) -> None:
        self._forget(self.clock())
        request, now = NumberRequest(device.beat.id, 1, self.digest, self.world_size or 1, self.most), self.clock()
        try:
            given = self.roster.give_number(request, now)
        except ValueError:
            device.full = True
        else:
            device.full = False
            if given is not None and self.roster.keep_number(given.rank, (device.beat.id, 1), now, KEPT_SECONDS):
                device.rank = given.rank

    def _forget(self, now: float) -> None:
        for id in [id for id, device in self._devices.items() if device.gone(now)]:
            del self._devices[id]

    def _status(self, device: Device) -> RunStatus:
        there, started = self.present(), self.phase is Phase.STARTED
        full = started and device.rank is None and device.full
        most = f"the run takes at most {count(self.most, 'device')} (parallel.max_workers), and all are taken"
        return RunStatus(
            run=self.run,
            phase=self.phase,
            job=self.name,
            position=there.index(device) + 1 + self.take_part if device in there else 0,
            count=len(there) + self.take_part,
            wanted=self.wanted,
            rank=device.rank if started else None,
            world_size=self.world_size if started else None,
            outcome=self._outcome,
            words=self._words or (most if full else ""),
        )

    def _job(self, peer: Peer, request: Nothing) -> Answer:
        there, shared = len(self.present()) + self.take_part, self.files is not None
        return at_once(
            JobOffer(self.job, self.name, self.lineage, self.run, shared, self.phase, there, self.progress())
        )

    def _data(self, peer: Peer, request: FilesRequest) -> Answer:
        if self.files is None:
            raise ValueError("the data is not shared; `horizonml up --share-data` would share it")
        return at_once(self.files.answer(request))


_REPLY_SECONDS = 10.0  # for an answer, which the service holds back for a second where nothing has changed
_BEAT_SECONDS = 0.5  # between two heartbeats of a device that does something else at the service
_AGAIN_SECONDS = 1.0  # between two attempts to connect
_PATIENT = (DeviceState.READY, DeviceState.TRAINING, DeviceState.DONE)


class DeviceHeartbeat(threading.Thread):
    """Gives the heartbeats of a device that joins a run, and keeps the newest answer. Used as a context manager."""

    def __init__(self, connect: Callable[[], Client], beat: DeviceBeat) -> None:
        """Speak over what `connect` returns, which raises ServiceError while nobody answers."""
        super().__init__(name="heartbeat", daemon=True)
        self._contact, self._beat = Contact(connect, connect()), beat
        self._lock, self._changed, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self.status: RunStatus | None = None
        self.lost_at: float | None = None  # since when the service does not answer, a time of `monotonic`
        self.problem = ""  # why not
        self._known: DeviceState | None = None  # what the service knows

    def __enter__(self) -> DeviceHeartbeat:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._changed.set()
        self.join(_REPLY_SECONDS)
        self._contact.close()

    def say(self, state: DeviceState, words: str = "", link: LinkRates | None = None, **more: object) -> None:
        """Say from now on that this device is in this state."""
        with self._lock:
            self._beat = self._beat.saying(state, words, link=link or self._beat.link, **more)
        self._changed.set()

    def leave(self, words: str) -> None:
        """Say that this device leaves, and wait for a moment until that is known."""
        self.say(DeviceState.LEAVING, words)
        deadline = time.monotonic() + 2.0
        while self._known is not DeviceState.LEAVING and self.lost_at is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def ask(self, request: Fields) -> Fields:
        """Ask the service something else. Raises ServiceError."""
        return self._contact.ask(request, _REPLY_SECONDS)

    def run(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            with self._lock:
                beat = self._beat
            known = self.status.phase if self.status is not None and beat.state in _PATIENT else None
            try:
                self.status = read(RunStatus, self.ask(fields_of(replace(beat, knows=known), "device")))
                self._known, self.lost_at = beat.state, None
            except (ServiceError, ValueError) as error:
                self.problem = str(error)
                self.lost_at = self.lost_at or time.monotonic()
                self._contact.close()
                self._ended.wait(_AGAIN_SECONDS)
                continue
            if beat.state not in _PATIENT or self.status.phase is Phase.OVER:
                self._changed.wait(_BEAT_SECONDS)


_ROUNDS, _SECONDS = 8, 0.5  # of messages in each direction, and how long they take at most


def measure_link(ask: Callable[[Fields], Fields]) -> LinkRates:
    """Return what messages to the service and back have shown.

    On a fast link that is what TLS and the two processors manage, so it is a lower bound; on a slow one it is the link.
    """

    def timed(payload: str, back: int) -> float:
        begin = time.perf_counter()
        ask(fields_of(Echo(payload, back), "echo"))
        return time.perf_counter() - begin

    def rate(payload: str, back: int) -> float:
        """Return the bytes per second of some messages, less the delay that each of them has anyway."""
        size = seconds = 0.0
        for _ in range(_ROUNDS):
            taken = timed(payload, back)
            size, seconds = size + MOST_CHUNK, seconds + max(taken - delay, taken / 10)
            if seconds > _SECONDS:
                break
        return size / seconds

    delay = min(timed("", 0) for _ in range(4))
    return LinkRates(rate("0" * MOST_CHUNK, 0), rate("", MOST_CHUNK), delay)
