"""Ranks whose number comes from a pod's, in a run whose world size the service knows, and that another job replaces."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.processes import steps, wait_for
from tests.distributed.test_recovery import OPTIONS, runs

pytestmark = pytest.mark.slow


class Pods:
    """The service and the workers of a job, which are started with the same files."""

    def __init__(self, folder: Path, start: Callable[..., subprocess.Popen[str]], port: int) -> None:
        self.job = folder / "files" / "job.yaml"
        self.job.parent.mkdir()
        self.job.write_text((folder / "job.yaml").read_text().replace(", workers: 3", ""))
        self._files, self._start, self._port = {"HORIZONML_JOB_FOLDER": str(self.job.parent)}, start, port
        self.service = self._serve()

    def _serve(self) -> subprocess.Popen[str]:
        service = self._start("rendezvous", "--port", str(self._port), "--workers", "2", **self._files)
        assert service.stdout is not None
        service.stdout.readline()
        return service

    def serve_anew(self) -> None:
        """Start the service with the files that there are now."""
        self.service.terminate()
        self.service.communicate(timeout=120)
        self.service = self._serve()

    def work(self, pod: str, ranks: str, run: str = "runs/test") -> subprocess.Popen[str]:
        """Start a worker."""
        own = {"HORIZONML_ELASTIC": "1", "HOSTNAME": pod, "HORIZONML_RANKS": ranks, **self._files}
        own["HORIZONML_RENDEZVOUS"] = f"127.0.0.1:{self._port}"
        endless = [*OPTIONS, "--set", "epochs=5000", "--stay", "--set", f"folder={run}"]
        return self._start("train", "files/job.yaml", *endless, **own)


def read_until(words: str, process: subprocess.Popen[str]) -> list[str]:
    """The lines that a process says until one of them has these words."""
    assert process.stdout is not None
    said = [""]
    while words not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], said
    return said


def test_workers_come_and_go_without_a_restart_until_another_job_replaces_theirs(
    folder: Path, start: Callable[..., subprocess.Popen[str]], free_port: int
) -> None:
    pods = Pods(folder, start, free_port)

    def world() -> int:
        found = runs(folder, 0)
        return int(str(found[-1]["world_size"])) if found else 0

    # Two classes of workers with one worker each, and then one more than the second class began with.
    first = [pods.work("mine-pc-0", "0-0"), pods.work("mine-pi-0", "1-1")]
    wait_for(lambda: steps(folder) > 7, "the first steps of two ranks")
    assert world() == 2
    further = pods.work("mine-pi-1", "1-1")
    wait_for(lambda: world() == 3, "a group of three")
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "steps of three")
    further.terminate()
    output, _ = further.communicate(timeout=240)
    assert further.returncode == 0, output
    assert "rank 2: this is the number that the rendezvous service has given" in output
    wait_for(lambda: world() == 2, "a group of two")
    assert [record["repeated"] for record in runs(folder, 0) if record.get("repeated")] == []

    # The same service started anew lets the group go on; one with another job stops it.
    pods.serve_anew()
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 20, "steps with the new service")
    pods.job.write_text(pods.job.read_text() + "# a change\n")
    # A worker whose files the service does not have yet waits for one that has them.
    early = pods.work("mine-pi-0", "1-1", "runs/early")
    said = read_until("has other files than this rank", early)
    early.terminate()
    output, _ = early.communicate(timeout=240)
    assert early.returncode == 0, output
    pods.serve_anew()
    # The others run with the files that they were started with, and wait for the end of their pods.
    said += read_until("waits until its pod is replaced", first[0])
    assert "another job replaces this one: it stops after this step\n" in said
    saved = [int(path.name.partition("-")[2]) for path in (folder / "runs" / "test" / "checkpoints").glob("step-*")]
    assert max(saved) == steps(folder)
    for process in first:
        process.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in first]
    assert [process.returncode for process in first] == [0, 0], outputs
    # A worker of the new job is let in.
    newcomer = pods.work("mine-pc-0", "0-0")
    other = pods.work("mine-pi-0", "1-1")
    wait_for(lambda: (folder / "runs" / "test").exists() and steps(folder) > max(saved) + 5, "steps of the new job")
    for process in (newcomer, other, pods.service):
        process.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in (newcomer, other)]
    assert "Traceback" not in "".join([*outputs, *said])


def test_workers_whose_job_was_replaced_train_again_when_that_is_undone(
    folder: Path, start: Callable[..., subprocess.Popen[str]], free_port: int
) -> None:
    pods = Pods(folder, start, free_port)
    workers = [pods.work("mine-worker-0", "0-255"), pods.work("mine-worker-1", "0-255", "runs/other")]
    wait_for(lambda: steps(folder) > 7, "the first steps")
    before = pods.job.read_text()
    pods.job.write_text(before + "# a change\n")
    pods.serve_anew()
    said = read_until("waits until its pod is replaced", workers[0])
    done = steps(folder)
    pods.job.write_text(before)
    pods.serve_anew()
    said += read_until("begins anew, as its pod is still there", workers[0])
    wait_for(lambda: steps(folder) > done + 5, "steps of both")
    assert runs(folder, 0)[-1]["world_size"] == 2
    for process in (*workers, pods.service):
        process.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in workers]
    assert [process.returncode for process in workers] == [0, 0], outputs
    resumed = re.search(r"resumed from step (\d+)", outputs[0])  # the other rank may have gone on alone meanwhile
    assert resumed is not None, outputs[0]
    assert int(resumed[1]) >= done
    assert "Traceback" not in "".join([*outputs, *said])
