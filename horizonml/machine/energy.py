"""Measures this machine's energy where its hardware can: Intel and AMD processors (RAPL), Jetson boards (INA sensors).

Nothing is estimated, so a machine without such counters has no energy figure. Reading RAPL usually requires root.
"""

from __future__ import annotations

import time
from pathlib import Path


class EnergyMeter:
    """Counts the joules that this machine has used since the meter was made."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Find the counters below `root`, where sysfs is mounted."""
        self._counters = [
            _Rapl(zone)
            for zone in sorted(root.glob("class/powercap/*-rapl:*"))
            if zone.name.count(":") == 1 and _number(zone / "energy_uj") is not None
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
        self._file, self._range = zone / "energy_uj", _number(zone / "max_energy_range_uj") or 0.0
        self._last = _number(self._file) or 0.0

    def more(self) -> float:
        """Return the joules since the last call."""
        value = _number(self._file)
        if value is None:
            return 0.0
        difference = value - self._last
        self._last = value
        return (difference if difference >= 0 else difference + self._range) * 1e-6


def _ina_sensors(root: Path) -> list[tuple[Path, Path]]:
    """Return the voltage and current files of the board's total input: the first channel of each INA3221."""
    found = []
    for sensor in sorted(root.glob("class/hwmon/hwmon*")):
        name = sensor / "name"
        voltage, current = sensor / "in1_input", sensor / "curr1_input"
        if name.is_file() and name.read_text().strip().startswith("ina") and _number(current) is not None:
            found.append((voltage, current))
    return found


def _watts(sensor: tuple[Path, Path]) -> float:
    millivolts, milliamperes = (_number(path) or 0.0 for path in sensor)
    return millivolts * milliamperes * 1e-6


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
