"""When a device that always joins may train, how it reads that from the system, and the systemd unit it runs in."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horizonml.errors import JobError
from horizonml.machine import yielding
from horizonml.machine.host import own_seconds, share_of_others
from horizonml.machine.sensors import hottest
from horizonml.machine.yielding import (
    ACTIVE_SECONDS,
    CALM_SECONDS,
    COOL_SECONDS,
    IDLE_SECONDS,
    Courtesy,
    DeviceReadings,
    DeviceUsage,
    Policy,
    desktops_idle,
    terminals_idle,
    unit,
)
from tests.programs import need


def idle(seconds: float, load: float | None = 0.0) -> DeviceReadings:
    return DeviceReadings(idle_seconds=seconds, others_load=load)


def test_it_trains_after_a_while_without_its_owner_and_stops_at_once() -> None:
    assert Policy().may_train(DeviceReadings(), 0.0) is None
    policy = Policy(when_idle=True)
    assert Policy(when_idle=True).may_train(DeviceReadings(), 0.0) is None, "nobody can use it"
    said = policy.may_train(idle(5.0), 0.0)
    assert said == "somebody used this device 5 s ago, and it waits until nobody has for 180 s"
    assert policy.may_train(idle(IDLE_SECONDS - 1), IDLE_SECONDS) is not None
    assert policy.may_train(idle(IDLE_SECONDS), IDLE_SECONDS + 1) is None
    assert policy.may_train(idle(ACTIVE_SECONDS + 1), 300.0) is None, "while it trains, less is enough"
    assert policy.may_train(idle(0.0), 301.0) is not None
    assert policy.may_train(idle(ACTIVE_SECONDS + 1), 330.0) is not None, "after it stopped, it takes longer"
    assert policy.may_train(idle(IDLE_SECONDS), 600.0) is None


def test_it_waits_until_other_programs_are_calm_and_a_short_burst_does_not_stop_it() -> None:
    policy, long = Policy(when_idle=True), 2 * IDLE_SECONDS
    assert "other programs use 5% of this device's processor" in str(policy.may_train(idle(long, 0.05), 0.0))
    assert policy.may_train(idle(long, 0.3), 30.0) is not None
    assert policy.may_train(idle(long, 0.05), 31.0) is not None
    assert policy.may_train(idle(long, 0.05), 30.0 + CALM_SECONDS) is not None, "the calm was broken"
    assert policy.may_train(idle(long, 0.05), 31.0 + CALM_SECONDS) is None
    assert policy.may_train(idle(long, 0.3), 100.0) is None, "less than busy"
    assert policy.may_train(idle(long, 0.9), 105.0) is None
    assert policy.may_train(idle(long, 0.9), 119.0) is None
    assert "90%" in str(policy.may_train(idle(long, 0.9), 120.0))
    assert policy.may_train(idle(long, 0.3), 125.0) is not None, "calm is less than not busy"
    assert policy.may_train(idle(long, None), 130.0) is None, "what cannot be read is no reason"


def test_heat_stops_it_until_it_has_cooled_down_for_a_while() -> None:
    policy = Policy(max_temperature=70.0)

    def at(degrees: float | None, now: float) -> str | None:
        return policy.may_train(DeviceReadings(temperature=degrees), now)

    assert at(69.0, 0.0) is None
    assert at(70.5, 1.0) == "this device is too hot: 70 °C, and at most 70 °C is allowed"
    assert "cools down: 69 °C, and it has to stay below 62 °C" in str(at(69.0, 2.0))
    assert at(61.0, 10.0) is not None
    assert at(65.0, 40.0) is not None
    assert at(61.0, 41.0) is not None
    assert at(61.0, 40.0 + COOL_SECONDS) is not None
    assert at(61.0, 41.0 + COOL_SECONDS) is None
    assert at(69.0, 110.0) is None
    assert at(None, 111.0) == "the temperature of this device can no longer be read"
    assert at(float("nan"), 112.0) is not None


def test_a_limit_of_the_temperature_that_makes_no_sense_is_refused() -> None:
    for limit in (19.0, 121.0, float("nan")):
        with pytest.raises(JobError, match=r"--max-temperature: .* 20 to 120"):
            Courtesy(max_temperature=limit)


def test_on_its_battery_it_does_not_train() -> None:
    policy = Policy(on_mains=True)
    assert policy.may_train(DeviceReadings(on_mains=True), 0.0) is None
    assert policy.may_train(DeviceReadings(on_mains=False), 1.0) == "this device runs on its battery"
    assert policy.may_train(DeviceReadings(on_mains=True), 5.0) == "this device has just been plugged in"
    assert policy.may_train(DeviceReadings(on_mains=True), 16.0) is None
    assert policy.may_train(DeviceReadings(), 17.0) == "whether this device runs on mains cannot be read"


def test_the_processor_s_sensors_count_and_others_only_without_them() -> None:
    assert hottest({"nvme": [71.0], "coretemp": [45.0, 52.0]}) == 52.0
    assert hottest({"nvme": [41.0], "acpitz": [27.8]}) == 41.0
    assert hottest({"cpu_thermal": [-274.0, None, 48.0]}) == 48.0
    assert hottest({"cpu_thermal": [None]}) is None
    assert hottest({}) is None


def test_a_missing_sensor_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "temperature", lambda: None)
    with pytest.raises(JobError, match="no sensor of its temperature that can be read"):
        Courtesy(max_temperature=90.0)


def test_the_device_counts_as_used_when_the_observation_begins_and_opens_no_keyboard(tmp_path: Path) -> None:
    keyboard = tmp_path / "dev" / "input" / "event0"
    keyboard.parent.mkdir(parents=True)
    os.mkfifo(keyboard)  # opening it would block
    usage = DeviceUsage(tmp_path)
    first = usage.idle_seconds()
    assert 0 <= first < usage.idle_seconds()


def test_what_was_typed_in_terminals_counts(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    for name, idle_for in (("pts/0", 40.0), ("pts/1", -3.0), ("tty1", 4000.0), ("tty2", 1e9), ("tty3", -7200.0)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        os.utime(path, (now - idle_for, now))
    (tmp_path / "pts" / "ptmx").write_text("")
    assert sorted(terminals_idle(tmp_path, now)) == [0.0, 40.0, 4000.0], "not what tells more about the clock"


def session(**changes: str) -> dict[str, str]:
    plain = {"Type": "wayland", "Class": "user", "State": "active", "IdleHint": "no", "LockedHint": "no"}
    return {**plain, "IdleSinceHintMonotonic": "0", **changes}


def test_a_desktop_is_used_unless_it_says_otherwise() -> None:
    assert desktops_idle([session()], 1000.0) == [0.0]
    assert desktops_idle([session(IdleHint="yes", IdleSinceHintMonotonic="400000000")], 1000.0) == [600.0]
    assert desktops_idle([session(LockedHint="yes")], 1000.0) == [1000.0]
    others = [session(Type="tty"), session(Class="greeter"), session(State="closing"), {}]
    assert desktops_idle(others, 1000.0) == []


def test_the_load_of_other_programs_is_told_from_that_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "_REST_SECONDS", 0.2)
    assert share_of_others((10.0, 100.0, 5.0), (20.0, 120.0, 15.0), 4) == 0.25
    assert share_of_others((10.0, 100.0, 5.0), (20.0, 120.0, 35.0), 4) == 0.0
    assert share_of_others((10.0, 100.0, 5.0), (20.0, 190.0, 5.0), 4) == 1.0
    usage = DeviceUsage()
    assert usage.others_load() is None
    time.sleep(0.3)
    load = usage.others_load()
    assert load is not None
    assert 0 <= load <= 1


BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"


def test_the_processor_time_of_children_is_our_own_before_and_after_they_end() -> None:
    before, pipe = own_seconds(), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-S", "-c", BURN], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert own_seconds() - before > 0.15, "the kernel counts in steps of 10 ms"
        assert own_seconds([child.pid, os.getpid()]) == pytest.approx(own_seconds(), abs=0.1), "nothing counts twice"
        child.communicate("\n", timeout=30)
    assert 0.15 < own_seconds() - before < 10


def test_other_ranks_on_this_machine_are_no_other_programs() -> None:
    burn = BURN.replace("input()", "time.sleep(60)")
    orphan = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).pid, flush=True)"
    for name, counts in (("horizonml.runtime.lobby.rank", True), ("another.program", False)):
        command = [sys.executable, "-S", "-c", orphan, burn, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            try:
                assert parent.stdout.readline() == "done\n"
                assert parent.wait(30) == 0, "whoever has started the rank is gone"
                assert (own_seconds([pid]) - own_seconds() > 0.15) is counts, name
            finally:
                os.kill(pid, signal.SIGKILL)


def parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_the_unit_runs_the_command_with_little_power() -> None:
    text = unit(["--forever", "--when-idle"], ["/opt/hml/bin/horizonml"])
    service = parsed(text)["Service"]
    assert service["ExecStart"] == "/opt/hml/bin/horizonml join --forever --when-idle"
    assert (service["DynamicUser"], service["ProtectHome"]) == ("yes", "yes")
    assert (service["ProtectSystem"], service["NoNewPrivileges"], service["Nice"]) == ("strict", "yes", "19")
    assert service["LoadCredential"] == "token:/etc/horizonml/token"
    assert service["DevicePolicy"] == "closed"
    assert not {"SupplementaryGroups", "DeviceAllow"} & set(service), "it opens no keyboards"
    assert "hml-" not in text
    assert "User" not in service


def test_the_unit_of_a_program_in_a_home_runs_as_its_owner() -> None:
    service = parsed(unit(["--forever"], ["/home/nobody-here/venv/bin/horizonml"]))["Service"]
    assert (service["User"], service["ProtectHome"]) == ("nobody-here", "read-only")
    assert "DynamicUser" not in service


def test_words_of_the_command_cannot_break_out_of_the_unit() -> None:
    options = ["--name", 'my "pi" $HOME 50% \\', "--peer", "pi.local"]
    service = parsed(unit(options, ["/opt/hml/bin/horizonml"]))["Service"]
    words = '--name "my \\"pi\\" $$HOME 50%% \\\\" --peer pi.local'
    assert service["ExecStart"] == f"/opt/hml/bin/horizonml join {words}"
    with pytest.raises(JobError, match="cannot stand in a unit"):
        unit(["--name", "pi\nExecStartPre=/bin/rm"])
    with pytest.raises(JobError, match="needs a token"):
        unit(["--forever", "--insecure"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    need("systemd-analyze", "package systemd")
    file = tmp_path / "horizonml-join.service"
    options = ["--forever", "--name", 'a "b" 50% $c', "--max-temperature", "75"]
    for program in (["/bin/sh"], [sys.executable, "-m", "horizonml"]):
        file.write_text(unit(options, program))
        done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
