"""The rendezvous service is lost, alone or together with ranks: the others meet at one of their own, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.outlive import House, one_round
from horizonml.telemetry.log import read_lines
from tests.distributed.processes import Service, rank_process, steps, wait_for
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
    outputs = [process.communicate(timeout=60)[0] for process in ranks[1:]]
    assert [process.returncode for process in ranks[1:]] == [0, 0, 0], outputs
    assert "Traceback" not in "".join(outputs)
    again.terminate()
    again.communicate(timeout=10)


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
        before = len(house.steps(1))
        house.wait_for(lambda: len(house.steps(1)) > before + 5, "steps of four")
        done = [int(one["step"]) for one in house.steps(1)]
        assert len(done) == len(set(done))
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*/log"))
