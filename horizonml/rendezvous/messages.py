"""What ranks say to the rendezvous service, checked when it is read.

Each request is a JSON object that names what it is about as `do` (see `service` for all of them).

What a rank says of itself when it joins, and how two ranks differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from horizonml.rendezvous.checks import MOST_GENERATION, MOST_RANKS, Fields, ranks, seconds, shown, text, whole
from horizonml.text import printable

_TEXTS = ("job", "digest", "code", "torch", "hostname", "machine", "address")

GroupKey = tuple[int, str, str, str, str]


@dataclass(frozen=True)
class Fingerprint:
    """What a rank says of itself when it joins."""

    rank: int
    world_size: int
    job: str  # the job's name
    digest: str  # of the job
    code: str  # version of HorizonML
    torch: str  # version of PyTorch, without the local part
    hostname: str  # for people only: two machines may have the same one
    machine: str  # what no other machine has (see `host.machine_id`)
    address: str  # where its peers reach it
    pid: int
    generation: int = 0  # of the group in which this process was before; 0 if there was none
    group_size: int = 0  # the world size of that group
    replace_timeout: float = 0.0  # seconds to wait for replacements of the ranks that group has lost
    min_world_size: int = 1  # ranks without which training does not go on
    max_world_size: int = 0  # ranks that may take part; 0 if no more than `world_size`
    begin_with: int = 0  # ranks with which training may begin when no others come; 0 if it takes all
    up: float = 0.0  # seconds since its process was started
    link_port: int = 29401  # where its machine takes the data of ranks on other machines

    def to_json(self) -> dict[str, str | int | float]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Return what `to_json` was made of. Raises ValueError for anything that no rank says of itself."""
        if not isinstance(value, dict):
            raise ValueError(f"a fingerprint must be an object, not {shown(value)}")
        world_size = whole(value, "world_size", 1, MOST_RANKS)
        max_world_size = whole(value, "max_world_size", 0, MOST_RANKS)
        return cls(
            rank=whole(value, "rank", 0, max(world_size, max_world_size) - 1),
            world_size=world_size,
            max_world_size=max_world_size,
            begin_with=whole(value, "begin_with", 0, MOST_RANKS),
            pid=whole(value, "pid", 1, (1 << 32) - 1),
            generation=whole(value, "generation", 0, MOST_GENERATION),
            group_size=whole(value, "group_size", 0, MOST_RANKS),
            replace_timeout=seconds(value, "replace_timeout"),
            up=seconds(value, "up"),
            min_world_size=whole(value, "min_world_size", 1, MOST_RANKS),
            link_port=whole(value, "link_port", 1, 65535),
            **{name: text(value, name) for name in _TEXTS},
        )

    @property
    def group_key(self) -> GroupKey:
        """Return what the ranks of one group have in common."""
        return self.world_size, self.job, self.digest, self.code, self.torch

    def same_process(self, other: Fingerprint) -> bool:
        """Return whether both came from the same process."""
        return (self.host_id, self.pid) == (other.host_id, other.pid)

    @property
    def host_id(self) -> str:
        """Return the identity of the machine or container: equal for two ranks only if they share cores and memory."""
        return f"{self.machine}/{self.address}"

    @property
    def place(self) -> str:
        """Return where it runs, for people."""
        return f"process {self.pid} on {self.hostname} ({self.address})"


_FIELDS = {
    "world_size": ("world size {}", "start all ranks with the same WORLD_SIZE"),
    "job": ("job {}", "start all ranks with the same job file"),
    "digest": ("job digest {}", "start all ranks with the same job file and the same --set options"),
    "code": ("HorizonML {}", "install the same version everywhere"),
    "torch": ("PyTorch {}", "install the same version everywhere"),
}


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """Return in words why two ranks do not belong together, or None if they do."""
    for name, (words, cure) in _FIELDS.items():
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return (
                f"rank {one.rank} has {words.format(left)} ({one.place}), "
                f"rank {other.rank} has {words.format(right)} ({other.place}); {cure}"
            )
    return None


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
