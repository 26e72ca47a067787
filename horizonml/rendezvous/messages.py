"""The messages of the rendezvous, checked when they are read.

An event goes from a rank to the service, and a verdict, the status and a farewell from the service to ranks. All travel
as JSON objects through the store (see `mailbox`). So does the end of a generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from horizonml.rendezvous.checks import (
    MOST_GENERATION,
    MOST_RANKS,
    Fields,
    parse,
    printable,
    ranks,
    seconds,
    shown,
    text,
    whole,
)
from horizonml.rendezvous.fingerprint import Fingerprint

_MOST_JOIN = (1 << 63) - 1
_MOST_STATUS = 1 << 18  # bytes, which the ranks of the largest world take
_MOST_VERDICT = 1 << 23  # bytes, which the fingerprints of the largest world take
_MOST_REASON = 2000  # characters


class Departure(StrEnum):
    """Why a rank leaves its group."""

    COMPLETE = "complete"  # it has trained to the end, as all have, and does not come back
    DONE = "done"  # it stops as agreed with the others, and does not come back
    AGAIN = "again"  # it meets the others again, as all have agreed
    LOST_PEER = "lost"  # it lost another rank, so it is not the one to blame, and meets the others again
    FAILED = "failed"  # it failed for a reason that holds for all ranks
    OTHER = "other"
    SILENT = "silent"  # it did not leave by itself: the service declared it lost

    @property
    def blames(self) -> bool:
        """Return whether the group ends because of this rank."""
        return self in (Departure.FAILED, Departure.OTHER, Departure.SILENT)


@dataclass(frozen=True)
class Farewell:
    """What a rank says when it leaves."""

    reason: str  # for people
    departure: Departure = Departure.OTHER

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"reason": self.reason, "kind": self.departure.value}

    @classmethod
    def from_json(cls, value: object) -> Farewell:
        """Return the farewell that a value stands for, whatever it is: a rank that leaves is never held back."""
        said = value if isinstance(value, dict) else {}
        departure = next((one for one in Departure if one == said.get("kind")), Departure.OTHER)
        return cls(printable(str(said.get("reason", ""))), departure)


@dataclass(frozen=True)
class Join:
    """A rank asks to take part; `number` names this join, and is drawn at random."""

    number: int
    fingerprint: Fingerprint

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"id": self.number, "join": self.fingerprint.to_json()}


@dataclass(frozen=True)
class Withdraw:
    """A rank that waits takes its join back."""

    number: int

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"id": self.number, "withdraw": True}


@dataclass(frozen=True)
class Leave:
    """A member leaves its group."""

    number: int
    farewell: Farewell

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"id": self.number, "leave": self.farewell.to_json()}


@dataclass(frozen=True)
class Resume:
    """A member of a group that runs already reports to a service that does not know it."""

    number: int
    fingerprint: Fingerprint
    beside: tuple[int, ...]  # the ranks of its group

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"id": self.number, "resume": self.fingerprint.to_json(), "beside": list(self.beside)}


@dataclass(frozen=True)
class Ask:
    """A process whose environment names no rank asks for a number; `number` names the question."""

    number: int
    host_id: str
    pid: int
    digest: str  # of the job
    world_size: int  # with which it would begin
    most: int  # ranks that may take part

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        values = asdict(self)
        return {"id": values.pop("number"), "ask": values}

    @classmethod
    def from_json(cls, number: int, value: object) -> Ask:
        """Return what `to_json` was made of. Raises ValueError."""
        if not isinstance(value, dict):
            raise ValueError(f"a question must be an object, not {shown(value)}")
        return cls(
            number,
            text(value, "host_id"),
            whole(value, "pid", 1, (1 << 32) - 1),
            text(value, "digest"),
            whole(value, "world_size", 1, MOST_RANKS),
            whole(value, "most", 1, MOST_RANKS),
        )


Event = Join | Withdraw | Leave | Resume | Ask


class UnreadableJoin(ValueError):
    """A join whose fingerprint is damaged, although its number is known, so that its sender can be told."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def read_event(message: bytes) -> Event:
    """Return the event that a message stands for. Raises ValueError, and UnreadableJoin if it may be answered."""
    values = parse(message)
    number = whole(values, "id", 0, _MOST_JOIN)
    if "leave" in values:
        return Leave(number, Farewell.from_json(values["leave"]))
    if "ask" in values:
        return Ask.from_json(number, values["ask"])
    if "withdraw" in values:
        return Withdraw(number)
    if "resume" in values:
        return Resume(number, Fingerprint.from_json(values["resume"]), ranks(values, "beside"))
    try:
        return Join(number, Fingerprint.from_json(values.get("join")))
    except ValueError as error:
        raise UnreadableJoin(number, str(error)) from None


@dataclass(frozen=True)
class Formed:
    """The verdict on a complete group: its generation, and its joins and members in the order of ranks."""

    generation: int
    joins: list[int]
    members: list[Fingerprint]

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        members = [member.to_json() for member in self.members]
        return {"generation": self.generation, "joins": self.joins, "members": members}


@dataclass(frozen=True)
class Refused:
    """The verdict on joins that were refused, and why."""

    joins: list[int]
    reason: str

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"refused": self.reason}


