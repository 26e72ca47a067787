"""Ranks that come to a run with no number of their own, and beyond its first world."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizonml.chaos.cluster import Cluster
from tests.distributed.processes import steps, wait_for
from tests.distributed.test_chaos import need_networks
from tests.distributed.test_recovery import OPTIONS, Service, runs, service

__all__ = ["service"]  # a fixture


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
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 1, output
    assert "the run takes at most 2 ranks (parallel.max_workers), and all their numbers are in use" in output

    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "more steps")
    for process in (first, second):
        process.terminate()
    outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert "rank 1: this is the number that the rendezvous service has given" in outputs[1]
    assert "Traceback" not in "".join([*outputs, output])


def test_the_others_train_while_a_newcomer_on_a_slow_link_receives_its_state(folder: Path) -> None:
    need_networks()
    job = folder / "job.yaml"
    job.write_text(job.read_text() + "model: {name: 'tests.models:frozen'}\nrendezvous: {replace_timeout: 0}\n")
    options = ["--set", "epochs=100000", "--set", "checkpoint.enabled=false"]

    def made(rank: int) -> list[dict[str, Any]]:
        return [record for record in cluster.records(rank) if record["kind"] == "step"]

    def worlds() -> list[int]:
        return [record["world_size"] for record in cluster.records(0) if record["kind"] == "run"]

    env = {"HORIZONML_TEST": str(folder), "PYTHONPATH": str(Path.cwd())}
    with Cluster(job, 3, folder / "out", env, options, None, True) as cluster:
        wait_for(lambda: len(made(2)) > 10, "the first steps")
        cluster.kill(2)
        wait_for(lambda: worlds()[-1:] == [2] and len(made(0)) > len(made(2)) + 10, "steps without rank 2")
        cluster.slow(2, 20e6)  # 8 MB take 3 s
        recorded = len(cluster.records(2))
        cluster.start_rank(2)
        wait_for(lambda: any(record["kind"] == "followed" for record in cluster.records(2)), "rank 2 with its state")
        wait_for(lambda: made(2)[-1]["samples"] > 0, "rank 2 with samples")
        records = cluster.records(2)[recorded:]
    (followed,) = [record for record in records if record["kind"] == "followed"]
    joined = next(record["resumed_at"] for record in records if record["kind"] == "run")
    assert followed["steps"] == followed["step"] - joined >= 10
    assert followed["bytes"] > 8e6
    by_step = {record["step"]: record["samples"] for record in records if record["kind"] == "step"}
    assert {step for step, samples in by_step.items() if not samples} == set(range(joined + 1, followed["step"] + 1))
    others = {
        record["step"]: record["samples"] for rank in (0, 1) for record in cluster.records(rank) if "lr" in record
    }
    assert all(others[step] > 0 for step in range(joined + 1, followed["step"] + 1))
    said = cluster.log(0).read_text()
    assert f"rank 2 joined at step {followed['step']}; 8." in said
    assert f"of state arrived while the others trained, in {followed['steps']} steps" in said
    assert "Traceback" not in "".join(cluster.log(rank).read_text() for rank in range(3))


def end_of(start: Callable[..., subprocess.Popen[str]], folder: Path, job: str, service: Service) -> str:
    """What a job that is refused says."""
    (folder / "job.yaml").write_text(job)
    process = start("train", "job.yaml", "--join", service.address)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    return output
