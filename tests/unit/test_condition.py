"""What a device says of itself: its heat, its clock, and other programs, from files that stand for the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horizonml.machine.sensors import Condition, ProcessorClock, Slowdown, clock
from horizonml.runtime.stragglers import Notices

COOL = ProcessorClock(2.4e9, 2.4e9, 50.0, 85.0)
HOT = ProcessorClock(1.2e9, 2.4e9, 92.0, 85.0)
HOT_REASON = "its processor is too hot: 92 °C, its clock is held at 1.2 of 2.4 GHz"


def sensors(root: Path, degrees: float, kilohertz: int, cooling: int = 0) -> Path:
    """Write what the kernel shows of one processor, beside a disk's sensor that is warm at rest."""
    for zone, kind, value, trip in ((0, "nvme", 71.0, 40), (1, "cpu-thermal", degrees, 85)):
        folder = root / "class" / "thermal" / f"thermal_zone{zone}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{1000 * value:.0f}\n")
        for number, (name, limit) in enumerate([("active", 30), ("passive", trip), ("critical", 110)]):
            (folder / f"trip_point_{number}_type").write_text(f"{name}\n")
            (folder / f"trip_point_{number}_temp").write_text(f"{limit}000\n")
    policy = root / "devices" / "system" / "cpu" / "cpufreq" / "policy0"
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "scaling_max_freq").write_text(f"{kilohertz}\n")
    (policy / "cpuinfo_max_freq").write_text("2400000\n")
    device = root / "class" / "thermal" / "cooling_device0"
    device.mkdir(parents=True, exist_ok=True)
    (device / "type").write_text("cpufreq-cpu0\n")
    (device / "cur_state").write_text(f"{cooling}\n")
    return root


def test_the_clock_and_the_heat_of_the_processor_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock(tmp_path) == ProcessorClock()
    assert not clock(tmp_path).hot
    found = clock(sensors(tmp_path, 50.0, 2_400_000))
    assert found == COOL
    assert not found.hot
    monkeypatch.setenv("HORIZONML_SYSFS", str(sensors(tmp_path, 92.0, 1_200_000)))
    assert clock() == HOT
    assert clock().hot
    assert clock(sensors(tmp_path, 70.0, 2_400_000, cooling=1)).hot


class Device:
    """A device whose time, sensors and load a test sets."""

    def __init__(self) -> None:
        self.now, self.clock, self.busy, self._seconds = 0.0, COOL, 0.0, 0.0
        self.condition = Condition(lambda: self.clock, self._load, lambda: self.now)

    def _load(self, siblings: object) -> tuple[float, float, float]:
        return self.now, self._seconds, 0.0

    def wait(self, seconds: float) -> list[tuple[float, str]]:
        """Look twice a second; return when there was news, and why."""
        told = []
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self._seconds += 0.5 * self.busy
            if self.condition.changed():
                told.append((self.now, self.condition.tell(news=True).reason))
        return told


def test_a_device_tells_once_that_it_is_too_hot_and_once_that_it_is_not_any_longer() -> None:
    device = Device()
    device.clock = HOT
    assert device.wait(3) == [], "a moment of heat is not told"
    device.clock = COOL
    assert device.wait(17) == []
    device.clock = HOT
    assert device.wait(20) == [(26.0, HOT_REASON)]
    assert device.condition.state == Slowdown(2.0, HOT_REASON)
    device.clock = COOL
    assert device.wait(20) == [(46.0, "")]
    assert device.condition.state == Slowdown()


def test_programs_that_come_and_go_are_not_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    device, told = Device(), []
    device.wait(20)
    for _ in range(10):
        for busy in (1.2, 0.8):  # above and below what is told, but never near what it was at first
            device.busy = busy
            told += device.wait(10)
    assert [bool(reason) for _, reason in told] == [True]


def test_the_user_hears_of_slow_ranks_once_and_seldom_of_those_that_come_and_go() -> None:
    notices = Notices(2)
    slow_for_good = [second for second in range(240) if notices.update(second, (False, second >= 20), (False, False))]
    assert (slow_for_good, notices.told) == ([23], (False, True))
    notices = Notices(2)
    blips = [second for second in range(240) if notices.update(second, (False, second % 3 == 0), (False, False))]
    assert blips == []
    notices = Notices(2)
    flapping = [s for s in range(240) if notices.update(s, (s % 10 < 5, s % 14 < 7), (False, False))]
    assert 1 <= len(flapping) <= 6
    notices = Notices(2)
    assert notices.update(3.0, (True, False), (True, False)), "a device that says so itself is believed at once"


def test_other_programs_are_told_if_they_use_more_than_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    device = Device()
    assert device.wait(4) == []
    device.busy = 1.0  # core, by another rank, say: the most of the first ten seconds is what is usual
    assert device.wait(6) == []
    device.busy = 1.5
    assert device.wait(20) == []
    device.busy = 3.0
    ((when, reason),) = device.wait(20)
    assert reason == "other programs use 75% of its processor"
    assert when <= 40
    device.busy = 1.0
    ((_, reason),) = device.wait(20)
    assert reason == ""
    device.condition.siblings = [os.getpid()]  # of a rank in another container
    device.busy = 3.0
    assert device.wait(30) == []
