"""Ranks that are lost, replaced, missing and come back, as in Compose and Kubernetes: something else restarts them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from horizonml.machine.network import split_address
from horizonml.rendezvous.client import Client, Endpoint, ServiceError
from horizonml.telemetry.log import read_lines
from tests.distributed.processes import Service, horizonml, rank_process, steps, wait_for
from tests.web import get

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
OPTIONS = ["--set", "telemetry.divergence_every=0", "--set", "checkpoint.every_steps=5"]


def connect(address: str) -> Client:
    """A client of the service, once it is there."""
    host, port = split_address(address)
    found: list[Client] = []

    def there() -> bool:
        with suppress(ServiceError):
            found.append(Endpoint(host, port).connect(1.0))
        return bool(found)

    wait_for(there, "the service")
    return found[0]


def running(client: Client) -> int:
    """How many ranks of the group that runs the service knows."""
    return int(str(client.ask({"do": "status"}, 60)["running"]))


def runs(folder: Path, rank: int) -> list[dict[str, object]]:
    """The first records of a rank's runs: one for each group that it was in."""
    lines = read_lines(folder / "runs" / "test" / f"rank-{rank}.jsonl")
    return [record for record in lines if record["kind"] == "run"]


def test_a_killed_rank_is_replaced_and_then_done_without(
    folder: Path, start: Start, service: Service, free_port: int
) -> None:
    def rank(number: int, *extra: str) -> subprocess.Popen[str]:
        options = [*OPTIONS, "--set", "epochs=5000", "--set", "rendezvous.replace_timeout=20", *extra]
        return start(
            "train", "job.yaml", *options, RANK=str(number), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=service.address
        )

    metrics = ["--metrics", str(free_port)]
    ranks = [rank(0, *metrics), rank(1), rank(2)]
    wait_for(lambda: steps(folder) > 7, "the first steps")

    # Killed and replaced: all go on from the newest checkpoint.
    rank_process(folder, 2).kill()
    wait_for(lambda: get(free_port, "/readyz") == (503, "waiting for rank 2\n"), "rank 2 being waited for")
    assert 'horizonml_waiting_for_rank{peer="2",rank="0"} 1.0' in get(free_port, "/metrics")[1]
    ranks[2] = rank(2)
    wait_for(lambda: len(runs(folder, 0)) == 2, "the second group")
    wait_for(lambda: get(free_port, "/readyz") == (200, "ready\n"), "rank 0 being ready again")
    assert runs(folder, 0)[1]["world_size"] == 3
    assert int(str(runs(folder, 0)[1]["resumed_at"])) >= 5

    # Killed and not replaced: the others go on without it.
    before = steps(folder)
    rank_process(folder, 1).kill()
    wait_for(lambda: len(runs(folder, 0)) == 3 and steps(folder) > before + 5, "a group of two")
    places = [(2, 0), (2, 1)]  # records of each rank reach the disk within a second
    wait_for(
        lambda: [(runs(folder, rank)[-1]["world_size"], runs(folder, rank)[-1]["rank"]) for rank in (0, 2)] == places,
        "both in a group of two",
    )
    told = get(free_port, "/metrics")[1]
    assert 'horizonml_peers_lost_total{rank="0"} 2.0' in told
    for series in ("count{", 'bucket{le="6.0",'):  # both kills, although connections that close leave no silence
        assert f'horizonml_loss_notice_seconds_{series}rank="0"}} 2.0' in told

    # The service is lost, and started anew at the same place: the group runs on, and reports to the new one.
    service.process.kill()
    service.process.communicate()
    again = start("rendezvous", "--port", service.address.rpartition(":")[2])
    client = connect(service.address)
    wait_for(lambda: running(client) == 2, "the group of two reporting to the new service")
    client.close()
    assert len(runs(folder, 0)) == 3

    # The lost rank comes after all, and is taken in.
    ranks[1] = rank(1)
    wait_for(lambda: len(runs(folder, 0)) == 4, "a group of three again")
    assert runs(folder, 0)[-1]["world_size"] == 3
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "more steps")

    # Asked to stop, all of them do, each with code 0.
    for process in ranks:
        process.terminate()
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    assert "rank 2 on" in outputs[0]
    assert outputs[0].count("going on with 2 of 3 ranks") == 1
    assert "meeting the others again" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    again.terminate()
    again.communicate(timeout=10)


