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


@pytest.mark.parametrize(
    ("number", "text", "options", "says"),
    [
        (0, MARGIN.replace("Margin", "Margins"), "{}", r"task\.name: .*margin_0\.py has no 'Margin'.*did you mean 'M"),
        (1, "Margin = 3\n", "{}", r"task\.name: margin_1:Margin is not a class; .*Task describes the interface"),
        (
            2,
            "class Margin:\n    def loss(self, outputs, targets, training): ...\n",
            "{}",
            r"task\.name: margin_2:Margin has no method 'judge' and no method 'units' and no method 'report'",
        ),
        (3, MARGIN, "{margins: 2}", r"task\.options: margin_3:Margin cannot be made with .*unexpected keyword"),
        (4, MARGIN.replace('("accuracy",)', '"accuracy"'), "{}", r"'metrics' of margin_4:Margin is 'accuracy', not a"),
        (5, MARGIN.replace("metrics =", "metric ="), "{}", r"task\.name: margin_5:Margin has no 'metrics': a tuple of"),
        (6, MARGIN + "    units_per_sample = 0\n", "{}", r"'units_per_sample' of margin_6:Margin is 0, not an integer"),
        (7, "raise OSError('no licence')", "{}", r"importing margin_7 failed: .*margin_7\.py:5: OSError: no licence"),
    ],
)
def test_what_a_class_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str, options: str, says: str
) -> None:
    with pytest.raises(JobError, match=says):
        chosen(tmp_path, monkeypatch, f"margin_{number}", text, options)


@pytest.mark.parametrize(
    ("loss", "sums", "says"),
    [
        (torch.ones(3), torch.zeros(1).double(), r"Classification\.loss returned a float32 tensor of shape \[3\]; ret"),
        (2.0, torch.zeros(1).double(), r"Classification\.loss returned a float; return the sum"),
        (torch.ones(()), torch.zeros(1).double(), r"does not depend on the model's outputs"),
        (
            torch.ones((), requires_grad=True),
            torch.zeros(2).double(),
            r"judge returned a float64 tensor of shape \[2\]",
        ),
        (
            torch.ones((), requires_grad=True),
            torch.zeros(1),
            r"judge returned a float32 .* \(accuracy\), a float64 ten",
        ),
        (torch.ones((), requires_grad=True), [1.0], r"judge returned a list; return the sum of each of the 1 metrics"),
    ],
)
def test_results_of_the_wrong_kind_are_told(loss: Any, sums: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        check_results(Classification(), loss, sums, True)


def test_samples_are_counted_in_any_tree_of_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = chosen(tmp_path, monkeypatch, "margins", MARGIN)
    assert task.units({"boxes": [torch.zeros(7, 4), {"more": torch.zeros(7)}], "count": torch.zeros(7)}) == 7
    assert task.units(torch.zeros(5, 2)) == 5
    with pytest.raises(DataError, match="the targets have no tensor"):
        task.units({"boxes": []})
