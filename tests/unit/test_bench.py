"""Benches: reading records, summing up, words, pictures and the report."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
from matplotlib.figure import Figure
from typer.main import get_command

from horizonml.bench import batch_size, compare, scaling
from horizonml.bench.manifest import ScalingMode
from horizonml.bench.report import write_report
from horizonml.bench.study import is_busy, load_study
from horizonml.cli.bench import _show, app
from horizonml.errors import HorizonError, JobError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.machine.resources import OtherWork, available_cores
from horizonml.plan.limits import limits_of
from horizonml.plan.spec import Strategy
from horizonml.report import charts, run_plots, style
from horizonml.report.records import load_run
from horizonml.report.summary import summarise, traffic
from horizonml.telemetry.record import EvaluationRecord, StepRecord

JOB = {
    "batch_size": 32, "epochs": 2, "model": {"name": "digits_cnn"}, "data": {"name": "digits", "image_size": 8},
}  # fmt: skip


def write_run(
    folder: Path, strategy: str = "ddp", ranks: int = 2, wall: float = 0.2, steps: int = 6, epochs: int = 2,
    accuracy: float = 0.9, rss: int = 400 << 20, batch: int = 32,
) -> None:  # fmt: skip
    """Records as ranks write them: rank r waits (r + 1) * 10% of each step, and transfers 10%."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = [{"start": 0, "stop": 4, "ranks": list(range(ranks)), "shares": [1.0] * ranks}]
    if strategy == "pipeline":
        stages = [{"start": r, "stop": r + 1, "ranks": [r], "shares": [1.0]} for r in range(ranks)]
    for rank in range(ranks):
        lines: list[dict[str, Any]] = [
            {
                "kind": "run", "rank": rank, "stage": rank if strategy == "pipeline" else 0, "world_size": ranks,
                "host": "here", "cores": 2.0, "rss_idle_bytes": 100 << 20, "machine": {"processor": "a test"},
                "versions": {"python": "3", "torch": "2", "horizonml": "1"},
                "job": JOB | {"batch_size": batch, "epochs": epochs},
                "plan": {"stages": stages, "micro_batches": 2, "schedule": "1f1b"},
            }
        ]  # fmt: skip
        wait, transfer = 0.1 * (rank + 1) * wall, 0.1 * wall
        for number in range(1, steps + 1):
            epoch = 1 + (number - 1) * epochs // steps
            lines.append(
                StepRecord(
                    step=number, epoch=epoch, time=100.0 + number, wall=wall, compute=wall - wait - transfer,
                    transfer=transfer, wait=wait, samples=batch // ranks, batch=batch, loss=2.0 / number,
                    metrics={"accuracy": 0.5}, lr=0.1, bytes_sent=1000, bytes_received=1000,
                    links={"members": (1000, 1000), "next": (0, 0)},
                    cpu_seconds=wall / 2, rss_bytes=rss + rank, joules=3.0 if rank == 0 else None,
                    divergence=0.5 if number % 2 else None,
                ).to_json()
            )  # fmt: skip
            if number % (steps // epochs) == 0:
                lines.append(EvaluationRecord(number, epoch, 100.0, 0.1, 0.3, {"accuracy": accuracy}, 10).to_json())
        spans = [["compute", "forward", 0, 1.0, 1.1], ["wait", "receive", -1, 1.1, 1.2]]
        lines.append({"kind": "timeline", "step": steps, "spans": spans})
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_study(folder: Path, kind: str, settings: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """A study whose cases are (factors, and what `write_run` is to write)."""
    environment = {
        "machine": {"processor": "a test", "system": "any"}, "cores": 2.0, "memory_limit": 4 << 30, "time": "now",
        "versions": {"python": "3", "torch": "2", "horizonml": "1"},
    }  # fmt: skip
    manifest = {"kind": kind, "settings": settings, "environment": environment, "cases": []}
    for number, case in enumerate(cases):
        run = folder / "runs" / f"case-{number}"
        write_run(run, **case["run"])
        (run / "done.json").write_text(json.dumps({"digest": "x", "seconds": 1.0, "error": case.get("error")}))
        manifest["cases"].append({"name": f"case-{number}", "factors": case["factors"], "digest": "x"})
    (folder / "study.json").write_text(json.dumps(manifest))


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def comparison(folder: Path) -> None:
    cases = []
    for repeat, slower in enumerate((1.0, 1.2)):
        for samples in (1000, 2000):
            for strategy, wall, ranks in (("single", 0.2, 1), ("ddp", 0.1, 3), ("pipeline", 0.15, 3)):
                run = {"strategy": strategy, "ranks": ranks, "wall": wall * slower, "rss": int(1e8 / wall)}
                cases.append({"factors": {"strategy": strategy, "samples": samples, "repeat": repeat}, "run": run})
    write_study(folder, "compare", {"workers": 3, "repeats": 2, "job": JOB}, cases)


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


def append(path: Path, *lines: str | dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


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


def test_a_run_without_steps_is_named(tmp_path: Path) -> None:
    with pytest.raises(HorizonError, match=r"has no records of a run \(rank-\*\.jsonl\)"):
        load_run("x", tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(HorizonError, match="ended before its first one was through"):
        load_run("x", tmp_path)


def test_a_damaged_record_is_named_with_its_field(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"wall": 0.2', '"wall": "long"', 1))
    with pytest.raises(HorizonError, match=r"rank-0\.jsonl: a record of kind step cannot be read: wall: "):
        load_run("x", tmp_path)


def test_what_is_not_told_is_absent_and_never_invented(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    path = tmp_path / "rank-0.jsonl"
    path.write_text(
        path.read_text().replace('"joules": 3.0', '"joules": null').replace('"divergence": 0.5', '"divergence": null')
    )
    one = summarise(load_run("x", tmp_path))
    assert one.joules_per_sample is None
    assert one.divergence is None


def test_the_report_of_a_comparison(tmp_path: Path) -> None:
    comparison(tmp_path)
    files = write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert files[0] == tmp_path / "report.html"
    assert all(path.exists() for path in files)
    assert not re.search(r'(src|href)="(?!data:image/png;base64,|#)', page), "the page must need no other file"
    for name in ("radar", "results-bars", "costs-bars", "learning-curves", "time-split", "timeline-pipeline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<img ") == 6
    best = "1,000 samples: ddp is fastest with 267 samples/s (267 to 320): 1.50 times pipeline, 2.00 times single."
    assert best in page
    assert "Warning" not in page
    rows = table(tmp_path / "results.csv")
    assert len(rows) == 12
    assert {row["strategy"] for row in rows} == {"single", "ddp", "pipeline"}
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["runs"][1]["links"][0]["to"] == "members"
    assert document["environment"]["cores"] == 2.0


def test_a_headline_and_its_table_say_the_same_and_doubt_is_told(tmp_path: Path) -> None:
    cases = [
        {"factors": {"strategy": name, "repeat": repeat}, "run": {"strategy": name, "ranks": 2, "wall": wall}}
        for name, walls in (("ddp", (0.1, 0.2, 0.13)), ("pipeline", (0.14, 0.14, 0.15)))
        for repeat, wall in enumerate(walls)
    ]
    write_study(tmp_path, "compare", {"workers": 2, "repeats": 3, "job": JOB}, cases)
    done = tmp_path / "runs" / "case-1" / "done.json"
    done.write_text(json.dumps(json.loads(done.read_text()) | {"cores_taken": 1.3}))
    part = compare.section(load_study(tmp_path))
    assert part.findings[0].startswith(
        "Warning: the machine was busy. Other processes had up to 1.3 of its 2 cores while case-1 ran"
    )
    assert part.findings[1].startswith("Warning: the repeats of ddp differ by 65% in speed (160 to 320 samples/s).")
    assert part.findings[2] == (
        "ddp is fastest with 246 samples/s (160 to 320): 1.08 times pipeline. The ranges of ddp and of pipeline "
        "overlap, so their order is not certain."
    )
    numbers = {row[0]: row[1:] for row in part.tables[0].rows}
    assert numbers["samples/s, median"] == ["246", "229"]
    assert numbers["epoch"] == ["390.0 ms", "420.0 ms"]


def test_the_work_of_other_processes_is_measured() -> None:
    others, cores = OtherWork(), available_cores()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        deadline = time.monotonic() + 60
        while not is_busy(others.cores_taken(), cores):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    own = OtherWork()
    work = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"]
    for child in [subprocess.Popen(work) for _ in range(os.cpu_count() or 1)]:
        child.wait()
    assert own.cores_taken() < 0.9 * cores, "what this process's children do is not others' work"


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


def test_bars_carry_their_values_and_units(tmp_path: Path) -> None:
    axis = Figure().subplots()
    values = {"HorizonML": [10.0, 12.0, 14.0], "another": [5.0]}
    charts.draw_ranking(axis, values, title="", own="HorizonML", text=lambda value: f"{value:g} samples/s")
    assert [text.get_text() for text in axis.texts] == ["12 samples/s", "5 samples/s"]
    for form, value, shown in (
        (style.seconds_axis, 0.3904, "390.4 ms"),
        (style.percent_axis, 0.99721, "99.7%"),
        (style.share_axis, 0.5333, "53%"),
        (style.share_axis, 0.000563, "0.1%"),
        (style.share_axis, 0.0996, "10%"),
        (style.bytes_axis, 330.4 * 2**20, "330 MiB"),
        (style.plain_axis, 2998.4, "2,998"),
    ):
        form(axis)
        assert style.label(axis, value) == shown


def test_a_usual_step_is_drawn_with_its_transfers_and_the_smallest_part(tmp_path: Path) -> None:
    write_run(tmp_path, "pipeline", ranks=2, steps=12)
    for rank in range(2):
        path = tmp_path / f"rank-{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "step" and line["step"] == 12:
                line["wall"] = 5.0
        spans = [["compute", "forward", 0, 1.0, 1.00001], ["transfer", "send", 0, 1.0, 1.1], ["wait", "", -1, 1.1, 2.0]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        append(path, {"kind": "timeline", "step": 8, "spans": spans})
    run = load_run("x", tmp_path)
    assert run_plots.recorded_step(run) == 8, "the newest one took 25 times as long"
    axis = Figure().subplots()
    run_plots.draw_timeline(axis, run, 8, ["laptop", "pi"])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["laptop", "pi"]
    assert axis.get_xlim()[1] == pytest.approx(1000)
    widths = sorted(patch.get_width() for patch in axis.patches)
    assert widths == pytest.approx([3, 3, 100, 100, 900, 900])


def test_scaling_has_logarithmic_axes_and_shades_what_the_cores_do_not_allow(tmp_path: Path) -> None:
    points = {"ddp": {1: [100.0], 2: [180.0], 4: [190.0]}}
    ideals = {"ideal": {1: 100.0, 2: 200.0, 4: 400.0}, "limit": {1: 100.0, 2: 200.0, 4: 200.0}}
    figure = charts.draw_lines(
        [("Speed", points, style.plain_axis), ("Efficiency", points, style.percent_axis)], "workers", [ideals], 1
    )
    speed, efficiency = figure.axes
    assert (speed.get_xscale(), speed.get_yscale(), efficiency.get_yscale()) == ("log", "log", "linear")
    assert [line.get_label() for line in speed.lines][:2] == ["ideal", "limit"]
    assert len(speed.collections) > len(efficiency.collections), "the shade"


def test_a_run_of_one_epoch_is_drawn_with_whole_epochs_and_a_solid_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=12, epochs=1)
    figure = run_plots.draw_learning_curves({"digits": load_run("ddp", tmp_path)})
    figure.draw_without_rendering()
    for axis in figure.axes:
        assert [line.get_linestyle() for line in axis.lines] == ["-"]
    for axis in figure.axes[1:]:
        assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_what_was_run_with_another_job_is_not_reported(tmp_path: Path) -> None:
    comparison(tmp_path)
    (tmp_path / "runs" / "case-0" / "done.json").write_text('{"digest": "y", "seconds": 1.0, "error": null}')
    assert [result.name for result in load_study(tmp_path).results] == [f"case-{number}" for number in range(1, 12)]


def test_the_radar_gives_nobody_nothing_for_being_last(tmp_path: Path) -> None:
    comparison(tmp_path)
    study = load_study(tmp_path)
    runs = {str(r.factors.strategy): [r] for r in study.results if r.factors.samples == 1000 and not r.factors.repeat}
    values = compare.radar_values(runs)
    assert all(0 < value <= 1 for axes in values.values() for value in axes.values())
    assert values["single"]["speed\n(/ fastest)"] == pytest.approx(0.5)
    assert values["single"]["not waiting\n(share of time)"] == pytest.approx(0.9)


def test_the_report_of_scaling_compares_with_one_worker_and_with_the_cores(tmp_path: Path) -> None:
    cases = [{"factors": {"strategy": "single", "workers": 1, "repeat": 0}, "run": {"ranks": 1, "wall": 0.4}}]
    cases += [
        {"factors": {"strategy": "ddp", "workers": n, "repeat": 0}, "run": {"ranks": n, "wall": wall}}
        for n, wall in ((2, 0.25), (4, 0.2))
    ]
    write_study(tmp_path, "scaling", {"mode": "strong", "steps": 6, "repeats": 1, "job": JOB}, cases)
    part = scaling.section(load_study(tmp_path))
    assert part.title == "Strong scaling"
    assert part.tables[0].rows[2] == ["ddp", "4", "160", "2.00", "50%", "100%"]
    assert part.findings[0].startswith("ddp: 4 workers are 2.00 times as fast as one, 100% of what 2 cores allow")
    assert "This machine has 2 cores" in part.findings[1]
    assert (tmp_path / "strong-scaling.png").exists()


def test_the_report_of_batch_sizes_names_the_best_and_where_memory_ends(tmp_path: Path) -> None:
    cases = [
        {
            "factors": {"model": "resnet18", "strategy": "single", "batch_size": size, "repeat": 0},
            "run": {"ranks": 1, "wall": wall, "batch": size, "rss": (100 << 20) + size * (1 << 20)},
        }
        for size, wall in ((64, 0.2), (128, 0.32), (256, 0.63))
    ]
    cases.append({**cases[0], "error": "rank 0 was killed by SIGKILL"})
    settings = {"strategy": "single", "workers": 1, "steps": 6, "repeats": 1, "job": JOB}
    write_study(tmp_path, "batch-size", settings, cases)
    part = batch_size.section(load_study(tmp_path))
    assert part.findings[0] == "case-3 failed: rank 0 was killed by SIGKILL"
    assert part.findings[1].startswith(
        "resnet18: 256 samples per batch are fastest (406 samples/s); 128 already reach 98%"
    )
    assert "grows by 1.0 MiB per sample and would end at about 3,996 samples" in part.findings[1]
    assert batch_size.memory_end({64: 5.0}, 10.0) is None
    assert batch_size.memory_end({64: 5.0, 128: 5.0}, 10.0) is None


def test_runs_of_any_kind_and_studies_share_a_page(tmp_path: Path) -> None:
    comparison(tmp_path / "compare")
    write_run(tmp_path / "mine", "pipeline")
    write_run(tmp_path / "other", "ddp")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rank-0.jsonl").write_text("")
    page = write_report(tmp_path)[0].read_text()
    assert "Training runs" in page
    assert "mine: 6 updates at 160 samples/s" in page
    assert "broken" not in page
    assert {row["run"] for row in table(tmp_path / "runs.csv")} == {"mine", "other"}
    alone = write_report(tmp_path / "mine", tmp_path / "elsewhere.html")
    assert alone[0] == tmp_path / "elsewhere.html"
    assert "Training run mine" in alone[0].read_text()


def test_a_report_on_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(HorizonError, match="is not a folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(HorizonError, match="has no records"):
        write_report(tmp_path)
    (tmp_path / "study.json").write_text('{"kind": "compare"')
    with pytest.raises(HorizonError, match=r"study\.json cannot be read"):
        write_report(tmp_path)


def test_peers_are_shown_against_the_nearest_other(tmp_path: Path) -> None:
    rows = [
        {"name": name, "seconds": seconds, "times": [seconds], "samples_per_second": 64 / seconds, "batch_size": 64,
         "rss_bytes": 1 << 28}
        for name, seconds in (("HorizonML ddp", 0.1), ("torch DDP", 0.2), ("Horovod", 0.15))
    ]  # fmt: skip
    race = {"title": "Data parallelism", "short": "ddp, 2 ranks", "reference": "torch DDP", "rows": rows}
    (tmp_path / "peers.json").write_text(json.dumps({"machine": "a test", "races": [race]}))
    page = write_report(tmp_path)[0].read_text()
    assert "HorizonML ddp takes 1.50 times as many samples per second as the fastest other, Horovod." in page
    (tmp_path / "peers.json").write_text("{}")
    with pytest.raises(HorizonError, match=r"peers\.json cannot be read"):
        write_report(tmp_path)


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
        with pytest.raises(JobError) if limits_of(strategy).min_workers > 2 else nullcontext():
            changed(job, compare.strategy_changes(strategy, 2))


def test_changes_of_a_job_are_checked() -> None:
    with pytest.raises(JobError, match=r"data\.samples"):
        changed(Job(), {"data.samples": 10})
    assert changed(Job(), {"optimizer.lr": 0.5}).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--samples", "1", "2", "3"], ["--samples", "1", "--samples", "2", "--samples", "3"]),
        (["job", "--samples", "1", "2", "--epochs", "4"], ["job", "--samples", "1", "--samples", "2", "--epochs", "4"]),
        (["--samples", "1", "jobs/a.yaml"], ["--samples", "1", "jobs/a.yaml"]),
        (["--set", "a=1", "--epochs", "2"], ["--set", "a=1", "--epochs", "2"]),
    ],
)  # fmt: skip
def test_options_take_several_values_at_once(words: list[str], expected: list[str]) -> None:
    command = get_command(app).commands["compare"]  # type: ignore[attr-defined]
    assert command.spread(words) == expected
    context = command.make_context("compare", list(words))
    after = itertools.pairwise(expected)
    assert list(context.params["samples"] or []) == [int(word) for option, word in after if option == "--samples"]


def test_a_run_without_an_evaluation_has_no_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "x", ranks=1)
    path = tmp_path / "x" / "rank-0.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "evaluation" not in line))
    assert summarise(load_run("x", tmp_path / "x")).accuracy is None
    assert ">nan" not in write_report(tmp_path / "x")[0].read_text().lower()
    assert json.loads((tmp_path / "x" / "runs.json").read_text())["x"]["summary"]["accuracy"] is None
