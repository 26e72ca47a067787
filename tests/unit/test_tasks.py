"""Tasks: what they sum and report, those of the user's own, and models of any input."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.errors import DataError, JobError, ModelError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.profiling.execution import try_threads
from horizonml.profiling.measure import measure
from horizonml.tasks.choose import channels_for, task_for
from horizonml.tasks.classification import Classification
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.regression import Regression
from horizonml.tasks.segmentation import Segmentation
from horizonml.tasks.task import InputSpec, OutputSpec, Task, check_results
from tests.builtin import BUILT_IN, CLASSES, BuiltIn
from tests.records import image_info
from tests.tasks import KINDS


def test_image_classification_sums_cross_entropy_and_hits() -> None:
    task, generator = Classification(label_smoothing=0.1), torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 3, generator=generator), torch.arange(7) % 3
    smoothed = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(task.loss(logits, labels, training=True), smoothed.sum())
    assert task.judge(logits, labels).tolist() == [float((logits.argmax(1) == labels).sum())]
    assert task.judge(logits, labels).dtype == torch.float64


def test_classification_says_what_a_model_must_take_and_return_and_needs_classes() -> None:
    task, info = Classification(), image_info(7, (3, 20, 20), 10, 2)
    assert (task.input(info).tensors, task.outputs(info)) == ((TensorSpec((3, 20, 20)),), OutputSpec.vector(7))
    for target in (TensorSpec(()), TensorSpec((2,), torch.int64)):
        with pytest.raises(JobError, match=r"task\.name: classification needs a class .* choose regression or multi_l"):
            task.outputs(replace(info, target=target))


def test_a_model_that_does_not_accept_its_input_is_told_with_the_tasks_advice() -> None:
    info = image_info(10, (3, 8, 8), 10, 2)
    with pytest.raises(ModelError, match=r"inputs of shape \[3, 8, 8\].*or set data.image_size to a size"):
        build(ModelSpec(name="tests.models:plain"), 0, 10, Classification().input(info))
    with pytest.raises(ModelError, match=r"does not accept inputs of shape \[4\] .*[^ ]$"):
        build(ModelSpec(name="tests.tasks:perceptron"), 0, 2, InputSpec.of((4,)))
    with pytest.raises(ModelError, match=r"digits_cnn takes inputs of shape .* inputs of shape \[6\]; choose another"):
        build(ModelSpec(name="digits_cnn"), 0, 10, InputSpec.of((6,), torch.int64))


@pytest.mark.parametrize("name", KINDS)
def test_models_of_any_input_are_cut_and_measured(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    assert len(model.chain) == 5
    assert model.chain.boundaries[0].tensors == kind.input.tensors
    assert [layer.name for layer in measure(model, (2, 4)).layers] == model.chain.names
    assert set(try_threads(model, 4, 1)) == {1}


def test_models_for_colour_get_three_channels() -> None:
    for model, channels in (("resnet18", 3), ("digits_cnn", None), ("tests.models:plain", None)):
        assert channels_for(Job.model_validate({"model": {"name": model}})) == channels


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


SPLITS = ([40], [1, 39], [13, 0, 20, 7])  # the rows of several ranks, one of which has none


def reported(task: Task, outputs: Tensor, targets: Tensor, sizes: list[int]) -> tuple[float, dict[str, float]]:
    """The loss and the metrics of a batch whose rows are judged in parts."""
    loss, units, sums = 0.0, 0, torch.zeros(len(task.metrics), dtype=torch.float64)
    for part, truth in zip(outputs.split(sizes), targets.split(sizes), strict=True):
        if len(part):
            loss += float(task.loss(part, truth, training=False))
            units += task.units(truth)
            sums += task.judge(part, truth)
    means = dict(zip(task.metrics, (sums / units).tolist(), strict=True))
    return loss / units, task.report(loss / units, means)


def outputs_of(one: BuiltIn, spread: float) -> tuple[Tensor, Tensor]:
    """Outputs of an untrained model, made so large that some are sure and wrong, and the targets."""
    samples, built = one.samples(40), one.model()
    with torch.no_grad():
        outputs = built.stage(0, len(built.chain)).eval()(samples.whole) * spread
    assert isinstance(samples.truth, Tensor)
    return outputs, samples.truth


@pytest.mark.parametrize("name", BUILT_IN)
def test_sums_over_rows_report_what_torchmetrics_computes(name: str) -> None:
    one = BUILT_IN[name]
    for spread in (0.5, 20.0):
        outputs, targets = outputs_of(one, spread)
        for sizes in SPLITS:
            loss, metrics = reported(one.task, outputs, targets, sizes)
            assert loss == pytest.approx(float(one.loss(outputs, targets)), rel=1e-5)
            assert metrics == pytest.approx(one.measured(outputs, targets), rel=1e-5)
            assert len(set(metrics.values()) - {0.0, 1.0}) >= min(2, len(metrics))  # they say something


def test_an_ignored_class_within_the_classes_has_no_share_in_the_mean() -> None:
    outputs, targets = outputs_of(BUILT_IN["segmentation"], 5.0)
    targets = torch.where(targets == 255, 1, targets)
    outputs[:, 1, :2] += 1000  # some pixels of other classes are taken for it
    import_torchvision()  # which torchmetrics imports without the precautions
    jaccard_index = importlib.import_module("torchmetrics.functional").jaccard_index
    _, metrics = reported(Segmentation(CLASSES, 1), outputs, targets, [40])
    expected = jaccard_index(outputs, targets, "multiclass", num_classes=CLASSES, ignore_index=1)
    assert metrics["mean_iou"] == pytest.approx(float(expected), rel=1e-5)


def test_regression_by_any_loss_takes_single_values_too() -> None:
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([1.5, 1.0])
    for kind, loss in (("mse", 9.25), ("mae", 3.5), ("huber", 0.125 + 2.5)):
        assert float(Regression(kind).loss(outputs, targets, True)) == pytest.approx(loss)  # type: ignore[arg-type]


def test_targets_of_the_wrong_shape_are_refused_with_the_reason() -> None:
    info = DataInfo(8, 2, (TensorSpec((5,)),), (), 3, TensorSpec((), torch.int64))
    for task, needs in ((Segmentation, r"\[height, width\]"), (LanguageModel, r"\[positions\]")):
        with pytest.raises(DataError, match=f"needs targets of shape {needs}"):
            task.of(info)  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"task\.options\.kind: 'cubic' is not one of mse, mae, huber"):
        Regression("cubic")  # type: ignore[arg-type]


def test_a_batch_without_any_unit_counts_nothing() -> None:
    task = LanguageModel(3, padded=True)
    targets = torch.full((2, 3), -100)
    assert task.units(targets) == 0
    assert float(task.loss(torch.randn(2, 3, 5), targets, True)) == 0
    assert task.judge(torch.randn(2, 3, 5), targets).tolist() == [0.0]
    assert Classification().units(torch.zeros(4)) == 4
