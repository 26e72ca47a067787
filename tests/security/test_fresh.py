"""`--fresh` is told to move or delete what is no run: it refuses, and nothing changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from horizonml.job.schema import Job
from horizonml.state import runfolder
from horizonml.state.runfolder import MARK, RunFolder, foreign, make_run_folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all that is below a folder, except for the places of ranks."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
        if ".places" not in path.parts
    }


def precious(folder: Path) -> Path:
    """Make a folder that is no run."""
    folder.mkdir(parents=True)
    (folder / "holidays.jpg").write_text("precious")
    return folder


def run(folder: Path) -> Path:
    """Make a folder that is one."""
    make_run_folder(folder)
    (folder / "rank-0.jsonl").write_text("{}\n")
    return folder


def refuses(folder: Path, all_of: Path, said: str) -> None:
    """Assert that a folder is not set aside, and that nothing is changed by the attempt."""
    before = tree(all_of)
    place = RunFolder(folder, 0, "digits", False)
    problem = place.set_aside()
    assert problem is not None
    assert said in problem
    shutil.rmtree(folder / ".places", ignore_errors=True)
    assert tree(all_of) == before


def a_link(mark: Path) -> None:
    run(mark.parent.parent / "other")
    mark.symlink_to(mark.parent.parent / "other" / MARK)


MARKS: dict[str, Callable[[Path], object]] = {
    "none": lambda mark: None,
    "another text": lambda mark: mark.write_text("This folder is a run of something else.\n"),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link": a_link,
    "a dead link": lambda mark: mark.symlink_to("nowhere"),
    "endless": lambda mark: mark.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", MARKS)
def test_a_folder_with_a_mark_that_is_none(tmp_path: Path, make: str) -> None:
    MARKS[make](precious(tmp_path / "photos") / MARK)
    refuses(tmp_path / "photos", tmp_path, "is none")


def test_the_folder_of_the_run_before_is_somebody_elses(tmp_path: Path) -> None:
    run(tmp_path / "digits")
    precious(tmp_path / "digits.previous")
    refuses(tmp_path / "digits", tmp_path, "digits.previous is none")


def test_the_folder_of_the_run_before_is_a_link(tmp_path: Path) -> None:
    run(tmp_path / "digits")
    run(tmp_path / "elsewhere")
    (tmp_path / "digits.previous").symlink_to(tmp_path / "elsewhere")
    refuses(tmp_path / "digits", tmp_path, "is a symbolic link")


def test_a_run_folder_that_is_a_link_to_no_run(tmp_path: Path) -> None:
    precious(tmp_path / "photos")
    (tmp_path / "digits").symlink_to(tmp_path / "photos")
    refuses(tmp_path / "digits", tmp_path, "is none")


def test_the_home_folder_even_if_somebody_has_marked_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that was unpacked there may have brought the mark."""
    home = run(tmp_path / "home")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    refuses(home, tmp_path, "holds your home folder")
    refuses(run(tmp_path), tmp_path, "holds your home folder")


def test_a_folder_around_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run(tmp_path / "digits") / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "digits" / "inner")
    refuses(tmp_path / "digits", tmp_path, "holds the working directory")
    assert foreign(Path("..")) is not None


def test_the_root_of_the_file_system() -> None:
    assert foreign(Path("/")) is not None
    assert foreign(Path("/etc")) is not None
    assert foreign(Path("/proc")) is not None


def test_a_folder_that_is_exchanged_after_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the deletion, somebody puts another folder in the place of the earlier run."""
    run(tmp_path / "digits")
    run(tmp_path / "digits.previous")
    original = runfolder.foreign

    def exchanged(path: Path) -> str | None:
        found = original(path)
        shutil.rmtree(tmp_path / "digits.previous")
        precious(tmp_path / "digits.previous")
        return found

    monkeypatch.setattr(runfolder, "foreign", exchanged)
    problem = RunFolder(tmp_path / "digits", 0, "digits", False).set_aside()
    assert problem is not None
    assert "is not a run any more" in problem
    assert (tmp_path / "digits.previous" / "holidays.jpg").read_text() == "precious"
    assert (tmp_path / "digits" / "rank-0.jsonl").exists()


def test_a_job_cannot_have_a_name_that_is_a_path() -> None:
    for name in (
        "..", ".", "../x", "/etc", "a/b", "a\\b", "", "a\n", "a\x00", "~", "-rf", ".ssh", "a" * 64, "é", "a b", "$HOME",
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            Job(name=name)
