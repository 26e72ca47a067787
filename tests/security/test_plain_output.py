"""Texts of other ranks and of records that move the cursor, forge lines or rename the terminal: shown as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonml.errors import HorizonError
from horizonml.report.records import lead_records, load_run
from horizonml.runtime.local import RankLog, Warnings
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.recorder import Lines
from horizonml.text import escaped
from tests.runs import write_run
from tests.security.bounds import bounded

ESCAPES = [
    "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1bP+q\x1b\\", "\x9b31m", "\rerror: forged", "\x08\x08\x08", "\x00", "\x7f",
    "\u202eevil", "\u2028line", "\x85line", "\ud800", "\x1b]8;;http://evil\x1b\\link",
]  # fmt: skip


@given(st.text(st.characters() | st.sampled_from("\x1b\n\r\x9b\u2028\u202e\x07[]")))
def test_whatever_is_shown_neither_moves_the_cursor_nor_begins_a_line_of_its_own(text: str) -> None:
    first, *more = escaped(text).split("\n")
    assert all(
        character.isprintable() or character == "\t" or category(character) == "Zs"
        for line in (first, *more)
        for character in line
    )
    assert all(line.startswith("  ") for line in more if line)


def test_plain_text_stays_as_it_is() -> None:
    for text in ("Grüße, 世界: 5 °C – “x” 😀", "a\tb", "C:\\x", "", "50 %", "5\xa0MB"):
        assert escaped(text) == text


def test_a_log_line_cannot_be_forged() -> None:
    code = (
        "import json, logging, sys\n"
        "from horizonml.errors import HorizonError\n"
        "from horizonml.runtime.process import run_and_exit\n"
        "def action():\n"
        "    for text in json.loads(sys.argv[1]):\n"
        "        logging.getLogger('x').warning('a rank said %s', text + '\\nWARNING: forged\\nerror: forged')\n"
        "    raise HorizonError('a rank said ' + ''.join(json.loads(sys.argv[1])))\n"
        "run_and_exit(action)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(ESCAPES)], capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 1
    lines = done.stderr.decode().split("\n")
    begun = [line.partition(" ")[0] for line in lines if not line.startswith("  ")]
    assert begun == ["WARNING:"] * len(ESCAPES) + ["error:", ""]
    assert all(line.isprintable() for line in lines), lines


def test_a_ranks_log_is_shown_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, escape in enumerate(ESCAPES):
        raw = escape.encode(errors="surrogatepass")
        log = RankLog(tmp_path / f"rank-{number}.log")
        log.path.write_bytes(b"WARNING: said " + raw + b"\nerror: it said " + raw + b"\n")
        Warnings().show(1, log.new_lines())
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert shown[:-1].isprintable()
        assert all(line.isprintable() for line in log.text().split("\n"))
        assert "error: it said" in log.text()
        log.file.close()


def test_a_ranks_log_without_an_end_takes_little_memory(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank-1.log")
    with log.path.open("wb") as file:
        file.truncate(1 << 33)
    with bounded(100):
        log.new_lines()
        log.text()
    log.file.close()


def test_messages_beside_the_progress_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    for escape in ESCAPES:
        Lines(3).message(f"rank 1 on {escape} joined")
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_texts_in_records_are_plain_wherever_they_are_read(tmp_path: Path) -> None:
    before = "here"
    write_run(tmp_path)
    for escape in ESCAPES:
        for file in tmp_path.glob("rank-*.jsonl"):
            file.write_text(file.read_text().replace(json.dumps(before), json.dumps(f"host{escape}")))
        before = f"host{escape}"
        run = load_run("x", tmp_path)
        assert run.lead.run.host.startswith("host")
        assert run.lead.run.host.isprintable() or "\n" in run.lead.run.host
        assert "\x1b" not in json.dumps([one.to_json() for one in lead_records(tmp_path)], ensure_ascii=False)


def test_records_of_another_kind_are_refused_by_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "rank-1.jsonl"
    good = file.read_bytes()
    for line in (
        "{", "[]", "7", "null", "[" * 100_000, '"x"', '{"kind": "step"}', '{"kind": "step", "step": 1e999}', "\xff\xfe",
        '{"kind": "run", "plan": {"stages": 3}}', '{"kind": "timeline", "step": 1, "spans": [[1]]}', "9" * 5000,
    ):  # fmt: skip
        file.write_bytes(line.encode("latin-1") + b"\n" + good)
        with pytest.raises(HorizonError, match=r"rank-1\.jsonl"):
            load_run("x", tmp_path)


def test_records_that_are_no_files_or_have_no_lines_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "rank-x.jsonl").write_text("not ours")
    (tmp_path / "rank-1.jsonl").unlink()
    (tmp_path / "rank-1.jsonl").symlink_to("/dev/zero")
    with bounded(100), pytest.raises(HorizonError, match=r"rank-1\.jsonl cannot be read: .*not a regular file"):
        load_run("x", tmp_path)
    (tmp_path / "rank-1.jsonl").unlink()
    with (tmp_path / "rank-1.jsonl").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with bounded(300), pytest.raises(ValueError, match="longer than"):
        list(read_lines(tmp_path / "rank-1.jsonl"))
