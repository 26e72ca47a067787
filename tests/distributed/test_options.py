"""Options of a training as a user gives them: several seeds, and a task of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import command
from tests.distributed.processes import horizonml

JOB = """
name: test
epochs: 2
batch_size: 32
data: {name: digits, samples: 100}
parallel: {strategy: single}
"""
TASK = '''
import torch
from horizonml.tasks.task import BySample, OutputSpec


class Margin(BySample):
    """Classification by a margin."""

    metrics = ("accuracy", "margin")

    def __init__(self, margin=1.0):
        self.margin = margin

    def loss(self, outputs, targets, training):
        return torch.nn.functional.multi_margin_loss(outputs, targets, margin=self.margin, reduction="sum")

    def judge(self, outputs, targets):
        best = outputs.topk(2).values
        hits = outputs.argmax(1) == targets
        return torch.stack([hits.sum(dtype=torch.float64), (best[:, 0] - best[:, 1]).sum(dtype=torch.float64)])

    def outputs(self, info):
        return OutputSpec.vector(info.outputs)
'''


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a small job and a task."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def last_losses(folder: Path) -> list[float]:
    found = []
    for seed in (0, 3):
        lines = map(json.loads, (folder / "runs" / "test" / f"seed-{seed}" / "rank-0.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if line["kind"] == "evaluation"][-1])
    return found


def test_several_seeds_are_trained_and_compared(here: Path) -> None:
    result = horizonml(here, "train", "job.yaml", "--seeds", "0,3")
    assert result.returncode == 0, result.stdout + result.stderr
    losses = last_losses(here)
    assert losses[0] != losses[1]
    content = json.loads((here / "runs" / "test" / "seeds.json").read_text())
    found = {row["metric"]: row for row in content["metrics"]}
    assert set(found) == {"held_out_loss", "held_out_accuracy"}
    assert found["held_out_loss"]["mean"] == pytest.approx(sum(losses) / 2)
    assert found["held_out_loss"]["deviation"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert f"{sum(losses) / 2:.4f}" in result.stdout
    assert "seed 3" in result.stdout


OWN = ("--set", "task={name: 'my_task:Margin', options: {margin: 0.5}}", "--set", "parallel.strategy=pipeline")


def test_a_task_of_ones_own_is_trained_from_a_job_file(here: Path) -> None:
    options = ("--set", "optimizer.clip_norm=0.5", "--set", "ema.decay=0.9", "--set", "evaluate.every_steps=4")
    kept = ("--set", "checkpoint={keep_best: held_out_margin, best_is: highest}")
    result = horizonml(here, "train", "job.yaml", *OWN, *options, *kept, "--workers", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the best checkpoint is that of step" in result.stdout
    lines = [json.loads(line) for line in (here / "runs" / "test" / "rank-1.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [4, 8]
    assert all({"accuracy", "margin"} <= line.keys() for line in evaluations)
    assert all(line["gradient_norm"] > 0 for line in lines if line["kind"] == "step")
    exported = command(here, "export", "--best", "--average", "runs/test", "model.pt")
    assert exported.returncode == 0, exported.stderr
    assert (here / "model.pt").exists()
