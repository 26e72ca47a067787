"""Decides when a device that always joins may train: only while its owner does not need it.

Every condition has two thresholds, so that a device does not come and go around one: leaving is quick, and coming back
takes longer. Whether anybody uses the device is seen by its terminals, its desktop, and the load of other programs. No
keyboard and no mouse is opened: the desktop reports to logind when it is idle or locked.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template

from horizonml.errors import JobError
from horizonml.machine.host import ProcessorSeconds, processor_seconds, share_of_others
from horizonml.machine.sensors import on_mains, temperature
from horizonml.machine.signals import StopRequest
from horizonml.text import percent

IDLE_SECONDS = 180.0  # without use of a desktop or a terminal, before it trains
ACTIVE_SECONDS = 20.0  # since the last of these, within which it stops: readings are no further apart
BUSY, CALM = 0.4, 0.2  # of the machine's cores, used by other programs
BUSY_SECONDS, CALM_SECONDS = 15.0, 60.0  # for which they must be busy before it stops, and calm before it trains
COOL_DEGREES, COOL_SECONDS = 8.0, 60.0  # below the limit, and for how long, before it trains again
_LOOK_SECONDS = 2.0  # between two looks at the device
MAINS_SECONDS = 15.0  # on mains before it trains again: plugs are pulled and put in again


@dataclass(frozen=True)
class DeviceReadings:
    """What was read of the device at one moment; None is what cannot be read."""

    idle_seconds: float | None = None  # since a desktop or a terminal was used
    others_load: float | None = None  # the share of the machine's cores that other programs use, from 0 to 1
    temperature: float | None = None  # of the processor, in degrees Celsius
    on_mains: bool | None = None


@dataclass
class Policy:
    """Decides from readings whether the device may train. It remembers what it needs to not change its mind too often.

    A policy without conditions always allows it.
    """

    when_idle: bool = False
    max_temperature: float | None = None
    on_mains: bool = False
    _allowed: bool = False  # the last decision
    _since: dict[str, float] = field(default_factory=dict)  # since when each of several things has been the case

    def __post_init__(self) -> None:
        """Raise ValueError if the limit of the temperature makes no sense."""
        if self.max_temperature is not None and not 20 <= self.max_temperature <= 120:
            raise ValueError(f"the highest temperature must be from 20 to 120 degrees, not {self.max_temperature:g}")

    def may_train(self, readings: DeviceReadings, now: float) -> str | None:
        """Return why the device may not train now, as a sentence without its period, or None if it may.

        `now` is a time in seconds that never goes back, such as `time.monotonic()`. Call it every few seconds.
        """
        reasons = [self._mains(readings, now), self._heat(readings, now)]
        if self.when_idle:
            reasons += [self._used(readings), self._busy(readings, now)]
        reason = next((reason for reason in reasons if reason is not None), None)
        self._allowed = reason is None
        return reason

    def _mains(self, readings: DeviceReadings, now: float) -> str | None:
        if not self.on_mains:
            return None
        if readings.on_mains is None:
            return "whether this device runs on mains cannot be read"
        if not readings.on_mains:
            self._since["unplugged"] = now
            return "this device runs on its battery"
        if now - self._since.get("unplugged", -math.inf) < MAINS_SECONDS:
            return "this device has just been plugged in"
        return None

    def _heat(self, readings: DeviceReadings, now: float) -> str | None:
        limit = self.max_temperature
        if limit is None:
            return None
        degrees = readings.temperature
        if degrees is None or not math.isfinite(degrees):
            return "the temperature of this device can no longer be read"
        cool = self._lasts("cool", degrees <= limit - COOL_DEGREES, now)
        if degrees > limit:
            self._since["hot"] = now
            return f"this device is too hot: {degrees:.0f} °C, and at most {limit:.0f} °C is allowed"
        if "hot" in self._since and (degrees > limit - COOL_DEGREES or cool < COOL_SECONDS):
            return f"this device cools down: {degrees:.0f} °C, and it has to stay below {limit - COOL_DEGREES:.0f} °C"
        self._since.pop("hot", None)
        return None

    def _used(self, readings: DeviceReadings) -> str | None:
        idle = readings.idle_seconds
        if idle is None:  # nobody is logged in, and nothing is there to be used
            return None
        if idle < (ACTIVE_SECONDS if self._allowed else IDLE_SECONDS):
            return f"somebody used this device {idle:.0f} s ago, and it waits until nobody has for {IDLE_SECONDS:.0f} s"
        return None

    def _busy(self, readings: DeviceReadings, now: float) -> str | None:
        load = readings.others_load
        if load is None:
            return None
        busy = self._lasts("busy", load > BUSY, now)
        calm = self._lasts("calm", load < CALM, now)
        if self._allowed and busy < BUSY_SECONDS:
            return None
        if not self._allowed and calm >= CALM_SECONDS:
            return None
        return (
            f"other programs use {percent(load, 0)} of this device's processor, and it waits until that was less than "
            f"{percent(CALM)} for {CALM_SECONDS:.0f} s"
        )

    def _lasts(self, what: str, true: bool, now: float) -> float:
        """Return for how many seconds something has been the case without a break, -1 if it is not."""
        if not true:
            self._since.pop(what, None)
            return -1.0
        return now - self._since.setdefault(what, now)


class Courtesy:
    """Tells whether this device may train now, and waits until it may.

    The processor time of this process and of its children is not counted as that of other programs.
    """

    def __init__(
        self,
        when_idle: bool = False,
        max_temperature: float | None = None,
        mains: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        """Begin to observe the device; `stop` ends every wait. Raises JobError if a condition cannot be measured."""
        try:
            self._policy = Policy(when_idle, max_temperature, mains)
        except ValueError as error:
            raise JobError(f"--max-temperature: {error}") from None
        if max_temperature is not None and temperature() is None:
            raise JobError(
                "--max-temperature: this device has no sensor of its temperature that can be read (neither in "
                "/sys/class/hwmon nor in /sys/class/thermal); leave the option out"
            )
        if mains and on_mains() is None:
            raise JobError("--on-mains: this device does not say whether it is plugged in; leave the option out")
        self._usage = DeviceUsage() if when_idle else None
        self._stop = stop or StopRequest()
        self._looked = -_LOOK_SECONDS
        self._reason: str | None = None

    def reason(self) -> str | None:
        """Return why this device may not train now, as a sentence without its period, or None if it may."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked, self._reason = now, self._policy.may_train(self._read(), now)
        return self._reason

    def wait(self) -> bool:
        """Wait until this device may train, and return False if this process is asked to end before."""
        said = False
        while (reason := self.reason()) is not None and not self._stop.wanted:
            if not said:
                said = True
                print(f"waiting: {reason}", flush=True)
            time.sleep(0.1)
        return not self._stop.wanted

    def sleep(self, seconds: float) -> None:
        """Wait for so long, or until this process is asked to end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop.wanted:
            time.sleep(0.1)

    def _read(self) -> DeviceReadings:
        policy, usage = self._policy, self._usage
        return DeviceReadings(
            idle_seconds=usage.idle_seconds() if usage is not None else None,
            others_load=usage.others_load() if usage is not None else None,
            temperature=temperature() if policy.max_temperature is not None else None,
            on_mains=on_mains() if policy.on_mains else None,
        )


_REST_SECONDS = 4.0  # between two looks at what takes some time to find out
_SECONDS = 3.0  # for loginctl
# A terminal that was used longer ago than this, or will be, tells more about a clock that was set than about people.
_LONGEST, _EARLIEST = 365 * 86400.0, -10.0


class DeviceUsage:
    """Observes, from its creation on, when this device was last used, and how much other programs compute."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Begin to observe; until there is other evidence, the device counts as last used now."""
        self._dev = root / "dev"
        self._began = time.monotonic()
        self._load: ProcessorSeconds | None = None
        self._share: float | None = None
        self._asked, self._desktops = -_REST_SECONDS, list[float]()

    def idle_seconds(self) -> float:
        """Return for how many seconds no terminal and no desktop has been used."""
        now = time.monotonic()
        if now - self._asked >= _REST_SECONDS:
            self._asked, self._desktops = now, desktops_idle(_sessions(), now)
        return min(now - self._began, *terminals_idle(self._dev, time.time()), *self._desktops, math.inf)

    def others_load(self) -> float | None:
        """Return the share of the machine's cores that other programs have used of late; None at first."""
        before, now = self._load, time.monotonic()
        if before is None or now - before[0] >= _REST_SECONDS:
            self._load = processor_seconds()
            if before is not None:
                self._share = share_of_others(before, self._load, os.cpu_count() or 1)
        return self._share


