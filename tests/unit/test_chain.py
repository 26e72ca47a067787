from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from horizonml.errors import ModelError
from horizonml.models.cutting import Chain
from horizonml.models.spec import ModelSpec
from horizonml.models.weights import materialise, record
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec
from tests import models
from tests.chains import compare_with_model
from tests.unit.test_families import small_densenet, small_vit


class MixesRows(nn.Sequential):
    """Computes with the number of rows, in ways that are the same for one row and for two."""

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self[0](value.flatten(1))
        found = found.roll(found.size(0) // 4, 0) * (1 + value.shape[0] // 12)
        few = found[: 1 + found.shape[0] // 8]
        return self[2](self[1](found) - few.mean(0, keepdim=True))


def test_what_is_computed_from_the_number_of_rows_is_computed_for_every_batch() -> None:
    for rows in (2, 13):
        original = MixesRows(nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10))
        chain = Chain(original, InputSpec.of((1, 8, 8)))
        assert len(chain) > 2
        compare_with_model(original, chain, (torch.randn(rows, 1, 8, 8),))


def test_slices_of_any_width_are_the_same_function() -> None:
    model = build(ModelSpec(), 3, 10, InputSpec.of((1, 8, 8)))
    images = torch.randn(4, 1, 8, 8)
    whole = model.stage(0, len(model.chain)).eval()(images)
    for cuts in ([5], [1, 2, 3], [4, 9, 14]):
        value = images
        for start, stop in zip([0, *cuts], [*cuts, len(model.chain)], strict=True):
            value = model.stage(start, stop).eval()(value)
        torch.testing.assert_close(value, whole, rtol=0, atol=0)


def test_modules_that_cannot_be_traced_or_frozen_become_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), models.BranchesOnMode(), models.BranchesOnValue(), nn.Linear(4, 4))
    chain = Chain(model, InputSpec.of((4,)))
    assert len(chain) == 4
    value = torch.randn(3, 4)
    stage = chain.slice(0, 4)
    torch.testing.assert_close(stage.eval()(value), model.eval()(value))
    stage.train()
    assert not torch.equal(stage(value), stage(value))  # the dropout is alive


def test_no_cut_where_two_tensors_live_or_a_weight_is_shared_or_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU())
    assert len(Chain(model, InputSpec.of((4,)))) == 3
    assert Chain(models.TwoTensors(), InputSpec.of((8,))).names == ["add", "out"]
    chain = Chain(models.Tied(), InputSpec.of((8,)))
    assert chain.names[-1] == "after"
    assert len(chain) == 2


def test_models_that_cannot_be_chains_are_refused() -> None:
    value = r"cannot be cut into layers: .*models\.py:\d+: it reads a value back from a tensor as a length, by 'len'"
    cases: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
        (models.two_outputs, (8,), "must return the results of operations"),
        (models.BranchesOnMode, (8,), "depends on train/eval mode"),
        (models.BranchesOnValue, (8,), value),
        (models.plain, (3, 8, 8), r"does not accept inputs of shape \[3, 8, 8\]"),
    ]
    for constructor, shape, words in cases:
        with pytest.raises(ModelError, match=words):
            Chain(constructor(), InputSpec.of(shape))


def test_wrong_models_are_named() -> None:
    cases: list[tuple[str, dict[str, object], str]] = [
        ("tests.models:not_a_model", {}, "returned an object of type dict, not a torch.nn.Module"),
        ("resnet18", {"with": 3}, "cannot be built with options"),
        ("resnet18", {"num_classes": 7}, r"returns \[7\] values per sample, but the data needs 10"),
        ("tests.models:MakesABufferLater", {}, r"makes 0\.seen when it is first called; make it in the"),
        ("tests.models:MakesAModuleLater", {}, "makes head when it is first called; make it in the"),
        ("tests.models:broken", {}, r"model tests\.models:broken cannot be built: no such device$"),
    ]
    for name, options, words in cases:
        with pytest.raises(ModelError, match=words):
            build(ModelSpec(name=name, options=options), 0, 10, InputSpec.of((3, 32, 32)))


# Initial values --------------------------------------------------------------------------------------------------


def test_recording_allocates_nothing_and_replay_makes_the_values() -> None:
    model, tape = record(models.OddConstructor)
    assert [name for name, p in model.named_parameters() if p.device.type != "meta"] == ["given"]  # torch.tensor's
    model = materialise(model, tape, 0, {})
    assert isinstance(model, models.OddConstructor)
    assert model.given.tolist() == [1, 2, 3, 4]
    assert model.scaled.flatten().tolist() == pytest.approx([1e-6] * 4)
    assert model.counted.tolist() == [0, 2, 4, 6]
    assert model.linear.bias.tolist() == [5, 7, 7, 7]
    assert model.rates == [0, 0.5, 1]
    torch.testing.assert_close(model.linear.weight @ model.linear.weight.T, torch.eye(4))
    assert 0 < float(model.cut.detach().abs().max()) < 0.1


@pytest.mark.parametrize("constructor", [small_densenet, small_vit])
def test_initial_values_are_distributed_as_the_model_wants(constructor: Callable[..., nn.Module]) -> None:
    model = build(ModelSpec(name=f"tests.unit.test_families:{constructor.__name__}"), 0, 10, InputSpec.of((3, 32, 32)))
    made = model.stage(0, len(model.chain)).state_dict()
    real = constructor(num_classes=10).state_dict()
    assert set(made) == set(real)
    for key, value in real.items():
        assert made[key].shape == value.shape
        assert made[key].dtype == value.dtype
        if not value.is_floating_point() or float(value.float().std(correction=0)) == 0:
            torch.testing.assert_close(made[key], value)
        elif value.numel() >= 2000:
            assert float(made[key].std()) == pytest.approx(float(value.std()), rel=0.1), key


def test_initial_values_depend_on_seed_and_name_but_not_on_the_plan() -> None:
    def values(seed: int, cuts: list[int]) -> dict[str, torch.Tensor]:
        model = build(ModelSpec(), seed, 10, InputSpec.of((1, 8, 8)))
        stages = [model.stage(a, b) for a, b in zip([0, *cuts], [*cuts, len(model.chain)], strict=True)]
        return {key: value for stage in stages for key, value in stage.state_dict().items()}

    whole, cut, other = values(1, []), values(1, [3, 7, 9]), values(2, [])
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert not torch.equal(whole["conv1a.weight"], other["conv1a.weight"])
    assert not torch.equal(whole["conv2b.weight"].flatten()[:9], whole["conv3b.weight"].flatten()[:9])


def test_a_constructor_that_reads_values_back_still_works(caplog: pytest.LogCaptureFixture) -> None:
    first = build(ModelSpec(name="tests.models:reads_back"), 5, 10, InputSpec.of((1, 8, 8))).stage(0, 3).state_dict()
    again = build(ModelSpec(name="tests.models:reads_back"), 5, 10, InputSpec.of((1, 8, 8))).stage(0, 3).state_dict()
    assert "builds the whole of tests.models:reads_back" in caplog.text
    assert all(torch.equal(first[key], again[key]) for key in first)
