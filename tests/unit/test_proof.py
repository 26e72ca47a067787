"""Models as their authors wrote them: what is proven, what is remembered of it, and the words for what cannot be."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from horizonml.data.choose import describe
from horizonml.errors import ModelError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.models.boundary import values_of
from horizonml.models.cutting import WholeModule
from horizonml.models.module_slice import ModuleSlice
from horizonml.models.proof import prove
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.runtime.agreement import model_for
from horizonml.runtime.checks import proven_cutting
from horizonml.tasks.task import InputSpec, WrongClass, check_classes

IMAGES = InputSpec.of((1, 8, 8))
NET = """
import torch
from torch import nn

GAPS = [float("nan"), torch.tensor([float("nan")])]  # which equal nothing, and do not change

def helper(value):
    return {body}

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)

    def forward(self, value):
        return self.head(helper(self.first(value.flatten(1))))
"""


class Complex(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, num_classes, dtype=torch.complex64))

    def forward(self, value: Tensor) -> Tensor:
        return (value.flatten(1).to(torch.complex64) @ self.weight).real


class OnMeta(nn.Sequential):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64, device="meta"), nn.Linear(64, num_classes))


def test_a_comparison_is_remembered_until_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also code beside the model's class: a helper that asks for the type of a tensor makes the graph another model."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    job = changed(Job(), {"model.name": "net_to_prove:Net", "parallel.strategy": "pipeline", "parallel.workers": 2})
    told: list[str] = []
    ways = []
    for body in (
        "value.relu() * (1 if type(value) is torch.Tensor else 1)",
        "value.relu() * (1 if type(value) is torch.Tensor else 1)",
        # Of another length, or Python would take the bytecode of a file that was written within the same second.
        "value.relu() * (2.0 if type(value) is torch.Tensor else 1)",
    ):
        (tmp_path / "net_to_prove.py").write_text(NET.format(body=body))
        monkeypatch.delitem(sys.modules, "net_to_prove", raising=False)
        info = describe(job.data)
        assert info is not None
        ways.append(proven_cutting(job, model_for(job, info), info, told.append).by)
    assert ways == ["any", "any", "modules"]
    assert len(list((tmp_path / "cache" / "cuts").iterdir())) == 2
    assert "its 2 layers compute what the model computes, on 8 training samples" in told[-1]
    assert len(told) < 3  # what was compared before is not compared again


def test_a_parameter_that_the_forward_never_uses_keeps_the_value_of_the_weights(tmp_path: Path) -> None:
    """In the model as a whole, and in the last layer of one that is cut, from which checkpoints are made."""
    name = "tests.awkward_models:LeavesParameterUnused"
    values = {key: torch.full_like(value, 0.25) for key, value in build_whole(name).state_dict().items()}
    save_file(values, tmp_path / "all.safetensors")
    spec = ModelSpec.model_validate({"name": name, "weights": str(tmp_path / "all.safetensors")})
    model = build(spec, 0, 10, IMAGES)
    last = len(model.chain) - 1
    for module in (model.stage(0, last + 1), model.stage(last, last + 1)):
        assert torch.equal(module.state_dict()["aside.weight"], values["aside.weight"])
    assert model.parameter_names["aside.weight"] == last


def build_whole(name: str) -> WholeModule:
    model = build(ModelSpec(name=name), 0, 10, IMAGES)
    whole = model.stage(0, len(model.chain))
    assert isinstance(whole, WholeModule)
    return whole


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(ModelError, match="parameter weight is complex; hold it as a real parameter"):
        build(ModelSpec(name="tests.unit.test_proof:Complex"), 0, 10, IMAGES)
    with pytest.raises(ModelError, match=r"1.* is constructed without a value; leave out device='meta'"):
        build_whole("tests.unit.test_proof:OnMeta")


def test_a_target_that_is_no_class_is_named_with_its_row() -> None:
    check_classes(torch.tensor([0, 9, 3]), 10)
    check_classes(torch.tensor([[0, -100], [1, 2]]), 3, ignored=-100)
    for wrong in (10, -1, -100):  # PyTorch would leave out -100 without a word
        with pytest.raises(WrongClass, match=f"has the class {wrong}, but classes are numbered from 0 to 9") as found:
            check_classes(torch.tensor([0, 1, wrong]), 10)
        assert found.value.row == 2


class MasksLargeBatches(nn.Module):
    """Uses in its last part what an earlier one returned, but not for the few samples of a comparison."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = Masked(), nn.Linear(8, 8)
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        found, mask = self.first(value.flatten(1))
        found = self.third(self.second(found))
        if len(value) > 4:
            found = found * mask
        return self.head(found)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 8)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        found = self.inner(value)
        return found, found > 0