def terminals_idle(dev: Path, now: float) -> list[float]:
    """Return for how many seconds nothing was typed in each terminal. The kernel keeps that to about 8 s."""
    found = []
    for path in (*dev.glob("tty[0-9]*"), *(dev / "pts").glob("[0-9]*")):
        try:
            found.append(now - path.stat().st_atime)
        except OSError:
            continue  # it was closed meanwhile
    return [max(0.0, idle) for idle in found if _EARLIEST < idle < _LONGEST]


def desktops_idle(sessions: Iterable[Mapping[str, str]], now: float) -> list[float]:
    """Return for how many seconds each desktop has not been used: 0 unless it says that it is idle, or is locked.

    `now` is the time in seconds since the machine was started.
    """
    found = []
    for session in sessions:
        graphical = session.get("Type") in ("x11", "wayland", "mir")
        if not graphical or session.get("Class") != "user" or session.get("State") not in ("active", "online"):
            continue
        if session.get("IdleHint") == "yes" or session.get("LockedHint") == "yes":
            since = session.get("IdleSinceHintMonotonic", "0")
            found.append(max(0.0, now - int(since) * 1e-6) if since.isdigit() else 0.0)
        else:
            found.append(0.0)
    return found


def _sessions() -> list[dict[str, str]]:
    """Return what logind knows of the sessions on this device, or nothing where there is no logind."""
    names = [line.split()[0] for line in _loginctl("list-sessions", "--no-legend") if line.split()]
    if not names:
        return []
    wanted = ("Type", "Class", "State", "IdleHint", "IdleSinceHintMonotonic", "LockedHint")
    lines = _loginctl("show-session", *names, *(f"--property={name}" for name in wanted))
    sessions: list[dict[str, str]] = [{}]
    for line in lines:
        if line.strip():
            name, _, value = line.partition("=")
            sessions[-1][name] = value.strip()
        else:
            sessions.append({})
    return sessions


