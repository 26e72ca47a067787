"""Defines what a device says to the lobby and what it is told, checked field by field before anybody believes it.

Speaks for this device at a lobby: gives its signs of life, and keeps what it is told.

Holds the options of `horizonml join`, and the lobby that it goes to.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from horizonml.rendezvous.checks import MOST_RANKS, Fields, shown, text, whole
from horizonml.rendezvous.client import Client, ServiceError
from horizonml.rendezvous.discovery.device import Device
from horizonml.security.token import INSECURE, TOKEN, Token

MOST_WORDS = 200  # characters of what a device says about itself
MOST_JOB = 32 << 10  # characters of a job that travels
MOST_CHUNK = 96 << 10  # bytes of a file, or of an echo, in one message
_MOST_RATE = 1e15
Kind = TypeVar("Kind", bound=StrEnum)
_ID = re.compile(r"[0-9a-f]{32}")


class Phase(StrEnum):
    """What goes on at a lobby."""

    WAITING = "waiting"  # for devices, before the training
    STARTED = "started"
    OVER = "over"


class Standing(StrEnum):
    """What a device is doing."""

    PREPARING = "preparing"  # it reads the job or fetches the data
    READY = "ready"
    TRAINING = "training"
    DONE = "done"  # its rank has trained to the end
    UNABLE = "unable"  # to run this job; its words say why
    LEAVING = "leaving"


class Outcome(StrEnum):
    """How a run has ended, as its lobby tells those who took part."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


def number(values: Fields, name: str, high: float) -> float:
    """Return a number from 0 to `high`. Raises ValueError."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:  # which no NaN is
        raise ValueError(f"{name} must be a number from 0 to {high:g}, not {shown(value)}")
    return float(value)


def words(values: Fields, name: str) -> str:
    """Return a short text for people. Raises ValueError."""
    found = text(values, name)
    if len(found) > MOST_WORDS:
        raise ValueError(f"{name} must be at most {MOST_WORDS} characters")
    return found


def identifier(values: Fields, name: str) -> str:
    """Return 32 hexadecimal characters. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise ValueError(f"{name} must be 32 hexadecimal characters, not {shown(value)}")
    return value


@dataclass(frozen=True)
class Link:
    """What a device has measured of its way to the lobby: bytes per second in both directions, and a round trip."""

    sent: float
    received: float
    seconds: float

    @classmethod
    def from_json(cls, value: object) -> Link:
        """Return what a device has measured. Raises ValueError."""
        if not isinstance(value, dict):
            raise ValueError(f"a link must be an object, not {shown(value)}")
        return cls(*(number(value, name, _MOST_RATE) for name in ("sent", "received", "seconds")))


@dataclass(frozen=True)
class Sign:
    """A device's sign of life, which it gives at least once a second."""

    id: str  # drawn by the device, and the same as long as its process lives
    device: Device  # what it says of itself
    standing: Standing = Standing.PREPARING
    words: str = ""
    link: Link | None = None
    knows: Phase | None = None  # the phase that it has been told last: the reply waits until there is news
    run: str | None = None  # the run for which it is ready, or trains
    rank: int | None = None  # with which it trains there

    def to_json(self) -> dict[str, object]:
        """Return the request."""
        return {**asdict(self), "do": "device", "device": self.device.to_json()}

    @classmethod
    def from_json(cls, values: Fields) -> Sign:
        """Return what `to_json` was made of. Raises ValueError."""
        device = values.get("device")
        if not isinstance(device, dict):
            raise ValueError(f"a device must be an object, not {shown(device)}")
        return cls(
            id=identifier(values, "id"),
            device=Device.from_json(device),
            standing=_one_of(Standing, values, "standing"),
            words=words(values, "words"),
            link=Link.from_json(values["link"]) if values.get("link") is not None else None,
            knows=_one_of(Phase, values, "knows") if values.get("knows") is not None else None,
            run=identifier(values, "run") if values.get("run") is not None else None,
            rank=whole(values, "rank", 0, MOST_RANKS) if values.get("rank") is not None else None,
        )


