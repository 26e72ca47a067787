"""Reads what the kernel measures of this device, and finds out what slows it down, such as heat.

The environment variable `HORIZONML_SYSFS` names another folder than /sys, such as the host's in a container.

Energy comes from the counters of Intel and AMD processors (RAPL, whose reading usually requires root) and from the
sensors of Jetson boards (INA). Nothing is estimated, so a machine without them has no energy figure.

A rank looks at its device every few seconds. When its condition changes, it tells the other ranks in the agreement on
a step, so that they need not wait until the slowdown shows in their statistics.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from horizonml.machine.host import ProcessorSeconds, is_other_rank, processor_seconds, share_of_others, text
from horizonml.text import percent

# Sensors of processors: Intel, AMD, boards with ARM. Others, of disks or of a Wi-Fi card, are warmer at rest.
_PROCESSOR = re.compile(r"coretemp|k10temp|zenpower|cpu|soc|x86_pkg_temp|bcm2835|tj", re.I)
_SANE = (-40.0, 150.0)  # degrees; a sensor that is not connected says something else
_SYS = Path("/sys")
_HOT = {"passive", "hot", "critical"}  # trip points at which the kernel slows the processor down, or worse


def number(path: Path, parts: float = 1.0) -> float | None:
    """Return the number in a file of the kernel, which counts in so many parts of the unit; None without a number."""
    try:
        return float(text(path)) / parts
    except ValueError:
        return None


def sysfs() -> Path:
    """Return the folder in which the kernel shows its sensors."""
    return Path(os.environ.get("HORIZONML_SYSFS") or _SYS)


def temperature(root: Path | None = None) -> float | None:
    """Return the temperature of the processor in degrees Celsius, the highest of its sensors, or None without one."""
    named: dict[str, list[float]] = {}
    root = root or sysfs()
    if root == _SYS and hasattr(psutil, "sensors_temperatures"):
        read: Mapping[str, Iterable[Any]] = psutil.sensors_temperatures()
        named = {name: [entry.current for entry in entries] for name, entries in read.items()}
    if not any(named.values()):
        named = _zones(root)
    return hottest(named)


def hottest(named: Mapping[str, Iterable[float | None]]) -> float | None:
    """Return the highest temperature of the processor's sensors, or of all, if none is known to be the processor's."""
    sane = {
        name: [value for value in values if value is not None and _SANE[0] < value < _SANE[1]]
        for name, values in named.items()
    }
    processor = [value for name, values in sane.items() if _PROCESSOR.search(name) for value in values]
    return max(processor or [value for values in sane.values() for value in values], default=None)


def on_mains() -> bool | None:
    """Return whether the device runs on mains, which one without a battery does; None if that cannot be read."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return True if battery is None else battery.power_plugged


@dataclass(frozen=True)
class ProcessorClock:
    """Says how fast the processor may run now, and how hot it is."""

    hertz: float | None = None  # the highest that the kernel allows at present, of the slowest core; None if unknown
    nominal: float | None = None  # the highest that this core could run at
    degrees: float | None = None
    limit: float | None = None  # degrees from which on the kernel slows the processor down
    cooled: bool = False  # whether the kernel slows the processor down at present to cool it

    @property
    def hot(self) -> bool:
        """Return whether heat holds the processor back."""
        return self.cooled or (self.degrees is not None and self.limit is not None and self.degrees >= self.limit)

    def describe(self) -> str:
        """Return what is known, for people: "92 °C, its clock is held at 1.2 of 2.4 GHz"."""
        parts = [f"{self.degrees:.0f} °C"] if self.degrees is not None else []
        if self.hertz is not None and self.nominal is not None and self.hertz < self.nominal:
            parts.append(f"its clock is held at {self.hertz / 1e9:.1f} of {self.nominal / 1e9:.1f} GHz")
        return ", ".join(parts)


def clock(root: Path | None = None) -> ProcessorClock:
    """Return what the kernel says of the processor's clock and its heat, as far as it says anything."""
    root = root or sysfs()
    slowest: tuple[float, float] | None = None
    for policy in sorted(root.glob("devices/system/cpu/cpufreq/policy*")):
        allowed, nominal = (number(policy / f"{name}_max_freq") for name in ("scaling", "cpuinfo"))
        if allowed and nominal and (slowest is None or allowed / nominal < slowest[0] / slowest[1]):
            slowest = allowed, nominal
    hertz, most = (slowest[0] * 1e3, slowest[1] * 1e3) if slowest is not None else (None, None)
    return ProcessorClock(hertz, most, temperature(root), _trip(root), _is_cooled(root))


def _trip(root: Path) -> float | None:
    """Return the lowest temperature at which the kernel slows the processor down."""
    found = []
    for zone in root.glob("class/thermal/thermal_zone*"):
        if not _PROCESSOR.search(text(zone / "type")):
            continue
        for kind in zone.glob("trip_point_*_type"):
            value = number(kind.with_name(kind.name.replace("_type", "_temp")), 1e3)
            if text(kind) in _HOT and value is not None and 0 < value < _SANE[1]:
                found.append(value)
    return min(found, default=None)


def _is_cooled(root: Path) -> bool:
    """Return whether a processor's cooling device, which lowers its clock, is active."""
    for device in root.glob("class/thermal/cooling_device*"):
        if re.search(r"cpufreq|processor", text(device / "type"), re.I) and (number(device / "cur_state") or 0) > 0:
            return True
    return False


def _zones(root: Path) -> dict[str, list[float]]:
    """Return the temperatures of the kernel's thermal zones, by kind."""
    found: dict[str, list[float]] = {}
    for zone in sorted(root.glob("class/thermal/thermal_zone*")):
        degrees = number(zone / "temp", 1e3)
        if degrees is not None:
            found.setdefault(text(zone / "type"), []).append(degrees)
    return found


