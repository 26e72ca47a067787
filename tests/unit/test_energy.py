"""Energy counters, on trees of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonml.machine import sensors
from horizonml.machine.sensors import EnergyMeter


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")
    return path


def test_a_machine_that_tells_nothing_has_no_energy(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert not meter.available
    assert meter.joules() is None


def test_rapl_counts_packages_and_starts_over(tmp_path: Path) -> None:
    counters = [write(tmp_path / f"class/powercap/intel-rapl:{n}/energy_uj", 5_000_000) for n in (0, 1)]
    for counter in counters:
        write(counter.parent / "max_energy_range_uj", 10_000_000)
    part = write(tmp_path / "class/powercap/intel-rapl:0:0/energy_uj", 777)  # of package 0
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0
    write(counters[0], 7_000_000)
    write(part, 1_000_777)
    assert meter.joules() == pytest.approx(2.0)
    write(counters[1], 1_000_000)  # past its range
    assert meter.joules() == pytest.approx(8.0)


def test_a_sensor_of_power_is_integrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sensors.time, "monotonic", lambda: now[0])
    sensor = tmp_path / "class/hwmon/hwmon3"
    write(sensor / "name", "ina3221")
    write(sensor / "in1_input", 5000)  # millivolts
    current = write(sensor / "curr1_input", 1000)  # milliamperes
    write(tmp_path / "class/hwmon/hwmon0/name", "coretemp")
    meter = EnergyMeter(tmp_path)
    now[0] = 102.0
    assert meter.joules() == pytest.approx(10.0)
    write(current, 3000)
    now[0] = 103.0
    assert meter.joules() == pytest.approx(20.0)
