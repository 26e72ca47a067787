"""Tasks by themselves, and models whose inputs are not images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from horizonml.data.tensors import TensorSpec
from horizonml.errors import JobError, ModelError
from horizonml.job.schema import Job
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.profiling.measure import measure
from horizonml.profiling.threads import try_threads
from horizonml.tasks.choose import channels_for
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec, OutputSpec
from tests.records import image_info
from tests.tasks import KINDS


def test_image_classification_sums_cross_entropy_and_hits() -> None:
    task, generator = Classification(label_smoothing=0.1), torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 3, generator=generator), torch.arange(7) % 3
    each = functional.cross_entropy(logits, labels, reduction="none")
    smoothed = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(task.loss(logits, labels, training=False), each.sum())
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
