"""A task of the user's own, by `module:Class`: found, checked, and refused with a sentence for what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from horizonml.errors import DataError, JobError
from horizonml.job.jobfile import parse
from horizonml.tasks.choose import task_for
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import check_results
from tests.records import image_info

HEAD = "import torch\nfrom horizonml.tasks.task import BySample, OutputSpec\n\n\n"
MARGIN = """
class Margin(BySample):
    metrics = ("accuracy",)

    def __init__(self, margin=1.0):
        self.margin = margin

    def loss(self, outputs, targets, training):
        return torch.nn.functional.multi_margin_loss(outputs, targets, margin=self.margin, reduction="sum")

    def judge(self, outputs, targets):
        return (outputs.argmax(1) == targets).sum(dtype=torch.float64).reshape(1)

    def outputs(self, info):
        return OutputSpec.vector(info.outputs)
"""


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, options: str = "{}") -> Any:
    """The task that a job names, of a module with this text in the working directory."""
    (folder / f"{name}.py").write_text(HEAD + text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    job = parse(f"task: {{name: '{name}:Margin', options: {options}}}", "job")
    return task_for(job, image_info(10, (1, 8, 8), 100, 20))


def test_a_class_of_the_users_own_is_made_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = chosen(tmp_path, monkeypatch, "margin_whole", MARGIN, "{margin: 2.0}")
    assert (task.margin, task.unit, task.units_per_sample) == (2.0, "samples", 1)
    check_results(task, torch.ones((), requires_grad=True), torch.zeros(1, dtype=torch.float64), True)


def test_what_a_class_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = "class Margin:\n    def loss(self, outputs, targets, training): ...\n"
    for number, (text, options, says) in enumerate((
        ("Margin = 3\n", "{}", r"task\.name: margin_0:Margin is not a class; .*Task describes the interface"),
        (half, "{}", r"margin_1:Margin has no method 'judge' and no method 'units' and no method 'report'"),
        (MARGIN, "{margins: 2}", r"task\.options: margin_2:Margin cannot be made with .*unexpected keyword"),
        (MARGIN.replace('("accuracy",)', '"accuracy"'), "{}", r"'metrics' of margin_3:Margin is 'accuracy', not a"),
        (MARGIN.replace("metrics =", "metric ="), "{}", r"task\.name: margin_4:Margin has no 'metrics': a tuple of"),
        (MARGIN + "    units_per_sample = 0\n", "{}", r"'units_per_sample' of margin_5:Margin is 0, not an integer"),
        ("raise OSError('no licence')", "{}", r"importing margin_6 failed: .*margin_6\.py:5: OSError: no licence"),
    )):  # fmt: skip
        with pytest.raises(JobError, match=says):
            chosen(tmp_path, monkeypatch, f"margin_{number}", text, options)


def test_results_of_the_wrong_kind_are_told() -> None:
    good, sums = torch.ones((), requires_grad=True), torch.zeros(1).double()
    for loss, judged, says in (
        (torch.ones(3), sums, r"Classification\.loss returned a float32 tensor of shape \[3\]; ret"),
        (2.0, sums, r"Classification\.loss returned a float; return the sum"),
        (torch.ones(()), sums, r"does not depend on the model's outputs"),
        (good, torch.zeros(2).double(), r"judge returned a float64 tensor of shape \[2\]"),
        (good, torch.zeros(1), r"judge returned a float32 .* \(accuracy\), a float64 ten"),
        (good, [1.0], r"judge returned a list; return the sum of each of the 1 metrics"),
    ):
        with pytest.raises(JobError, match=says):
            check_results(Classification(), loss, judged, True)


def test_samples_are_counted_in_any_tree_of_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = chosen(tmp_path, monkeypatch, "margins", MARGIN)
    assert task.units({"boxes": [torch.zeros(7, 4), {"more": torch.zeros(7)}], "count": torch.zeros(7)}) == 7
    assert task.units(torch.zeros(5, 2)) == 5
    with pytest.raises(DataError, match="the targets have no tensor"):
        task.units({"boxes": []})
