"""How processes learn that they should end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from horizonml.machine.signals import LAUNCHER, StopRequest, explain_signal, launcher_name

WATCH = "from horizonml.machine.signals import watch_launcher; watch_launcher(); print('alive')"


@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        (launcher_name(), 0),  # this process, which waits for it
        (f"{os.getpid()} 1 {launcher_name().split(' ', 2)[2]}", 128 + signal.SIGTERM),  # a number that was given again
        (f"{os.getpid()} 1 another-machine pid:[1]", 0),  # of which nothing can be known
        ("1", 0),
        ("", 0),
    ],
    ids=["this process", "another process", "another machine", "damaged", "none"],
)
def test_a_process_ends_at_once_if_its_launcher_is_gone_already(launcher: str, code: int) -> None:
    command = [sys.executable, "-c", WATCH]
    result = subprocess.run(
        command, env={**os.environ, LAUNCHER: launcher}, capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stderr
    assert result.stdout == ("alive\n" if code == 0 else "")


def test_a_launcher_that_nobody_has_collected_yet_is_gone() -> None:
    command = [
        sys.executable,
        "-c",
        "from horizonml.machine.signals import launcher_name; print(launcher_name(), flush=True)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        name = launcher.stdout.readline().strip()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but stays a zombie
        result = subprocess.run([sys.executable, "-c", WATCH], env={**os.environ, LAUNCHER: name}, check=False)
    assert result.returncode == 128 + signal.SIGTERM


def test_only_a_second_interrupt_asks_to_end_at_once() -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        stop.note(number)
        assert (stop.wanted, stop.at_once) == (True, False)
    stop.note(signal.SIGINT)
    assert stop.at_once


def test_signals_are_explained() -> None:
    assert explain_signal(signal.SIGKILL) == "SIGKILL; the machine may be out of memory (see dmesg)"
    assert explain_signal(signal.SIGSEGV) == "SIGSEGV"
    assert explain_signal(200) == "signal 200"
