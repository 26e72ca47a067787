"""Defines what a device says to the lobby and what it is told, checked field by field before anybody believes it."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TypeVar

from horizonml.discovery.device import Device
from horizonml.rendezvous.checks import MOST_RANKS, Fields, shown, text, whole

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