def test_one_rank_stops_and_the_others_wait_for_it(folder: Path, start: Start, service: Service) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        return start(
            "train", "job.yaml", "--set", "epochs=30", *OPTIONS,
            RANK=str(number), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=service.address,
        )  # fmt: skip

    ranks = [rank(number) for number in range(3)]
    wait_for(lambda: steps(folder) > 12, "the first steps")
    ranks[1].terminate()
    output, _ = ranks[1].communicate(timeout=120)
    assert ranks[1].returncode == 0, output
    stopped_at = json.loads(
        sorted((folder / "runs" / "test" / "checkpoints").iterdir())[-1].joinpath("checkpoint.json").read_text()
    )["step"]
    ranks[1] = rank(1)
    outputs = [process.communicate(timeout=300)[0] for process in ranks]  # of 30 epochs on a machine that may be shared
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    assert f"resumed from step {stopped_at} of 300" in outputs[0]  # nothing was lost
    assert "done: records" in outputs[0]


def test_a_finished_rank_that_is_started_again_does_not_train_and_stays(
    folder: Path, start: Start, service: Service, free_port: int
) -> None:
    def rank(number: int, *extra: str) -> subprocess.Popen[str]:
        return start(
            "train", "job.yaml", *extra, RANK=str(number), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=service.address
        )

    ranks = [rank(number) for number in range(3)]
    for process in ranks:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    before = steps(folder, 2)
    again = rank(2, "--stay", "--metrics", str(free_port))  # alone: the others are gone
    wait_for(lambda: get_or_none(free_port) == (200, "ready\n"), "the finished rank being ready")
    assert 'horizonml_complete{rank="2"} 1.0' in get(free_port, "/metrics")[1]
    assert steps(folder, 2) == before
    again.terminate()
    output, _ = again.communicate(timeout=10)
    assert again.returncode == 0
    assert "stays, to be watched" in output


def test_two_neighbours_that_are_killed_at_once_cost_no_step(folder: Path, start: Start, service: Service) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        return start(
            "train", "job.yaml", "--set", "epochs=5000",
            "--set", "parallel.strategy=pipeline", "--set", "parallel.workers=4",
            "--set", "checkpoint.enabled=false", "--set", "recovery={mirrors: 2, mirror_budget: 1.0}",
            RANK=str(number), WORLD_SIZE="4", HORIZONML_RENDEZVOUS=service.address,
        )  # fmt: skip

    ranks = [rank(number) for number in range(4)]
    wait_for(lambda: steps(folder) > 30, "the first steps")
    for number in (1, 2):
        rank_process(folder, number).kill()
    path = folder / "runs" / "test" / "rank-0.jsonl"
    wait_for(lambda: any(record["kind"] == "recovery" for record in read_lines(path)), "a group of two")
    (recovery,) = [record for record in read_lines(path) if record["kind"] == "recovery"]
    assert (recovery["lost"], recovery["source"], recovery["steps_repeated"]) == ([1, 2], "replica", 0)
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "more steps")
    for process in (ranks[0], ranks[3]):
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("mirror", [True, False])
def test_without_checkpoints_memory_is_all_there_is(folder: Path, start: Start, service: Service, mirror: bool) -> None:
    ranks = [
        start(
            "train", "job.yaml", "--set", "epochs=5000", "--set", "parallel={strategy: pipeline, workers: 2}",
            "--set", "checkpoint.enabled=false", "--set", f"recovery.mirrors={int(mirror)}",
            RANK=str(number), WORLD_SIZE="2", HORIZONML_RENDEZVOUS=service.address,
        )
        for number in range(2)
    ]  # fmt: skip
    wait_for(lambda: steps(folder) > 3, "the first steps")
    ranks[1].kill()
    if mirror:
        wait_for(lambda: len(runs(folder, 0)) == 2, "the survivor going on")
        first, second = runs(folder, 0)
        assert int(str(second["resumed_at"])) > int(str(first["resumed_at"]))
        ranks[0].terminate()
    output, _ = ranks[0].communicate(timeout=240)
    assert ranks[0].returncode == (0 if mirror else 3), output
    assert ("a lost rank alone held some of the layers, and no copy of them can be used" in output) is not mirror


