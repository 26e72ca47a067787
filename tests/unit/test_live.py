"""How a run stands, read from its records while they are written."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from horizonml.report.live import LiveRun
from horizonml.report.live_facts import RunState
from horizonml.report.records import describe, load_run
from horizonml.report.summary import summarise
from horizonml.report.top import ASCII, UNICODE, frame, sparkline
from horizonml.telemetry.log import Tails
from tests.runs import append, write_group, write_run


def polled(folder: Path, now: float = 200.0) -> LiveRun:
    run = LiveRun(folder, lambda: now)
    run.poll()
    return run


def test_lines_are_read_once_when_they_are_whole_in_the_order_of_time(tmp_path: Path) -> None:
    tails = Tails(tmp_path)
    first, second = tmp_path / "rank-0.jsonl", tmp_path / "rank-11.jsonl"
    append(first, {"time": 1.0, "n": 0}, {"n": 1}, {"time": 4.0, "n": 4})
    append(second, {"time": 2.0, "n": 2}, {"time": 3.0, "n": 3}, '{"time": 5.0, "n"')
    assert [(rank, line["n"]) for rank, line in tails.read()] == [(0, 0), (0, 1), (11, 2), (11, 3), (0, 4)]
    assert list(tails.read()) == []
    append(second, ": 5}\n")
    assert [line["n"] for _, line in tails.read()] == [5]
    assert not tails.is_replaced
    assert tails.damaged == 0


def test_a_damaged_line_is_counted_and_skipped(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert polled(tmp_path).damaged == 0
    others = ({"kind": "step", "step": "x"}, {"kind": "unknown"}, {"time": "x"}, "\n")
    append(tmp_path / "rank-0.jsonl", "no json\n", "[1]\n", "\x00\xff\n", "[" * 100_000 + "\n", *others)
    run = polled(tmp_path)
    assert (run.damaged, run.step) == (5, 6)


def test_a_run_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6)
    run = polled(tmp_path)
    assert run.step == 6
    assert not run.poll()
    (tmp_path / "rank-1.jsonl").unlink()
    (tmp_path / "rank-0.jsonl").rename(tmp_path / "old")
    write_run(tmp_path, ranks=1, steps=4)
    assert run.poll()
    assert (run.step, [point[0] for point in run.curve.since()], len(run.members)) == (4, [1, 2, 3, 4], 1)
    (tmp_path / "rank-0.jsonl").rename(tmp_path / "older")
    write_run(tmp_path, ranks=1, steps=8)  # longer than the one before
    assert run.poll()
    assert run.step == 8
    write_run(tmp_path, ranks=1, steps=2)  # the same file, cut and written anew
    assert run.poll()
    assert run.step == 2


def test_the_time_that_is_left_follows_from_the_steps_that_are_left(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6, wall=0.5)
    path = tmp_path / "rank-0.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "total_steps": 16, "total_epochs": 2}) + "\n" + rest)
    run = polled(tmp_path, now=110.0)
    assert (run.state, run.total_steps) == (RunState.RUNNING, 16)
    assert run.seconds_left == pytest.approx(10 * 0.5)


def test_how_a_run_ended(tmp_path: Path) -> None:
    for number, (outcome, now, state) in enumerate(
        (
            ("complete", 1e9, RunState.FINISHED),
            ("stopped", 1e9, RunState.STOPPED),
            ("failed", 105.0, RunState.FAILED),
            ("re-form", 105.0, RunState.RUNNING),
            ("re-form", 1e9, RunState.LOST),
            ("re-plan", 105.0, RunState.RUNNING),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_group(folder, (0, 1), 1, 100.0, range(1, 5), outcome)
        assert polled(folder, now).state is state


def test_a_device_that_has_joined_shows_its_own_state_and_step(tmp_path: Path) -> None:
    for outcome, state in (
        ("complete", RunState.FINISHED),
        ("stopped", RunState.STOPPED),
        ("re-form", RunState.RUNNING),
    ):
        folder = tmp_path / outcome
        folder.mkdir()
        write_group(folder, (0, 1), 1, 100.0, range(1, 5), outcome)
        (folder / "rank-0.jsonl").unlink()  # it is on another device
        run = polled(folder, 105.0)
        assert (run.state, run.step, run.newest) == (state, 4, None)


def test_a_run_without_records_or_steps_waits(tmp_path: Path) -> None:
    run = polled(tmp_path)
    assert (run.state, run.step, run.members, run.curve.since(), run.timeline) == (RunState.WAITING, 0, [], [], None)
    write_group(tmp_path, (0, 1), 1, 199.0, range(1, 1))
    for path in tmp_path.glob("rank-*.jsonl"):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    assert run.poll()
    assert (run.state, len(run.members), run.newest, run.speed) == (RunState.WAITING, 2, None, None)


def test_a_process_that_is_gone_is_noticed_at_once_and_one_that_is_there_is_trusted(tmp_path: Path) -> None:
    from horizonml.telemetry.lifeline import Lifeline

    write_group(tmp_path, (0, 1), 1, 100.0, range(1, 5))
    for path in tmp_path.glob("rank-*.jsonl"):
        path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert polled(tmp_path, 110.0).state is RunState.RUNNING
    assert polled(tmp_path, 1e6).state is RunState.LOST
    lifeline = Lifeline(tmp_path, 0)
    lifeline.begin(1)
    try:
        assert polled(tmp_path, 1e6).state is RunState.RUNNING
        trace = tmp_path / ".places" / "rank-0.lifeline"
        content = json.loads(trace.read_text())
        gone = os.fork()
        if not gone:
            os._exit(0)
        os.waitpid(gone, 0)
        trace.write_text(json.dumps({**content, "pid": gone}))
        assert polled(tmp_path, 110.0).state is RunState.LOST
    finally:
        lifeline.end()


def test_another_process_becomes_rank_0_and_the_curve_goes_on(tmp_path: Path) -> None:
    lost = {"lost": [0], "silent_seconds": 5.1, "steps_repeated": 1, "source": "disk"}
    write_group(tmp_path, (0, 1, 2), 1, 100.0, range(1, 5))
    run = LiveRun(tmp_path, lambda: 110.0)
    run.poll()
    write_group(tmp_path, (1, 2), 2, 107.0, range(4, 8), "complete", lost)
    run.poll()
    for found in (run, polled(tmp_path)):  # while it happens, and afterwards
        assert [point[0] for point in found.curve.since()] == [1, 2, 3, 4, 5, 6, 7]
        assert [(member.rank, member.started_as) for member in found.members] == [(0, 1), (1, 2)]
        assert found.state is RunState.FINISHED
        told = [event for event in found.events if event.kind == "lost"]
        assert told[-1].text == "rank 0 lost; went on after 2.0 s, from disk, 1 step again"


def test_rank_0_alone_records_what_reports_and_pages_show_of_all(tmp_path: Path) -> None:
    """Devices of `horizonml join` record in folders of their own: here one joins, one is lost, and one leaves."""
    names, path = {0: "laptop", 1: "pi-a", 2: "pi-b"}, tmp_path / "rank-0.jsonl"
    lost = {"lost": [1], "silent_seconds": 0.0, "steps_repeated": 0, "source": "memory"}
    for generation, ranks, outcome in ((1, (0, 1), "re-form"), (2, (0, 1, 2), "failed"), (3, (0, 2), "re-form")):
        begin = 100 + 10 * generation
        write_group(
            tmp_path, ranks, generation, begin, range(begin, begin + 5), outcome, lost if generation == 3 else None
        )
        facts = {
            "steps": 4, "wall": 4.0, "compute": 3.2, "transfer": 0.4, "wait": 0.4, "cpu_seconds": 6.0, "rss_bytes": 7,
            "links": {"members": [400, 400]},
        }  # fmt: skip
        append(path, {"kind": "ranks", "step": begin + 4, "time": begin + 5, "ranks": [facts] * len(ranks)})
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            about = json.loads(line)
            if about["kind"] == "run" and about["generation"] == generation:
                plan = {"stages": [{"start": 0, "stop": 1, "ranks": list(range(len(ranks)))}]}
                members = [
                    {"rank": place, "started_as_rank": rank, "host": names[rank], "node": names[rank]}
                    for place, rank in enumerate(ranks)
                ]
                more = {"members": members, "plan": plan, "host": names[0], "resumed_at": begin - 110}
                lines[number] = json.dumps({**about, **more})
        path.write_text("\n".join(lines) + "\n")
    for rank in (1, 2):
        (tmp_path / f"rank-{rank}.jsonl").unlink()
    run = load_run("evening", tmp_path)
    found = summarise(run)
    assert (found.ranks, found.losses, found.joins, run.missing) == (2, 1, 1, [])
    assert [describe(change) for change in run.history.changes] == [
        "rank 2 (pi-b) joined", "rank 1 (pi-a) lost",
    ]  # fmt: skip
    assert [(rank.run.host, len(rank.settled)) for rank in run.ranks] == [("laptop", 7), ("pi-b", 2)]
    assert found.compute == pytest.approx((7 * 0.6 + 2 * 0.8) / 9)
    assert found.bytes_per_step == pytest.approx((7 * 10 + 2 * 100) / 7)
    assert found.joules_per_sample is None
    live = polled(tmp_path)
    assert [(member.host, member.is_recorded) for member in live.members] == [("laptop", True), ("pi-b", False)]
    assert live.members[1].split["compute"] == pytest.approx(0.8)
    texts = [event.text for event in live.events]
    assert "rank 2 (pi-b) joined; goes on with 3 ranks (2 before)" in texts
    assert "rank 1 (pi-a) lost; went on after 2.0 s, from memory" in texts


def test_a_frame_says_how_the_run_stands(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", "pipeline", ranks=3, wall=0.2, steps=6, batch=30)
    lines = [line.plain for line in frame(polled(tmp_path / "digits", 110.0), 100, None)]
    for words in (
        "digits · running · step 6 · epoch 2 of 2", "loss 0.3333 · accuracy 90.00% · 150 samples/s · 200.0 ms a step",
        "stage 1: rank 1: layer 1", "  1 here", " 70/10/20%", "400.0 MiB", "3 ranks begin to train",
        "same stage 40 kbit/s out, 40 kbit/s in",
    ):  # fmt: skip
        assert any(words in line for line in lines), words
    bar = next(line for line in lines if line.startswith("  1 here"))
    signs = [bar.count(sign) for sign in UNICODE.bar]
    assert signs[0] == pytest.approx(0.7 * sum(signs), abs=1)
    assert signs[2] == pytest.approx(0.2 * sum(signs), abs=1)
    assert sparkline([1.0, float("nan"), 2.0, float("inf")], 4) == "▁?█?"
    assert all(line.plain.isascii() for line in frame(polled(tmp_path / "digits", 110.0), 100, 20, ASCII))


def test_a_frame_fits_the_terminal(tmp_path: Path) -> None:
    for ranks, width, height in ((60, 80, 24), (60, 80, 8), (5, 200, 60), (1, 20, 2)):
        folder = tmp_path / f"{ranks}-{height}"
        write_run(folder, "pipeline", ranks=ranks)
        recovery = {"kind": "recovery", "time": 101.0, "generation": 1, "lost": [1], "seconds": 1.0, "source": "memory"}
        append(folder / "rank-0.jsonl", *[{**recovery, "steps_repeated": 0}] * 30)
        lines = frame(polled(folder, 110.0), width, height)
        assert len(lines) <= height
        assert all(cell_len(line.plain) <= max(40, width) for line in lines)
        assert "running" in lines[0].plain


ODD = (
    None, True, -1, 0, 10**400, -(10**30), 1e308, float("nan"), float("inf"), -float("inf"), "", "x\x1b[2J", "1", [],
    {}, [[]], [None], {"a": []}, [float("nan")] * 4, [1e308] * 4,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """All that can be replaced in a record: a container and its key."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def test_whatever_is_wrong_in_the_records_the_rest_is_shown(tmp_path: Path) -> None:
    for seed in range(100):
        shows_the_rest(tmp_path / str(seed), random.Random(seed))


