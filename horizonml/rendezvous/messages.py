"""What ranks say to the rendezvous service, and what it answers, with the bounds of each field.

Each request is a JSON object that names what it is about as `do` (see `service` for all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated

from horizonml.rendezvous.wire import MOST_RANKS, any_text, by_rank, cleaned, listed, message, number, text, whole
from horizonml.text import printable, shown

MOST_GENERATION = (1 << 53) - 1
MOST_KEY = 512  # characters
_MOST_REASON = 2000  # characters

Name = Annotated[str, text(255)]
Words = Annotated[str, cleaned(_MOST_REASON)]  # for people
Rank = Annotated[int, whole(0, MOST_RANKS - 1)]
Size = Annotated[int, whole(0, MOST_RANKS)]  # of a world
WorldSize = Annotated[int, whole(1, MOST_RANKS)]
Pid = Annotated[int, whole(1, (1 << 32) - 1)]
Seconds = Annotated[float, number(1e9, "seconds")]
JoinNumber = Annotated[int, whole(0, (1 << 63) - 1)]  # names a join; drawn at random, and nobody else learns it
Generation = Annotated[int, whole(0, MOST_GENERATION)]
Ranks = Annotated[Sequence[int], listed(MOST_RANKS, whole(0, MOST_RANKS - 1), "ranks")]

GroupKey = tuple[int, str, str, str]


@dataclass(frozen=True)
class Fingerprint:
    """What a rank says of itself when it joins."""

    rank: Rank
    world_size: WorldSize
    job: Name
    digest: Name  # of the job
    code: Name  # version of HorizonML
    torch: Name  # version of PyTorch, without the local part
    hostname: Name  # for people only: two machines may have the same one
    machine: Name  # what no other machine has (see `host.machine_id`)
    address: Name  # where its peers reach it
    pid: Pid
    generation: Generation = 0  # of the group in which this process was before; 0 if there was none
    group_size: Size = 0  # the world size of that group
    replace_timeout: Seconds = 0.0  # for which it waits for replacements of the ranks that group has lost
    min_world_size: WorldSize = 1  # ranks without which training does not go on
    max_world_size: Size = 0  # ranks that may take part; 0 if no more than `world_size`
    begin_with: Size = 0  # ranks with which training may begin when no others come; 0 if it takes all
    begin_after: Seconds = 10.0  # without a further rank, after which it does
    files: Name = ""  # what identifies the job's files, where it was started with some (see `runtime.command`)
    up: Seconds = 0.0  # since its process was started
    link_port: Annotated[int, whole(1, 65535)] = 29401  # where its machine takes the data of ranks on other machines
    standby_port: Annotated[int, whole(0, 65535)] = 0  # of the service that it keeps in reserve; 0 if it has none
    standby_key: Name = ""  # by which that one is recognised
    # The last group that it was in and whose ranks had all connected: a majority of that one decides how to go on.
    trained: Generation = 0
    trained_size: Size = 0

    def check_fields(self) -> None:
        """Raise ValueError if the rank is none of its world."""
        most = max(self.world_size, self.max_world_size) - 1
        if self.rank > most:
            raise ValueError(f"rank must be a whole number from 0 to {most}, not {self.rank}")

    @property
    def group_key(self) -> GroupKey:
        """Return what the ranks of one group have in common."""
        return self.world_size, self.job, self.digest, self.torch

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


_DIFFERENCES = {
    "job": ("job {}", "start all ranks with the same job file, or let each job meet at a service of its own"),
    "world_size": ("world size {}", "start all ranks with the same WORLD_SIZE"),
    "digest": ("job digest {}", "start all ranks with the same job file and the same --set options"),
    "torch": ("PyTorch {}", "install the same version everywhere"),
}


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """Return in words why two ranks do not belong together, or None if they do."""
    for name, (words, cure) in _DIFFERENCES.items():
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return (
                f"rank {one.rank} has {words.format(left)} ({one.place}), "
                f"rank {other.rank} has {words.format(right)} ({other.place}); {cure}"
            )
    return None


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
    kind: Departure = Departure.OTHER


def read_farewell(value: object) -> Farewell:
    """Return the farewell that a value stands for, whatever it is: a rank that leaves is never held back."""
    said = value if isinstance(value, dict) else {}
    departure = next((one for one in Departure if one == said.get("kind")), Departure.OTHER)
    return Farewell(printable(str(said.get("reason", ""))), departure)


# What ranks ask


@dataclass(frozen=True)
class Nothing:
    """A request without fields."""


@dataclass(frozen=True)
class Join:
    """A rank asks to take part."""

    id: JoinNumber
    join: Fingerprint


@dataclass(frozen=True)
class Resume:
    """A member of a group that runs already reports on a new connection, perhaps to a service that does not know it."""

    id: JoinNumber
    resume: Fingerprint
    beside: Ranks  # of its group


@dataclass(frozen=True)
class Beat:
    """A sign of life."""

    count: Annotated[int, whole(0, 10**18)]
    reached: bool = False  # whether all peers for which it was left out have answered
    verdict: bool = False  # whether it waits for one, and for how many seconds
    seconds: Seconds = 0.0
    dead: Ranks = ()  # of the last group that had connected, whose machines say that their processes are gone


@dataclass(frozen=True)
class Leave:
    """A member leaves its group."""

    leave: Annotated[Farewell, read_farewell]


@dataclass(frozen=True)
class Unreached:
    """A member does not reach these members of its group."""

    ranks: Ranks


@dataclass(frozen=True)
class SetKey:
    """A member of a group sets a key."""

    key: Annotated[str, any_text(MOST_KEY)]
    value: Annotated[str, any_text(1 << 18)]  # in base64


@dataclass(frozen=True)
class GetKeys:
    """A member of a group asks for the values of keys, or with `check` only whether they are there."""

    keys: Annotated[Sequence[str], listed(10_000, any_text(MOST_KEY), "keys")]
    seconds: Seconds = 0.0  # for which it waits for all of them
    check: bool = False


@dataclass(frozen=True)
class NumberRequest:
    """What a process says of itself that asks for a rank number."""

    host_id: Name
    pid: Pid
    digest: Name  # of the job
    world_size: WorldSize  # with which it would begin
    most: WorldSize  # ranks that may take part
    rank: Rank | None = None  # that it has already, if it asks for the world size alone


@dataclass(frozen=True)
class Ask:
    """A process whose environment names no rank asks for a number."""

    id: JoinNumber  # of the question
    ask: NumberRequest


# What they are answered


@dataclass(frozen=True)
class GivenNumber:
    """A rank number that a process was given, and the world size of the run that it joins."""

    rank: Rank
    world_size: WorldSize


@dataclass(frozen=True)
class Number:
    """The answer to `Ask`: no number as long as it is not clear who is there."""

    number: GivenNumber | None = None


@dataclass(frozen=True)
class Resumed:
    """The answer to `Resume`: whether the group is to stop, because another job has replaced its own."""

    replaced: bool = False


@dataclass(frozen=True)
class JoinVerdict:
    """What has become of a join: its place in a group that has formed, unless it was refused or the job is complete."""

    generation: Generation = 0
    rank: Rank = 0  # its place among the members
    members: Annotated[Sequence[Fingerprint], listed(MOST_RANKS, message(Fingerprint), "members")] = ()
    refused: Annotated[str, cleaned(_MOST_REASON)] | None = None
    replaced: bool = False  # whether it was refused because another job has replaced its own
    complete: bool = False

    def check_fields(self) -> None:
        """Raise ValueError if it is none."""
        if self.refused is None and not self.complete and not (self.generation and self.rank < len(self.members)):
            raise ValueError("members must be there, and this rank must be one of them")


@dataclass(frozen=True)
class Lost:
    """A rank that its generation has lost."""

    rank: Rank  # as it was started
    hostname: Name
    reason: Words
    silent: Seconds  # for which it gave no sign of life; 0 if it left with a word

    def __str__(self) -> str:
        """Return it for people."""
        where = f"rank {self.rank} on {self.hostname}" if self.hostname else f"rank {self.rank}"
        return f"{where} {self.reason}" + (f" ({self.silent:.1f} s)" if self.silent else "")


@dataclass(frozen=True)
class Ended:
    """What the service says when a generation is over before its members have agreed on its end."""

    reason: Words
    lost: Annotated[tuple[Lost, ...], listed(MOST_RANKS, message(Lost), "lost ranks")] = ()  # as far as they are known
    evicted: bool = False  # whether the reader itself was declared lost: the others go on without it


def _address(value: object) -> tuple[str, int]:
    match value:
        case [str(host), int(port)] if 0 < port < 65536:
            return str(ip_address(host)), port
    raise ValueError(f"must be addresses with ports, not {shown(value)}")


@dataclass(frozen=True)
class HeldBack:
    """A rank that is not taken in for some time, because the processes before it died too soon."""

    reason: Words
    left: Seconds
    own: bool = False  # whether it is the reader
    # Addresses that the reader is to reach before it is taken in.
    probe: Annotated[Sequence[tuple[str, int]], listed(MOST_RANKS, _address, "addresses")] = ()


@dataclass(frozen=True)
class GroupStatus:
    """What the service says at each heartbeat."""

    missing: Ranks = ()  # that the others wait for
    running: Size = 0  # ranks in the group that runs
    member: bool = False  # whether the reader is in the group that runs
    newcomers: Ranks = ()  # that wait to be taken in by the group that runs
    refused: Annotated[Sequence[str], listed(64, cleaned(500), "reasons")] = ()  # why ranks were refused lately
    short: Annotated[str, cleaned(500)] = ""  # why those who are here do not begin
    held: Annotated[Sequence[HeldBack], listed(64, message(HeldBack), "ranks")] = ()
    moves: bool = False  # whether the ranks go back to the service that they were told of


@dataclass(frozen=True)
class BeatAnswer:
    """The answer to a sign of life."""

    status: GroupStatus
    verdict: JoinVerdict | None = None
    ended: Ended | None = None


@dataclass(frozen=True)
class Peers:
    """What has become of the other members of a group, by their ranks as they were started."""

    ended: Ended | None
    gone: Annotated[dict[int, Farewell], by_rank(read_farewell)]
    beats: Annotated[dict[int, int], by_rank(whole(0, 10**18))]  # where their heartbeats stand
