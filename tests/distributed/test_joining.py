"""Ranks that come to a run with no number of their own, and beyond its first world."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.cluster import Cluster
from tests.distributed.processes import Service, steps, wait_for
from tests.distributed.test_recovery import OPTIONS, runs
from tests.programs import need_networks

pytestmark = pytest.mark.slow


def test_a_run_begins_with_the_least_number_of_ranks_and_grows_to_the_most(
    folder: Path, start: Callable[..., subprocess.Popen[str]], service: Service
) -> None:
    job = (folder / "job.yaml").read_text()
    bounds = "workers: 3, min_workers: 1, max_workers: 2"
    assert "max_workers: 2 is less than workers, 3" in end_of(start, folder, job.replace("workers: 3", bounds), service)
    (folder / "job.yaml").write_text(job.replace("workers: 3", "workers: 2, min_workers: 1, max_workers: 2"))
    options = [*OPTIONS, "--set", "epochs=5000", "--join", service.address]
    first = start("train", "job.yaml", *options)
    wait_for(lambda: steps(folder) > 7, "the first steps, of one rank")
    assert runs(folder, 0)[0]["world_size"] == 1

    # Another machine has the job file, and nothing else.
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job.yaml").write_text((folder / "job.yaml").read_text())
    second = start("train", "elsewhere/job.yaml", *options, "--set", "folder=elsewhere/run")
    wait_for(lambda: runs(folder, 0)[-1]["world_size"] == 2, "a group of two")
    wait_for(lambda: (elsewhere / "run" / "rank-1.jsonl").exists(), "the records of rank 1")

    third = start("train", "job.yaml", *options)
    output, _ = third.communicate(timeout=240)
    assert third.returncode == 1, output
    assert "the run takes at most 2 ranks (parallel.max_workers), and all their numbers are in use" in output

    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "more steps")
    for process in (first, second):
        process.terminate()
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert "rank 1: this is the number that the rendezvous service has given" in outputs[1]
    assert "Traceback" not in "".join([*outputs, output])


def slow_link(folder: Path) -> Cluster:
    """Three ranks, with a network for each, which train much state with small gradients and save often."""
    need_networks()
    job = folder / "job.yaml"
    job.write_text(job.read_text() + "model: {name: 'tests.models:frozen'}\n")
    options = ["--set", "epochs=100000", "--set", "checkpoint.every_steps=5"]
    env = {"HORIZONML_TEST": str(folder), "PYTHONPATH": str(Path.cwd())}
    return Cluster(job, 3, folder / "out", env, options, None, True)


def of_kind(cluster: Cluster, rank: int, kind: str) -> list[dict[str, Any]]:
    return [record for record in cluster.records(rank) if record["kind"] == kind]


def come_back(cluster: Cluster, rank: int, bits_per_second: float) -> None:
    """Kill a rank, and start it again on a slow link once the others train without it."""
    wait_for(lambda: all(len(of_kind(cluster, one, "step")) > 10 for one in range(3)), "the first steps")
    cluster.kill(rank)
    wait_for(lambda: of_kind(cluster, 0, "run")[-1]["world_size"] == 2, "a group without the rank")
    before = len(of_kind(cluster, 0, "step"))
    wait_for(lambda: len(of_kind(cluster, 0, "step")) > before + 10, "steps without it")
    cluster.slow(rank, bits_per_second)
    cluster.start_rank(rank)


def test_the_others_train_while_a_newcomer_on_a_slow_link_receives_its_state(folder: Path) -> None:
    with slow_link(folder) as cluster:
        come_back(cluster, 2, 20e6)  # 8 MB take 3 s
        wait_for(lambda: bool(of_kind(cluster, 2, "followed")), "rank 2 with its state")
        (followed,) = of_kind(cluster, 2, "followed")
        wait_for(lambda: of_kind(cluster, 2, "step")[-1]["step"] > followed["step"] + 10, "steps of all")
        wait_for(lambda: of_kind(cluster, 0, "step")[-1]["step"] > followed["step"] + 10, "records of them")
    assert not cluster.hung
    assert [cluster.exit_code(rank) for rank in range(3)] == [0, 0, 0]
    joined = of_kind(cluster, 2, "run")[-1]["resumed_at"]
    assert followed["steps"] == followed["step"] - joined >= 10
    assert followed["bytes"] > 8e6
    begun = of_kind(cluster, 2, "run")[-1]["time"]
    samples = {r["step"]: r["samples"] for r in of_kind(cluster, 2, "step") if r["time"] > begun}
    assert {step for step, count in samples.items() if not count} == set(range(joined + 1, followed["step"] + 1))
    while_followed = range(joined + 1, followed["step"] + 1)
    worked = {r["step"] for r in of_kind(cluster, 1, "step") if r["samples"]}
    assert worked.issuperset(while_followed)
    # All members of a stage take part in a checkpoint, so what falls due meanwhile is saved at the end of it.
    saved = [r["step"] for r in of_kind(cluster, 0, "checkpoint")]
    assert [step for step in saved if step in while_followed] == [followed["step"]]
    said = cluster.log(0).read_text()
    assert f"rank 2 joined at step {followed['step']}; 8." in said
    assert f"of state arrived while the others trained, in {followed['steps']} steps" in said
    assert "Traceback" not in "".join(cluster.log(rank).read_text() for rank in range(3))


def end_of(start: Callable[..., subprocess.Popen[str]], folder: Path, job: str, service: Service) -> str:
    """What a job that is refused says."""
    (folder / "job.yaml").write_text(job)
    process = start("train", "job.yaml", "--join", service.address)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    return output


def test_a_device_that_comes_when_the_others_have_finished_is_told_so(
    folder: Path, start: Callable[..., subprocess.Popen[str]], service: Service
) -> None:
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("workers: 3", "workers: 2, max_workers: 3"))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job.yaml").write_text(job.read_text())
    late = start("train", "elsewhere/job.yaml", "--join", service.address, "--set", "folder=elsewhere/run")
    late.send_signal(signal.SIGSTOP)  # it is on its way while the others train
    ranks = [
        start("train", "job.yaml", RANK=str(number), WORLD_SIZE="2", HORIZONML_RENDEZVOUS=service.address)
        for number in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    late.send_signal(signal.SIGCONT)
    output, _ = late.communicate(timeout=240)  # rendezvous.timeout is much longer
    assert late.returncode == 0, output
    assert "the job is complete: the other ranks have trained it to the end" in output
    assert "Traceback" not in output
