"""What `horizonml watch --terminal` shows, at several sizes of the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from horizonml.report.live import LiveRun
from horizonml.report.top import UNICODE, ScreenCharacters, frame, sparkline
from tests.runs import append, write_group, write_run


def shown(folder: Path, width: int = 80, height: int | None = None, chars: ScreenCharacters = UNICODE) -> list[str]:
    run = LiveRun(folder, lambda: 110.0)
    run.poll()
    lines = frame(run, width, height, chars)
    assert all(cell_len(line.plain) <= max(40, width) for line in lines)
    assert height is None or len(lines) <= height
    return [line.plain for line in lines]


def test_a_frame_says_how_the_run_stands(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", "pipeline", ranks=3, wall=0.2, steps=6, batch=30)
    text = "\n".join(shown(tmp_path / "digits", 100))
    assert "digits · running · step 6 · epoch 2 of 2" in text
    assert "loss 0.3333 · accuracy 90.00% · 150 samples/s · 200.0 ms a step" in text
    assert "stage 1: rank 1: layer 1" in text
    assert "  1 here" in text
    assert " 70/10/20%" in text
    assert "400.0 MiB" in text
    assert "same stage 40 kbit/s out, 40 kbit/s in" in text
    assert "3 ranks begin to train" in text
    bar = next(line for line in text.splitlines() if line.startswith("  1 here"))
    signs = [bar.count(sign) for sign in UNICODE.bar]
    assert signs[0] == pytest.approx(0.7 * sum(signs), abs=1)
    assert signs[2] == pytest.approx(0.2 * sum(signs), abs=1)


@pytest.mark.parametrize(
    ("width", "height", "ranks"), [(80, 24, 5), (200, 60, 60), (80, 8, 60), (60, 16, 1), (20, 3, 5)]
)
def test_a_frame_fits_the_terminal(tmp_path: Path, width: int, height: int, ranks: int) -> None:
    write_run(tmp_path, "pipeline", ranks=ranks)
    for number in range(30):
        recovery = {"kind": "recovery", "time": 101.0, "generation": 1, "lost": [number], "seconds": 1.0}
        append(tmp_path / "rank-0.jsonl", {**recovery, "steps_repeated": 0, "source": "memory"})
    lines = shown(tmp_path, width, height)
    assert lines[0].startswith(tmp_path.name[:11])
    assert "running" in lines[0]
    if height >= 16:
        assert any(line.startswith("ranks") for line in lines)
        assert lines[-1][10:40] == "rank 29 lost; went on after 1.0 s, from memory"[:30]
    console = Console(width=max(40, width), height=height, record=True, force_terminal=True, file=io.StringIO())
    run = LiveRun(tmp_path, lambda: 110.0)
    run.poll()
    console.print(Group(*frame(run, width, height)))
    assert console.export_text().splitlines() == [line.rstrip() for line in shown(tmp_path, width, height)]


def test_where_there_is_little_room_each_part_keeps_some_lines_and_says_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, "pipeline", ranks=20)
    lines = shown(tmp_path, 80, 24)
    assert len(lines) == 24
    headings = [line for line in lines if line.startswith(("ranks", "plan", "links", "events"))]
    assert [line.split()[0] for line in headings] == ["ranks", "plan", "links", "events"]
    left_out = [int(line.rpartition("(")[2].split()[0]) for line in headings if "more)" in line]
    assert len(left_out) == 3
    assert sum(left_out) == 60 - (len(lines) - len(headings) * 2 - 3 - 1)


def test_before_the_first_step_and_without_records(tmp_path: Path) -> None:
    assert shown(tmp_path)[0].endswith("waiting · step 0")
    write_group(tmp_path, (0, 1), 1, 109.0, range(1, 1))
    (tmp_path / "rank-0.jsonl").write_text((tmp_path / "rank-0.jsonl").read_text().splitlines()[0] + "\n")
    text = "\n".join(shown(tmp_path))
    assert "waiting" in text
    assert "no step is done yet" in text


def test_no_escape_sequence_reaches_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    path = tmp_path / "rank-0.jsonl"
    evil = "x\x1b]0;y\x07\x9b2J"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"host": evil, "layers": [evil] * 4, "machine": {"processor": evil}}
    lines[0]["plan"]["stages"][0] |= {"send": evil}
    lines[0]["job"]["name"] = "[bold]" + evil
    for line in lines[1:]:
        if line["kind"] == "step":
            line |= {"links": {evil: [1, 1]}, "unit": evil}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    append(path, {"kind": "end", "outcome": evil, "time": 107.0})
    lines = shown(tmp_path, 200)
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("[bold]x ]0;y  2J"), "no markup either"
    assert len([line for line in lines if "x ]0;y  2J" in line]) >= 5


def test_a_curve_in_one_line() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([8.0] * 50 + [1.0] * 50, 4) == "██▁▁"
    assert sparkline([1.0, float("nan"), 2.0, float("inf")], 4) == "▁?█?"
    assert sparkline([float("nan")], 4) == "?"
