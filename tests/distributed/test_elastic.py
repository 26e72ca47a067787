"""Ranks whose number comes from a pod's, in a run whose world size the service knows, and that another job replaces."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.distributed.processes import steps, wait_for
from tests.distributed.test_recovery import OPTIONS, runs


def test_workers_come_and_go_without_a_restart_until_another_job_replaces_theirs(
    folder: Path, start: Callable[..., subprocess.Popen[str]], free_port: int
) -> None:
    job = folder / "files" / "job.yaml"
    job.parent.mkdir()
    job.write_text((folder / "job.yaml").read_text().replace(", workers: 3", ""))
    files = {"HORIZONML_JOB_FOLDER": str(job.parent)}
    endless = [*OPTIONS, "--set", "epochs=5000", "--stay"]

    def serve(workers: int) -> subprocess.Popen[str]:
        service = start("rendezvous", "--port", str(free_port), "--workers", str(workers), **files)
        assert service.stdout is not None
        service.stdout.readline()
        return service

    def work(pod: str, ranks: str, run: str = "runs/test") -> subprocess.Popen[str]:
        address = f"127.0.0.1:{free_port}"
        own = {"HORIZONML_ELASTIC": "1", "HOSTNAME": pod, "HORIZONML_RENDEZVOUS": address, "HORIZONML_RANKS": ranks}
        return start("train", "files/job.yaml", *endless, "--set", f"folder={run}", **own, **files)

    def world() -> int:
        found = runs(folder, 0)
        return int(str(found[-1]["world_size"])) if found else 0

    service = serve(2)
    # Two classes of workers with one worker each, and then one more than the second class began with.
    first = [work("mine-pc-0", "0-0"), work("mine-pi-0", "1-1")]
    wait_for(lambda: steps(folder) > 7, "the first steps of two ranks")
    assert world() == 2
    further = work("mine-pi-1", "1-1")
    wait_for(lambda: world() == 3, "a group of three")
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "steps of three")
    further.terminate()
    output, _ = further.communicate(timeout=60)
    assert further.returncode == 0, output
    assert "rank 2: this is the number that the rendezvous service has given" in output
    wait_for(lambda: world() == 2, "a group of two")
    assert [record["repeated"] for record in runs(folder, 0) if record.get("repeated")] == []

    # The same service started anew lets the group go on; one with another job stops it.
    service.terminate()
    service.communicate(timeout=30)
    service = serve(2)
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 20, "steps with the new service")
    job.write_text(job.read_text() + "# a change\n")
    # A worker whose files the service does not have yet waits for one that has them.
    early = work("mine-pi-0", "1-1", "runs/early")
    assert early.stdout is not None
    said = [early.stdout.readline()]
    while "has other files than this rank" not in said[-1]:
        said.append(early.stdout.readline())
        assert said[-1], said
    early.terminate()
    output, _ = early.communicate(timeout=60)
    assert early.returncode == 0, output
    service.terminate()
    service.communicate(timeout=30)
    service = serve(2)
    # The others run with the files that they were started with, and wait for the end of their pods.
    assert first[0].stdout is not None
    while "waits until its pod is replaced" not in "".join(said[-1:]):
        said.append(first[0].stdout.readline())
        assert said[-1], said
    assert "another job replaces this one: it stops after this step\n" in said
    saved = [int(path.name.partition("-")[2]) for path in (folder / "runs" / "test" / "checkpoints").glob("step-*")]
    assert max(saved) == steps(folder)
    for process in first:
        process.terminate()
    outputs = [process.communicate(timeout=60)[0] for process in first]
    assert [process.returncode for process in first] == [0, 0], outputs
    # A worker of the new job is let in.
    newcomer = work("mine-pc-0", "0-0")
    other = work("mine-pi-0", "1-1")
    wait_for(lambda: (folder / "runs" / "test").exists() and steps(folder) > max(saved) + 5, "steps of the new job")
    for process in (newcomer, other, service):
        process.terminate()
    outputs = [process.communicate(timeout=60)[0] for process in (newcomer, other)]
    assert "Traceback" not in "".join([*outputs, *said])
