"""The rendezvous service is lost, alone or together with ranks: the others meet at one of their own, and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.outlive import House, one_round
from horizonml.telemetry.log import read_lines
from tests.distributed.processes import ROOT, Service, environment, rank_process, steps, wait_for
from tests.programs import need_networks

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
OPTIONS = ["--set", "telemetry.divergence_every=0", "--set", "checkpoint.every_steps=100000", "--set", "epochs=5000"]


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(one)) for one in read_lines(folder / "runs" / "test" / f"rank-{rank}.jsonl")]


def groups(folder: Path, rank: int) -> list[int]:
    """The world sizes of the groups that a rank was in."""
    return [one["world_size"] for one in records(folder, rank) if one["kind"] == "run"]


def repeated(folder: Path, rank: int) -> int:
    """How many steps a rank has done more than once."""
    done = [one["step"] for one in records(folder, rank) if one["kind"] == "step"]
    return len(done) - len(set(done))


def test_ranks_outlive_the_service_and_the_first_rank_and_go_back_when_it_is_there_again(
    folder: Path, start: Start, service: Service
) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        return start(
            "train",
            "job.yaml",
            "--workers",
            "4",
            *OPTIONS,
            RANK=str(number),
            WORLD_SIZE="4",
            HORIZONML_RENDEZVOUS=service.address,
        )

    ranks = [rank(number) for number in range(4)]
    wait_for(lambda: steps(folder, 1) > 7, "the first steps")

    # The service and the first rank die at the same moment.
    service.process.kill()
    rank_process(folder, 0).kill()
    wait_for(lambda: groups(folder, 1) == [4, 3], "a group of three", 30)
    before = steps(folder, 1)
    wait_for(lambda: steps(folder, 1) > before + 5, "steps of three")

    # The rank whose standby they use dies, too; and then one more.
    rank_process(folder, 1).kill()
    wait_for(lambda: groups(folder, 2) == [4, 3, 2], "a group of two", 30)
    before = steps(folder, 2)
    wait_for(lambda: steps(folder, 2) > before + 5, "steps of two")
    assert [repeated(folder, number) for number in (2, 3)] == [0, 0]

    # A service is started at the old place: they report to it, and who comes there is taken in.
    again = start("rendezvous", "--port", service.address.rpartition(":")[2])
    ranks[1] = rank(1)
    wait_for(lambda: groups(folder, 2)[-1] == 3, "a group of three again", 60)
    before = steps(folder, 2)
    wait_for(lambda: steps(folder, 2) > before + 5, "more steps")
    assert [repeated(folder, number) for number in (2, 3)] == [0, 0]
    for process in ranks[1:]:
        process.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=240)[0] for process in ranks[1:]]
    assert [process.returncode for process in ranks[1:]] == [0, 0, 0], outputs
    assert "Traceback" not in "".join(outputs)
    again.terminate()
    again.communicate(timeout=10)


def next_release(folder: Path) -> Path:
    """A copy of this package as another release might be: ranks say one thing more of themselves, and leave one out."""
    package = folder / "next"
    shutil.copytree(ROOT / "horizonml", package / "horizonml", ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in (
        ("__init__.py", '__version__ = "0.2.0"', '__version__ = "0.3.0"'),
        (
            "rendezvous/messages.py",
            "    begin_after: Seconds = 10.0",
            "    humour: Seconds = 1.0\n    begin_after: Seconds = 10.0",
        ),
        ("rendezvous/service.py", "self._is_replaced(one)", "self._is_replaced(one) or not one.humour"),
    ):
        file = package / "horizonml" / name
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))
    return package


@pytest.mark.longest
def test_ranks_and_their_service_are_updated_to_another_release_one_by_one_while_they_train(
    folder: Path, free_port: int
) -> None:
    package, place = next_release(folder), f"127.0.0.1:{free_port}"

    def run(code: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
        env = environment(HORIZONML_TEST=str(folder), PYTHONPATH=f"{code}{os.pathsep}{ROOT}", **extra)
        command = [sys.executable, "-m", "horizonml", *words]
        return subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def rank(code: Path, number: int) -> subprocess.Popen[str]:
        return run(code, "train", "job.yaml", *OPTIONS, RANK=str(number), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=place)

    with ExitStack() as started:

        def begin(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
            started.callback(process.communicate)
            started.callback(process.kill)
            return process

        service = begin(run(ROOT, "rendezvous", "--port", str(free_port)))
        ranks = [begin(rank(ROOT, number)) for number in range(3)]
        wait_for(lambda: steps(folder) > 7, "the first steps")
        service.terminate()
        service.communicate(timeout=120)
        service = begin(run(package, "rendezvous", "--port", str(free_port)))
        for number in range(3):
            ranks[number].terminate()
            said = ranks[number].communicate(timeout=240)[0]
            assert ranks[number].returncode == 0, said
            other = (number + 1) % 3
            wait_for(lambda other=other: groups(folder, other)[-1] == 2, "a group of two")
            ranks[number] = begin(rank(package, number))
            wait_for(lambda other=other: groups(folder, other)[-1] == 3, "a group of three")
            before = steps(folder, other)
            wait_for(lambda other=other, before=before: steps(folder, other) > before + 5, "more steps")
        assert [repeated(folder, number) for number in range(3)] == [0, 0, 0]
        service.terminate()
        said = service.communicate(timeout=120)[0]
        assert "a rank has HorizonML 0.2.0, and this service has 0.3.0: only one of them knows humour" in said


def test_the_rank_of_up_is_killed_and_the_other_devices_go_on(tmp_path: Path) -> None:
    need_networks()
    with House(3, tmp_path) as house:
        house.wait_for(lambda: all(len(house.steps(device)) > 20 for device in range(3)), "steps of all devices")
        up = house.processes.pop(0)
        children = psutil.Process(up.pid).children(recursive=True)
        max(children, key=lambda process: process.memory_info().rss).kill()  # its rank, as for want of memory
        house.wait_for(lambda: all(house.size(device) == 2 for device in (1, 2)), "a group of two")
        assert up.wait(60) > 0
        assert "the other devices go on without this one" in (house.home(0) / "log").read_text()
        before = len(house.steps(1))
        house.wait_for(lambda: len(house.steps(1)) > before + 20, "steps of two")
        done = [int(one["step"]) for one in house.steps(1)]
        assert len(done) == len(set(done))
        house.start(0, ["join", "--accept-data"], again=True)
        house.wait_for(lambda: all(house.size(device) == 3 for device in (1, 2)), "a group of three")


@pytest.mark.longest
def test_the_machine_of_up_is_unplugged_and_then_switched_off_and_devices_still_come(tmp_path: Path) -> None:
    need_networks()
    with House(5, tmp_path, train=3) as house:
        first = one_round(house, 3)
        assert first.repeated == 0
        os.killpg(house.processes[0].pid, signal.SIGKILL)
        assert house.processes.pop(0).wait() == -signal.SIGKILL
        house.wait_for(lambda: all(house.size(device) == 2 for device in (1, 2)), "a group of two")
        # One device is told of another that trains, and one looks for the run on its network.
        house.join(3, house.networks.address_of(2))
        house.wait_for(lambda: all(house.size(device) == 3 for device in (1, 2, 3)), "a group of three")
        house.join(4)
        house.wait_for(lambda: all(house.size(device) == 4 for device in (1, 2, 3, 4)), "a group of four")
        # The device that had begun the run does not begin another one beside it, and is taken in again.
        house.start(0, house.command_of_up, again=True)
        assert house.processes[-1].wait(60) == 2
        said = (house.home(0) / "log").read_text().splitlines()[-1]
        assert "digits goes on without this device, which had begun it" in said, said
        house.processes.pop()
        house.start(0, ["join", "--accept-data"], again=True)
        house.wait_for(lambda: all(house.size(device) == 5 for device in (1, 2, 3, 4)), "a group of five")
        before = len(house.steps(1))
        house.wait_for(lambda: len(house.steps(1)) > before + 5, "steps of five")
        done = [int(one["step"]) for one in house.steps(1)]
        assert len(done) == len(set(done))
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*/log"))
