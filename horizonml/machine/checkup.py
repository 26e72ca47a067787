"""Looks for what keeps a device from training, or makes it slow: the part of `horizonml doctor` about the device.

Every check reads what the kernel shows below a root folder, so a test can lay out any device as files.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile

from horizonml import __version__
from horizonml.machine.host import (
    available_cores,
    killed_on_machine,
    needs_one_thread,
    processor_name,
    text,
    threads_per_rank,
)
from horizonml.machine.sensors import clock, number
from horizonml.machine.signals import explain_signal
from horizonml.text import human_bytes, printable

_GIB = 1 << 30
_CHILD_SECONDS = 180.0  # to load PyTorch from a slow card, and take a step
_LEAST_MEMORY, _LITTLE_MEMORY = 256 << 20, 512 << 20  # that are left; a rank of a tiny model takes 150 MiB and more
_SWAP_WANTED = 2 * _GIB  # of memory, below which a device should have swap
_LEAST_DISK, _LITTLE_DISK = 256 << 20, 2 * _GIB
_SLOW_DISK = 5e6  # bytes per second
_DISK_TRIAL = 8 << 20  # bytes
_LEAST_FILES, _LEAST_PROCESSES = 1024, 256
_CPU_BUILD = "pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu"
_STEP = """
import json, sys, time
import torch
begin = time.monotonic()
torch.set_num_threads(int(sys.argv[1]))
torch.randn(256, 256) @ torch.randn(256, 256)  # as large as to take all threads
layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
torch.nn.functional.cross_entropy(layers(torch.randn(4, 3, 8, 8)), torch.arange(4)).backward()
optimizer.step()
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available(), time.monotonic() - begin]))
"""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # it is worth knowing
    WARNING = "warning"  # training works, but slowly, or not for long
    PROBLEM = "problem"  # this device cannot train, or cannot meet the others


@dataclass(frozen=True)
class Finding:
    """What a check has found, why that matters, and the command, or the deed, that mends it."""

    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Return all of it in one line."""
        why = f": {self.why}" if self.why else ""
        return f"{self.what}{why}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Patient:
    """A device that is looked at."""

    root: Path = Path("/")
    architecture: str = field(default_factory=platform.machine)
    folder: Path = Path("runs")  # to which training writes
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: Sequence[str] = (sys.executable,)  # what runs Python

    @property
    def cgroup(self) -> Path:
        """Return where the limits of the container are."""
        return self.root / "sys/fs/cgroup"

    def read(self, path: str) -> str:
        """Return the text of a file, or nothing."""
        return text(self.root / path)


Check = Callable[[Patient], Iterator[Finding]]


def software(patient: Patient) -> Iterator[Finding]:
    """Look at Python, and at the version of this package."""
    found = f"HorizonML {__version__}, Python {platform.python_version()}"
    yield Finding("software", Level.OK, f"{found} on {platform.system()} {platform.release()}")


def processor(patient: Patient) -> Iterator[Finding]:
    """Look for a processor for which there is no build of PyTorch, or only a slow one."""
    described, kind = patient.read("proc/cpuinfo"), patient.architecture
    if kind in ("armv6l", "armv7l", "armv8l", "i386", "i686"):
        yield Finding(
            "processor", Level.PROBLEM, f"this is a 32-bit system ({kind})", "PyTorch has no builds for it",
            "install a 64-bit system, such as Raspberry Pi OS (64-bit)",
        )  # fmt: skip
    elif kind == "aarch64" and re.search("GenuineIntel|AuthenticAMD", described):
        yield Finding(
            "processor", Level.WARNING, "this is an Arm system that is emulated on another processor",
            "it computes 10 to 50 times as slowly as the processor could",
            "use the image or the system for amd64 on this machine",
        )  # fmt: skip
    elif kind == "x86_64" and described and " avx2" not in described:
        yield Finding(
            "processor", Level.NOTE, "the processor has no AVX2",
            "PyTorch computes at a fraction of the speed of processors since 2013; the planner gives it less work",
        )  # fmt: skip
    yield Finding("processor", Level.OK, f"{processor_name()}, {kind}")


def is_armv8_0(patient: Patient) -> bool:
    """Return whether the processor is an Arm of 2016 or before, as of Raspberry Pi 3 and 4 and of the Jetson Nano."""
    features = re.search(r"^Features\s*:(.*)$", patient.read("proc/cpuinfo"), re.M)
    return patient.architecture == "aarch64" and features is not None and "atomics" not in features[1].split()