def get_or_none(port: int) -> tuple[int, str] | None:
    try:
        return get(port, "/readyz")
    except OSError:
        return None


FAULTS = """
name: test
epochs: 16
batch_size: 48
model: {name: "tests.models:slow"}
data: {name: digits, samples: 480}
parallel: {strategy: %s, workers: 3}
checkpoint: {every_steps: 1000}
telemetry: {divergence_every: 0}
"""


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint of a run."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_after_faults_the_parameters_are_those_of_an_undisturbed_run(
    folder: Path, start: Start, service: Service, strategy: str
) -> None:
    """A rank is killed, replaced, and taken in; another is stopped until it counts as lost, and wakes up."""
    (folder / "job.yaml").write_text(FAULTS % strategy)
    assert horizonml(folder, "train", "job.yaml", "--set", "folder=undisturbed").returncode == 0

    slow = folder / "slow"
    slow.write_text("2")  # so that the training lasts until all of it has happened

    def rank(number: int) -> subprocess.Popen[str]:
        return start(
            "train", "job.yaml", RANK=str(number), WORLD_SIZE="3",
            HORIZONML_RENDEZVOUS=service.address, HORIZONML_TEST_SLOW=str(slow),
        )  # fmt: skip

    def worlds(number: int) -> list[object]:
        return [record["world_size"] for record in runs(folder, number)]

    ranks = [rank(number) for number in range(3)]
    wait_for(lambda: steps(folder, 2) > 15, "the first steps")
    rank_process(folder, 1).kill()
    wait_for(lambda: worlds(2)[-1] == 2, "a group without the killed rank")
    ranks[1] = rank(1)
    wait_for(lambda: worlds(2)[-1] == 3, "a group with the replacement")
    before = steps(folder, 2)
    wait_for(lambda: steps(folder, 2) > before + 15, "the first copies for other ranks' memory")
    stopped = rank_process(folder, 0)
    stopped.suspend()
    wait_for(lambda: worlds(2)[-1] == 2, "a group without the stopped rank")
    stopped.resume()
    wait_for(lambda: worlds(2)[-1] == 3, "a group with the rank that woke up")
    slow.write_text("")
    outputs = [process.communicate(timeout=400)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    assert worlds(2) == [3, 2, 3, 2, 3]
    assert "this rank gave no sign of life for too long, and its group goes on without it" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    records = [list(read_lines(folder / f"runs/test/rank-{number}.jsonl")) for number in range(3)]
    done = [[record["step"] for record in lines if record["kind"] == "step"] for lines in records]
    assert len(done[2]) == len(set(done[2]))  # none is repeated
    assert sorted(set().union(*done)) == list(range(1, 161))  # and none is missing
    recoveries = [record for record in records[2] if record["kind"] == "recovery"]
    assert [(r["lost"], r["steps_repeated"]) for r in recoveries] == [([1], 0), ([0], 0)]
    assert {r["source"] for r in recoveries} == {"memory" if strategy == "ddp" else "replica"}
    expected, found = saved(folder / "undisturbed"), saved(folder / "runs" / "test")
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)
