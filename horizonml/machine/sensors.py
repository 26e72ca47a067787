"""Reads the temperature of the processor, whether heat lowers its clock, and whether the device runs on mains power.

The environment variable `HORIZONML_SYSFS` names another folder than /sys, such as the host's in a container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Sensors of processors: Intel, AMD, boards with ARM. Others, of disks or of a Wi-Fi card, are warmer at rest.
_PROCESSOR = re.compile(r"coretemp|k10temp|zenpower|cpu|soc|x86_pkg_temp|bcm2835|tj", re.I)
_SANE = (-40.0, 150.0)  # degrees; a sensor that is not connected says something else
_SYS = Path("/sys")
_HOT = {"passive", "hot", "critical"}  # trip points at which the kernel slows the processor down, or worse


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


def on_mains(root: Path = Path("/sys")) -> bool | None:
    """Return whether the device runs on mains, which one without a battery does; None if that cannot be read."""
    if root == Path("/sys") and hasattr(psutil, "sensors_battery"):
        battery = psutil.sensors_battery()
        if battery is None:
            return True
        return None if battery.power_plugged is None else bool(battery.power_plugged)
    return True


@dataclass(frozen=True)
class Clock:
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


def clock(root: Path | None = None) -> Clock:
    """Return what the kernel says of the processor's clock and its heat, as far as it says anything."""
    root = root or sysfs()
    slowest: tuple[float, float] | None = None
    for policy in sorted(root.glob("devices/system/cpu/cpufreq/policy*")):
        allowed, nominal = (_read(policy / f"{name}_max_freq") for name in ("scaling", "cpuinfo"))
        if allowed and nominal and (slowest is None or allowed / nominal < slowest[0] / slowest[1]):
            slowest = allowed, nominal
    hertz, most = (slowest[0] * 1e3, slowest[1] * 1e3) if slowest is not None else (None, None)
    return Clock(hertz, most, temperature(root), _trip(root), _is_cooled(root))


def _trip(root: Path) -> float | None:
    """Return the lowest temperature at which the kernel slows the processor down."""
    found = []
    for zone in root.glob("class/thermal/thermal_zone*"):
        if not _PROCESSOR.search(_text(zone / "type")):
            continue
        for kind in zone.glob("trip_point_*_type"):
            value = _read(kind.with_name(kind.name.replace("_type", "_temp")))
            if _text(kind) in _HOT and value is not None and _SANE[0] < value / 1000 < _SANE[1] and value > 0:
                found.append(value / 1000)
    return min(found, default=None)


def _is_cooled(root: Path) -> bool:
    """Return whether a processor's cooling device, which lowers its clock, is active."""
    for device in root.glob("class/thermal/cooling_device*"):
        if re.search(r"cpufreq|processor", _text(device / "type"), re.I) and (_read(device / "cur_state") or 0) > 0:
            return True
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _zones(root: Path) -> dict[str, list[float]]:
    """Return the temperatures of the kernel's thermal zones, by kind."""
    found: dict[str, list[float]] = {}
    for zone in sorted(root.glob("class/thermal/thermal_zone*")):
        try:
            kind, value = (zone / "type").read_text().strip(), float((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):
            continue
        found.setdefault(kind, []).append(value)
    return found