def pytorch(patient: Patient) -> Iterator[Finding]:
    """Load PyTorch and take a step, in a process of its own, which may die of that."""
    try:
        done = subprocess.run(
            [*patient.python, "-c", _STEP, f"{threads_per_rank(available_cores(), 1)}"],
            capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False,
            env=dict(patient.env),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding(
            "PyTorch", Level.PROBLEM, f"PyTorch does not load and take a step within {_CHILD_SECONDS:.0f} s",
            "a card that hangs, or memory that is swapped all the time, are the usual reasons",
            "look at `free -m` and `dmesg --level err`",
        )  # fmt: skip
        return
    if done.returncode < 0:
        old = is_armv8_0(patient) and -done.returncode == 4
        yield Finding(
            "PyTorch", Level.PROBLEM, f"a process that loads PyTorch and takes a step is ended by "
            f"{explain_signal(-done.returncode)}", "no rank can train here",
            f"{_CPU_BUILD} 'torch!=2.10.*'" if old else "",
        )  # fmt: skip
    elif done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        missing = re.search("No module named '?torch'?$", last)
        yield Finding(
            "PyTorch", Level.PROBLEM,
            "PyTorch is not installed for this Python" if missing else f"PyTorch fails: {printable(last, 300)}",
            "no rank can train here", _CPU_BUILD,
        )  # fmt: skip
    else:
        yield from _build(patient, *json.loads(done.stdout.splitlines()[-1]))


def _build(patient: Patient, version: str, cuda: str | None, usable: bool, seconds: float) -> Iterator[Finding]:
    nvidia = (patient.root / "proc/driver/nvidia/version").exists() or (patient.root / "etc/nv_tegra_release").exists()
    if needs_one_thread():
        yield Finding(
            "PyTorch", Level.WARNING,
            f"PyTorch {version} is a build for CUDA, which this processor runs in one thread only",
            "with several threads it would end with an illegal instruction, so ranks take one", _CPU_BUILD,
        )  # fmt: skip
    elif cuda is not None and not usable and not nvidia:
        yield Finding(
            "PyTorch", Level.NOTE, f"PyTorch {version} is a build for CUDA, and there is no NVIDIA GPU",
            "it takes gigabytes of the disk, and more memory in every rank", _CPU_BUILD,
        )  # fmt: skip
    elif nvidia and not usable:
        yield Finding(
            "PyTorch", Level.WARNING, f"there is an NVIDIA GPU, which PyTorch {version} cannot use",
            "ranks train on the processor", "install a build of PyTorch for it and its driver (docs/containers.md)",
        )  # fmt: skip
    yield Finding("PyTorch", Level.OK, f"PyTorch {version} takes a step ({seconds:.2f} s)")


def memory(patient: Patient) -> Iterator[Finding]:
    """Look for too little memory, and for no swap where there should be some."""
    found = {
        name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", patient.read("proc/meminfo"), re.M)
    }
    if "MemAvailable" not in found:
        return
    total, left, swap = (found.get(name, 0) for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    limit = _limit(patient)
    what = f"{human_bytes(left)} of {human_bytes(total)} are free"
    if limit is not None and limit < total:
        left = min(left, limit - int(number(patient.cgroup / "memory.current") or 0))
        what = f"{human_bytes(max(0, left))} are left of this container's {human_bytes(limit)}"
    level = Level.PROBLEM if left < _LEAST_MEMORY else Level.WARNING if left < _LITTLE_MEMORY else Level.OK
    if level is Level.OK:
        yield Finding("memory", level, what)
    else:
        yield Finding(
            "memory", level, what, "a rank takes 150 MiB for PyTorch alone, and the kernel ends it where that is gone",
            "end other programs, such as a desktop (`sudo systemctl isolate multi-user.target`)",
        )  # fmt: skip
    if total < _SWAP_WANTED and not swap:
        yield Finding(
            "swap", Level.NOTE, "there is no swap", "with little memory, a short peak ends a rank",
            "sudo apt install zram-tools   # compressed swap in memory, which wears out no card",
        )  # fmt: skip
    elif swap and found.get("SwapFree", 0) < swap / 2 and level is not Level.OK:
        yield Finding(
            "swap", Level.WARNING, f"{human_bytes(swap - found.get('SwapFree', 0))} of memory are swapped out",
            "steps wait for the disk", "end other programs, or train a smaller model here",
        )  # fmt: skip
    killed = killed_on_machine(patient.root / "proc/vmstat")
    if killed:
        yield Finding(
            "memory", Level.NOTE, f"the kernel has ended {killed} processes for their memory since the last start",
            "a rank may have been among them", "sudo dmesg | grep -i 'out of memory'",
        )  # fmt: skip


def _limit(patient: Patient) -> int | None:
    limit = text(patient.cgroup / "memory.max") or text(patient.cgroup / "memory/memory.limit_in_bytes")
    return int(limit) if limit.isdigit() else None


def disk(patient: Patient) -> Iterator[Finding]:
    """Look for a disk that is full, slow, or cannot be written to."""
    place = patient.folder.absolute()
    while not place.exists():
        place = place.parent
    why = "records and checkpoints are written there"
    free = shutil.disk_usage(place).free
    try:
        rate = _write_rate(place)
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding(
            "disk", Level.PROBLEM, f"{place} cannot be written to: {reason}", why,
            "choose another folder (`folder` in the job file, `join --run-folder`), or mount the disk for writing",
        )  # fmt: skip
        return
    level = Level.PROBLEM if free < _LEAST_DISK else Level.WARNING if free < _LITTLE_DISK else Level.OK
    what = f"{human_bytes(free)} are free in {place}, and {rate / 1e6:,.0f} MB/s are written there"
    if level is not Level.OK:
        yield Finding("disk", level, what, why, f"du -xh --max-depth 2 {place} | sort -h | tail   # what is large")
    elif rate < _SLOW_DISK:
        yield Finding(
            "disk", Level.WARNING, what, "checkpoints and data are slow", "use another card, or a disk at a USB 3 port"
        )
    else:
        yield Finding("disk", level, what)


def _write_rate(place: Path) -> float:
    """Return how many bytes per second reach the disk. Raises OSError."""
    with TemporaryFile(dir=place) as file:
        content, begin = os.urandom(_DISK_TRIAL), time.monotonic()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_TRIAL / max(1e-6, time.monotonic() - begin)


_THROTTLED = "sys/devices/platform/soc/soc:firmware/get_throttled"  # a hexadecimal number, on Raspberry Pi


def speed(patient: Patient) -> Iterator[Finding]:
    """Look for heat, under-voltage, a low clock, a battery, and other programs, which all make a device slow."""
    found, flags = clock(patient.root / "sys"), patient.read(_THROTTLED)
    seen = int(flags, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]+", flags) else 0
    if seen & 0x10001:
        when = "now" if seen & 1 else "since the last start"
        yield Finding(
            "power", Level.WARNING, f"the voltage is too low ({when})",
            "the processor is slowed down, and the card may be damaged", "use the board's own power supply and cable",
        )  # fmt: skip
    if found.hot or seen & 0x4:
        yield Finding(
            "heat", Level.WARNING, f"the processor is slowed down to cool it ({found.describe() or 'by its firmware'})",
            "steps take longer, and all others wait for this device", "give it a heat sink or a fan",
        )  # fmt: skip
    elif found.degrees is not None:
        yield Finding("heat", Level.OK, found.describe())
    governors = {text(one) for one in patient.root.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_governor")}
    if governors == {"powersave"} and "intel_pstate" not in patient.read(
        "sys/devices/system/cpu/cpufreq/policy0/scaling_driver"
    ):
        yield Finding(
            "clock rate", Level.WARNING, "the processor is kept at its lowest clock (powersave)",
            "it computes several times as slowly as it could",
            "echo performance | sudo tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
        )  # fmt: skip
    if any(
        text(one / "type") == "Battery" and text(one / "status") == "Discharging"
        for one in patient.root.glob("sys/class/power_supply/*")
    ):
        yield Finding(
            "power", Level.NOTE, "it runs on its battery", "many laptops compute more slowly then, and go to sleep",
            "plug it in; `horizonml join --on-mains` trains only then",
        )  # fmt: skip
    load, cores = patient.read("proc/loadavg").split(), os.cpu_count() or 1
    if load and float(load[0]) > 0.75 * cores:
        yield Finding(
            "load", Level.NOTE, f"the processor is busy already (a load of {float(load[0]):.1f} on {cores} cores)",
            "ranks share it with other programs", "`horizonml join --when-idle` trains only while it is idle",
        )  # fmt: skip


def limits(patient: Patient) -> Iterator[Finding]:
    """Look for limits on processes, on open files, and of a container."""
    with suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
            yield Finding(
                "limits", Level.WARNING, f"a process may open only {hard} files and connections",
                "ranks of large groups cannot connect to all others", f"ulimit -n {2 * _LEAST_FILES}",
            )  # fmt: skip
    processes = number(patient.cgroup / "pids.max")
    if processes is not None and processes < _LEAST_PROCESSES:
        yield Finding(
            "limits", Level.WARNING, f"this container may have only {processes:.0f} processes and threads",
            "PyTorch and the loading of data start more", "start it with `--pids-limit 2048`",
        )  # fmt: skip
    cores = available_cores(patient.cgroup)
    if cores < (os.cpu_count() or 1):
        yield Finding(
            "limits", Level.NOTE, f"this process may use {cores:g} of the machine's {os.cpu_count()} cores",
            "the planner gives it work for that",
        )  # fmt: skip
    if cores < 0.2:
        yield Finding(
            "limits", Level.WARNING, f"{cores:g} cores are hardly enough to take part", "the others wait for this rank",
            "raise the limit of the container (`--cpus`, or resources.limits.cpu)",
        )  # fmt: skip
    if "KUBERNETES_SERVICE_HOST" in patient.env and not patient.env.get("HORIZONML_RENDEZVOUS"):
        yield Finding(
            "Kubernetes", Level.WARNING, "this is a pod, and $HORIZONML_RENDEZVOUS is not set",
            "a rank here does not know where the others meet", "start jobs by `horizonml cluster submit`, or see k8s/",
        )  # fmt: skip


DEVICE_CHECKS: tuple[Check, ...] = (software, processor, pytorch, memory, disk, speed, limits)
