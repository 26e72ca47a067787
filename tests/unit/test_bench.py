"""Benches: reading records, summing them up, and the cases of a study."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from horizonml.cli.bench import _show, app
from horizonml.errors import HorizonError, JobError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.plan.plan import facts_of
from horizonml.plan.spec import Strategy
from horizonml.report.bench import compare, scaling
from horizonml.report.bench.report import write_report
from horizonml.report.bench.study import ScalingMode, load_study
from horizonml.report.records import load_run
from horizonml.report.summary import summarise, traffic
from tests.runs import JOB, append, comparison, write_run, write_study


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    write_run(tmp_path)
    one = summarise(load_run("x", tmp_path))
    assert (one.ranks, one.plan, one.updates, one.epochs, one.samples) == (2, "2", 6, 2, 192)
    assert (one.compute, one.transfer, one.wait) == pytest.approx((0.75, 0.1, 0.15))
    assert one.samples_per_second == pytest.approx(160)
    assert one.epoch_seconds == pytest.approx(0.6)
    assert one.idle_seconds == pytest.approx(0.15 * 0.6)
    assert one.cpu_cores == pytest.approx(1.0)
    assert one.cpu_utilisation == pytest.approx(0.5)
    assert (one.accuracy, one.train_accuracy, one.divergence) == (0.9, 0.5, 0.5)
    assert one.rss_peak_bytes == (400 << 20) + 1
    assert (one.bytes_per_step, one.bytes_per_second) == pytest.approx((2000, 10_000))
    assert one.joules_per_sample == pytest.approx(3 / 32)
    links = list(traffic(load_run("x", tmp_path)))
    assert [(link.rank, link.to) for link in links] == [(0, "members"), (1, "members")]
    assert links[0].bytes_per_second == pytest.approx(5000)


def test_steps_that_were_done_twice_count_once_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    path = tmp_path / "rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    again = [line for line in lines if '"step": 5' in line or '"step": 6' in line]
    path.write_text("".join([*lines, lines[0], *again]) + '{"kind": "st')
    one = summarise(load_run("x", tmp_path))
    assert (one.updates, one.samples) == (6, 192)


def describe(path: Path, **changes: Any) -> None:
    """Change the description with which a rank's file begins."""
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | changes) + "\n", *others]))


def test_after_a_loss_the_living_are_reported_and_not_the_dead(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=4)
    for rank in range(4):
        describe(tmp_path / f"rank-{rank}.jsonl", generation=1, time=1.0)
    for rank, started in enumerate((1, 2, 3)):  # rank 0 is lost, and those who are left move up
        path = tmp_path / f"rank-{started}.jsonl"
        first, *_, step, _, _ = path.read_text().splitlines()
        stages = [{"start": 0, "stop": 4, "ranks": [0, 1, 2], "shares": [1.0] * 3}]
        plan = {"stages": stages, "micro_batches": 2, "schedule": "1f1b"}
        new = {"rank": rank, "started_as_rank": started, "world_size": 3, "generation": 2, "time": 2.0, "plan": plan}
        slow = {"step": 7, "wall": 0.4, "compute": 0.4, "transfer": 0.0, "wait": 0.0}
        append(path, json.loads(first) | new, json.loads(step) | slow)
    run = load_run("x", tmp_path)
    assert [(rank.run.rank, rank.run.started_as_rank) for rank in run.ranks] == [(0, 1), (1, 2), (2, 3)]
    one = summarise(run)
    assert (one.ranks, one.updates) == (3, 7)
    assert one.samples_per_second == pytest.approx(80), "steps of the larger group say nothing about this one's speed"


def test_a_rerun_that_trains_nothing_changes_no_report(tmp_path: Path) -> None:
    write_run(tmp_path, "pipeline", ranks=3)
    before = summarise(load_run("x", tmp_path))
    for rank in range(2):  # started again with two ranks: everything is trained already
        path = tmp_path / f"rank-{rank}.jsonl"
        first = json.loads(path.read_text().splitlines()[0])
        append(path, first | {"world_size": 2, "time": 9.0, "plan": {"stages": []}}, {"kind": "end", "outcome": "x"})
    assert summarise(load_run("x", tmp_path)) == before


def test_machines_with_one_name_have_cores_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path)
    for rank in range(2):
        describe(tmp_path / f"rank-{rank}.jsonl", host="raspberrypi", node=f"board-{rank}")
    assert summarise(load_run("x", tmp_path)).cpu_utilisation == pytest.approx(1 / 4)


