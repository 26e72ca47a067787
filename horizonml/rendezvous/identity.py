"""Determines which rank this process is, and of how many, from whatever started it.

A launcher inside another's job must come first: an `mpirun` in a Slurm batch job inherits SLURM_PROCID=0.

In Kubernetes the number of workers may change while they run, so only the rendezvous service is told how many there
are to be (HORIZONML_ELASTIC), and a worker asks it. A job may have several classes of workers, each of which numbers
its pods from 0: HORIZONML_RANKS says which ranks those have.

A process whose environment names no rank asks the service for a number: the lowest that no living rank holds. The
number of a rank that was started with it, and is lost, comes last: whatever started that rank starts it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from horizonml.errors import IdentityError
from horizonml.rendezvous.messages import NumberRequest
from horizonml.rendezvous.wire import MOST_RANKS

Environment = Mapping[str, str]


ELASTIC = "HORIZONML_ELASTIC"  # set where the rendezvous service knows the world size
RANKS = "HORIZONML_RANKS"  # of the class of workers that a pod belongs to: "2-4"; pods beyond them ask for a number
ASKED = -1  # a rank, or a world size, for which the rendezvous service is asked


@dataclass(frozen=True)
class Identity:
    """The rank of this process and the world size, and the source that gave them; either may be `ASKED`."""

    rank: int
    world_size: int
    source: str


# The first that knows wins: the variables of the rank and of the world size, what sets them, and what must be set, too.
_SOURCES = (
    ("RANK", "WORLD_SIZE", "RANK", None),  # torchrun, Compose and our own launcher
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "Indexed Job", "WORLD_SIZE"),
    ("POD_INDEX", "WORLD_SIZE", "StatefulSet", "WORLD_SIZE"),  # the label apps.kubernetes.io/pod-index
    ("HOSTNAME", "WORLD_SIZE", "StatefulSet", "WORLD_SIZE"),  # of a pod, which ends with its ordinal
    ("HOROVOD_RANK", "HOROVOD_SIZE", "horovodrun", None),  # over gloo
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI", None),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH", None),
    ("PMI_RANK", "PMI_SIZE", "PMI", None),  # MPICH and Intel MPI
    ("PMIX_RANK", "PMIX_SIZE", "PMIx", "PMIX_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS", "PMIx", None),
    # A batch script has SLURM_PROCID, too; only a step has one of these.
    ("SLURM_PROCID", "SLURM_NTASKS", "Slurm", "SLURM_STEP_ID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "Slurm", "SLURM_STEPID"),
    # PET_NPROC_PER_NODE is the number of the pod's cores, all of which one rank uses.
    ("PET_NODE_RANK", "PET_NNODES", "Kubeflow Trainer", None),
)


def from_rank(env: Environment) -> Identity | None:
    """Return what `RANK` and `WORLD_SIZE` say, which torchrun, Compose and our own launcher set."""
    return _from(env, *_SOURCES[0])


def identify(env: Environment, most: int | None = None) -> Identity | None:
    """Return this process's identity, or None if no launcher started it. Raises IdentityError.

    `most` ranks may take part (parallel.max_workers), where that is more than the world size.
    """
    started_by_launcher = {"RANK", "WORLD_SIZE"} <= env.keys()  # as inside such a pod
    if not started_by_launcher and (elastic := _elastic(env)) is not None:
        return elastic
    found = next((found for source in _SOURCES if (found := _from(env, *source)) is not None), None)
    if found is not None and found.rank >= max(found.world_size, most or 0):
        last = max(found.world_size, most or 0) - 1
        raise IdentityError(
            f"{found.source} says rank {found.rank} of a world of {found.world_size}: ranks go from 0 to {last} "
            "(parallel.max_workers makes room for more)"
        )
    return found


def _elastic(env: Environment) -> Identity | None:
    """Return the identity of a pod whose world size the rendezvous service knows. Raises IdentityError."""
    if env.get(ELASTIC, "").lower() not in ("1", "true", "yes"):
        return None
    for name, _, source, _ in _SOURCES[1:4]:
        found = _from({**env, "WORLD_SIZE": "1"}, name, "WORLD_SIZE", source, None)
        if found is None:
            continue
        bounds = re.fullmatch(r"(\d+)-(\d+)", env.get(RANKS, f"0-{MOST_RANKS - 1}"))
        if bounds is None:
            raise IdentityError(f"{RANKS} is {env[RANKS]!r}; it must be the first and the last rank, such as 2-4")
        rank = int(bounds[1]) + found.rank
        return Identity(rank if rank <= int(bounds[2]) else ASKED, ASKED, source)
    raise IdentityError(
        f"{ELASTIC} is set, but nothing numbers this pod: it must belong to a StatefulSet or an Indexed Job"
    )


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


def _from(env: Environment, rank_name: str, size_name: str, source: str, needs: str | None) -> Identity | None:
    if rank_name not in env or (needs is not None and needs not in env):
        return None
    if rank_name == "HOSTNAME":
        ordinal = re.fullmatch(r".+-(\d+)", env[rank_name])
        if ordinal is None:
            return None
        env = {**env, rank_name: ordinal[1]}
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


@dataclass
class Numbers:
    """Remembers which number was reserved for which process. Times are seconds of any clock."""

    _given: set[int] = field(default_factory=set)  # whose holders ask for a number again when they come back
    _reserved: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)

    def give(
        self,
        ask: NumberRequest,
        held: Mapping[int, tuple[str, int]],
        closed: Iterable[int],
        before: Iterable[int],
        now: float,
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

    def keep(self, rank: int, process: tuple[str, int], now: float, seconds: float) -> bool:
        """Reserve a number for a process for some seconds, unless it is reserved for another one."""
        holder, until = self._reserved.get(rank, (process, now))
        free = holder == process or until <= now
        if free:
            self._reserved[rank] = process, now + seconds
        return free
