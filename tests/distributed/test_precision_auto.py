"""With `precision: auto`, layers run in bf16 only after a warm-up has shown that accuracy does not suffer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from horizonml.comm.group import Group
from horizonml.job.jobfile import parse
from horizonml.plan.plan import Execution
from horizonml.profiling.execution import _key, _rows, modes_for
from horizonml.profiling.kept import path_of
from horizonml.runtime.agreement import describe_together
from horizonml.telemetry.log import read_lines
from tests.distributed.processes import horizonml

JOB = """
name: test
epochs: 150
batch_size: 16
model: {name: "tests.models:wide"}
data: {name: digits, samples: 300}
optimizer: {name: sgd, lr: 0.02, momentum: 0.9}
lr_schedule: {name: constant}
evaluate: {every_steps: 20}
early_stop: {patience: 1, min_delta: 100}
memory_format: contiguous
parallel: {strategy: pipeline, workers: 2, threads: 1}
"""


def remember(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write into the cache that all layers run fastest in bf16 here, as a trial of this device would."""
    job = parse(JOB + "precision: auto", "job.yaml")
    _, model = describe_together(job, Group(None, 0, 1, 30.0))
    before = torch.get_num_threads()
    monkeypatch.setenv("HORIZONML_CACHE", str(cache))
    torch.set_num_threads(1)
    try:
        path = path_of("executions", _key(job, model, modes_for("contiguous", "auto", model), _rows(job, 2)))
    finally:
        torch.set_num_threads(before)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"execution": asdict(Execution(precision="bf16")), "seconds": [1.0, 2.0]}))


def run(folder: Path, name: str, *settings: str) -> tuple[str, dict[str, Any], list[float]]:
    """Train; return the output, what is planned, and the losses of the first steps."""
    (folder / "own.yaml").write_text(JOB)
    pairs = [part for setting in (f"folder={folder / name}", *settings) for part in ("--set", setting)]
    done = horizonml(folder, "train", "own.yaml", *pairs, HORIZONML_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line["loss"]) for line in read_lines(folder / name / "rank-0.jsonl") if line["kind"] == "step"]
    return done.stdout, json.loads((folder / name / "planning.json").read_text()), losses[:5]


@pytest.mark.slow
def test_bf16_is_used_from_the_verdict_on_and_not_where_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(folder / "cache", monkeypatch)
    said, planning, narrow = run(folder, "auto", "precision=auto")
    assert "what this costs in accuracy: layers are computed in bf16" in said
    assert "layers are computed in bf16; on a warm-up of 26 steps held-out accuracy was " in said
    assert "layers are computed in bf16; on a warm-up" in str(planning["reasons"])
    assert planning["problem"]["profiles"][0]["execution"]["precision"] == "fp32"  # measured before it

    said, _, exact = run(folder, "short", "precision=auto", "steps=5")
    assert "precision: auto: layers are computed in fp32, as a run of 5 steps is too short to try it" in said
    assert "warm-up" not in said
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.05)
