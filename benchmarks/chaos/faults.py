"""Defines the faults, one class for each; a class that is added here is found automatically."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from contextlib import suppress
from inspect import isabstract
from typing import ClassVar

import psutil

from benchmarks.chaos import network
from benchmarks.chaos.cluster import Cluster


class Fault(ABC):
    """Describes a kind of fault, and how it is done to a rank and undone."""

    name: ClassVar[str]
    deadly: ClassVar[bool] = False  # whether it takes effect when the rank's process ends
    isolated: ClassVar[bool] = False  # whether ranks need networks of their own

    @abstractmethod
    def begin(self, cluster: Cluster, rank: int) -> None:
        """Do it to a rank, which runs."""

    def end(self, cluster: Cluster, rank: int) -> None:
        """Undo it, if there is anything to undo. The rank's process may have ended."""
        return

    def seconds(self, dice: random.Random) -> float:
        """Return how long it is to last, if the rank lives so long; 0 for what is over at once."""
        return 0.0

    def problem(self) -> str | None:
        """Return why this machine cannot do it, or None if it can."""
        return None


class Kill(Fault):
    """Ends a rank without a word, like a power cut."""

    name = "kill"
    deadly = True

    def begin(self, cluster: Cluster, rank: int) -> None:
        """Kill the rank."""
        cluster.kill(rank)


class Pause(Fault):
    """Freezes a rank, like a device that swaps or sleeps: it is silent, but its connections stay open."""

    name = "pause"

    def begin(self, cluster: Cluster, rank: int) -> None:
        """Stop the rank."""
        cluster.pause(rank)

    def end(self, cluster: Cluster, rank: int) -> None:
        """Continue the rank."""
        cluster.resume(rank)

    def seconds(self, dice: random.Random) -> float:
        """Return a time that is shorter than 4 s as often as longer."""
        return _short_or_long(dice)


class Partition(Fault):
    """Cuts a rank's network in both directions, as when Wi-Fi is gone: no connection is closed, and nothing answers."""

    name = "partition"
    isolated = True

    def begin(self, cluster: Cluster, rank: int) -> None:
        """Cut the rank off."""
        cluster.partition(rank)

    def end(self, cluster: Cluster, rank: int) -> None:
        """Connect the rank again."""
        cluster.heal(rank)

    def seconds(self, dice: random.Random) -> float:
        """Return a time that is shorter than 4 s as often as longer."""
        return _short_or_long(dice)

    def problem(self) -> str | None:
        """Return what this machine lacks for networks of its ranks' own."""
        return network.problem()


class _Limit(Fault):
    """Lowers limits of the rank's process, which needs no privilege."""

    @abstractmethod
    def limits(self, process: psutil.Process) -> dict[int, int]:
        """Return the limits, and what they are lowered to."""

    def begin(self, cluster: Cluster, rank: int) -> None:
        """Lower the limits of the rank."""
        process = cluster.process(rank)
        for limit, value in self.limits(process).items():
            process.rlimit(limit, (value, process.rlimit(limit)[1]))

    def end(self, cluster: Cluster, rank: int) -> None:
        """Lift the limits; they have gone with the process if that has ended."""
        with suppress(psutil.NoSuchProcess):
            process = cluster.process(rank)
            for limit in self.limits(process):
                hard = process.rlimit(limit)[1]
                process.rlimit(limit, (hard, hard))

    def problem(self) -> str | None:
        """Return that limits of another process can be set on Linux only."""
        return None if hasattr(psutil, "RLIMIT_AS") else "limits of another process can be set on Linux only"


class OutOfMemory(_Limit):
    """Gives a rank no further memory, so that the next allocation that needs some fails.

    RLIMIT_AS and RLIMIT_DATA are used because a cgroup's limit needs privileges; the first one refuses new mappings,
    and the second one growth within those that are reserved. What a rank sees is an allocation that fails, as on a
    system without overcommitment; a container's limit kills it with SIGKILL instead, which is what `kill` does.
    """

    name = "oom"
    deadly = True

    def limits(self, process: psutil.Process) -> dict[int, int]:
        """Limit memory to half of what the rank uses already."""
        used = process.memory_info()
        return {psutil.RLIMIT_AS: used.vms // 2, psutil.RLIMIT_DATA: used.data // 2}

    def seconds(self, dice: random.Random) -> float:
        """Return how long to wait for the allocation that fails."""
        return 20.0


class DiskFull(_Limit):
    """Makes every write to a file fail, like a full disk, until there is room again."""

    name = "disk"

    def limits(self, process: psutil.Process) -> dict[int, int]:
        """Allow no file to grow."""
        return {psutil.RLIMIT_FSIZE: 0}

    def seconds(self, dice: random.Random) -> float:
        """Return some seconds."""
        return dice.uniform(4.0, 10.0)


def _short_or_long(dice: random.Random) -> float:
    return dice.uniform(1.0, 3.0) if dice.random() < 0.5 else dice.uniform(6.0, 10.0)


def _found(base: type[Fault]) -> list[Fault]:
    """Return the faults below a class, in the order in which they are defined."""
    found = [] if isabstract(base) else [base()]
    return [*found, *(fault for kind in base.__subclasses__() for fault in _found(kind))]


FAULTS: dict[str, Fault] = {fault.name: fault for fault in _found(Fault)}  # type: ignore[type-abstract]