def test_speed_and_the_time_of_an_epoch_are_one_statistic(tmp_path: Path) -> None:
    """Two of five epochs are slow: the mean speed falls, and the median does not."""
    write_run(tmp_path, ranks=1, wall=0.1, steps=20, epochs=5)
    path = tmp_path / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["epoch"] in (2, 3):
            line["wall"] = 2.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = summarise(load_run("x", tmp_path))
    assert one.samples_per_second == pytest.approx(320)
    assert one.epoch_seconds == pytest.approx(0.4)
    assert one.samples_per_second * one.epoch_seconds * one.epochs == pytest.approx(one.samples)
    assert (one.slowest_part, one.fastest_part) == pytest.approx((16, 320))


def test_a_run_without_steps_and_a_damaged_record_are_named(tmp_path: Path) -> None:
    with pytest.raises(HorizonError, match=r"has no records of a run \(rank-\*\.jsonl\)"):
        load_run("x", tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(HorizonError, match="ended before its first one was through"):
        load_run("x", tmp_path)
    write_run(tmp_path, ranks=1)
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"wall": 0.2', '"wall": "long"', 1))
    with pytest.raises(HorizonError, match=r"rank-0\.jsonl: a record of kind step cannot be read: wall: "):
        load_run("x", tmp_path)


@pytest.mark.slow
def test_the_table_in_a_terminal_is_whole_at_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    comparison(tmp_path / "sizes")
    runs = [{"factors": {"strategy": name}, "run": {"strategy": name, "wall": 3.0}} for name in ("ddp", "pipeline")]
    write_study(tmp_path / "one", "compare", {"workers": 2, "repeats": 1, "job": JOB}, runs)
    for name, column in (("sizes", "samples"), ("one", "memory")):
        study = load_study(tmp_path / name)
        _show(compare.section(study))
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 80 and "…" not in line for line in lines)
        header = next(line for line in lines if "accuracy" in line).split()
        assert set(header) >= {column, "accuracy", "samples/s", "epoch", "compute", "transfer", "wait"}


def test_cases_differ_in_nothing_but_their_factors() -> None:
    job = Job.model_validate({"seed": 3, "parallel": {"micro_batches": 2, "strategy": "ddp"}})
    cases = compare.cases(job, ["single", "ddp", "tensor"], [100, 200], 5, 2)
    assert len({case.name for case in cases}) == len(cases) == 12
    assert {(case.job.seed, case.factors.repeat) for case in cases} == {(3, 0), (4, 1)}
    for case in cases:
        assert case.job.data.samples == case.factors.samples
        assert case.job.batch_size == job.batch_size
        assert not case.job.checkpoint.enabled
    weak = scaling.cases(job, ScalingMode.WEAK, ["ddp", "hybrid"], [2, 4], 6, 1)
    assert [(case.name, case.job.batch_size) for case in weak] == [
        ("single-1", 64), ("ddp-2", 128), ("ddp-4", 256), ("hybrid-4", 256)
    ]  # fmt: skip
    strong = scaling.cases(job, ScalingMode.STRONG, ["ddp"], [2, 4], 6, 1)
    assert {case.job.batch_size for case in strong} == {64}
    assert all(case.job.parallel.threads == 1 for case in [*weak, *strong])


def test_a_strategy_is_given_no_workers_or_micro_batches_that_it_cannot_have() -> None:
    for strategy in get_args(Strategy):
        job = changed(Job.model_validate({"parallel": {"micro_batches": 2, "strategy": "ddp"}}), {"name": "x"})
        parallel = changed(job, compare.strategy_changes(strategy, 5)).parallel
        assert parallel.world_size() == (1 if strategy == "single" else 5)
        with pytest.raises(JobError) if facts_of(strategy).min_workers > 2 else nullcontext():
            changed(job, compare.strategy_changes(strategy, 2))


def test_options_take_several_values_at_once() -> None:
    command = get_command(app).commands["compare"]  # type: ignore[attr-defined]
    assert command.spread(["--samples", "1", "jobs/a.yaml"]) == ["--samples", "1", "jobs/a.yaml"]
    words = ["job", "--samples", "1", "2", "--epochs", "4", "--set", "a=1"]
    assert command.spread(words) == ["job", "--samples", "1", "--samples", "2", *words[4:]]
    assert list(command.make_context("compare", words).params["samples"]) == [1, 2]


def test_what_is_not_told_is_absent_and_never_invented(tmp_path: Path) -> None:
    write_run(tmp_path / "x", ranks=1)
    path = tmp_path / "x" / "rank-0.jsonl"
    text = (
        path.read_text().replace('"joules": 3.0', '"joules": null').replace('"divergence": 0.5', '"divergence": null')
    )
    path.write_text("".join(line for line in text.splitlines(keepends=True) if "evaluation" not in line))
    one = summarise(load_run("x", tmp_path / "x"))
    assert (one.joules_per_sample, one.divergence, one.accuracy) == (None, None, None)
    assert ">nan" not in write_report(tmp_path / "x")[0].read_text().lower()
    assert json.loads((tmp_path / "x" / "runs.json").read_text())["x"]["summary"]["accuracy"] is None
