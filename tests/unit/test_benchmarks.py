"""What the benchmarks of faults read from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults_read import read_trace, repeated_steps, window
from benchmarks.faults_table import summary, table


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(generation: int, time: float, world_size: int) -> dict[str, Any]:
    return {"kind": "run", "generation": generation, "world_size": world_size, "time": time}


def steps(first: int, last: int, begin: float, seconds: float = 0.1) -> list[dict[str, Any]]:
    """Steps, the first of which ends at `begin`."""
    return [
        {"kind": "step", "step": number, "time": begin + (number - first) * seconds, "batch": 64}
        for number in range(first, last + 1)
    ]


@pytest.fixture
def survivor(tmp_path: Path) -> Path:
    """Ten steps of four ranks until 1.0, the group breaks at 1.2, and three go on from step 7 at 3.0."""
    broken = {"kind": "end", "outcome": "failed", "time": 1.2}
    return write(tmp_path / "a", run(1, 0.0, 4), *steps(1, 10, 0.1), broken, run(2, 2.5, 3), *steps(7, 12, 3.0))


def test_a_trace_says_when_a_group_broke_and_when_the_next_one_stepped(survivor: Path) -> None:
    trace = read_trace(survivor)
    assert trace.noticed(1.1) == 1.2
    assert trace.again(1.1) == trace.again(1.1, 3) == 3.0
    assert trace.again(1.1, 4) is None  # the group of four was formed before
    assert trace.again(2.6) is None


def test_steps_are_repeated_if_a_later_group_takes_them_again(survivor: Path, tmp_path: Path) -> None:
    lost = write(tmp_path / "b", run(1, 0.0, 4), *steps(1, 11, 0.1))  # which took a step that the survivor did not
    assert repeated_steps([read_trace(survivor)]) == 4
    assert repeated_steps([read_trace(survivor), read_trace(lost)]) == 5
    assert repeated_steps([read_trace(lost), read_trace(lost)]) == 0


def test_a_window_counts_samples_once_and_says_where_its_time_went(survivor: Path) -> None:
    found = window([read_trace(survivor)], 0.55, 4.0, enough=5)  # steps 6 to 10, then 7 to 12
    assert found.steps == 7
    assert found.gained_per_second == pytest.approx(7 * 64 / 3.45)
    assert found.worked_per_second == pytest.approx(11 * 64 / 3.45)
    assert found.repeated == 4
    assert found.step_seconds == {3: pytest.approx(0.1)}  # there are but four gaps of four ranks
    assert found.stalled == pytest.approx((3.0 - 1.0 - 0.1) + (4.0 - 3.5 - 0.1))


def test_the_table_says_how_many_rounds_did_not_go_on(tmp_path: Path) -> None:
    for label, times in {"before": [None, None], "horizonml": [1.0, None, 3.0]}.items():
        rounds = [{"rank": number, "again": time, "repeated": 1} for number, time in enumerate(times)]
        path = tmp_path / f"{label}-kill-ddp.json"
        path.write_text(json.dumps({"deadline": 60.0, "rounds": rounds, "summary": summary(rounds)}))
    made = table(tmp_path)
    assert "| | **HorizonML** | HorizonML before |" in made
    assert "step again | 2.0 s (3.0), not in 60 s (1 of 3) | not in 60 s |" in made
    assert "steps repeated | 1 (1) | 1 (1) |" in made