@dataclass(frozen=True)
class News:
    """What the lobby answers to a sign of life."""

    run: str  # identifies this run of `horizonml up`
    phase: Phase
    job: str  # its name
    position: int = 0  # of this device among those who are there, from 1
    count: int = 0  # of devices that are there
    wanted: int | None = None  # devices that are waited for
    rank: int | None = None  # once this device is to train
    world_size: int | None = None
    outcome: Outcome | None = None  # once it is over
    words: str = ""  # why it failed, or why this device cannot take part
    refused: bool = False  # whether this device cannot take part

    def to_json(self) -> dict[str, object]:
        """Return the reply."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Fields) -> News:
        """Return what `to_json` was made of. Raises ValueError."""
        given = {
            name: whole(values, name, 0, MOST_RANKS)
            for name in ("wanted", "rank", "world_size")
            if values.get(name) is not None
        }
        return cls(
            run=identifier(values, "run"),
            phase=_one_of(Phase, values, "phase"),
            job=words(values, "job"),
            position=whole(values, "position", 0, MOST_RANKS),
            count=whole(values, "count", 0, MOST_RANKS),
            outcome=_one_of(Outcome, values, "outcome") if values.get("outcome") is not None else None,
            words=text(values, "words"),
            refused=values.get("refused") is True,
            **given,
        )


def shortened(sign: Sign) -> Sign:
    """Return a sign whose words the lobby accepts: on one line, and not too long."""
    plain = "".join(character if character.isprintable() else " " for character in sign.words)
    return replace(sign, words=plain if len(plain) <= MOST_WORDS else f"{plain[: MOST_WORDS - 4]} ...")


def rate_words(link: Link | None) -> str:
    """Return the rate of a link for people, in bits per second: that of its slower direction."""
    if link is None or not math.isfinite(rate := 8 * min(link.sent, link.received)) or rate <= 0:
        return "-"
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.0f} Mbit/s"


def _one_of(kind: type[Kind], values: Fields, name: str) -> Kind:
    """Return one of the values of an enumeration. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, str) or value not in {*kind}:
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not {shown(value)}")
    return kind(value)


_REPLY_SECONDS = 10.0  # for a reply, which the lobby holds back for a second where there is no news
_BEAT_SECONDS = 0.5  # between two signs of life of a device that does something else at the lobby
_AGAIN_SECONDS = 1.0  # between two attempts to connect
_PATIENT = (Standing.READY, Standing.TRAINING, Standing.DONE)


class Voice(threading.Thread):
    """Gives signs of life in a thread, and connects again when the connection is lost. Used as a context manager."""

    def __init__(self, connect: Callable[[], Client], sign: Sign) -> None:
        """Speak over what `connect` returns, which raises ServiceError while nobody answers."""
        super().__init__(name="signs of life", daemon=True)
        self._connect, self._sign = connect, sign
        self._client: Client | None = connect()
        self._lock, self._changed, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self.news: News | None = None
        self.lost_at: float | None = None  # since when the lobby does not answer, a time of `monotonic`
        self.problem = ""  # why not
        self._last: Standing | None = None  # what the lobby knows

    def __enter__(self) -> Voice:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._changed.set()
        self.join(_REPLY_SECONDS)
        if self._client is not None:
            self._client.close()

    def say(self, standing: Standing, words: str = "", **more: Any) -> None:
        """Say from now on that this device stands so."""
        with self._lock:
            self._sign = shortened(replace(self._sign, standing=standing, words=words, **more))
        self._changed.set()

    def leave(self, words: str) -> None:
        """Say that this device leaves, and wait for a moment until that is known."""
        self.say(Standing.LEAVING, words)
        deadline = time.monotonic() + 2.0
        while self._last is not Standing.LEAVING and self.lost_at is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def ask(self, request: Fields) -> Fields:
        """Ask the lobby something else. Raises ServiceError."""
        client = self._client
        if client is None:
            raise ServiceError(self.problem or "the connection is lost")
        return client.ask(request, _REPLY_SECONDS)

    def run(self) -> None:
        """Give signs of life until the end."""
        while not self._ended.is_set():
            self._changed.clear()
            try:
                if self._client is None:
                    self._client = self._connect()
                with self._lock:
                    sign = self._sign
                known = self.news.phase if self.news is not None and sign.standing in _PATIENT else None
                self.news = News.from_json(self._client.ask(replace(sign, knows=known).to_json(), _REPLY_SECONDS))
                self._last, self.lost_at = sign.standing, None
            except (ServiceError, ValueError) as error:
                self._note(error)
                self._ended.wait(_AGAIN_SECONDS)
                continue
            if sign.standing not in _PATIENT or self.news.phase is Phase.OVER:
                self._changed.wait(_BEAT_SECONDS)

    def _note(self, error: Exception) -> None:
        """Take note that the lobby does not answer."""
        self.problem = str(error)
        if self.lost_at is None:
            self.lost_at = time.monotonic()
        if self._client is not None:
            self._client.close()
            self._client = None


@dataclass(frozen=True)
class Place:
    """Where a lobby is: what it is called, and the addresses to try."""

    name: str
    hosts: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class JoinSettings:
    """What `horizonml join` was asked for."""

    token: Token | None
    runs: Path = Path("runs")  # where this device keeps what runs leave
    data: tuple[Path, ...] = ()  # folders whose files jobs may read
    accept_data: bool = False
    allow_code: bool = False
    name: str | None = None
    ask: Callable[[str], bool] = lambda question: False  # the person at the terminal, if there is one
    busy: Callable[[], str | None] = lambda: None  # why this device must not train now; None if it may


def secret(token: Token | None) -> dict[str, str]:
    """Return the environment variable by which a rank may take part."""
    return {TOKEN: token.text} if token is not None else {INSECURE: "1"}
