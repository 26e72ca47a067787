"""The one declaration of what is recorded: what is written is read back, and a number needs to be declared once."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from horizonml.machine.host import MachineInfo
from horizonml.telemetry.log import read_records
from horizonml.telemetry.record import (
    RECORDS,
    SHOWN,
    AloneRecord,
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
    AloneRecord(8.0, 900.0, [500.0, None], ["pi", "nano"]),
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


def test_a_number_that_cannot_be_is_named() -> None:
    wrong: tuple[object, ...] = ("x", None, -1, float("nan"), float("inf"), 1e300, 10**400, [], {})
    for value in wrong:
        with pytest.raises(ValueError, match=r"^a record of kind step cannot be read: wall: "):
            read({**EXAMPLES[1].to_json(), "wall": value})
