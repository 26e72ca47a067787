"""The commands about the runs of this device: `horizonml ls`, `stop` and `logs`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from horizonml.machine.signals import LAUNCHER, process_space, started_at
from horizonml.telemetry.lifeline import Lifeline, living_ranks
from horizonml.text import rough_time
from tests.commands import command
from tests.runs import write_run


def test_runs_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        write_run(tmp_path / "runs" / name, ranks=2)
        when = time.time() - 7300 * (age + 1)
        os.utime(tmp_path / "runs" / name / "rank-0.jsonl", (when, when))
        os.utime(tmp_path / "runs" / name / "rank-1.jsonl", (when, when))
    listed = command(tmp_path, "ls", "--here")
    rows = [line.split() for line in listed.stdout.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["runs/new", "lost", "6", "90.0%"], ["runs/old", "lost", "6", "90.0%"]]
    assert [row[-2:] for row in rows] == [["2", "hours"], ["4", "hours"]]
    assert listed.returncode == 0


def test_where_there_is_no_run_the_list_says_how_to_begin_one(tmp_path: Path) -> None:
    listed = command(tmp_path, "ls", "--here")
    assert (listed.returncode, listed.stdout.startswith("no run is in runs")) == (0, True)
    assert "elsewhere is not a folder" in command(tmp_path, "ls", "elsewhere").stderr


def test_logs_are_those_of_all_ranks_or_of_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "rank-0.log").write_text("warning: a\n")
    (tmp_path / "run" / "rank-1.log").write_text("".join(f"line {number}\n" for number in range(30)) + "\x1b[2J\n")
    everyone = command(tmp_path, "logs", "run", "--lines", "3", "--follow")  # which ends, as nobody trains there
    assert everyone.stdout == "rank 0: warning: a\nrank 1: line 28\nrank 1: line 29\nrank 1: \\x1b[2J\n"
    assert command(tmp_path, "logs", "run", "0").stdout == "warning: a\n"
    missing = command(tmp_path, "logs", "run", "7")
    assert (missing.returncode, "run has no log of rank 7" in missing.stderr) == (2, True)


def test_a_run_without_ranks_here_cannot_be_stopped(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    refused = command(tmp_path, "stop", "run")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no rank of run trains on this device" in refused.stderr


@pytest.mark.parametrize("above", [os.getppid(), None])
def test_a_rank_is_stopped_by_the_launcher_above_it_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: int | None
) -> None:
    monkeypatch.setenv(LAUNCHER, f"{above} {started_at(above)} {process_space()}" if above is not None else "")
    lifeline = Lifeline(tmp_path, 1)
    lifeline.begin(1)
    try:
        assert living_ranks(tmp_path) == {1: os.getpid() if above is None else above}
    finally:
        lifeline.end()
    assert living_ranks(tmp_path) is None


def test_rough_times() -> None:
    found = [rough_time(seconds) for seconds in (0.2, 1.0, 119.0, 120.0, 7300.0, 864000.0)]
    assert found == ["0 seconds", "1 second", "119 seconds", "2 minutes", "2 hours", "10 days"]
