"""What ranks say to the rendezvous service, checked when it is read.

Each request is a JSON object that names what it is about as `do` (see `service` for all of them).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from horizonml.rendezvous.checks import MOST_RANKS, Fields, printable, ranks, shown, text, whole
from horizonml.rendezvous.fingerprint import Fingerprint

MOST_JOIN = (1 << 63) - 1


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
    """A rank asks to take part. It draws `number`, which names this join, at random and tells nobody else."""

    number: int
    fingerprint: Fingerprint

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        return {"do": "join", "id": self.number, "join": self.fingerprint.to_json()}

    @classmethod
    def from_json(cls, values: Fields) -> Join:
        """Return what `to_json` was made of. Raises ValueError."""
        return cls(whole(values, "id", 0, MOST_JOIN), Fingerprint.from_json(values.get("join")))


@dataclass(frozen=True)
class Resume:
    """A member of a group that runs already reports on a new connection, perhaps to a service that does not know it."""

    number: int
    fingerprint: Fingerprint
    beside: tuple[int, ...]  # the ranks of its group

    def to_json(self) -> Fields:
        """Return plain JSON values."""
        beside = list(self.beside)
        return {"do": "resume", "id": self.number, "resume": self.fingerprint.to_json(), "beside": beside}

    @classmethod
    def from_json(cls, values: Fields) -> Resume:
        """Return what `to_json` was made of. Raises ValueError."""
        number, beside = whole(values, "id", 0, MOST_JOIN), ranks(values, "beside")
        return cls(number, Fingerprint.from_json(values.get("resume")), beside)


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
        return {"do": "ask", "id": values.pop("number"), "ask": values}

    @classmethod
    def from_json(cls, values: Fields) -> Ask:
        """Return what `to_json` was made of. Raises ValueError."""
        value = values.get("ask")
        if not isinstance(value, dict):
            raise ValueError(f"a question must be an object, not {shown(value)}")
        return cls(
            whole(values, "id", 0, MOST_JOIN),
            text(value, "host_id"),
            whole(value, "pid", 1, (1 << 32) - 1),
            text(value, "digest"),
            whole(value, "world_size", 1, MOST_RANKS),
            whole(value, "most", 1, MOST_RANKS),
        )
