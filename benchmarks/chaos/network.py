"""Gives every rank a network of its own, which can be cut without a trace: no connection is closed, nothing answers.

Each rank lives in a network namespace with one cable (a veth pair) to a switch (a bridge) in a further namespace, where
the rendezvous service listens. The network of this machine is not touched. Nothing is left behind, even if this process
is killed: a namespace lives as long as a process within it, and the one that holds it open reads from a pipe that
closes with this process. Root may create namespaces, and on many systems every user may, as root of a user namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from horizonml.errors import HorizonError

_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_START_SECONDS = 10.0
_BURST_BYTES, _QUEUE_MILLISECONDS = 8192, 400  # of a slow link
_TICKS_PER_SECOND = 100  # of the kernel, at least: what a fast link sends in one must fit into a burst
_SWITCH = "10.251.0.1"  # in no network but those of the namespaces


class NoNetworks(HorizonError):
    """Reports that this machine lets nobody, or not this user, create networks for ranks."""


class Networks:
    """Holds the networks of a number of ranks, and the switch between them. Used as a context manager, it ends them."""

    def __init__(self, ranks: int) -> None:
        """Create the networks. Raises NoNetworks with what is missing."""
        check_programs()
        self._user = os.geteuid() != 0
        self._holders: list[subprocess.Popen[bytes]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self._switch = self._hold([])
            self._ip(self._switch, "link set lo up")
            self._ip(self._switch, "link add switch type bridge")
            self._ip(self._switch, f"addr add {_SWITCH}/16 dev switch")
            self._ip(self._switch, "link set switch up")
            self._ranks = [self._plug_in(rank) for rank in range(ranks)]
            undo.pop_all()

    @property
    def address(self) -> str:
        """Return the address of the switch, where a service can listen."""
        return _SWITCH

    def at_switch(self, command: list[str]) -> list[str]:
        """Return the command that runs another one at the switch."""
        return [*self._enter(self._switch), *command]

    def at_rank(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs another one in a rank's network."""
        return [*self._enter(self._ranks[rank]), *command]

    def address_of(self, rank: int) -> str:
        """Return the address of a rank."""
        return f"10.251.{1 + rank // 250}.{1 + rank % 250}"

    def cut(self, rank: int) -> None:
        """Cut a rank off: what it sends and what is sent to it is lost."""
        self._ip(self._switch, f"link set rank{rank} down")

    def mend(self, rank: int) -> None:
        """Connect a rank again."""
        self._ip(self._switch, f"link set rank{rank} up")

    def lose(self, share: float) -> None:
        """Lose this share of all packets from now on, at random, wherever they arrive. Needs iptables."""
        rule = f"iptables -A INPUT -m statistic --mode random --probability {share} -j DROP"
        for place in (self._switch, *self._ranks):
            self._run(place, rule)

    def slow_down(self, rank: int, bits_per_second: float) -> None:
        """Let a rank send and receive only so many bits per second from now on. Raises NoNetworks."""
        burst = max(_BURST_BYTES, int(bits_per_second / 8 / _TICKS_PER_SECOND))
        shape = f"root tbf rate {bits_per_second:.0f}bit burst {burst} latency {_QUEUE_MILLISECONDS}ms"
        self._run(self._ranks[rank], f"tc qdisc replace dev cable {shape}")
        self._run(self._switch, f"tc qdisc replace dev rank{rank} {shape}")

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that a rank's cable has carried away from it, headers included."""
        for line in Path(f"/proc/{self._ranks[rank].pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "cable":
                return int(counters.split()[8])
        raise NoNetworks(f"rank {rank}'s network has no cable")

    def close(self) -> None:
        """Let go of the networks, which end with the last process within them."""
        for holder in reversed(self._holders):
            holder.communicate()  # closes the pipe that it reads from
        self._holders.clear()

    def __enter__(self) -> Networks:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _plug_in(self, rank: int) -> subprocess.Popen[bytes]:
        """Create a rank's network, with a cable to the switch."""
        holder = self._hold(self._enter(self._switch))
        self._ip(self._switch, f"link add rank{rank} type veth peer name cable netns {holder.pid}")
        self._ip(self._switch, f"link set rank{rank} master switch up")
        self._ip(holder, "link set lo up")
        self._ip(holder, f"addr add {self.address_of(rank)}/16 dev cable")
        self._ip(holder, "link set cable up")
        return holder

    def _hold(self, within: list[str]) -> subprocess.Popen[bytes]:
        """Start a process in a new network namespace, which keeps it alive until this process ends."""
        user = ["--user", "--map-root-user"] if self._user and not within else []
        known = {_network("self"), *(_network(holder.pid) for holder in self._holders)}
        holder = subprocess.Popen(
            [*within, "unshare", *user, "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._holders.append(holder)
        deadline = time.monotonic() + _START_SECONDS
        while _network(holder.pid) in known:  # the program that enters it has not got there yet
            if holder.poll() is not None or time.monotonic() > deadline:
                assert holder.stderr is not None
                said = holder.stderr.read().decode(errors="replace").strip() if holder.returncode else "no answer"
                raise NoNetworks(
                    f"this machine gives user {os.geteuid()} no network namespaces ({said}); run it as root, or allow "
                    "user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces)"
                )
            time.sleep(0.005)
        return holder

    def _enter(self, holder: subprocess.Popen[bytes]) -> list[str]:
        """Return the words before a command that is to run in a holder's network."""
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(holder.pid), *user, "--net"]

    def _ip(self, holder: subprocess.Popen[bytes], words: str) -> None:
        """Configure a network's addresses and cables. Raises NoNetworks if that is not possible."""
        self._run(holder, f"ip {words}")

    def _run(self, holder: subprocess.Popen[bytes], words: str) -> None:
        """Run a command in a network. Raises NoNetworks if it fails."""
        command = [*self._enter(holder), *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_START_SECONDS)
        if done.returncode:
            raise NoNetworks(f"`{words}` failed in a network namespace: {done.stderr.strip()}")


def check_programs() -> None:
    """Raise NoNetworks if a program is missing that networks need."""
    missing = {program: package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if missing:
        raise NoNetworks(
            f"cutting a rank's network needs Linux with {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed (package {', '.join(sorted(set(missing.values())))})"
        )


def problem() -> str | None:
    """Return why this machine cannot cut networks, or None if it can."""
    try:
        with Networks(1):
            return None
    except NoNetworks as error:
        return str(error)


def _network(pid: int | str) -> str | None:
    """Return the network namespace of a process, or None if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