def _loginctl(*arguments: str) -> list[str]:
    program = shutil.which("loginctl")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


_HOMES = ("home", "root")  # folders at the top that ProtectHome= of systemd hides
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def unit(options: Sequence[str], program: Sequence[str] = (), source: str = "~/.config/horizonml/token") -> str:
    """Return the unit that runs `horizonml join` with these options, without --print-unit.

    `program` is the command that runs horizonml, by default the one that runs now. `source` is where the file with the
    token is, for the comment that says how to install it. Where the program is in somebody's home, the service runs as
    that user, who alone may be able to read it; elsewhere, as a user of its own. Raises JobError for an option that
    cannot stand in a unit, or makes no sense there.
    """
    if "--insecure" in options:
        raise JobError("--print-unit: a device that always joins needs a token; leave --insecure out")
    command = [*(program or this_program()), "join", *options]
    home = _home(command[0])
    user = "DynamicUser=yes" if home is None else f"User={_owner(home)}"
    template = resources.files("horizonml.machine").joinpath("join.service").read_text(encoding="utf-8")
    return Template(template).substitute(
        command=" ".join(_quoted(word) for word in command),
        options=shlex.join(options),
        token=source,
        user=user,
        home="yes" if home is None else "read-only",
    )


def this_program() -> list[str]:
    """Return the command by which this program was started, with the whole path."""
    beside = Path(sys.executable).with_name("horizonml")
    found = str(beside) if beside.exists() else shutil.which("horizonml")
    return [found] if found is not None else [sys.executable, "-m", "horizonml"]


def _home(program: str) -> Path | None:
    """Return the home that a program lies in, or None."""
    parts = Path(program).parts
    if len(parts) < 3 or parts[0] != "/" or parts[1] not in _HOMES:
        return None
    return Path(*parts[: 2 if parts[1] == "root" else 3])


def _owner(home: Path) -> str:
    """Return the user to whom a home belongs."""
    try:
        return home.owner()
    except (KeyError, OSError):
        return home.name


def _quoted(word: str) -> str:
    """Return a word of a command as systemd reads it. Raises JobError."""
    if not word.isprintable():
        raise JobError(f"--print-unit: {word!a} cannot stand in a unit")
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    escaped = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
