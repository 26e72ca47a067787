"""Reads the temperature of the processor, and whether the device runs on mains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

# Sensors of processors: Intel, AMD, boards with ARM. Others, of disks or of a Wi-Fi card, are warmer at rest.
_PROCESSOR = re.compile(r"coretemp|k10temp|zenpower|cpu|soc|x86_pkg_temp|bcm2835|tj", re.I)
_SANE = (-40.0, 150.0)  # degrees; a sensor that is not connected says something else


def temperature(root: Path = Path("/sys")) -> float | None:
    """Return the temperature of the processor in degrees Celsius, the highest of its sensors, or None without one."""
    named: dict[str, list[float]] = {}
    if root == Path("/sys") and hasattr(psutil, "sensors_temperatures"):
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
