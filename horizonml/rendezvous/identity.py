"""Finds out which rank this process is, and of how many, from whatever started it.

Each source is a pure function of environment variables; the first that knows wins, in the order of `SOURCES`.
A launcher inside another's job must come first: an `mpirun` in a Slurm batch job inherits SLURM_PROCID=0.

Gives rank numbers to processes whose environment names none: the lowest that no living rank holds.

The number of a rank that was started with it, and is lost, comes last: whatever started that rank starts it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from horizonml.errors import IdentityError
from horizonml.rendezvous.checks import MOST_RANKS, Fields, shown, whole
from horizonml.rendezvous.messages import Ask

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """The rank of this process and the world size, and the source that gave them."""

    rank: int
    world_size: int
    source: str


def from_rank(env: Environment) -> Identity | None:
    """Read `RANK` and `WORLD_SIZE`, which torchrun, Compose and our own launcher set."""
    return _pair(env, "RANK", "WORLD_SIZE", "RANK")


def from_stateful_set(env: Environment) -> Identity | None:
    """Read the ordinal of a StatefulSet's pod, and `WORLD_SIZE`.

    The ordinal is POD_INDEX (the label apps.kubernetes.io/pod-index through the downward API), else the number at the
    end of the pod's HOSTNAME.
    """
    if "WORLD_SIZE" not in env:
        return None
    if "POD_INDEX" in env:
        return _pair(env, "POD_INDEX", "WORLD_SIZE", "StatefulSet")
    ordinal = re.fullmatch(r".+-(\d+)", env.get("HOSTNAME", ""))
    if ordinal is None:
        return None
    return _pair({**env, "HOSTNAME": ordinal[1]}, "HOSTNAME", "WORLD_SIZE", "StatefulSet")


def from_horovod(env: Environment) -> Identity | None:
    """Read what horovodrun sets when it runs over gloo."""
    return _pair(env, "HOROVOD_RANK", "HOROVOD_SIZE", "horovodrun")


def from_open_mpi(env: Environment) -> Identity | None:
    """Read what Open MPI's mpirun sets."""
    return _pair(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI")


def from_mvapich(env: Environment) -> Identity | None:
    """Read what MVAPICH's mpirun_rsh sets."""
    return _pair(env, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH")


def from_pmi(env: Environment) -> Identity | None:
    """Read what MPICH and Intel MPI set (`PMI_RANK`, `PMI_SIZE`), or PMIx, whose world size comes from Slurm."""
    if "PMI_RANK" in env:
        return _pair(env, "PMI_RANK", "PMI_SIZE", "PMI")
    if "PMIX_RANK" in env:
        size = "PMIX_SIZE" if "PMIX_SIZE" in env else "SLURM_NTASKS"
        return _pair(env, "PMIX_RANK", size, "PMIx")
    return None


def from_slurm(env: Environment) -> Identity | None:
    """Read what Slurm's srun sets."""
    # A batch script itself has SLURM_PROCID too; only a step has SLURM_STEP_ID beside it.
    if "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env:
        return None
    return _pair(env, "SLURM_PROCID", "SLURM_NTASKS", "Slurm")


SOURCES: tuple[Callable[[Environment], Identity | None], ...] = (
    from_rank,
    from_stateful_set,
    from_horovod,
    from_open_mpi,
    from_mvapich,
    from_pmi,
    from_slurm,
)


def identify(env: Environment, most: int | None = None) -> Identity | None:
    """Return this process's identity, or None if no launcher started it. Raises IdentityError.

    `most` ranks may take part (parallel.max_workers), where that is more than the world size.
    """
    found = next((found for source in SOURCES if (found := source(env)) is not None), None)
    if found is not None and found.rank >= max(found.world_size, most or 0):
        last = max(found.world_size, most or 0) - 1
        raise IdentityError(
            f"{found.source} says rank {found.rank} of a world of {found.world_size}: ranks go from 0 to {last} "
            "(parallel.max_workers makes room for more)"
        )
    return found


def local_rank(env: Environment) -> int:
    """Return this process's place among the ranks on its machine, or 0 if the launcher does not say.

    Raises IdentityError.
    """
    names = (
        "LOCAL_RANK",
        "HOROVOD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    )
    return next((_number(env, name) for name in names if name in env), 0)


def _pair(env: Environment, rank_name: str, size_name: str, source: str) -> Identity | None:
    if rank_name not in env:
        return None
    rank = _number(env, rank_name)
    if size_name not in env:
        raise IdentityError(f"{rank_name} is set ({rank}) but {size_name} is not; set both, or neither")
    size = _number(env, size_name)
    if size < 1:
        raise IdentityError(f"{size_name} is {size}; a world has at least 1 rank")
    return Identity(rank, size, source)


def _number(env: Environment, name: str) -> int:
    value = env[name].strip()
    if not re.fullmatch(r"\d+", value):
        raise IdentityError(f"{name} is {value!r}, which is not a whole number from 0 up")
    return int(value)


RESERVE_SECONDS = 60.0  # in which a process that was given a number joins with it


@dataclass(frozen=True)
class Given:
    """A rank number that a process was given, and the world size of the run that it joins."""

    rank: int
    world_size: int


@dataclass
class Numbers:
    """Remembers which number was reserved for which process. Times are seconds of any clock."""

    _given: set[int] = field(default_factory=set)  # whose holders ask for a number again when they come back
    _reserved: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)

    def give(
        self, ask: Ask, held: Mapping[int, tuple[str, int]], closed: Iterable[int], before: Iterable[int], now: float
    ) -> int | None:
        """Return a number for a process, or None if there is none left.

        `held` says which process holds a number; those in `closed` are not given for now. Who held one of those in
        `before` may come back.
        """
        process = ask.host_id, ask.pid
        self._reserved = {rank: entry for rank, entry in self._reserved.items() if now < entry[1]}
        taken = {rank for rank, holder in held.items() if holder != process}
        taken |= {rank for rank, (holder, _) in self._reserved.items() if holder != process}
        own = [rank for rank, (holder, _) in self._reserved.items() if holder == process and rank not in taken]
        own += [rank for rank, holder in held.items() if holder == process]
        free = set(range(ask.most)) - taken - set(closed)
        if not (free := set(own) & set(range(ask.most)) or free):
            return None
        others = set(before) - self._given
        rank = min(free - others or free)
        if rank not in others:
            self._given.add(rank)
        self._reserved[rank] = process, now + RESERVE_SECONDS
        return rank


def read_given(answer: Fields) -> Given | None:
    """Return the number that the service has given, None if it has none yet. Raises ValueError."""
    value = answer.get("number")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"a number must be an object, not {shown(value)}")
    return Given(whole(value, "rank", 0, MOST_RANKS - 1), whole(value, "world_size", 1, MOST_RANKS))
