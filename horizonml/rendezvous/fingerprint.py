"""What a rank says of itself when it joins, checked, since anyone may say it; and how two ranks differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MOST_RANKS = 4096  # of a world: far more than gloo connects, and few enough to count
_MOST_TEXT = 255  # characters of a name
_MOST_SECONDS = 1e9
_TEXTS = ("job", "digest", "code", "torch", "host", "machine", "address")

Kind = tuple[int, str, str, str, str]


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
    machine: str  # what no other machine has (see `host.machine_id`)
    address: str  # where its peers reach it
    pid: int
    generation: int = 0  # of the group in which this process was before; 0: in none
    group_size: int = 0  # of that group
    replace_timeout: float = 0.0  # seconds to wait for the ranks that group has lost; 0: as long as it takes
    fewest: int = 1  # ranks without which there is no going on

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Return what `to_json` was made of. Raises ValueError for anything that no rank says of itself."""
        if not isinstance(value, dict):
            raise ValueError(f"a fingerprint must be an object, not {_shown(value)}")
        world_size = whole(value, "world_size", 1, MOST_RANKS)
        return cls(
            rank=whole(value, "rank", 0, world_size - 1),
            world_size=world_size,
            pid=whole(value, "pid", 1, (1 << 32) - 1),
            generation=whole(value, "generation", 0, (1 << 53) - 1),
            group_size=whole(value, "group_size", 0, MOST_RANKS),
            replace_timeout=_seconds(value, "replace_timeout"),
            fewest=whole(value, "fewest", 1, MOST_RANKS),
            **{name: _text(value, name) for name in _TEXTS},
        )

    @property
    def kind(self) -> Kind:
        """Return what the ranks of one group have in common."""
        return self.world_size, self.job, self.digest, self.code, self.torch

    def same_process(self, other: Fingerprint) -> bool:
        """Return whether both came from the same process."""
        return (self.node, self.pid) == (other.node, other.pid)

    @property
    def node(self) -> str:
        """Return the machine or container it runs in: equal for two ranks only if they share its cores and memory."""
        return f"{self.machine}/{self.address}"

    @property
    def place(self) -> str:
        """Return where it runs, for people."""
        return f"process {self.pid} on {self.host} ({self.address})"


_FIELDS = {
    "world_size": ("world size {}", "start all ranks with the same WORLD_SIZE"),
    "job": ("job {}", "start all ranks with the same job file"),
    "digest": ("job digest {}", "start all ranks with the same job file and the same --set options"),
    "code": ("HorizonML {}", "install the same version everywhere"),
    "torch": ("PyTorch {}", "install the same version everywhere"),
}


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """Return how two ranks do not belong together, or None."""
    for name, (words, cure) in _FIELDS.items():
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return (
                f"rank {one.rank} has {words.format(left)} ({one.place}), "
                f"rank {other.rank} has {words.format(right)} ({other.place}); {cure}"
            )
    return None


def whole(values: dict[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number of an object from the network. Raises ValueError."""
    value = values.get(name)
    if type(value) is not int or not low <= value <= high:  # True would be an int, too
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}")
    return value


def _seconds(values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:  # which no NaN is
        raise ValueError(f"{name} must be seconds from 0 to {_MOST_SECONDS:g}, not {_shown(value)}")
    return float(value)


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or len(value) > _MOST_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be at most {_MOST_TEXT} printable characters, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Return a value from the network as it may stand in a message: short, on one line, and plain."""
    text = type(value).__name__ if isinstance(value, dict | list) else ascii(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
