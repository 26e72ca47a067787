"""The one declaration of what is recorded: what is written is read back, and a number needs to be declared once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from horizonml.machine.host import MachineInfo
from horizonml.telemetry.log import read_records
from horizonml.telemetry.record import (
    RECORDS,
    SHOWN,
    CheckpointRecord,
    CheckpointSkippedRecord,
    EndRecord,
    EvaluationRecord,
    FollowedRecord,
    RanksRecord,
    RankSums,
    RecordedSpan,
    RecoveryRecord,
    SlowdownsRecord,
    StateSource,
    StepRecord,
    TimelineRecord,
    read,
)
from horizonml.telemetry.run_info import JobFacts, MemberFacts, PlanFacts, RunInfo

ROOT = Path(__file__).resolve().parents[2]
JOB = {"name": "a", "model": {"name": "b", "x": 1}, "data": {"name": "c"}, "batch_size": 4, "later": [1]}
PLAN = {"stages": [{"start": 0, "stop": 2, "ranks": [1], "shares": [1.0]}, {"ranks": [0]}], "new": 3}
EXAMPLES = (
    RunInfo(
        time=1.0, rank=0, host="pi", node="n", job=JobFacts.model_validate(JOB), layers=["x"], cores=2.0,
        machine=MachineInfo("p"), versions={"torch": "2"}, plan=PlanFacts.model_validate(PLAN),
        members=[MemberFacts(0, 1, "pi", "n", 2.0, None, MachineInfo("p"))],
    ),
    StepRecord(
        step=3, epoch=1, time=2.0, wall=0.4, compute=0.2, transfer=0.1, wait=0.1, batch=8, loss=1.0, bytes_sent=9,
        cpu_seconds=0.3, rss_bytes=7, metrics={"accuracy": 0.5}, links={"next": (9, 0)}, gradient_norm=2.0,
    ),
    EvaluationRecord(3, 1, 2.5, 0.1, 0.9, {"perplexity": 4.0}, 10, True, True),
    TimelineRecord(3, [RecordedSpan("compute", "forward", 0, 1.0, 1.5)]),
    RecoveryRecord(3.0, 2, [1], 1.5, 4, StateSource.REPLICA, 0.2),
    RanksRecord(4, 3.0, [None, RankSums(2, 0.4, 0.2, 0.1, 0.1, 0.3, 7.0, {"next": (9.0, 0.0)})]),
    SlowdownsRecord(4, 3.0, [1.0, 2.0], [1], {"1": "it is hot"}),
    CheckpointRecord(4, 3.0, True, 0.1, 0.2),
    CheckpointSkippedRecord(4, 3.0),
    FollowedRecord(4, 3.0, 2, 100),
    EndRecord(9.0, "complete"),
)  # fmt: skip


def test_every_kind_of_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert {one.kind for one in EXAMPLES} == RECORDS.keys()
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in EXAMPLES) + '{"kind": "later"}\n')
    for found, written in zip(read_records(path), EXAMPLES, strict=True):
        assert type(found) is type(written)
        assert json.dumps(found.to_json()) == json.dumps(written.to_json())  # tuples and lists are alike there
    about = next(iter(read_records(path)))
    assert isinstance(about, RunInfo)
    assert (about.stage, about.to_json()["stage"], about.to_json()["job"], about.to_json()["plan"]) == (1, 1, JOB, PLAN)


def test_what_is_shown_is_a_field() -> None:
    for record, rows in SHOWN.items():
        assert rows.keys() <= {one.name for one in fields(record)}
    names = [how.scalar for rows in SHOWN.values() for how in rows.values() if how.scalar]
    assert len(set(names)) == len(names)


def test_records_of_older_versions_are_read() -> None:
    """Without what they did not have yet: members, load, skipped samples, units, the norm of the gradient."""
    old = {
        "kind": "step", "step": 1, "epoch": 1, "wall": 0.2, "compute": 0.1, "transfer": 0.1, "wait": 0.0, "batch": 4,
        "loss": 1.0, "bytes_sent": 0, "cpu_seconds": 0.1, "rss_bytes": 5, "accuracy": 0.25, "time": 7.0,
    }  # fmt: skip
    found = read(old)
    assert isinstance(found, StepRecord)
    assert (found.accuracy, found.load, found.unit, found.gradient_norm) == (0.25, 0.0, "samples", None)
    about = read({"kind": "run", "rank": 1, "plan": {"stages": [{"ranks": [0]}, {"ranks": [1]}]}})
    assert isinstance(about, RunInfo)
    assert (about.started_as, about.stage, about.members, about.job) == (1, 1, (), None)


@pytest.mark.parametrize("value", ["x", None, -1, float("nan"), float("inf"), 1e300, 10**400, [], {}])
def test_a_number_that_cannot_be_is_named(value: object) -> None:
    line = {**EXAMPLES[1].to_json(), "wall": value}
    with pytest.raises(ValueError, match=r"^a record of kind step cannot be read: wall: "):
        read(line)


PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path

from prometheus_client import generate_latest

from dashboards import time
from horizonml.api.history import read_run
from horizonml.report.records import load_run
from horizonml.report.section import number_rows
from horizonml.report.summary import summarise
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.progress import Silent
from horizonml.telemetry.record import StepRecord
from horizonml.telemetry.recorder import Recorder
from horizonml.telemetry.sinks import scalars
from horizonml.telemetry.table import document
from tests.unit.test_metrics import INFO, STEP

folder, metrics = Path(sys.argv[1]), Metrics(3)
recorder = Recorder(folder / "rank-3.jsonl", Silent(), INFO, 0, metrics)
for number in (1, 2, 3):
    recorder.step(replace(STEP, heat=number / 2), number, 1, 64, 0.1)
recorder.close("complete")
run = load_run("x", folder)
step = run.lead.steps[-1]
summary = summarise(run)
print(json.dumps({
    "record": step.heat, "scalar": scalars(step)["time/heat"], "history": read_run(folder)[1].column("heat"),
    "metric": "horizonml_heat 1.5" in generate_latest(metrics.registry).decode().replace('{rank="3"}', ""),
    "page": "`horizonml_heat`" in document(), "row": summary.to_json()["heat"],
    "table": [row for row in number_rows({"x": summary}) if row[0] == "heat, median"],
    "panel": [panel.title for panel in time.PANELS if "horizonml_heat" in str(panel.queries)],
}))
"""