def shows_the_rest(folder: Path, dice: random.Random) -> None:
    """Write records in which some values are odd; what is shown of them is printable and fits."""
    write_run(folder, "pipeline", ranks=3)
    for path in folder.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        facts = {"steps": 1, "wall": 0.1, "compute": 0.1, "rss_bytes": 5, "links": {"next": [1.0, 2.0]}}
        lines += [
            {"kind": "ranks", "step": 7, "time": 107.0, "ranks": [facts] * 3},
            {"kind": "slowdowns", "step": 7, "time": 107.0, "slowdowns": [1.0, 2.0, 1.0]},
            {"kind": "checkpoint", "step": 7, "time": 107.0, "saved": True, "seconds": 1.0},
            {"kind": "followed", "step": 7, "time": 107.0},
            {"kind": "recovery", "time": 107.0, "generation": 1, "lost": [1], "seconds": 1.0, "steps_repeated": 1,
             "source": "disk"},
            {"kind": "end", "time": 107.0, "outcome": "failed"},
        ]  # fmt: skip
        for _ in range(dice.randint(1, 4)):
            container, key = dice.choice(places(lines))
            container[key] = copy.deepcopy(dice.choice(ODD))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = polled(folder)
    for width, height in ((80, 24), (200, None)):
        lines = [line.plain for line in frame(run, width, height)]
        assert height is None or len(lines) <= height
        assert all(line.isprintable() and len(line) <= width for line in lines)
    assert run.seconds_left is None or run.seconds_left >= 0
