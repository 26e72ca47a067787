"""Processes that are forked from one that has loaded what they need: like any other, but sooner there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from horizonml.runtime.forkserver import SERVER, Forked, ForkServer, start, start_ahead, started_ahead

VERSION = [sys.executable, "-P", "-m", "horizonml", "--version"]
SERVICE = [sys.executable, "-m", "horizonml", "rendezvous", "--port", "0"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows and passes on what this needs")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A server that has loaded the command line only."""
    with ForkServer(os.environ, 2, ("horizonml.cli.app",)) as made:
        while not made.loaded():
            assert made.process.poll() is None
        yield made


def test_it_runs_the_command_with_its_own_streams_folder_and_environment(server: ForkServer, tmp_path: Path) -> None:
    env = {**os.environ, "RANK": "3", "HORIZONML_HOME": str(tmp_path)}
    with start(VERSION, server.address, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE) as process:
        assert isinstance(process, Forked)
        assert process.communicate(timeout=60)[0].startswith("horizonml ")
    assert process.returncode == 0
    wrong = [sys.executable, "-m", "horizonml", "train", "no-such-job"]
    with start(wrong, server.address, cwd=tmp_path, text=True, stderr=subprocess.PIPE) as process:
        assert "no-such-job" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


def test_a_process_that_ends_before_its_command_says_why(server: ForkServer, tmp_path: Path) -> None:
    with start(VERSION, server.address, cwd=tmp_path / "gone", text=True, stderr=subprocess.PIPE) as process:
        assert "No such file or directory" in process.communicate(timeout=60)[1]
    assert process.returncode == 1


@contextmanager
def killed_at_the_end(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_others_see_the_command_and_its_environment(server: ForkServer, tmp_path: Path) -> None:
    env = {**os.environ, "RANK": "3"}
    command = [*SERVICE, "--", "cat"]
    own = start(command, server.address, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    with killed_at_the_end(own) as process:
        assert process.stderr is not None
        assert b"127.0.0.1" in process.stderr.readline()
        seen = psutil.Process(process.pid)
        assert [part for part in seen.cmdline() if part] == command
        assert (seen.environ()["RANK"], seen.cwd()) == ("3", str(tmp_path))
        assert os.getsid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, 128 + signal.SIGTERM)


def test_descriptors_keep_their_numbers(server: ForkServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inherited = [*SERVICE[:4], "--inherited", str(listener.fileno())]
        own = start(inherited, server.address, stdout=subprocess.PIPE, pass_fds=[listener.fileno()])
        with killed_at_the_end(own) as process:
            assert process.stdout is not None
            assert str(listener.getsockname()[1]) in process.stdout.readline().decode()
            process.terminate()
            assert process.wait(10) == 0


def test_anything_else_is_started_as_usual(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["true"], [sys.executable, "-c", ""], [sys.executable, "-m", "json.tool", "--help"]):
        with start(command, server.address, stdout=subprocess.DEVNULL) as process:
            assert not isinstance(process, Forked)
            assert process.wait(60) == 0
    monkeypatch.delenv(SERVER, raising=False)
    with start(VERSION, stdout=subprocess.DEVNULL) as process:
        assert not isinstance(process, Forked)


def test_what_it_has_started_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with ForkServer(os.environ, 2, ()) as own:
        with killed_at_the_end(start(SERVICE, own.address, stdout=subprocess.PIPE)) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert process.poll() is None
            own.process.kill()
            assert process.wait(10) == -signal.SIGKILL
        with pytest.raises(OSError, match=r"refused|has ended"):
            start(VERSION, own.address)


def test_a_server_ends_with_who_started_it_and_says_why_it_cannot_load(tmp_path: Path) -> None:
    code = (
        "import os; from horizonml.runtime.forkserver import ForkServer; print(ForkServer(os.environ, 2).process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with (tmp_path / "log").open("wb") as log, ForkServer(os.environ, log, ("no_such_module",)) as own:
        while not own.loaded():
            pass
        assert own.process.wait(10) != 0
    assert "no_such_module" in (tmp_path / "log").read_text()


def test_a_server_that_was_started_ahead_is_used_once_and_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "typer.py").write_text("raise ImportError('not this one')")
    start_ahead()
    own = started_ahead()
    assert own is not None
    assert started_ahead() is None
    with own, (tmp_path / "log").open("wb") as log:
        while not own.loaded():
            pass
        assert own.process.wait(10) != 0
        own.repeat(log)
    assert "not this one" in (tmp_path / "log").read_text()


def test_nobody_goes_on_loading_for_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from horizonml.runtime.forkserver import _ahead, start_ahead; start_ahead(); print(_ahead[0].process.pid)"
    monkeypatch.delenv(SERVER, raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_does_not_know_the_secret_gets_no_process(server: ForkServer) -> None:
    name, _, secret = server.address.partition(":")
    for wrong in (f"{name}:", f"{name}:{'0' * len(secret)}", name):
        with pytest.raises(OSError, match=r"does not know the secret|has ended"):
            start(VERSION, wrong)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        socket.send_fds(stranger, [b"0" * len(secret) + (1 << 60).to_bytes(8, "big")], [1])
        with suppress(OSError):  # it is turned away before that arrives
            stranger.sendall(b"[" * 100)
    with start(VERSION, server.address, stdout=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
