"""What devices say that wait for a rank, or have started one, and what they are answered; see `messages` for ranks.

It is a module of its own because a rendezvous service without `horizonml up` does without it, and its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from horizonml.rendezvous.messages import Name, Rank, Size
from horizonml.rendezvous.wire import any_text, listed, matching, number, text, whole

MOST_WORDS = 200  # characters of what a device says about itself
MOST_JOB = 32 << 10  # characters of a job that travels
MOST_CHUNK = 96 << 10  # bytes of a file, or of an echo, in one message
MOST_FILES = 200_000

Line = Annotated[str, text(MOST_WORDS)]  # for people
Id = Annotated[str, matching("[0-9a-f]{32}", "32 hexadecimal characters")]
Bytes = Annotated[int, whole(0, 1 << 60)]


class Phase(StrEnum):
    """How far a run of `horizonml up` is."""

    WAITING = "waiting"  # for devices, before the training
    STARTED = "started"
    OVER = "over"


class DeviceState(StrEnum):
    """What a device is doing."""

    PREPARING = "preparing"  # it reads the job or fetches the data
    READY = "ready"
    TRAINING = "training"
    DONE = "done"  # its rank has trained to the end
    UNABLE = "unable"  # to run this job; its words say why
    LEAVING = "leaving"


class RunOutcome(StrEnum):
    """How a run of `horizonml up` has ended."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class DeviceInfo:
    """Describes a device. Nothing of it is proven; it serves people, and a first guess at a plan."""

    name: Annotated[str, text(255, least=1)]
    cores: Annotated[float, number(1 << 16)]  # that it lets a process use
    memory: Bytes  # that it lets a process use
    architecture: Name = ""
    system: Name = ""
    model: Name = ""  # such as "Raspberry Pi 5 Model B Rev 1.0"
    processor: Name = ""
    accelerator: Name = ""  # such as a GPU; empty if there is none that is known
    gflops: Annotated[float, number(1e9)] = 0.0  # measured, in 10^9 operations of 32 bits a second; 0 if not measured
    horizonml: Name = ""  # version
    torch: Name = ""  # version; empty if it is not installed


_Rate = Annotated[float, number(1e15)]


@dataclass(frozen=True)
class LinkRates:
    """What a device has measured of its way to the service: bytes per second in both directions, and a round trip."""

    sent: _Rate
    received: _Rate
    seconds: _Rate

    def __str__(self) -> str:
        """Return the rate of the slower direction for people, in bits per second."""
        rate = 8 * min(self.sent, self.received)
        if rate <= 0:
            return "-"
        return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.0f} Mbit/s"


@dataclass(frozen=True)
class DeviceBeat:
    """A device's sign of life, which it gives at least once a second."""

    id: Id  # drawn by the device, and the same as long as its process lives
    device: DeviceInfo
    state: DeviceState = DeviceState.PREPARING
    words: Line = ""
    link: LinkRates | None = None
    knows: Phase | None = None  # the phase that it knows already: the answer waits until there is another one
    run: Id | None = None  # the run for which it is ready, or trains
    rank: Rank | None = None  # with which it trains there

    def saying(self, state: DeviceState, words: str, **more: Any) -> DeviceBeat:
        """Return a sign of life with other words, on one line and not too long."""
        plain = "".join(character if character.isprintable() else " " for character in words)
        plain = plain if len(plain) <= MOST_WORDS else f"{plain[: MOST_WORDS - 4]} ..."
        return replace(self, state=state, words=plain, **more)


@dataclass(frozen=True)
class RunStatus:
    """The answer to a device's sign of life."""

    run: Id  # identifies this run of `horizonml up`
    phase: Phase
    job: Line  # its name
    position: Size = 0  # of this device among those who are there, from 1
    count: Size = 0  # of devices that are there
    wanted: Size | None = None  # devices that are waited for
    rank: Rank | None = None  # once this device is to train
    world_size: Size | None = None
    outcome: RunOutcome | None = None  # once it is over
    words: Name = ""  # why it failed, or why this device cannot take part
    refused: bool = False  # whether this device cannot take part


@dataclass(frozen=True)
class RunProgress:
    """How far the training of a run is, as far as the device that is asked knows."""

    step: Annotated[int, whole(0, 1 << 53)] | None = None
    accuracy: Annotated[float, number(1.0)] | None = None  # on held-out data
    seconds: Annotated[float, number(1e12)] | None = None  # since it began


@dataclass(frozen=True)
class JobOffer:
    """The job of a run, as text."""

    job: Annotated[str, any_text(MOST_JOB)]
    name: Line
    lineage: Id  # identifies a training through all its continuations
    run: Id
    shared: bool = False  # whether its data can be fetched
    phase: Phase = Phase.WAITING
    devices: Size = 0  # that are there
    progress: RunProgress = RunProgress()


@dataclass(frozen=True)
class FilesRequest:
    """Asks for a page of the list of shared files, or for a piece of a file."""

    list: Annotated[int, whole(0, MOST_FILES)] | None = None  # the first file of the page
    file: Annotated[int, whole(0, MOST_FILES)] | None = None  # by its place in the list
    start: Bytes = 0  # of the piece


@dataclass(frozen=True)
class FilesPage:
    """A page of the list of shared files: names, sizes in bytes, and SHA-256."""

    ready: bool = False  # whether all files have been hashed
    done: Bytes = 0  # bytes that have been hashed
    bytes: Bytes = 0  # of all files
    count: Annotated[int, whole(0, MOST_FILES)] = 0
    single: bool = False  # whether it is one file, and not a folder
    files: Annotated[Sequence[Any], listed(1000, lambda value: value, "files")] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of a shared file, in base64."""

    piece: Annotated[str, any_text(2 * MOST_CHUNK)]


@dataclass(frozen=True)
class Echo:
    """Characters that travel there, and as many as are asked for that travel back, so that a link can be measured."""

    payload: Annotated[str, any_text(2 * MOST_CHUNK)] = ""
    back: Annotated[int, whole(0, 2 * MOST_CHUNK)] = 0
