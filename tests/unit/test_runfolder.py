"""A run's folder: marked as ours, in use by one run, moved only if it is ours."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from horizonml.errors import CheckpointError, JobError
from horizonml.state.runfolder import MARK, RunFolder, make_run_folder

HOLD = """
import sys
from pathlib import Path
from horizonml.state.runfolder import RunFolder
place = RunFolder(Path(sys.argv[1]), 0, "digits", True)
print("here", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        RunFolder(folder, 1, "digits", True)  # another rank of that run
        with pytest.raises(JobError, match=rf"in use by rank 0 of job digits \(process {other.pid} on "):
            RunFolder(folder, 0, "digits", True)
        other.kill()
        other.communicate()
    RunFolder(folder, 0, "digits", True)  # whose lock ended with its process


def test_only_runs_are_moved_away_and_deleted(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "holidays.jpg").write_text("precious")
    for _ in range(3):
        problem = RunFolder(photos, 0, "digits", True).set_aside()
        assert problem is not None
        assert f"{photos} is none" in problem
    assert (photos / "holidays.jpg").read_text() == "precious"
    assert not (photos / MARK).exists()

    run = tmp_path / "run"
    place = RunFolder(run, 0, "digits", True)
    (run / "rank-0.jsonl").write_text("first")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "first"
    (run / "rank-0.jsonl").write_text("second")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "second"

    # An attempt that failed before its first step leaves empty folders and logs, and no run to keep.
    (run / "rank-0.log").write_text("error: there is no module my_netwrk")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "second"

    # A folder of somebody's own that happens to have the name under which the run before is kept.
    (tmp_path / "run.previous" / MARK).unlink()
    assert "run.previous is none" in str(place.set_aside())
    assert (tmp_path / "run.previous" / "rank-0.jsonl").read_text() == "second"


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


def test_the_working_directory_may_be_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "lost+found").mkdir(parents=True)  # a volume of its own
    monkeypatch.chdir(tmp_path / "run")
    place = RunFolder(Path(), 0, "digits", True)
    Path("rank-0.jsonl").write_text("first")
    assert place.set_aside() is None
    assert (tmp_path / "run.previous" / MARK).exists()


def test_a_folder_that_has_something_in_it_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    make_run_folder(tmp_path)
    assert not (tmp_path / MARK).exists()
    make_run_folder(tmp_path / "new")
    assert (tmp_path / "new" / MARK).exists()