@dataclass(frozen=True)
class Complete:
    """The verdict on joins that come when the others have trained the job to the end."""

    joins: list[int]

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"complete": True}


Verdict = Formed | Refused | Complete


def read_verdict(message: bytes, number: int) -> Verdict:
    """Return the verdict on the join `number`. Raises ValueError."""
    values = parse(message, _MOST_VERDICT)
    if "refused" in values:
        return Refused([number], printable(str(values["refused"]), _MOST_REASON))
    if "complete" in values:
        return Complete([number])
    joins, members = values.get("joins"), values.get("members")
    if not isinstance(joins, list) or not isinstance(members, list) or not 0 < len(members) <= MOST_RANKS:
        raise ValueError("a verdict must have joins and members")
    if len(joins) != len(members) or not all(type(join) is int for join in joins) or number not in joins:
        raise ValueError("a verdict must have a join for each member, and this rank among them")
    generation = whole(values, "generation", 1, MOST_GENERATION)
    return Formed(generation, joins, [Fingerprint.from_json(member) for member in members])


@dataclass(frozen=True)
class Lost:
    """A rank that its generation has lost."""

    rank: int  # as it was started
    hostname: str
    reason: str
    silent: float  # seconds for which it gave no sign of life; 0 if it left with a word

    def __str__(self) -> str:
        """Return it for people."""
        where = f"rank {self.rank} on {self.hostname}" if self.hostname else f"rank {self.rank}"
        return f"{where} {self.reason}" + (f" ({self.silent:.1f} s)" if self.silent else "")


@dataclass(frozen=True)
class Ended:
    """What the service publishes when a generation is over before its members have agreed on its end."""

    reason: str
    lost: tuple[Lost, ...] = ()  # as far as they are known
    evicted: bool = False  # whether the reader itself was declared lost: the others go on without it

    def to_json(self) -> Fields:
        """Return plain JSON values of what holds for all readers."""
        return {"reason": self.reason, "lost": [asdict(one) for one in self.lost]}


def read_ended(message: bytes) -> Ended:
    """Return how a generation ended. Raises ValueError."""
    values = parse(message, _MOST_STATUS)
    lost = values.get("lost")
    if not isinstance(lost, list) or len(lost) > MOST_RANKS:
        raise ValueError("lost must be a list of lost ranks")
    return Ended(printable(str(values.get("reason", ""))), tuple(_read_lost(one) for one in lost))


def _read_lost(value: object) -> Lost:
    if not isinstance(value, dict):
        raise ValueError(f"a lost rank must be an object, not {shown(value)}")
    return Lost(
        whole(value, "rank", 0, MOST_RANKS - 1),
        text(value, "hostname"),
        printable(str(value.get("reason", ""))),
        seconds(value, "silent"),
    )


@dataclass(frozen=True)
class HeldBack:
    """A join that is not taken in for some time."""

    number: int
    reason: str
    left: float  # seconds


@dataclass(frozen=True)
class Status:
    """What the service says to everyone, four times a second."""

    missing: Sequence[int] = ()  # ranks that the others wait for
    running: Sequence[int] | None = None  # the joins of the group that runs; None if the service has not said yet
    newcomers: Sequence[int] = ()  # ranks that wait to be taken in by the group that runs
    refused: Sequence[str] = ()  # why ranks were refused lately
    short: str = ""  # why those who are here do not begin, where missing ranks do not say it
    held: Sequence[HeldBack] = ()  # who has to wait, because the processes before it died too soon

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        lists = {"missing": self.missing, "running": self.running or (), "newcomers": self.newcomers}
        return {
            **{name: list(values) for name, values in lists.items()},
            "refused": list(self.refused),
            "short": self.short,
            "held": [asdict(one) for one in self.held],
        }


def read_status(message: bytes | None) -> Status:
    """Return the status that a message stands for, empty where there is none or a stranger has written over it."""
    try:
        values = parse(message or b"{}", _MOST_STATUS)
    except ValueError:
        return Status()
    running, refused = values.get("running"), values.get("refused")
    return Status(
        _ranks_among(values.get("missing")),
        [join for join in running if type(join) is int] if isinstance(running, list) else None,
        _ranks_among(values.get("newcomers")),
        [printable(str(reason)) for reason in refused[-1:]] if isinstance(refused, list) else [],
        printable(str(values.get("short", ""))),
        _held_among(values.get("held")),
    )


def _ranks_among(value: object) -> list[int]:
    """Return the ranks in a list, and leave out whatever else it holds."""
    found = value if isinstance(value, list) else []
    return [rank for rank in found[:MOST_RANKS] if type(rank) is int and 0 <= rank < MOST_RANKS]


def _held_among(value: object) -> list[HeldBack]:
    """Return who is held back, and leave out whatever else there is."""
    found = []
    for one in value[:MOST_RANKS] if isinstance(value, list) else []:
        with suppress(ValueError):
            if isinstance(one, dict):
                number, left = whole(one, "number", 0, _MOST_JOIN), seconds(one, "left")
                found.append(HeldBack(number, printable(str(one.get("reason", ""))), left))
    return found
