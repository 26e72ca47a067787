"""Injects faults into a running job, one after the other, and measures what they cost.

The unfaulted reference is the same cluster, for a while before the first fault and for as long after the last one: the
same processes, caches and machine, whose speed may drift meanwhile; and never at the same time, because the two would
share the cores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from benchmarks.chaos import checks
from benchmarks.chaos.accounting import Aftermath, Injected, Ledger, Span, parse
from benchmarks.chaos.cluster import Cluster, Exit
from benchmarks.chaos.faults import FAULTS, Fault
from horizonml.text import human_seconds

_LOOK_SECONDS = 0.1
_START_SECONDS = 120.0  # for the first step


@dataclass(frozen=True)
class Settings:
    """Describes what is done to which job."""

    job: Path
    ranks: int
    folder: Path
    faults: tuple[str, ...]
    every: float  # seconds between two faults
    length: float  # seconds of the part with faults
    reference: float  # seconds of each part without
    seed: int = 0
    restart_after: float = 1.0
    deadline: float = 60.0  # seconds after a fault within which all ranks must step again
    options: tuple[str, ...] = ()


class Watcher(Protocol):
    """Is told what happens."""

    def part(self, name: str, seconds: float) -> None:
        """Tell that a part of the run begins, and how long it takes."""

    def status(self, done: float, text: str) -> None:
        """Tell how far the part is, in seconds, and what is going on."""

    def say(self, text: str) -> None:
        """Tell something that stays."""


@dataclass
class Result:
    """Holds what happened in a campaign."""

    settings: Settings
    ledger: Ledger
    faults: list[Injected]
    references: list[Span]
    faulted: Span
    failures: list[str]  # in words, with the rank and its log
    exits: list[Exit] = field(default_factory=list)

    @cached_property
    def points(self) -> list[tuple[float, int]]:
        """Return the samples that the state of the training has seen, over time."""
        return list(self.ledger.progress())

    @cached_property
    def aftermaths(self) -> list[Aftermath]:
        """Return what followed each fault."""
        last = max([self.faulted.end, *(span.end for span in self.references)])
        return [
            self.ledger.aftermath(fault, later.time if later is not None else last)
            for fault, later in zip_longest(self.faults, self.faults[1:])
        ]

    def speed(self, *spans: Span) -> float:
        """Return the samples per second over parts of the run."""
        seconds = sum(span.seconds for span in spans)
        return sum(self.ledger.samples(span, self.points) for span in spans) / seconds if seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Return the samples of the part with faults, as a share of what the reference makes in the same time."""
        reference = self.speed(*self.references)
        return self.speed(self.faulted) / reference if reference else None


