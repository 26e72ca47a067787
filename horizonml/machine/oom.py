"""Counts the processes that the kernel has ended because memory ran out, in this container and on this machine."""

from __future__ import annotations

from pathlib import Path

# In cgroup v2 and v1: processes that were killed in this container, under its limit or the machine's.
_CONTAINER = ("memory.events", "memory/memory.oom_control")


def killed_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of this container the kernel has ended for their memory; None if unknown.

    The count belongs to the container: one that is started anew, as by Kubernetes, counts from 0 again.
    """
    for name in _CONTAINER:
        found = _count(root / name)
        if found is not None:
            return found
    return None


def killed_on_machine(path: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has ended for their memory since this machine was started; None if unknown.

    Containers see this count, too: it is the machine's, and includes what was killed for the limit of a container.
    """
    return _count(path)


def _count(path: Path) -> int | None:
    """Return the value of the line `oom_kill` in a file of names and values."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None
