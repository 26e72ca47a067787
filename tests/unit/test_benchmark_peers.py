"""What the benchmarks against peers compute from what they have measured, and the data set that they make."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.slow_links_run import Wanted, condense, job_of
from benchmarks.slow_links_ways import TASKS, WAYS
from benchmarks.tables import HERE, NOT_MEASURED, TABLES, Runs, marks, row
from horizonml.job.schema import Job

TOTAL = TASKS["digits"].job["steps"]


def records(steps: int, seconds: float, evaluated: dict[int, float]) -> list[dict[str, Any]]:
    """Steps of equal length from the time 100 on, and evaluations of 5 seconds after some of them."""
    now, found = 100.0, []
    for step in range(1, steps + 1):
        now += seconds
        found.append({"kind": "step", "step": step, "time": now, "wall": seconds})
        if step in evaluated:
            now += 5.0
            found.append({"kind": "evaluation", "step": step, "time": now, "seconds": 5.0, "accuracy": evaluated[step]})
    return found


def counters(until: float, rate: float, before: int = 5000) -> list[tuple[float, int]]:
    """Counted bytes: `before` by the time 100, then so many a second, looked at every 10 ms."""
    looks = int((until - 90) * 100) + 1
    return [(90 + look / 100, before + round(max(0.0, look / 100 - 10) * rate)) for look in range(looks)]


def test_a_run_that_was_cut_short_tells_a_steps_seconds_and_bytes_without_evaluations() -> None:
    wanted = Wanted("digits", WAYS["torch-ddp"], 0, 5.0, 10.0, 6)
    found = condense(wanted, records(20, 0.5, {10: 0.9}), counters(120.0, 0.0))
    assert not found["whole"]
    assert found["step_seconds"] == 0.5
    assert found["seconds"] == 10.0
    assert found["reached"] == {"10": 5.0}
    assert found["bytes_per_sample"] == 0
    assert found["start_bytes"] == 5000


def test_bytes_are_counted_over_whole_cycles_of_a_way_that_synchronises_seldom() -> None:
    way = WAYS["torch-localsgd"]
    wanted = Wanted("digits", way, 0, 5.0, 10.0, 64)
    steps = way.skip("digits") + way.cycle("digits") + 11  # the last 11 belong to a cycle that is not at its end
    found = condense(wanted, records(steps, 0.1, {}), counters(100 + steps * 0.1, 64_000.0))
    assert abs(found["bytes_per_sample"] - 100) < 2  # 0.1 s a step: 6400 bytes for 64 samples


def whole(way: str, seed: int, rate: float, accuracies: dict[int, float], carried: float) -> dict[str, Any]:
    seconds = 1.0 if rate else 0.01
    wanted = Wanted("digits", WAYS[way], seed, rate)
    end = 100 + TOTAL * seconds + 5 * len(accuracies)
    spent = TOTAL * 64 * carried / (end - 100)
    return condense(wanted, records(TOTAL, seconds, accuracies), counters(end + 0.02, spent))


def test_the_time_to_the_target_is_a_product_only_where_the_training_was_not_waited_for() -> None:
    reached = {TOTAL // 2: 0.99, TOTAL: 0.99}
    runs: Runs = {f"digits/torch-ddp/{seed}/0": whole("torch-ddp", seed, 0.0, reached, 1000.0) for seed in range(3)}
    short = Wanted("digits", WAYS["torch-ddp"], 0, 5.0, 10.0, 6)
    runs["digits/torch-ddp/0/5"] = condense(short, records(12, 2.0, {}), counters(130.0, 0.0))
    cells = row(runs, "digits", "torch-ddp", [5.0], 100_000.0)
    assert cells is not None
    assert cells[1:3] == ["100x", "99.00% (worst of 3 seeds: 99.00%)"]
    assert cells[3].startswith("≈ ")
    runs["digits/torch-ddp/0/5"] = whole("torch-ddp", 0, 5.0, reached, 1000.0)
    waited = row(runs, "digits", "torch-ddp", [5.0], 100_000.0)
    assert waited is not None
    assert not waited[3].startswith("≈")
    assert row(runs, "digits", "ddp", [5.0], None) is None


def test_jobs_and_ways_of_the_study_are_valid() -> None:
    for task in TASKS.values():
        job = Job.model_validate(task.job)
        assert job.steps is not None
        assert job.steps % task.every == 0, "the end is a synchronisation of all that take local steps"
        assert (job.evaluate.every_steps or 0) % task.every == 0
        for way in WAYS.values():
            if way.peer is None:
                job = Job.model_validate(job_of(Wanted(task.name, way, 0, 5.0), HERE))
                assert (job.parallel.sync is not None) == way.local
                assert job.parallel.sync is None or job.parallel.sync.every == task.every


def test_each_table_of_the_readme_has_rows_or_says_that_nothing_was_measured() -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    for name in TABLES:
        begin, end = marks(name)
        for mark in (begin, end):
            assert readme.count(mark) == 1, mark
        content = readme.split(begin)[1].split(end)[0]
        rows = [line for line in content.splitlines() if re.match(r" *\| *[^| -]", line)][1:]  # after the titles
        assert rows or NOT_MEASURED in content, f"the table of {name} is empty"