def test_a_number_is_added_by_declaring_and_measuring_it(tmp_path: Path) -> None:
    """What docs/extending.md promises: it is declared in one file, and measured in the engine; nothing else changes."""
    shutil.copytree(ROOT / "horizonml", tmp_path / "horizonml", ignore=shutil.ignore_patterns("__pycache__"))
    clock, record = (tmp_path / "horizonml" / name for name in ("engine/clock.py", "telemetry/record.py"))
    measured, declared = clock.read_text(), record.read_text()
    row = (
        '    "heat": Shown("time/heat", gauge("heat", "How hot it is."), column="heat, median", '
        'panel=PanelSpec("Heat", "How hot is it?", "celsius")),\n'
    )
    for text, path, before, new in (
        (measured, clock, "    local_steps: int | None = None", "    heat: float | None = None\n"),
        (declared, record, "    local_steps: Count | None = None", "    heat: float | None = None\n"),
    ):
        assert text.count(before) == 1
        path.write_text(text.replace(before, new + before))
    assert declared.count("_OF_STEP = {\n") == 1
    record.write_text(record.read_text().replace("_OF_STEP = {\n", "_OF_STEP = {\n" + row))
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / "scripts", ROOT)))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "record": 1.5, "scalar": 1.5, "history": [0.5, 1.0, 1.5], "metric": True, "page": True, "row": 1.0,
        "table": [["heat, median", "1"]], "panel": ["Heat"],
    }  # fmt: skip
