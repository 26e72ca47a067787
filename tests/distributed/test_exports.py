"""What comes out of a real run: scalars while it trains, and a model that other software runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horizonml.telemetry.log import read_lines
from tests.distributed.processes import horizonml


def test_a_run_is_shown_while_it_trains_and_its_model_is_exported(folder: Path) -> None:
    options = ["--set", "parallel.strategy=pipeline", "--set", "telemetry.tensorboard=true", "--workers", "2"]
    trained = horizonml(folder, "train", "job.yaml", *options)
    assert trained.returncode == 0, trained.stderr
    run = folder / "runs" / "test"
    records = list(read_lines(run / "rank-0.jsonl"))
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for kind, name, tag in (("step", "loss", "train/loss"), ("evaluation", "accuracy", "held_out/accuracy")):
        recorded = [(line["step"], line[name]) for line in records if line["kind"] == kind]
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in shown] == [step for step, _ in recorded]
        assert [value for _, value in shown] == pytest.approx([value for _, value in recorded], rel=1e-6)

    exported = horizonml(folder, "export", "runs/test", "model.onnx")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith("verified: 16 held-out samples of digits: largest difference ")
    card = (folder / "model.onnx.md").read_text()
    assert "digits, 300 training and 359 held-out samples" in card
    assert "- stage 1: rank 1: layer" in card
    assert "| 1 | " in card
