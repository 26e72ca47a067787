"""What tasks sum over rows, and report of the sums, equals what torchmetrics computes of the whole batch."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from horizonml.data.dataset import DataInfo
from horizonml.data.tensors import TensorSpec
from horizonml.errors import DataError, JobError
from horizonml.machine.torchvision import import_torchvision
from horizonml.tasks.classification import Classification
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.regression import Regression
from horizonml.tasks.segmentation import Segmentation
from horizonml.tasks.task import Task
from tests.builtin import BUILT_IN, CLASSES, BuiltIn

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
