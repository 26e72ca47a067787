"""Tables at the widths that terminals have."""

from __future__ import annotations

import re

import pytest

from horizonml.cli.tables import layout, print_table, print_text, terminal_width
from horizonml.text import count

BENCH = (
    ["", "samples", "accuracy", "samples/s", "epoch", "compute/ transfer/ wait %", "memory", "sent/step"],
    [
        ["single", "1,438", "97.5%", "10,144", "141.8 ms", "100 / 0 / 0", "331.2 MiB", "0 B"],
        ["pipeline", "1,438", "97.5%", "3,144", "1 min 41 s", "50 / 10 / 40", "331.2 MiB", "12.5 MiB"],
    ],
    (0,),
)
PLAN = (
    ["stage", "layers", "rank", "rows", "sends", "memory", "busy"],
    [["0", "0-4 (conv1a .. relu1b)", "0 (mini-pc-0)", "16 of 16", "8.0 KiB fp32", "100.5 MiB of 4.0 GiB", "95%"]] * 2,
    (1, 2, 4),
)


@pytest.mark.parametrize("table", [BENCH, PLAN], ids=["bench", "plan"])
@pytest.mark.parametrize("width", [None, 80, 40])
def test_no_line_is_too_long_and_no_number_or_word_is_broken(
    table: tuple[list[str], list[list[str]], tuple[int, ...]], width: int | None
) -> None:
    header, rows, text = table
    shown = layout(header, rows, text, width)
    lines = shown.splitlines()
    assert "…" not in shown
    assert max(map(len, lines)) <= (width or 200)
    numbers = [cell for row in rows for number, cell in enumerate(row) if number not in text and len(cell) < 20]
    for cell in numbers:
        assert any(cell in line for line in lines), cell
    words = {word for name in [*header, *rows[0]] for word in re.split(r"\s|(?<=/)(?=\w{3})", name) if word}
    for word in words:
        assert any(word in line for line in lines), word


def test_a_table_keeps_its_columns_as_long_as_they_fit() -> None:
    assert layout(["", "samples/s", "time"], [["ddp", "1,000", "1.5 ms"], ["a b", "9", "-"]]).splitlines() == [
        "     samples/s    time",
        "---  ---------  ------",
        "ddp      1,000  1.5 ms",
        "a b          9       -",
    ]
    assert layout(["", "output/sample"], [["a long name", "1.0 KiB"]], width=18).splitlines() == [
        "           output/",
        "            sample",
        "-------  ---------",
        "a long     1.0 KiB",
        "name",
    ]
    assert layout(["name", "output/s"], [["ddp", "1.0 KiB"]], width=11) == "- name ddp,\n  output/s\n  1.0 KiB"


def test_without_a_terminal_lines_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width() is None
    print_text("word " * 60 + "12.5 ms")
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "40")
    print_text("word " * 7 + "12.5 ms", "- ")
    assert capsys.readouterr().out == "- word word word word word word word\n  12.5 ms\n"
    print_table("a title", *BENCH)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_one_of_a_thing_is_singular() -> None:
    words = [count(1, "epoch"), count(2, "rank"), count(1000, "micro-batch"), count(0, "folder")]
    assert words == ["1 epoch", "2 ranks", "1,000 micro-batches", "0 folders"]
