"""Frozen parameters: which they are, what BatchNorm does beside them, and what the planner makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from horizonml.errors import ModelError
from horizonml.models.spec import ModelSpec
from horizonml.models.tuning import selected
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.devices import read_profile, write_profile
from horizonml.planner.evaluator import Evaluator, judge
from horizonml.planner.explain import explain
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.simulate import predict
from horizonml.profiling.measure import measure
from horizonml.tasks.task import InputSpec

SHAPE = (1, 8, 8)
BODY = ["[0-8].*"]  # of tests.models:backbone


def model(*freeze: str, name: str = "backbone") -> Model:
    return build(ModelSpec(name=f"tests.models:{name}", freeze=list(freeze)), 0, 10, InputSpec.of(SHAPE))


def trained(made: Model) -> list[str]:
    stage = made.stage(0, len(made.chain))
    return [name for name, parameter in stage.named_parameters() if parameter.requires_grad]


HEAD = ["9.weight", "9.bias", "13.weight", "13.bias"]


def test_globs_choose_what_is_frozen_later_ones_first_and_a_module_stands_for_what_is_in_it() -> None:
    assert selected(["*", "!fc.*", "fc.bias"], "fc.bias")
    assert selected(["layer1"], "layer1.0.weight")
    assert not selected(["layer1"], "layer10.weight")
    for patterns in (BODY, ["!9", "!13.*"], ["*", "!9.*", "!13.*"]):
        assert trained(model(*patterns)) == HEAD


def test_mistakes_are_told_with_the_nearest_name() -> None:
    with pytest.raises(
        ModelError, match=r"model.freeze: '113.wieght' matches no parameter; did you mean '13.weight'\?"
    ):
        model("113.wieght")
    with pytest.raises(ModelError, match=r"model.freeze: every parameter is frozen; exclude those to train"):
        model("*")
    with pytest.raises(ValidationError, match="lora freezes everything but its adapters already"):
        ModelSpec.model_validate({"freeze": ["a"], "lora": {"targets": ["b"]}})


def test_batchnorm_of_a_frozen_part_keeps_its_statistics_and_others_do_not() -> None:
    made = model("[0-5].*")
    assert {name for name in made.frozen if "running" in name} == {
        f"{number}.running_{kind}" for number in (1, 4) for kind in ("mean", "var")
    }
    stage = made.stage(0, len(made.chain)).train()
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    stage(torch.randn(6, *SHAPE))
    changed = {name for name, buffer in stage.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"7.running_mean", "7.running_var", "7.num_batches_tracked"}
    # Only the parameters are frozen: the statistics belong to what is trained.
    assert not {name for name in model("1.weight", "1.bias").frozen if "running" in name}


@pytest.mark.parametrize(
    ("name", "freeze", "first"), [("backbone", BODY[0], "9.weight"), ("Stubborn", "blocks.[0-2].*", "blocks.3.weight")]
)
def test_no_gradient_crosses_a_cut_before_what_is_trained(name: str, freeze: str, first: str) -> None:
    """In a model that is traced, and in one that is cut by its modules."""
    made = model(freeze, name=name)
    crossing = [bool(boundary.gradients.tensors) for boundary in made.chain.boundaries[1:-1]]
    trained_first = made.parameter_names[first]
    assert 0 < trained_first < len(made.chain) - 1
    assert crossing == [layer > trained_first for layer in range(1, len(made.chain))]


def test_the_profile_of_a_frozen_part_has_no_gradients_and_no_backward_pass() -> None:
    torch.set_num_threads(1)
    made = model(*BODY)
    profile = measure(made, (4,))
    first = made.parameter_names["9.weight"]
    for number, layer in enumerate(profile.layers):
        frozen = number < first
        assert (layer.trained == 0 and layer.backward == (0.0,) and layer.saved_bytes == 0) == frozen
        assert layer.returns_gradients == (number >= first)
    assert sum(layer.trained for layer in profile.layers) == 4 * (16 * 16 * 9 + 16 + 64 * 10 + 10)
    assert profile.update_seconds_per_byte > 0


def problem(frozen: int, ranks: int = 2) -> Problem:
    """Four layers of 1 MiB with outputs of 1 KiB, of which the first few are frozen."""
    layers = tuple(
        LayerProfile(
            f"layer{number}",
            (1e-3, 1e-2),
            (0.0, 0.0) if number < frozen else (2e-3, 2e-2),
            1 << 20,
            0 if number < frozen else 2048,
            1024,
            0 if number < frozen else 1 << 20,
            0 if number < frozen else 1024,
        )
        for number in range(4)
    )
    profile = Profile("x", (1, 10), 1e-9, layers)
    hosts = [Host((rank,), 1.0, 1e9) for rank in range(ranks)]
    return Problem([profile] * ranks, hosts, Network(1e-4, 1e7), 20, optimizer_copies=2)


def test_the_planner_counts_what_is_trained_alone() -> None:
    pipeline = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 4, (1,), (1.0,))), micro_batches=2)
    every, half = (predict(problem(frozen), pipeline) for frozen in (0, 2))
    mib = 1 << 20
    assert every.memory[0] - every.memory[1] > 0  # the first stage holds more micro-batches
    assert half.memory[0] == 2 * mib  # the parameters, and nothing for training
    assert half.memory[1] == every.memory[1] == 2 * mib * 4 + 2 * 2048 * 10
    assert {(message.sender, message.receiver) for message in half.messages} == {(0, 1)}
    assert {(message.sender, message.receiver) for message in every.messages} == {(0, 1), (1, 0)}
    assert half.seconds < every.seconds


def test_a_plan_is_explained_with_the_gradients_that_travel() -> None:
    pipeline = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 4, (1,), (1.0,))), micro_batches=2)
    for frozen, back, cut in ((0, ", and back", "40.0 KiB"), (2, "", "20.0 KiB")):
        slow = replace(problem(frozen), network=Network(1e-4, 1e4))
        found = judge(slow, pipeline)
        told = [one.text for one in explain(Evaluator(slow), found, ["rank 0", "rank 1"])]
        assert f"stage 0 to 1 (20.0 KiB{back})" in told[0]
        assert f"between stages of this plan {cut} travel in all" in told[1]


def test_members_of_a_frozen_stage_sum_nothing() -> None:
    data_parallel = Plan((Stage(0, 2, (0, 1), (1.0, 1.0)), Stage(2, 4, (2,), (1.0,))), micro_batches=2)
    frozen = predict(problem(2, 3), data_parallel)
    half = predict(replace(problem(1, 3)), data_parallel)
    assert frozen.seconds < half.seconds - 2 * (1 << 20) / 2 / 1e7 / 2  # the ring of one layer's gradients takes this
    assert frozen.memory[0] == 2 << 20


def test_profiles_of_older_versions_are_read_and_new_ones_keep_what_is_trained(tmp_path: Path) -> None:
    new = problem(2).profiles[0]
    write_profile(new, {}, tmp_path / "new.yaml")
    names = [layer.name for layer in new.layers]
    assert read_profile(tmp_path / "new.yaml", names) == new
    assert Profile.from_json(new.to_json()) == new
    lines = (tmp_path / "new.yaml").read_text().splitlines(keepends=True)
    old = [line for line in lines if "trained_bytes" not in line and "gradient_bytes" not in line]
    (tmp_path / "old.yaml").write_text("".join(old))
    found = read_profile(tmp_path / "old.yaml", names)
    assert [(layer.trained, layer.gradients) for layer in found.layers] == [(1 << 20, 1024)] * 4
