"""Ranks that come to a run with no number of their own, and beyond its first world."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.distributed.processes import steps, wait_for
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


def end_of(start: Callable[..., subprocess.Popen[str]], folder: Path, job: str, service: Service) -> str:
    """What a job that is refused says."""
    (folder / "job.yaml").write_text(job)
    process = start("train", "job.yaml", "--join", service.address)
    output, _ = process.communicate(timeout=60)
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
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    late.send_signal(signal.SIGCONT)
    output, _ = late.communicate(timeout=60)  # rendezvous.timeout is much longer
    assert late.returncode == 0, output
    assert "the job is complete: the other ranks have trained it to the end" in output
    assert "Traceback" not in output
