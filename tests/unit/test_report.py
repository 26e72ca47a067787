"""Reports of studies and runs: words, tables and pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from horizonml.errors import HorizonError
from horizonml.report import run_plots
from horizonml.report.bench import batch_size, compare, scaling
from horizonml.report.bench.report import write_report
from horizonml.report.bench.study import load_study
from horizonml.report.records import load_run
from tests.runs import JOB, append, comparison, table, write_group, write_run, write_study


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


def test_the_perplexity_stands_beside_the_unigram_baseline(tmp_path: Path) -> None:
    write_run(tmp_path / "images", ranks=1)
    write_run(tmp_path / "text", ranks=1)
    path = tmp_path / "text" / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "run":
            line["unigram"] = 22.63
        if line["kind"] == "evaluation":
            line["perplexity"] = 7.401
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path / "text")
    page = (tmp_path / "text" / "report.html").read_text()
    assert "held-out perplexity 7.40 (unigram baseline 22.6)" in page
    drawn = run_plots.draw_learning_curves({"text": load_run("", tmp_path / "text")}).axes[2]
    assert drawn.get_title(loc="left") == "Held-out perplexity"
    assert 22.63 in [line.get_ydata()[0] for line in drawn.lines]
    assert drawn.get_ylim()[1] > 22.63
    write_report(tmp_path / "images")
    assert "perplexity" not in (tmp_path / "images" / "report.html").read_text()


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


LOST_1 = {"lost": [1], "silent_seconds": 5.1, "steps_repeated": 1, "source": "disk"}


def losing_run(folder: Path) -> None:
    """Rank 1 is lost in step 5 at 104 s; the others step again at 107 s, from step 4, and it is back at 110 s."""
    folder.mkdir(exist_ok=True)
    write_group(folder, (0, 1, 2), 1, 100.0, range(1, 5))
    write_group(folder, (0, 2), 2, 107.0, range(4, 6), "re-form", LOST_1)
    write_group(folder, (0, 1, 2), 3, 110.0, range(6, 11), "complete")
    append(
        folder / "rank-1.jsonl",
        {"kind": "recovery", "time": 111.0, "generation": 3, "seconds": 0.1, **LOST_1, "source": "memory"},
    )


def test_losses_and_joins_are_told_with_what_they_cost(tmp_path: Path) -> None:
    losing_run(tmp_path / "mine")
    found = load_run("x", tmp_path / "mine").history
    loss, join = found.changes
    assert (loss.step, loss.ranks, loss.lost, loss.left, loss.joined) == (4, 2, [1], [], [])
    assert (loss.before, loss.after, loss.stopped, loss.steps_repeated) == (104, 107, 3, 1)
    assert (loss.silent_seconds, loss.recovery_seconds, loss.source) == (5.1, 2.1, "disk")
    assert (join.step, join.ranks, join.lost, join.joined, join.stopped, join.source) == (6, 3, [], [1], 1, None)
    assert found.goodput == pytest.approx(1 - (3 + 1 + 1) / 15)
    page = write_report(tmp_path / "mine")[0].read_text()
    assert "1 loss and 1 join of ranks: no steps for 4.0 s, 1 step repeated, goodput 66.7%." in page
    cells = ("rank 1 lost", "4", "2", "5.1 s", "2.1 s", "3.0 s", "checkpoint", "1")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    cells = ("rank 1 joined", "6", "3", "-", "-", "1.0 s", "-", "0")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert (tmp_path / "mine" / "changes-mine.png").exists()
    (row,) = table(tmp_path / "mine" / "runs.csv")
    assert (row["losses"], row["joins"], row["steps_repeated"], row["stopped_seconds"]) == ("1", "1", "1", "4.0")


def test_a_job_that_starts_again_and_a_better_plan_are_no_losses(tmp_path: Path) -> None:
    write_group(tmp_path, (0, 1), 1, 100.0, range(1, 5), "re-plan")
    write_group(tmp_path, (0, 1), 1, 110.0, range(5, 7), "stopped")
    write_group(tmp_path, (0, 1, 2), 1, 130.0, range(7, 9), "complete")
    found = load_run("x", tmp_path).history
    assert [[sorted(group.parts) for group in groups] for groups in found.attempts] == [[[0, 1]], [[0, 1, 2]]]
    assert (found.changes, found.goodput) == ([], 1.0)
    assert "lost" not in write_report(tmp_path)[0].read_text()


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


def test_runs_of_any_kind_share_a_page(tmp_path: Path) -> None:
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
