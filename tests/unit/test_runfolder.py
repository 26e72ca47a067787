"""A run's folder: marked as ours, in use by one run, moved only if it is ours."""

from __future__ import annotations

import errno
import gc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from horizonml.errors import CheckpointError, HorizonError, JobError
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.identity import Identity
from horizonml.runtime.lobby.up import Up, UpSettings
from horizonml.runtime.worker import Worker
from horizonml.state import runfolder
from horizonml.state.disks import DiskProbe
from horizonml.state.runfolder import RunFolder
from horizonml.state.shards import steps
from horizonml.telemetry.log import JsonLines, read_lines
from horizonml.telemetry.metrics import Metrics

HOLD = """
import sys
from pathlib import Path
from horizonml.state.runfolder import RunFolder
place = RunFolder(Path(sys.argv[1]), 0, "digits", True)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfolder, "_LOCK_SECONDS", 0.3)


def test_a_second_run_in_a_folder_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        RunFolder(folder, 1, "digits", True)  # another rank of that run
        taken = rf"in use by rank 0 of job digits \(process {other.pid} on "
        with pytest.raises(JobError, match=taken):
            RunFolder(folder, 0, "digits", True)
        job = Job.model_validate({"name": "digits", "folder": str(folder), "model": {"name": "digits_cnn"}})
        with pytest.raises(JobError, match=taken):  # before it shows a code, or searches for the others
            Up(UpSettings(job, None, wanted=1))
        other.kill()
        other.communicate()
    RunFolder(folder, 0, "digits", True)  # whose lock ended with its process


def test_the_earlier_run_is_moved_away_and_what_never_began_does_not_replace_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = RunFolder(run, 0, "digits", True)
    (run / "rank-0.jsonl").write_text("first")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "first"
    (run / "rank-0.jsonl").write_text("second")
    probe = DiskProbe(run)  # of another rank, which may delete it at any moment
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "second"
    assert (run / f".probe-{probe.token}").is_file()
    assert not list((tmp_path / "run.previous").glob(".probe-*"))
    probe.remove()

    # An attempt that failed before its first step leaves empty folders and logs, and no run to keep.
    (run / "rank-0.log").write_text("error: there is no module my_netwrk")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "second"


def test_a_run_that_ended_before_its_first_step_does_not_cost_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = RunFolder(run, 0, "digits", True)
    (run / "rank-0.jsonl").write_text('{"kind": "run"}\n{"kind": "step"}\n')
    (run / "cluster.yaml").write_text("devices: []")
    assert place.previous is None
    assert place.set_aside() is None
    assert place.previous == tmp_path / "run.previous"
    assert (run / "cluster.yaml").read_text() == (tmp_path / "run.previous" / "cluster.yaml").read_text()
    (run / "rank-0.jsonl").write_text('{"kind": "run"}\n{"kind": "end", "outcome": "failed"}\n')
    (run / "checkpoints").mkdir()
    assert place.set_aside() is None
    assert '"step"' in (tmp_path / "run.previous" / "rank-0.jsonl").read_text()
    assert not (run / "rank-0.jsonl").exists()
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / ".generation-0-0-8f0f2949").write_text("the mark of the group that is about to train")
    assert place.set_aside() is None
    assert '"step"' in (tmp_path / "run.previous" / "rank-0.jsonl").read_text()


def test_a_run_folder_that_is_deleted_while_training_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = RunFolder(tmp_path / "run", 0, "digits", True)
    lines = JsonLines(tmp_path / "run" / "rank-0.jsonl", place.restore)
    lines.write({"kind": "run"})
    lines.flush()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run" / ".places").mkdir(parents=True)  # by the process's trace
    lines.write({"kind": "step", "step": 7})
    lines.flush()
    assert "rank-0.jsonl was deleted or moved while training: it is made again" in caplog.text
    assert [line["kind"] for line in read_lines(tmp_path / "run" / "rank-0.jsonl")] == ["run", "step"]
    with pytest.raises(JobError, match="in use by rank 0"):
        RunFolder(tmp_path / "run", 0, "digits", True)
    lines.close()
    assert place.set_aside() is None  # it is still known as a run
    assert len(caplog.records) == 1


def train(folder: Path, fresh: bool, **more: Any) -> None:
    """Train a small job with one rank in this process."""
    values = {
        "name": "test", "folder": str(folder), "steps": 2, "data": {"name": "digits", "samples": 100},
        "batch_size": 32, "parallel": {"strategy": "single"}, **more,
    }  # fmt: skip
    worker = Worker(Job.model_validate(values), Identity(0, 1, "a test"), None, Metrics(0), StopRequest())
    try:
        worker.run(fresh=fresh, rejoin=False)
    finally:
        del worker
        gc.collect()  # which gives the folder back


def test_a_run_that_cannot_start_over_leaves_the_earlier_one_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = tmp_path / "run", tmp_path / "run.previous"
    train(run, False)
    before = (run / "rank-0.jsonl").read_text()
    mistakes = [
        {"data": {"name": "folder", "folder": str(tmp_path / "nowhere")}},
        {"model": {"name": "no_such:model"}},
        {"parallel": {"stages": [{"ranks": [0], "layers": [0, 99]}]}},
    ]
    for mistake in mistakes:
        with pytest.raises(HorizonError):
            train(run, True, **mistake)
        assert (run / "rank-0.jsonl").read_text() == before
        assert len(steps(run / "checkpoints")) == 1
        assert not kept.exists()
    assert "kept in" not in capsys.readouterr().out
    train(run, True, seed=5)  # which would not go on with the earlier run's checkpoints
    assert f"the earlier run is kept in {kept}, until the next --fresh. To go back to it: mv {run} " in (
        capsys.readouterr().out
    )
    assert (kept / "rank-0.jsonl").read_text() == before
    assert [len(steps(folder / "checkpoints")) for folder in (run, kept)] == [1, 1]
    assert [line["kind"] for line in read_lines(run / "rank-0.jsonl")].count("step") == 2
    run.rename(tmp_path / "run.new")
    kept.rename(run)  # as the message says
    train(run, False, steps=3)
    assert [line["step"] for line in read_lines(run / "rank-0.jsonl") if line["kind"] == "step"] == [1, 2, 3]


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", without)
    RunFolder(tmp_path / "run", 0, "digits", True)
    assert "without locks" in caplog.text


def test_checkpoints_that_can_never_be_written_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write records and checkpoints"):
        RunFolder(tmp_path, 0, "digits", True)
    RunFolder(tmp_path, 0, "digits", False)  # none are wanted
