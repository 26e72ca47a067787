"""Who is in the group: the judgement on joins, as plain data without sockets.

The rendezvous service keeps one `Roster`. Ranks join with a fingerprint; when every rank of the world is there and
they belong together, a generation is formed. A duplicate rank, a different world size, another job or other software
is refused, and everyone who waits is told which rank it was and what differs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_BEAT_SECONDS = 2.5  # a rank whose heartbeat has not moved for this long makes way for another of its number
_GONE_SECONDS = 5.0  # a rank whose heartbeat has not moved for this long is forgotten
_REFUSAL_SECONDS = 5.0  # ranks of a refused group that come late are told, too, for this long


@dataclass(frozen=True)
class Fingerprint:
    """What a rank says of itself when it joins."""

    rank: int
    world_size: int
    job: str  # the job's name
    digest: str  # of the job
    code: str  # version of HorizonML
    torch: str  # version of PyTorch, without the local part
    host: str  # the machine's name, for people: two machines may have the same
    machine: str  # what no other machine has (see `device.machine_id`)
    address: str  # where its peers reach it
    pid: int
    generation: int = 0  # of the group in which this process was before; 0: in none
    group_size: int = 0  # of that group
    replace_timeout: float = 0.0  # seconds to wait for the ranks that group has lost; 0: as long as it takes
    fewest: int = 1  # ranks without which there is no going on

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Fingerprint:
        """The inverse of `to_json`."""
        texts = ("job", "digest", "code", "torch", "host", "machine", "address")
        return cls(
            rank=int(value["rank"]),
            world_size=int(value["world_size"]),
            pid=int(value["pid"]),
            generation=int(value["generation"]),
            group_size=int(value["group_size"]),
            replace_timeout=float(value["replace_timeout"]),
            fewest=int(value["fewest"]),
            **{name: str(value[name]) for name in texts},
        )

    def same_process(self, other: Fingerprint) -> bool:
        """Whether both joins came from the same process."""
        return (self.node, self.pid) == (other.node, other.pid)

    @property
    def node(self) -> str:
        """The machine or container it runs in: equal for two ranks only if they share its cores and memory."""
        return f"{self.machine}/{self.address}"

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        return f"process {self.pid} on {self.host} ({self.address})"


@dataclass(frozen=True)
class Formed:
    """A complete group: its generation, and its joins and members in the order of ranks."""

    generation: int
    joins: list[int]
    members: list[Fingerprint]


@dataclass(frozen=True)
class Refused:
    """Why some joins were refused."""

    joins: list[int]
    reason: str


@dataclass
class _Member:
    fingerprint: Fingerprint
    joined: float
    moved: float  # when its heartbeat last moved
    beat: int = -1
    formed: bool = False


class Roster:
    """Who waits, who is in the group formed last, and what was refused lately. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.generation = 0
        self._members: dict[int, _Member] = {}
        self._refused_until = float("-inf")
        self._reason = ""

    def join(self, number: int, fingerprint: Fingerprint, now: float) -> None:
        """A rank asks to take part; `number`, which grows, names this join."""
        self._members[number] = _Member(fingerprint, joined=now, moved=now)

    def leave(self, number: int) -> None:
        """A rank goes in peace."""
        self._members.pop(number, None)

    def beat(self, number: int, count: int, now: float) -> None:
        """A rank's heartbeat stands at `count`."""
        member = self._members.get(number)
        if member is not None and member.beat != count:
            member.beat, member.moved = count, now

    def joins(self) -> list[int]:
        """The joins whose heartbeats matter."""
        return list(self._members)

    def decide(self, now: float) -> list[Formed | Refused]:
        """What has become clear since the last call."""
        verdicts: list[Formed | Refused] = []
        self._forget(now)
        if now < self._refused_until and self._waiting():
            verdicts.append(self._refuse(list(self._waiting()), self._reason))
        for older, newer in self._clashes():
            if self._members[older].moved > self._members[newer].joined:
                reason = _clash(self._members[older].fingerprint, self._members[newer].fingerprint)
                # A running group is not disturbed; one that is just forming must be told.
                running = self._members[older].formed
                verdicts.append(self._refuse([newer], reason) if running else self._refuse_all(reason, now))
                break
        waiting = self._waiting()
        reference = next(iter(waiting.values()), None)
        if reference is None:
            return verdicts
        for member in waiting.values():
            difference = _difference(reference.fingerprint, member.fingerprint)
            if difference is not None:
                return [*verdicts, self._refuse_all(difference, now)]
        if not self._clashes() and (self.missing() == [] or self._may_shrink(waiting, now)):
            verdicts.append(self._form(waiting))
        return verdicts

    def _may_shrink(self, waiting: dict[int, _Member], now: float) -> bool:
        """Whether the survivors of a group may go on without those that do not come back."""
        survivors = [member.fingerprint for member in waiting.values() if member.fingerprint.generation > 0]
        if not survivors or any(member.formed for member in self._members.values()):
            return False  # a first meeting needs everyone, and a group that may still run is not split
        last = max(survivors, key=lambda fingerprint: fingerprint.generation)
        if last.replace_timeout <= 0 or len(waiting) < last.fewest:
            return False
        if last.generation != self.generation and 2 * len(survivors) <= last.group_size:
            return False  # this service did not see that group form: only its majority may go on
        return now - max(member.joined for member in waiting.values()) > last.replace_timeout

    def present(self) -> list[int]:
        """The ranks that wait."""
        return sorted({member.fingerprint.rank for member in self._waiting().values()})

    def missing(self) -> list[int]:
        """The ranks that the ones who wait are waiting for."""
        size = max((member.fingerprint.world_size for member in self._waiting().values()), default=0)
        return sorted(set(range(size)) - set(self.present()))

    def newcomers(self) -> list[int]:
        """The ranks that wait and could take part in the group that runs without them."""
        running = [member.fingerprint for member in self._members.values() if member.formed]
        inside = {fingerprint.rank for fingerprint in running}
        return sorted(
            member.fingerprint.rank
            for member in self._waiting().values()
            if running and member.fingerprint.rank not in inside and not _difference(running[0], member.fingerprint)
        )

    def _waiting(self) -> dict[int, _Member]:
        return {number: member for number, member in self._members.items() if not member.formed}

    def _clashes(self) -> list[tuple[int, int]]:
        """Pairs of joins for the same rank, the older first."""
        first: dict[int, int] = {}
        pairs = []
        for number in sorted(self._members):
            rank = self._members[number].fingerprint.rank
            if rank in first:
                pairs.append((first[rank], number))
            first.setdefault(rank, number)
        return pairs

    def _forget(self, now: float) -> None:
        """Drop ranks that are gone: replaced by themselves, or silent for too long."""
        for older, newer in self._clashes():
            if older not in self._members:
                continue
            old = self._members[older]
            if old.fingerprint.same_process(self._members[newer].fingerprint) or now - old.moved > _BEAT_SECONDS:
                del self._members[older]
        for number, member in list(self._members.items()):
            if now - member.moved > _GONE_SECONDS:
                del self._members[number]

    def _form(self, waiting: dict[int, _Member]) -> Formed:
        # A service that was started anew goes on where the one before was.
        self.generation = 1 + max(self.generation, *(member.fingerprint.generation for member in waiting.values()))
        ranked = {member.fingerprint.rank: number for number, member in waiting.items()}
        joins = [ranked[rank] for rank in sorted(ranked)]
        self._members = waiting
        for member in waiting.values():
            member.formed = True
        return Formed(self.generation, joins, [waiting[number].fingerprint for number in joins])

    def _refuse(self, joins: list[int], reason: str) -> Refused:
        for number in joins:
            del self._members[number]
        return Refused(joins, reason)

    def _refuse_all(self, reason: str, now: float) -> Refused:
        self._refused_until, self._reason = now + _REFUSAL_SECONDS, reason
        return self._refuse(list(self._waiting()), reason)


def _clash(older: Fingerprint, newer: Fingerprint) -> str:
    return (
        f"rank {newer.rank} is there twice: {older.place} and {newer.place}; "
        "give every process its own rank, or end the one that is left over"
        if older.digest == newer.digest
        else f"rank {newer.rank} of job {newer.job} ({newer.place}) came while job {older.job} runs here; "
        "wait for its end, or use another rendezvous service"
    )


_FIELDS = {
    "world_size": ("world size {}", "start all ranks with the same WORLD_SIZE"),
    "job": ("job {}", "start all ranks with the same job file"),
    "digest": ("job digest {}", "start all ranks with the same job file and the same --set options"),
    "code": ("HorizonML {}", "install the same version everywhere"),
    "torch": ("PyTorch {}", "install the same version everywhere"),
}


def _difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """How two ranks do not belong together, or None."""
    for name, (words, cure) in _FIELDS.items():
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return (
                f"rank {one.rank} has {words.format(left)} ({one.place}), "
                f"rank {other.rank} has {words.format(right)} ({other.place}); {cure}"
            )
    return None
