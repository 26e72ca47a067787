"""`horizonml doctor`: each fault of a device that is laid out here is named, with a way to mend it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from horizonml.machine import checkup as device
from horizonml.machine.checkup import DEVICE_CHECKS, Check, Finding, Level, Patient
from horizonml.rendezvous.discovery import checkup as network
from horizonml.rendezvous.discovery.multicast import Hearing, Interface
from horizonml.security.token import make_token
from tests.commands import command

GIB = 1 << 20  # in kB
ARMV8_0 = "processor : 0\nFeatures : fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid\n"
POLICY = "sys/devices/system/cpu/cpufreq/policy0/"
ZONE = "sys/class/thermal/thermal_zone0/"


def meminfo(available: int, total: int = 4 * GIB, swap: int = GIB, free: int = GIB) -> dict[str, str]:
    lines = {"MemTotal": total, "MemAvailable": available, "SwapTotal": swap, "SwapFree": free}
    return {"proc/meminfo": "".join(f"{name}:  {value} kB\n" for name, value in lines.items())}


# What is laid out below the root, what is looked at, how bad it is, and words of what is said of it.
DEVICES: list[tuple[Mapping[str, str], Check, str, str]] = [
    ({"proc/cpuinfo": "vendor_id : GenuineIntel\nflags : fpu sse2"}, device.processor, "note", "has no AVX2"),
    (meminfo(200 << 10), device.memory, "problem", "200.0 MiB of 4.0 GiB are free"),
    (meminfo(400 << 10), device.memory, "warning", "400.0 MiB of 4.0 GiB are free"),
    (
        meminfo(2 * GIB) | {"sys/fs/cgroup/memory.max": str(512 << 20), "sys/fs/cgroup/memory.current": str(400 << 20)},
        device.memory, "problem", "112.0 MiB are left of this container's 512.0 MiB",
    ),
    (meminfo(700 << 10, GIB, 0, 0), device.memory, "note", "there is no swap"),
    (meminfo(300 << 10, GIB, GIB, 100 << 10), device.memory, "warning", "924.0 MiB of memory are swapped out"),
    (meminfo(GIB) | {"proc/vmstat": "oom_kill 3\n"}, device.memory, "note", "the kernel has ended 3 processes"),
    ({"sys/devices/platform/soc/soc:firmware/get_throttled": "50005"}, device.speed, "warning", "too low (now)"),
    (
        {"sys/devices/platform/soc/soc:firmware/get_throttled": "50000"},
        device.speed, "warning", "too low (since the last start)",
    ),
    (
        {ZONE + "type": "cpu-thermal", ZONE + "temp": "86000", ZONE + "trip_point_0_type": "passive",
         ZONE + "trip_point_0_temp": "85000"},
        device.speed, "warning", "slowed down to cool it (86 °C",
    ),
    ({POLICY + "scaling_governor": "powersave"}, device.speed, "warning", "kept at its lowest clock"),
    (
        {"sys/class/power_supply/BAT0/type": "Battery", "sys/class/power_supply/BAT0/status": "Discharging"},
        device.speed, "note", "it runs on its battery",
    ),
    ({"proc/loadavg": "999.0 1.0 1.0 1/100 1"}, device.speed, "note", "busy already (a load of 999.0"),
    ({"sys/fs/cgroup/pids.max": "64"}, device.limits, "warning", "only 64 processes"),
    ({"sys/fs/cgroup/cpu.max": "10000 100000"}, device.limits, "warning", "0.1 cores are hardly enough"),
    ({"etc/ufw/ufw.conf": "# comment\nENABLED=yes\n"}, network.firewall, "note", "ufw is active"),
]  # fmt: skip


def lay_out(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def bad(findings: Iterator[Finding]) -> list[Finding]:
    return [one for one in findings if one.level is not Level.OK]


def only(findings: Iterator[Finding], level: str, words: str) -> Finding:
    """The one finding that has these words."""
    found = list(findings)
    (one,) = (each for each in found if words in each.what)
    assert one.level == level, one
    return one


@pytest.mark.parametrize(("files", "check", "level", "words"), DEVICES, ids=[words for *_, words in DEVICES])
def test_a_fault_of_a_device_is_named(
    tmp_path: Path, files: Mapping[str, str], check: Check, level: str, words: str
) -> None:
    lay_out(tmp_path, files)
    one = only(check(Patient(tmp_path, "x86_64", env={})), level, words)
    assert one.why


def test_a_device_without_faults_has_none(tmp_path: Path) -> None:
    healthy = meminfo(3 * GIB) | {"proc/cpuinfo": "flags : fpu avx2", "proc/loadavg": "0.1 0.1 0.1 1/9 9"}
    lay_out(tmp_path, healthy)
    script = answers(tmp_path, "echo '[\"2.13.0+cpu\", null, false, 0.1]'")
    patient = Patient(tmp_path, "x86_64", tmp_path / "runs", {}, ("sh", script))
    found = [one for check in DEVICE_CHECKS for one in check(patient)]
    assert [one for one in found if one.level is not Level.OK] == []
    assert [one.check for one in found] == ["software", "processor", "PyTorch", "memory", "disk"]


def answers(folder: Path, *lines: str) -> str:
    """A script in the place of Python."""
    (folder / "python.sh").write_text("\n".join(lines))
    return str(folder / "python.sh")


@pytest.mark.parametrize(
    ("architecture", "cpuinfo", "words"),
    [("armv7l", "", "this is a 32-bit system (armv7l)"), ("aarch64", "vendor_id : GenuineIntel", "that is emulated")],
)
def test_a_processor_that_is_unfit_is_named(tmp_path: Path, architecture: str, cpuinfo: str, words: str) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert only(device.processor(Patient(tmp_path, architecture)), "problem" if not cpuinfo else "warning", words).fix


@pytest.mark.parametrize(
    ("lines", "level", "words", "fix"),
    [
        (["kill -ILL $$"], "problem", "SIGILL", "'torch!=2.10.*'"),
        (["kill -KILL $$"], "problem", "SIGKILL; the machine may be out of memory", ""),
        (["echo \"No module named 'torch'\" >&2; exit 1"], "problem", "PyTorch is not installed", "pip install torch"),
        (["echo 'ImportError: libgomp.so.1' >&2; exit 1"], "problem", "PyTorch fails: ImportError: libgomp", "pip"),
        (['echo \'["2.13.0", "13.0", false, 0.1]\''], "note", "and there is no NVIDIA GPU", "/whl/cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_pytorch_is_named(
    tmp_path: Path, lines: list[str], level: str, words: str, fix: str
) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": ARMV8_0})
    patient = Patient(tmp_path, "aarch64", env={}, python=("sh", answers(tmp_path, *lines)))
    assert fix in only(device.pytorch(patient), level, words).fix


def test_a_gpu_that_pytorch_cannot_use_is_named(tmp_path: Path) -> None:
    lay_out(tmp_path, {"proc/driver/nvidia/version": "580"})
    script = answers(tmp_path, "echo '[\"2.13.0+cpu\", null, false, 0.1]'")
    only(device.pytorch(Patient(tmp_path, env={}, python=("sh", script))), "warning", "there is an NVIDIA GPU, which")


def test_pytorch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CHILD_SECONDS", 0.2)
    only(
        device.pytorch(Patient(python=("sh", answers(tmp_path, "exec sleep 30")))), "problem", "does not load and take"
    )


def test_a_disk_that_is_full_slow_or_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(device.disk(Patient(folder=Path("/proc/here/runs"))), "problem", "/proc cannot be written to")
    patient = Patient(folder=tmp_path / "not" / "yet")
    monkeypatch.setattr(device, "_write_rate", lambda place: 2e6)
    only(device.disk(patient), "warning", f"are free in {tmp_path}, and 2 MB/s are written there")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100 << 20))
    only(device.disk(patient), "problem", "100.0 MiB are free in")


def test_few_open_files_are_named() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from horizonml.machine.checkup import Patient, limits\n"
        "print(*(one.what for one in limits(Patient())))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "a process may open only 256 files" in said


def test_a_pod_that_does_not_know_its_service_is_named(tmp_path: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    only(device.limits(Patient(tmp_path, env=env)), "warning", "this is a pod, and $HORIZONML_RENDEZVOUS is not set")


def test_what_is_wrong_with_a_token_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    env = {"HORIZONML_TOKEN_FILE": str(file)}
    file.write_text(make_token().text)
    file.chmod(0o644)
    only(network.secret(Patient(env=env)), "problem", "others may read the token")
    only(
        network.secret(Patient(env={"HORIZONML_TOKEN": "hml-mistyped"})),
        "problem",
        "has 12 characters, and a token has",
    )
    only(network.secret(Patient(env={"XDG_CONFIG_HOME": str(tmp_path / "none")})), "note", "this device has no token")


WIFI, CABLE = Interface("wlan0", ("192.168.1.5",)), Interface("eth0", ("192.168.1.6",))
NICS: list[tuple[Interface, int, bool, int, str, str]] = [  # Mbit/s, half duplex, packet size
    (CABLE, 100, False, 1500, "note", "eth0 is connected at 100 Mbit/s"),
    (CABLE, 1000, True, 1500, "warning", "eth0 works in half duplex"),
    (CABLE, 1000, False, 1280, "note", "eth0 takes packets of up to 1280 bytes only"),
    (WIFI, 0, False, 1500, "note", "training goes over Wi-Fi, although eth0 is up"),
    (WIFI, 0, False, 1500, "warning", "the Wi-Fi signal is weak (-81 dBm)"),
]


@pytest.mark.parametrize(("used", "speed", "half", "mtu", "level", "words"), NICS, ids=[words for *_, words in NICS])
def test_what_is_wrong_with_a_network_card_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: Interface, speed: int, half: bool, mtu: int, level: str,
    words: str,
) -> None:  # fmt: skip
    lay_out(tmp_path, {"proc/net/wireless": "Inter-| sta-|\n wlan0: 0000   30.  -81.  -256        0\n"})
    lay_out(tmp_path, {"sys/class/net/wlan0/wireless/x": ""})
    duplex = psutil.NIC_DUPLEX_HALF if half else psutil.NIC_DUPLEX_FULL
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {used.name: SimpleNamespace(speed=speed, duplex=duplex, mtu=mtu)}
    )
    monkeypatch.setattr(network, "interfaces", lambda: [CABLE, WIFI])
    monkeypatch.setattr(network, "route_to", lambda host, port: (used.ipv4[0], used.name))
    only(network.interface(Patient(tmp_path)), level, words)


def test_a_device_without_a_network_or_with_one_of_its_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "interfaces", list)
    only(network.interface(Patient()), "problem", "no network interface is up")
    docker = Interface("docker0", ("172.17.0.1",))
    monkeypatch.setattr(network, "interfaces", lambda: [docker])
    monkeypatch.setattr(network, "route_to", lambda host, port: ("172.17.0.1", "lo"))
    only(network.interface(Patient()), "warning", "only docker0 is up")
    monkeypatch.setattr(network, "interfaces", lambda: [CABLE])
    lay_out(tmp_path, {".dockerenv": "", "sys/class/net/eth0/iflink": "7", "sys/class/net/eth0/ifindex": "2"})
    only(network.container(Patient(tmp_path)), "warning", "this is a container with a network of its own")
    lay_out(tmp_path, {"sys/class/net/eth0/iflink": "2"})  # that of its machine
    assert list(network.container(Patient(tmp_path))) == []


def test_a_firewall_that_is_running_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, {"etc/ufw/ufw.conf": "# comment\nENABLED=no\n"})
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter([SimpleNamespace(info={"name": "firewalld"})]))
    (one,) = network.firewall(Patient(tmp_path))
    assert (one.what, "firewall-cmd --permanent --add-service=mdns" in one.fix) == ("firewalld is running", True)


def test_a_device_that_finds_nobody_is_told_why_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "hear", lambda interfaces, seconds: [Hearing(CABLE, "nothing came back")])
    said = "\n".join(network.explain_silence())
    assert "multicast seems blocked on eth0: a packet to UDP port 5353 did not come back (nothing came back)" in said
    assert "UDP port 5353 and TCP ports 29400 to 29402" in said


def test_a_port_that_is_taken_is_named_with_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        monkeypatch.setattr(network, "PORT", taken.getsockname()[1])
        monkeypatch.setattr(network, "STANDBY_PORT", taken.getsockname()[1])
        found = bad(network.ports(Patient()))
        assert found[0].what.startswith(f"port {taken.getsockname()[1]} is taken by ")
        assert "python" in found[0].what


@pytest.mark.parametrize(
    ("heard", "level", "words"),
    [
        (Hearing(CABLE, "it got lost"), "warning", "multicast seems blocked on eth0"),
        (Hearing(Interface("eth0", CABLE.ipv4, multicast=False)), "warning", "multicast is switched off on eth0"),
        (Hearing(CABLE), "note", "this device hears itself by multicast, and no other"),
        (Hearing(CABLE, None, ("192.168.1.9",)), "ok", "other devices were heard (192.168.1.9)"),
    ],
)
def test_what_is_wrong_with_multicast_is_named(
    monkeypatch: pytest.MonkeyPatch, heard: Hearing, level: str, words: str
) -> None:
    monkeypatch.setattr(network, "hear", lambda interfaces, seconds: [heard])
    only(network.multicast(Patient()), level, words)


def test_a_clock_that_was_never_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    only(network.time_of_day(Patient()), "warning", "This device's clock has not been set, it says 1970-01-01")


def test_a_peer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    only(network.peer(Patient(env={}), "127.0.0.1", port), "problem", "nothing listens on port")
    only(network.peer(Patient(env={}), "no-such-host.invalid", 29400), "problem", "does not resolve")


def test_the_command_says_what_it_has_found_and_ends_with_1_for_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "hear", lambda interfaces, seconds: [Hearing(CABLE)])
    monkeypatch.setattr(device, "_STEP", "print('[\"2.13.0\", null, false, 0.1]')")
    env = {"HORIZONML_TOKEN": make_token().text}
    fine = command(tmp_path, "doctor", **env)
    assert (fine.returncode, "0 problems" in fine.stdout) == (0, True), fine.stdout
    broken = command(tmp_path, "doctor", "--json", "--run-folder", "/proc/runs", **env)
    assert broken.returncode == 1
    found = json.loads(broken.stdout)["findings"]
    (disk,) = (one for one in found if one["check"] == "disk")
    assert (disk["level"], "cannot be written to" in disk["what"]) == ("problem", True)
    assert disk["fix"]
    assert env["HORIZONML_TOKEN"] not in fine.stdout + broken.stdout
