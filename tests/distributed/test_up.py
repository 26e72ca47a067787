"""`horizonml up` and `horizonml join` as users run them: devices with networks of their own, and only a token."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horizonml.security.token import make_token, save_token
from tests.distributed.processes import wait_for
from tests.netns import Lab
from tests.programs import need_networks

pytestmark = pytest.mark.slow

SETTINGS = ("--set", "epochs=30", "--set", "batch_size=32")  # of a training that ends between 99.4% and 100%


class Output:
    """What a process says, which is read while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def says(self, words: str, seconds: float = 300.0) -> None:
        """Wait until it has said these words."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} within {seconds:.0f} s:\n{self.text}"
            assert self.process.poll() is None or words in self._rest(), f"ended without {words!r}:\n{self.text}"
            time.sleep(0.05)

    def _rest(self) -> str:
        self._thread.join(5)
        return self.text

    def ends(self, seconds: float = 300.0) -> int:
        """Wait for its end, and return its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds:.0f} s:\n{self.text}") from None
        self._thread.join(5)
        return code


class Devices:
    """Devices of a lab that all have one token."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        token = make_token()
        self.token = token.text
        for home in lab.homes:
            save_token(token, home / ".config" / "horizonml" / "token")

    def start(self, device: int, *arguments: str, **extra: str) -> Output:
        return Output(self.lab.start(device, sys.executable, "-m", "horizonml", *arguments, **extra))

    def ready(self, device: int) -> str:
        """The status of the page by which Prometheus and Kubernetes see that a rank is ready; /metrics would make it
        wait at its end until it is asked once more."""
        script = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9400/readyz').status)"
        done = self.lab.run(device, sys.executable, "-c", script)
        return done.stdout.strip() or done.stderr

    def records(self, device: int, rank: int, kind: str) -> list[dict[str, Any]]:
        file = self.lab.homes[device] / "runs" / "digits" / f"rank-{rank}.jsonl"
        *lines, _ = (file.read_text() if file.exists() else "").split("\n")  # the last one may not be whole yet
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.fixture
def devices(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Devices]:
    need_networks()
    with Lab(tmp_path, request.param) as lab:
        yield Devices(lab)


@pytest.mark.parametrize("devices", [6], indirect=True)
def test_devices_with_nothing_but_a_token_train_together_and_one_leaves_and_one_comes(devices: Devices) -> None:
    host = devices.start(
        0, "up", "digits", "--workers", "5", "--set", "epochs=30", "--set", "batch_size=32", HORIZONML_METRICS="9400"
    )
    joiners = [devices.start(number, "join", HORIZONML_METRICS="9400") for number in range(1, 5)]
    wait_for(lambda: len(devices.records(0, 0, "step")) > 5, "the first steps")
    assert devices.records(0, 0, "run")[0]["world_size"] == 5
    assert [devices.ready(device) for device in range(5)] == ["200"] * 5

    joiners[0].process.send_signal(signal.SIGINT)
    joiners.append(devices.start(5, "join"))
    assert joiners[0].ends() == 0, joiners[0].text
    assert "this device has left the run after" in joiners[0].text
    joiners[-1].says("this device is rank ")  # 5 while the one that leaves still has its number, and then that one
    found = re.search(r"this device is rank (5|[1-4])(; the run began with 5 devices| of 5)", joiners[-1].text)
    assert found is not None, joiners[-1].text

    assert host.ends(900) == 0, host.text
    codes = [joiner.ends() for joiner in joiners]
    assert codes == [0] * 5, "\n\n".join(joiner.text for joiner in joiners)
    assert all("digits is trained to the end; the result is on device-0" in joiner.text for joiner in joiners[1:])
    assert devices.records(0, 0, "evaluation")[-1]["accuracy"] >= 0.99
    sizes = {run["world_size"] for run in devices.records(0, 0, "run")}
    assert {4, 5} <= sizes
    assert devices.records(5, int(found[1]), "step"), "the device that came later has trained"
    everything = "\n".join(output.text for output in (host, *joiners))
    assert devices.token not in everything
    assert "Traceback" not in everything


@pytest.mark.parametrize("devices", [3], indirect=True)
def test_data_travels_to_who_accepts_it_and_a_stop_ends_the_run_for_all(devices: Devices) -> None:
    home = devices.lab.homes[0]
    (home / "book.txt").write_text("the quick brown fox jumps over the lazy dog, and so on. " * 4000)
    (home / "job.yaml").write_text(
        "{name: digits, epochs: 100000, batch_size: 16, data: {name: text, path: book.txt, length: 16}, "
        "model: {name: gpt, options: {layers: 2, heads: 2, width: 32}}}"
    )
    host = devices.start(0, "up", "job.yaml", "--workers", "2", "--share-data")
    host.says("ready: 1 of 2 devices")
    refused = devices.start(2, "join", "--run-folder", "elsewhere")
    assert refused.ends() == 2, refused.text
    assert "data.path: book.txt is not in a folder that this device offers" in refused.text
    assert "horizonml join --accept-data" in refused.text
    _look_at_the_way(devices)
    (devices.lab.homes[1] / ".config" / "horizonml" / "token").unlink()
    code = re.findall(r"joins by `horizonml join (\d+-[a-z]+-[a-z]+)`", host.text)[-1]
    wrong = devices.start(1, "join", f"{code.partition('-')[0]}-lantern-orbit")
    assert wrong.ends() == 2, wrong.text
    assert "this is not the code that is shown; 2 more can be tried" in wrong.text
    joiner = devices.start(1, "join", code, "--accept-data")
    joiner.says("this device is paired with device-0")
    joiner.says("the data is in")
    wait_for(lambda: len(devices.records(1, 1, "step")) > 5, "steps on the joiner")
    for device in (1, 2):  # one takes part in it, and the other does not
        listed = devices.lab.run(device, sys.executable, "-m", "horizonml", "ls", COLUMNS="200").stdout
        assert len(listed.splitlines()) == 3, listed  # the heads, and one run
        assert re.search(r"^digits on device-0 .*running +\d.* 2 ", listed, re.M), listed
    stopped = devices.lab.run(0, sys.executable, "-m", "horizonml", "stop", "runs")
    assert "runs/digits has stopped after step " in stopped.stdout, stopped.stderr
    assert host.ends() == 130, host.text
    assert joiner.ends() == 0, joiner.text
    assert "the run is over: it was stopped on the device that started it" in joiner.text
    assert "a checkpoint is saved" in host.text


def _look_at_the_way(devices: Devices) -> None:
    """Device 2 looks at the way to device 0, which is in order, and then at one with faults."""
    lab = devices.lab

    def look() -> list[tuple[str, str, str]]:
        done = lab.run(2, sys.executable, "-m", "horizonml", "doctor", "--peer", lab.addresses[0], "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)["findings"]
        return [
            (one["check"], one["level"], one["what"]) for one in found if one["check"] in ("peer", "link", "network")
        ]

    fine = look()
    assert [one[:2] for one in fine] == [("network", "ok"), ("peer", "ok"), ("link", "ok")], fine
    assert "lets this device in" in fine[1][2]
    lab.configure(0, "iptables -A INPUT -p tcp --dport 29401:29402 -j DROP")
    lab.configure(2, "ip link set cable mtu 1280")
    lab.slow_down(2, 8e6)
    faulty = look()
    assert [one[:2] for one in faulty if one[1] != "ok"] == [("network", "note"), ("link", "note"), ("peer", "warning")]
    assert "and not on 29401, 29402" in faulty[-1][2]
    lab.configure(0, "iptables -F")
    lab.configure(2, "ip link set cable mtu 1500")
    lab.slow_down(2, 1e9)


@pytest.mark.parametrize("devices", [3], indirect=True)
def test_the_same_commands_go_on_with_the_run_in_any_order_and_with_fewer_devices(devices: Devices) -> None:
    settings = ("--set", "epochs=100000", "--set", "batch_size=16", "--set", "parallel.strategy=pipeline")
    reached = 0
    for joiners in ([1, 2], [2, 1], [2]):  # on three evenings, in the order in which they come
        host = devices.start(0, "up", "digits", "--workers", str(len(joiners) + 1), *settings)
        outputs = []
        for place, device in enumerate(joiners, 1):
            outputs.append(devices.start(device, "join"))
            outputs[-1].says("this device is rank" if place == len(joiners) else f"joins as the {place + 1}")
        if reached:
            host.says("resumed")
        before = reached
        wait_for(
            lambda last=before: any(step["step"] > last + 5 for step in devices.records(0, 0, "step")), "further steps"
        )
        host.process.send_signal(signal.SIGINT)
        assert host.ends() == 130, host.text
        assert [output.ends() for output in outputs] == [0] * len(outputs), "\n".join(one.text for one in outputs)
        steps = [step["step"] for step in devices.records(0, 0, "step")]
        assert steps == sorted(steps), "no step was done twice"
        reached = steps[-1]
    assert not list(devices.lab.homes[0].parent.glob("*/runs/*.previous*")), "nothing was set aside"