class Failed(Exception):
    """Ends a campaign, since something does not happen that must; carries the reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


class Interrupted(Exception):
    """Ends a campaign because the user wants it to end."""


class Campaign:
    """Runs one campaign."""

    def __init__(self, settings: Settings, watcher: Watcher, stopped: Callable[[], bool]) -> None:
        self._settings, self._watcher, self._stopped = settings, watcher, stopped
        self._dice = random.Random(settings.seed)
        self._ledger = Ledger(settings.ranks)
        self._read: dict[int, int] = {}  # how far each rank's file was read
        self._faults: list[Injected] = []
        self._references: list[Span] = []
        self._faulted = Span(0.0, 0.0)
        self._doing = ""

    def run(self) -> Result:
        """Run it. Raises HorizonError if it cannot begin, and Interrupted."""
        settings, failures = self._settings, []
        isolated = any(FAULTS[name].isolated for name in settings.faults)
        self._cluster = Cluster(
            settings.job,
            settings.ranks,
            settings.folder,
            options=settings.options,
            restart_after=settings.restart_after,
            isolated=isolated,
        )
        with self._cluster:
            try:
                self._watcher.part("starting the ranks", 0.0)
                self._wait_whole(_START_SECONDS, "after the start")
                self._refer("training without faults, for comparison")
                self._inject_all()
                self._refer("training without faults again, for comparison")
            except Failed as failure:
                failures += failure.reasons
            self._watcher.part("stopping the ranks", 0.0)
        self._look()
        failures += self._check_end(bool(failures))
        exits = self._cluster.exits
        return Result(settings, self._ledger, self._faults, self._references, self._faulted, failures, exits)

    def _refer(self, name: str) -> None:
        """Let the cluster run without faults for a while."""
        begin = time.time()
        self._watcher.part(name, self._settings.reference)
        while time.time() < begin + self._settings.reference:
            self._pass(time.time() - begin)
            self._check_untouched(begin)
        self._references.append(Span(begin, time.time()))

    def _inject_all(self) -> None:
        """Inject a fault at every time that is due, as soon as all ranks step."""
        settings, begin = self._settings, time.time()
        self._faulted = Span(begin, begin)
        self._watcher.part("injecting faults", settings.length)
        due, kinds = begin, list[str]()
        try:
            while due < begin + settings.length - settings.every / 2:
                while time.time() < due or len(self._cluster.alive) < settings.ranks:
                    self._pass(time.time() - begin)
                kinds = kinds or self._dice.sample(settings.faults, len(settings.faults))
                self._inject(FAULTS[kinds.pop()], self._dice.randrange(settings.ranks), begin)
                fault = self._faults[-1]
                self._wait_whole(settings.deadline, f"after {fault.kind} of rank {fault.rank}", begin)
                self._tell(fault, begin)
                due = max(due + settings.every, time.time())
            while time.time() < begin + settings.length:
                self._pass(time.time() - begin)
        finally:
            self._faulted = Span(begin, time.time())

    def _inject(self, kind: Fault, rank: int, begin: float) -> None:
        """Do one fault, and undo it when its time is over or the rank's process has ended."""
        process, at = self._cluster.processes[rank], time.time()
        seconds = min(kind.seconds(self._dice), self._settings.every / (1 if kind.deadly else 2))
        with ExitStack() as undo:
            undo.callback(kind.end, self._cluster, rank)
            kind.begin(self._cluster, rank)
            self._doing = f"{kind.name} of rank {rank}"
            while process.poll() is None and (time.time() < at + seconds or (kind.deadly and not seconds)):
                self._pass(time.time() - begin)
        self._doing, ended = "", time.time()
        if seconds and kind.deadly and process.poll() is not None:
            at = self._ledger.given_up(rank, at) or ended - 2 * _LOOK_SECONDS
        detail = f"{ended - at:.1f} s" if seconds and not kind.deadly else ""
        struck = process.poll() is not None or not kind.deadly
        if not struck:
            detail = f"survived {ended - at:.0f} s"
        self._faults.append(Injected(kind.name, rank, at, max(at, ended), detail, struck))

    def _tell(self, fault: Injected, begin: float) -> None:
        """Say what came of a fault."""
        found = self._ledger.aftermath(fault, time.time())
        detail = f" ({fault.detail})" if fault.detail else ""
        if found.noticed is not None:
            told = (
                f"noticed after {human_seconds(found.noticed)}, "
                f"the others step again after {human_seconds(found.stepped or 0)}, "
                f"all ranks after {human_seconds(found.whole or 0)}"
            )
        else:
            told = f"the group held, and the others waited {human_seconds(found.stepped or 0)}"
        self._watcher.say(f"{fault.time - begin:6.1f} s  {fault.kind} of rank {fault.rank}{detail}: {told}")

    def _wait_whole(self, seconds: float, when: str, begin: float | None = None) -> None:
        """Wait until all ranks step. Raises Failed with what keeps them from it."""
        since = time.time()
        while not self._ledger.whole_since(since if self._faults else 0.0):
            if not self._faults:
                self._check_untouched(0.0)
            self._pass(time.time() - (since if begin is None else begin))
            if time.time() > since + seconds:
                raise Failed(checks.missing(self._cluster, self._ledger.members(), f"{human_seconds(seconds)} {when}"))

    def _check_untouched(self, since: float) -> None:
        """Raise Failed if a rank has died since a time at which nothing is done to any."""
        dead = checks.deaths(self._cluster, since)
        if dead:
            raise Failed(dead[:1])  # the others end because of it

    def _pass(self, done: float) -> None:
        """Let a moment pass, and look at what the ranks have recorded. Raises Interrupted, and Failed."""
        if self._stopped():
            raise Interrupted
        time.sleep(_LOOK_SECONDS)
        self._look()
        if self._cluster.service_exit is not None:
            raise Failed([f"the rendezvous service has ended (its log: {self._cluster.log_folder / 'rendezvous.log'})"])
        members, made = self._ledger.members(), self._ledger.made
        stepping = f"step {made[-1].step:,}, {len(members)} of {self._settings.ranks} ranks" if made else "no step yet"
        self._watcher.status(done, f"{stepping}{', ' + self._doing if self._doing else ''}")

    def _look(self) -> None:
        """Read what was recorded since the last look."""
        for rank in range(self._settings.ranks):
            path = self._cluster.run_folder / f"rank-{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[rank] = self._read.get(rank, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                record = parse(line)
                if record is not None:
                    self._ledger.add(rank, record)

    def _check_end(self, failed: bool) -> list[str]:
        """Return what is wrong after the end: ranks that hung, tracebacks, ranks that disagree."""
        found = [*checks.hung(self._cluster), *checks.tracebacks(self._cluster.log_folder)]
        if not failed and not self._ledger.agree():
            found.append(f"the ranks do not agree on the loss of the last step ({self._cluster.run_folder})")
        return found