class EnergyMeter:
    """Counts the joules that this machine has used since the meter was made."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Find the counters below `root`, where sysfs is mounted."""
        self._counters = [
            _Rapl(zone)
            for zone in sorted(root.glob("class/powercap/*-rapl:*"))
            if zone.name.count(":") == 1 and number(zone / "energy_uj") is not None
        ]
        self._sensors = [] if self._counters else _ina_sensors(root)
        self._joules, self._power = 0.0, self._watts()
        self._since = time.monotonic()

    @property
    def available(self) -> bool:
        """Return whether this machine measures its energy."""
        return bool(self._counters or self._sensors)

    def joules(self) -> float | None:
        """Return the joules so far, or None if the machine does not measure them.

        The power that a sensor reports is integrated from call to call.
        """
        if self._counters:
            self._joules += sum(counter.more() for counter in self._counters)
        elif self._sensors:
            now, power = time.monotonic(), self._watts()
            self._joules += (now - self._since) * (power + self._power) / 2
            self._since, self._power = now, power
        return self._joules if self.available else None

    def _watts(self) -> float:
        return sum(_watts(sensor) for sensor in self._sensors)


class _Rapl:
    """Reads a counter of microjoules that starts over at `max_energy_range_uj`."""

    def __init__(self, zone: Path) -> None:
        self._file, self._range = zone / "energy_uj", number(zone / "max_energy_range_uj") or 0.0
        self._last = number(self._file) or 0.0

    def more(self) -> float:
        """Return the joules since the last call."""
        value = number(self._file)
        if value is None:
            return 0.0
        difference = value - self._last
        self._last = value
        return (difference if difference >= 0 else difference + self._range) * 1e-6


def _ina_sensors(root: Path) -> list[tuple[Path, Path]]:
    """Return the voltage and current files of the board's total input: the first channel of each INA3221."""
    found = []
    for sensor in sorted(root.glob("class/hwmon/hwmon*")):
        voltage, current = sensor / "in1_input", sensor / "curr1_input"
        if text(sensor / "name").startswith("ina") and number(current) is not None:
            found.append((voltage, current))
    return found


def _watts(sensor: tuple[Path, Path]) -> float:
    millivolts, milliamperes = (number(path) or 0.0 for path in sensor)
    return millivolts * milliamperes * 1e-6


_LOOK_SECONDS = 2.0  # between two looks at the device
_LESS = 0.5  # of what makes a condition worth telling: below that, it is over
_LASTS_SECONDS = 4.0  # for which a condition must be the case before it is told
_SLOWER = 1.1  # a clock must be held back by this factor to be told
_MORE = 0.25  # of the machine's cores that other programs use beyond what they used at first
_USUAL_SECONDS = 10.0  # of the beginning, in which the use by other programs counts as usual


@dataclass(frozen=True)
class Slowdown:
    """Says what holds a device back: by which factor, as far as the clock tells it, and why."""

    factor: float = 1.0
    reason: str = ""  # goes on from "because"; empty if nothing does

    def alike(self, other: Slowdown) -> bool:
        """Return whether two states are the same for those who plan."""
        return bool(self.reason) == bool(other.reason) and max(self.factor, other.factor) < _SLOWER * min(
            self.factor, other.factor
        )


class Condition:
    """Watches a device from its creation on, when it is taken to be in its usual condition."""

    def __init__(
        self,
        read: Callable[[], ProcessorClock] = clock,
        others: Callable[[Collection[int]], ProcessorSeconds] = processor_seconds,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch; `read` reads the sensors, and `others` how long everything and this program computed."""
        self._read, self._others, self._now = read, others, now
        self._first, self._looked = read(), now()
        self.siblings: Collection[int] = ()  # processes of other ranks on this machine, which are no other programs
        self._load, self._begun = others(()), now()
        self._usual: float | None = None
        self._share: float | None = None
        self.state = Slowdown()  # the last one that was told
        self._next, self._since = Slowdown(), now()

    def changed(self) -> bool:
        """Return whether the device's condition is another one than `state`; looks at the device now and then."""
        now = self._now()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            found = self._look(now)
            if not found.alike(self._next):
                self._since = now
            self._next = found
        return not self._next.alike(self.state) and now - self._since >= _LASTS_SECONDS

    def tell(self, news: bool) -> Slowdown:
        """Return what holds the device back now; if that is `news`, only another condition is from now on."""
        if news:
            self.state = self._next
        return self._next

    def _look(self, now: float) -> Slowdown:
        found, first = self._read(), self._first
        factor = 1.0
        if found.hertz and first.hertz:
            factor = max(1.0, first.hertz / found.hertz)
        if found.hot or factor >= 1 + (_SLOWER - 1) * self._bar:
            details = found.describe()
            what = "its processor is too hot" if found.hot else "its processor's clock is held back"
            return Slowdown(factor, f"{what}: {details}" if details else what)
        return Slowdown(1.0, self._busy(now))

    @property
    def _bar(self) -> float:
        return _LESS if self.state.reason else 1.0

    def _busy(self, now: float) -> str:
        """Return in words that other programs use more of the processor than usual, or nothing."""
        if not all(map(is_other_rank, self.siblings)):
            return ""  # ranks in other containers of this machine look like other programs
        load = self._others(self.siblings)
        if load[0] - self._load[0] >= _LOOK_SECONDS:
            self._share = share_of_others(self._load, load, os.cpu_count() or 1)
            self._load = load
        if self._share is None:
            return ""
        if self._usual is None or now - self._begun < _USUAL_SECONDS:
            self._usual = max(self._share, self._usual or 0.0)
        if self._share <= self._usual + _MORE * self._bar:
            return ""
        return f"other programs use {percent(self._share, 0)} of its processor"
