"""The rendezvous service is lost, alone or together with ranks: the others meet at one of their own, and go on."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizonml.telemetry.log import read_lines
from tests.distributed.processes import Service, rank_process, steps, wait_for

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
