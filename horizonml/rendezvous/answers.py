"""What the rendezvous service says to ranks, checked when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address

from horizonml.rendezvous.checks import MOST_GENERATION, MOST_RANKS, Fields, seconds, shown, text, whole
from horizonml.rendezvous.messages import Fingerprint
from horizonml.text import printable

_MOST_REASON = 2000  # characters
_MOST_PROBED = 64  # addresses


@dataclass(frozen=True)
class Formed:
    """The verdict on a complete group: its generation, and its joins and members in the order of ranks."""

    generation: int
    joins: list[int]
    members: list[Fingerprint]

    def to_json(self, number: int) -> Fields:
        """Return plain JSON values for the member of this join; nobody learns the others' joins."""
        members = [member.to_json() for member in self.members]
        return {"generation": self.generation, "rank": self.joins.index(number), "members": members}


@dataclass(frozen=True)
class Refused:
    """The verdict on joins that were refused, and why."""

    joins: list[int]
    reason: str

    def to_json(self, number: int) -> Fields:
        """Return plain JSON values."""
        return {"refused": self.reason}


@dataclass(frozen=True)
class Complete:
    """The verdict on joins that come when the others have trained the job to the end."""

    joins: list[int]

    def to_json(self, number: int) -> Fields:
        """Return plain JSON values."""
        return {"complete": True}


Verdict = Formed | Refused | Complete


@dataclass(frozen=True)
class Member:
    """What a rank reads when it is a member of a group that has formed."""

    generation: int
    rank: int  # its place among the members
    members: list[Fingerprint]


def read_verdict(values: object) -> Member | Refused | Complete:
    """Return the verdict on this rank's join. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"a verdict must be an object, not {shown(values)}")
    if "refused" in values:
        return Refused([], printable(str(values["refused"]), _MOST_REASON))
    if "complete" in values:
        return Complete([])
    members = values.get("members")
    if not isinstance(members, list) or not 0 < len(members) <= MOST_RANKS:
        raise ValueError("a verdict must have members")
    rank, generation = whole(values, "rank", 0, len(members) - 1), whole(values, "generation", 1, MOST_GENERATION)
    return Member(generation, rank, [Fingerprint.from_json(member) for member in members])


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
    """What the service says when a generation is over before its members have agreed on its end."""

    reason: str
    lost: tuple[Lost, ...] = ()  # as far as they are known
    evicted: bool = False  # whether the reader itself was declared lost: the others go on without it

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return asdict(self)


def read_ended(values: object) -> Ended | None:
    """Return how a generation ended, None if it has not. Raises ValueError."""
    if values is None:
        return None
    lost = values.get("lost") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(lost, list | tuple) or len(lost) > MOST_RANKS:
        raise ValueError("the end of a generation must be an object with a list of lost ranks")
    found = tuple(_read_lost(one) for one in lost)
    return Ended(printable(str(values.get("reason", ""))), found, values.get("evicted") is True)


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
    """A rank that is not taken in for some time, because the processes before it died too soon."""

    number: int  # of its join, which only the service knows
    reason: str
    left: float  # seconds
    own: bool = False  # whether it is the reader
    probe: tuple[tuple[str, int], ...] = ()  # addresses that the reader is to reach before it is taken in


@dataclass(frozen=True)
class Status:
    """What the service says at each heartbeat."""

    missing: Sequence[int] = ()  # ranks that the others wait for
    running: int = 0  # ranks in the group that runs
    member: bool | None = None  # whether the reader is in the group that runs; None if the service has not said
    newcomers: Sequence[int] = ()  # ranks that wait to be taken in by the group that runs
    refused: Sequence[str] = ()  # why ranks were refused lately
    short: str = ""  # why those who are here do not begin, where missing ranks do not say it
    held: Sequence[HeldBack] = ()

    def to_json(self, number: int | None, member: bool) -> Fields:
        """Return plain JSON values for the rank of this join, which is in the group that runs or is not."""
        return {
            "missing": list(self.missing),
            "running": self.running,
            "member": member,
            "newcomers": list(self.newcomers),
            "refused": list(self.refused),
            "short": self.short,
            "held": [
                {"reason": one.reason, "left": one.left, "own": one.number == number}
                | ({"probe": one.probe} if one.probe and one.number == number else {})
                for one in self.held
            ],
        }


def read_status(values: object) -> Status:
    """Return the status that a service has sent; what is malformed in it is left out."""
    if not isinstance(values, dict):
        return Status()
    running, member, refused = values.get("running"), values.get("member"), values.get("refused")
    return Status(
        _ranks_among(values.get("missing")),
        running if type(running) is int and 0 <= running <= MOST_RANKS else 0,
        member if isinstance(member, bool) else None,
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
                left, own = seconds(one, "left"), one.get("own") is True
                found.append(
                    HeldBack(0, printable(str(one.get("reason", ""))), left, own, _addresses(one.get("probe")))
                )
    return found


def _addresses(value: object) -> tuple[tuple[str, int], ...]:
    """Return the addresses in a list, and leave out whatever else it holds."""
    found = []
    for one in value[:_MOST_PROBED] if isinstance(value, list) else []:
        with suppress(ValueError):
            match one:
                case [str(host), int(port)] if 0 < port < 65536:
                    found.append((str(ip_address(host)), port))
    return tuple(found)
