"""Tasks by themselves, and models whose inputs are not images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.choose import agree
from horizonml.data.choose import describe as describe_data
from horizonml.data.choose import load as load_data
from horizonml.data.dataset import Data, DataInfo, Tree
from horizonml.data.needs import loads_ahead
from horizonml.data.own import Opened, describe_opened, load_opened
from horizonml.data.spec import SOURCES, DataSource, DataSpec
from horizonml.data.tensors import TensorSpec
from horizonml.errors import DataError, JobError, ModelError
from horizonml.job.foreign import places
from horizonml.job.schema import Job
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.profiling.measure import measure
from horizonml.profiling.threads import try_threads
from horizonml.runtime.lobby.offer import needed
from horizonml.tasks.choose import channels_for, task_for
from horizonml.tasks.classification import Classification
from horizonml.tasks.spec import TASKS
from horizonml.tasks.task import BySample, InputSpec, OutputSpec
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


class LogCosh(BySample):
    """A task as an extension adds it: the logarithm of the hyperbolic cosine of the errors."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def outputs(self, info: DataInfo) -> OutputSpec:
        return OutputSpec.vector(1)

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        assert isinstance(outputs, Tensor)
        assert isinstance(targets, Tensor)
        return (outputs - targets).cosh().log().sum()

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)


class Waves:
    """A map-style data set of what a source reads from a file."""

    task = "log_cosh"

    def __init__(self, text: str) -> None:
        self._values = [float(line) for line in text.splitlines()]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([self._values[index]])
        return value, value.sin()


def describe(spec: DataSpec, channels: int | None, encoding: Mapping[str, Any] | None) -> DataInfo | None:
    return describe_opened(spec, open_waves)


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    return load_opened(spec, info, open_waves, inputs, targets)


def open_waves(spec: DataSpec) -> Opened:
    assert spec.path is not None
    return Opened(Waves(Path(spec.path).read_text()), None, "waves")


def test_a_row_each_adds_a_source_of_data_and_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "waves", DataSource(__name__, "columns", "path", needs_place=True, decodes=True))
    monkeypatch.setitem(TASKS, "log_cosh", f"{__name__}:LogCosh")
    with pytest.raises(ValueError, match="path: say where the waves data lies"):
        DataSpec(name="waves", targets=["y"])
    file = tmp_path / "waves.txt"
    spec = DataSpec(name="waves", path=str(file), targets=["y"])
    job = Job(data=spec)
    assert describe_data(spec) is None
    assert [place.path for place in [needed(job)] if place is not None] == [file]
    assert "data.path" in {place.field for place in places(job)}
    with pytest.raises(DataError, match=re.escape(f"data.path: {file} does not exist on any rank")):
        agree([None], spec)
    file.write_text("\n".join(map(str, range(10))))
    info = describe_data(spec)
    assert info is not None
    assert (info.train, info.held_out, info.task) == (8, 2, "log_cosh")
    assert loads_ahead(spec)
    data = load_data(spec, info, tmp_path)
    every = torch.arange(8)
    inputs, targets = data.train.inputs(every), data.train.targets(every)
    torch.testing.assert_close(inputs.sin(), targets)
    task = task_for(job, info)
    assert isinstance(task, LogCosh)
    assert float(task.loss(targets, targets, training=True)) == 0
