"""Devices that ranks of this machine stand for."""

import platform
import subprocess
import sys
import time

import pytest

from horizonml.errors import JobError
from horizonml.machine import emulation, host
from horizonml.machine.emulation import EMULATE, DevicePace, emulated_devices, of_rank, too_many
from horizonml.machine.host import EMULATED_CORES, available_cores, threads_per_rank
from horizonml.runtime import forkserver


def _compute(seconds: float) -> None:
    """Use so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_rank_waits_as_long_as_its_device_would_still_compute() -> None:
    pace = DevicePace(0.25)
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(5):
        _compute(0.02)
        pace.keep(may_sleep=True)
    wall, computed = time.perf_counter() - begin, time.process_time() - used
    assert wall >= computed / 0.25 - 0.005


def test_time_without_work_cannot_be_saved_for_later() -> None:
    pace = DevicePace(0.5)
    time.sleep(0.2)
    pace.keep(may_sleep=False)
    begin = time.perf_counter()
    _compute(0.05)
    pace.keep(may_sleep=True)
    assert time.perf_counter() - begin >= 0.098


def test_what_was_computed_while_others_waited_is_owed_later() -> None:
    pace = DevicePace(0.2)
    begin = time.perf_counter()
    _compute(0.03)
    pace.keep(may_sleep=False)  # as at the end of a transfer
    pace.keep(may_sleep=True)
    assert time.perf_counter() - begin >= 0.148


@pytest.mark.parametrize(
    ("text", "ranks", "cores"),
    [("", 3, ()), ("0.4", 3, (0.4, 0.4, 0.4)), ("0.8,0.2", 2, (0.8, 0.2)), ("0.2,0.8,0.4", 1, (0.8,))],
)
def test_devices_of_ranks(text: str, ranks: int, cores: tuple[float, ...]) -> None:
    assert emulated_devices(ranks, {EMULATE: text}) == cores


@pytest.mark.parametrize("text", ["0.4,0.2", "fast", "0", "-1", "0.4,,0.2", "nan", "inf"])
def test_wrong_devices_are_refused_in_words(text: str) -> None:
    with pytest.raises(JobError, match="--emulate"):
        emulated_devices(3, {EMULATE: text})


def test_a_rank_is_told_its_cores_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_rank((), 0) == {}
    for name, value in of_rank((0.6, 0.2), 1).items():
        monkeypatch.setenv(name, value)
    assert available_cores() == 0.2
    assert emulation.is_emulated()
    assert emulation.machine_of(emulation.emulated_host("boot/10.0.0.1", 1)) == "boot/10.0.0.1"


def test_a_machine_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATED_CORES, "1")  # what this process may use
    assert too_many((0.4, 0.6)) is None
    assert "1.4 cores together, and this machine has 1" in str(too_many((0.8, 0.6)))


def test_only_ranks_that_are_started_here_can_be_emulated() -> None:
    command = [sys.executable, "-m", "horizonml", "train", "digits", "--join", "127.0.0.1:9", "--emulate", "0.4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --emulate: only ranks that this command starts")


@pytest.mark.parametrize(("flags", "process", "threads"), [(0, 2, 1), (1 << 8, 2, 4), (0, 1, 4)])
def test_old_arm_processors_compute_in_one_thread_with_builds_for_cuda(
    monkeypatch: pytest.MonkeyPatch, flags: int, process: int, threads: int
) -> None:
    class Library:
        def __init__(self, name: None) -> None:
            self.getauxval = {16: flags}.__getitem__

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host.ctypes, "CDLL", Library)
    monkeypatch.setattr(host, "_CUDA_PROCESS", 2)
    monkeypatch.setattr(host, "process_memory", lambda: process)
    host.needs_one_thread.cache_clear()
    try:
        assert threads_per_rank(4.0, 1) == threads
    finally:
        host.needs_one_thread.cache_clear()


@pytest.mark.parametrize(
    ("system", "machine", "torch", "can"),
    [
        ("linux", "x86_64", "2.9.1", True),
        ("linux", "aarch64", "2.9.1", False),
        ("linux", "aarch64", "2.13.0", True),
        ("darwin", "arm64", "2.13.0", False),
    ],
)
def test_where_ranks_are_forked(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, torch: str, can: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(forkserver, "version", lambda name: torch)
    assert forkserver.can_fork() is can