class AddsWeightsForLargeBatches(MasksLargeBatches):
    """Uses in its last part a parameter of an earlier one, but not for the few samples of a comparison."""

    def forward(self, value: Tensor) -> Tensor:
        found, _ = self.first(value.flatten(1))
        found = self.third(self.second(found))
        return self.head(found + self.second.weight.sum() if len(value) > 4 else found)


@pytest.mark.parametrize("kind", [MasksLargeBatches, AddsWeightsForLargeBatches])
def test_what_has_not_travelled_to_a_part_is_never_used(kind: type[nn.Module]) -> None:
    model = build(ModelSpec(name=f"{__name__}:{kind.__name__}"), 0, 10, IMAGES)
    model = model.recut(prove(model, (torch.randn(2, 1, 8, 8),)))
    assert len(model.chain) >= 3
    parts = [model.stage(index, index + 1) for index in range(len(model.chain))]

    def run(samples: int) -> None:
        values: Any = (torch.randn(samples, 1, 8, 8),)
        for part in parts:
            values = values_of(part(*values))

    run(4)
    with pytest.raises(ModelError, match=r"forward hands a tensor to head that it did not use when the model was cut"):
        run(5)


class KeepsInitial(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)
        nn.init.orthogonal_(self.inner.weight)
        self.anchor = self.inner.weight.detach().clone()

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.inner(value.flatten(1))) + (self.inner.weight - self.anchor).square().sum()


def test_a_model_in_memory_has_the_values_of_its_parts() -> None:
    """So whatever else its author has made of initial values is made of these."""
    model = build(ModelSpec(name=f"{__name__}:KeepsInitial"), 3, 10, IMAGES)
    root, is_initial = model.make()
    assert is_initial
    assert isinstance(root, KeepsInitial)
    assert torch.equal(root.anchor, root.inner.weight)
    whole = dict(root.named_parameters())
    parts = [model.stage(index, index + 1, as_graph=True) for index in range(len(model.chain))]
    found = {name: value for part in parts for name, value in part.named_parameters()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_state_of_a_module_that_only_the_forward_imports_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("net_that_imports", "counts_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    counts = "def count():\n    import counts_of_mine\n    counts_of_mine.calls += 1\n    return counts_of_mine.calls"
    (tmp_path / "counts_of_mine.py").write_text("calls = 0\n")
    (tmp_path / "net_that_imports.py").write_text(NET.format(body="value.relu() * count()") + counts)
    importlib.import_module("counts_of_mine")
    model = build(ModelSpec(name="net_that_imports:Net"), 0, 10, IMAGES)
    cutting = prove(model, (torch.randn(2, 1, 8, 8),))
    assert cutting.by == "nothing"
    assert "changes counts_of_mine.calls, which stages in several processes do not share" in cutting.reason
    assert sys.modules["counts_of_mine"].calls == 0


COUNTS = """
import torch
from torch import nn

made, seen = [], []

class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, num_classes))
        made.append(len(made))
"""


@pytest.mark.parametrize("more", ["", "        float(self[1].weight.sum())", "        self.append(nn.LazyLinear(10))"])
def test_what_a_constructor_does_to_its_module_is_done_once_and_nothing_else_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net_that_counts", raising=False)
    monkeypatch.delenv("SET_LATER", raising=False)
    (tmp_path / "net_that_counts.py").write_text(COUNTS + more)
    model = build(ModelSpec(name="net_that_counts:Net"), 0, 10, IMAGES)
    module = sys.modules["net_that_counts"]
    assert module.made == [0]
    module.seen.append("a step")  # by a user's own callback, for example
    monkeypatch.setenv("SET_LATER", "1")
    for _ in range(2):
        model.stage(0, len(model.chain))
        assert (module.made, module.seen, os.environ["SET_LATER"]) == ([0], ["a step"], "1")


class ClampsByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        self.inner.weight.data.t()[:4].clamp_(-9, 9)  # which a comparison does not show, for they are never so large
        return self.inner(value)


class HasAClamp(nn.Sequential):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), ClampsByData(), nn.ReLU(), nn.Linear(8, num_classes))


def test_code_that_changes_a_parameter_behind_pytorchs_back_runs_as_it_is() -> None:
    model = build(ModelSpec(name=f"{__name__}:HasAClamp"), 0, 10, IMAGES)
    parts = [model.stage(index, index + 1) for index in range(len(model.chain))]
    assert len(parts) == 5
    assert [type(one) for part in parts for one in part.modules()].count(ClampsByData) == 1


def test_a_part_of_a_model_is_in_the_mode_that_the_models_own_train_chooses() -> None:
    model = build(ModelSpec(name="tests.awkward_models:KeepsItsOwnMode"), 0, 10, IMAGES)
    for number in range(len(model.chain)):
        part = model.stage(number, number + 1).train()
        assert isinstance(part, ModuleSlice)
        assert not part.horizonml_root.training
        assert all(inner.training for path, inner in part.named_modules() if path)
