from __future__ import annotations

import time
from pathlib import Path

import pytest

from horizonml.report.records import load_run
from horizonml.telemetry.lifeline import Lifeline, Trace
from horizonml.telemetry.log import JsonLines, read_lines
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import StateSource
from horizonml.telemetry.recorder import Display, Outage, Recorder
from tests.distributed.processes import wait_for
from tests.unit.test_metrics import INFO, STEP, values


def test_recoveries_are_recorded_counted_and_read_back(tmp_path: Path) -> None:
    metrics, path = Metrics(3), tmp_path / "rank-1.jsonl"
    recorder = Recorder(path, Display(), INFO, 0, metrics)
    recorder.after(Outage(time.monotonic() - 1.5, [0, 2], None, 7), 3, StateSource.REPLICA, 6)
    recorder.step(STEP, 7, 1, 64, 0.1)
    recorder.checkpoint_skipped(7)
    recorder.close("complete")
    assert [line["kind"] for line in read_lines(path)] == ["run", "step", "recovery", "checkpoint skipped", "end"]
    (found,) = load_run("x", tmp_path).lead.recoveries
    assert (found.generation, found.lost, found.silent_seconds, found.source) == (3, [0, 2], None, StateSource.REPLICA)
    assert (found.seconds, found.steps_repeated) == (pytest.approx(1.5, abs=0.5), 1)
    now = values(metrics)
    assert now["horizonml_recovery_seconds_count{source=replica}"] == 1
    assert now["horizonml_steps_repeated_total"] == now["horizonml_checkpoints_skipped_total"] == 1


def test_the_lifeline_follows_the_steps_that_are_recorded(tmp_path: Path) -> None:
    lifeline, path = Lifeline(tmp_path, 3), tmp_path / ".places" / "rank-3.lifeline"
    lifeline.begin(2)
    lifeline.expected(INFO.expected_memory)
    recorder = Recorder(tmp_path / "rank-3.jsonl", Display(), INFO, 0, None, None, lifeline)
    recorder.step(STEP, 41, 1, 64, 0.1)
    wait_for(lambda: Trace.read(path).step == 41, "the newest step in the lifeline")
    assert Trace.read(path).expected == pytest.approx(6e8)
    recorder.close("complete")
    lifeline.end()
    assert not path.exists()


@pytest.mark.parametrize(
    "cut", [b"", b'{"kind": "ranks", "step": 12207', b"x" * (3 << 20)], ids=["whole", "short", "long"]
)
@pytest.mark.parametrize("before", [b"", b'{"kind": "step"}\n'], ids=["empty", "a record"])
def test_what_a_process_has_not_finished_writing_is_not_continued_by_the_next_one(
    tmp_path: Path, before: bytes, cut: bytes
) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(before + cut)
    lines = JsonLines(path)
    lines.write({"kind": "run"})
    lines.close()
    assert [one["kind"] for one in read_lines(path)] == ["step"] * bool(before) + ["run"]
