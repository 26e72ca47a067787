"""How layers run: as data, in one process, and how it is chosen."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.execution import convert, memory_format, runs_for
from horizonml.job.schema import Job
from horizonml.machine import accelerator
from horizonml.machine.accelerator import Compute
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.execution import PLAIN, Execution, Executions, described, from_json, runs, to_json, without_bf16
from horizonml.planner.devices import read_profile, write_profile
from horizonml.planner.profile import Host, Profile
from horizonml.profiling.executions import (
    _key,
    _rows,
    _Trial,
    choose_executions,
    executions_here,
    gain_here,
    modes_for,
    try_modes,
    untried,
    unused_bf16,
)
from horizonml.profiling.kept import path_of
from horizonml.profiling.measure import measure
from horizonml.state.optim import Optimizer, lies_alike
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.task import InputSpec

LAST, NARROW, BOTH = Execution(True), Execution(False, "bf16"), Execution(True, "bf16")
MIXED = (LAST, LAST, BOTH, PLAIN, PLAIN, NARROW)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads would wait for each other where other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits(size: int = 8) -> Model:
    return build(ModelSpec(options={"image_size": size}), 0, 10, InputSpec.of((1, size, size)))


def job(**fields: Any) -> Job:
    return Job.model_validate({"batch_size": 64, **fields})


def test_executions_travel_as_json_and_damage_is_an_error() -> None:
    assert from_json(json.loads(json.dumps(to_json(MIXED)))) == MIXED
    assert [run[:2] for run in runs(MIXED)] == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert [run[:2] for run in runs(MIXED, 1, 4)] == [(1, 2), (2, 3), (3, 4)]
    assert from_json([[2, True, "fp32", True]]) == (LAST, LAST)  # as an earlier version wrote it
    damaged: list[Any] = [
        None,
        {},
        [[1, True]],
        [[0, True, "fp32"]],
        [[1 << 40, True, "fp32"]],
        [[1.0, True, "fp32"]],
        [[1, 1, "fp32"]],
        [[1, True, "fp8"]],
        ["text"],
    ]
    for value in damaged:
        with pytest.raises(ValueError, match=r"run|executions"):
            from_json(value)


def test_executions_are_described_and_float32_is_what_is_left_without_bf16() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert described(MIXED, names) == "a to b in channels_last; c in channels_last and bf16; f in bf16, the rest plain"
    assert described((LAST,) * 6, names) == "a to f in channels_last"
    assert described((PLAIN,) * 6, names) == "all layers plain"
    assert without_bf16(MIXED) == (LAST, LAST, LAST, PLAIN, PLAIN, PLAIN)


def test_weights_are_channels_last_only_where_all_ranks_run_so() -> None:
    other = (LAST, PLAIN, LAST, LAST, PLAIN, PLAIN)
    assert Executions.of(MIXED).channels_last_weights == {0, 1, 2}
    assert Executions.among(MIXED, [MIXED, other]).channels_last_weights == {0, 2}
    assert Executions.among(other, [MIXED, other]).channels_last_weights == {0, 2}


def test_tensors_and_their_gradients_are_converted_and_back() -> None:
    leaf = torch.randn(2, 3, 4, 5, requires_grad=True)
    last = convert(leaf * 1, True, torch.bfloat16)
    assert (last.dtype, memory_format(last)) == (torch.bfloat16, torch.channels_last)
    (last.float() ** 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.is_contiguous()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach(), rtol=0.02, atol=0.02)
    numbers, flat = torch.arange(3), torch.randn(2, 3)
    assert convert(numbers, True, torch.float32) is numbers
    assert convert(flat, True) is flat


@pytest.mark.parametrize("optimizer", [Sgd(momentum=0.9), Adam(name="adam")], ids=lambda spec: spec.name)
def test_updates_do_not_depend_on_how_gradients_and_state_lie(optimizer: Sgd | Adam) -> None:
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=form))
        updates, state = Optimizer(optimizer), {}
        for _ in range(3):
            weight.grad = torch.randn(4, 3, 5, 5)  # as it lies in a message
            updates.step({"weight": weight}, state, 0.1)
            state["weight"] = {key: value.clone(memory_format=torch.contiguous_format) for key, value in
                               state["weight"].items()}  # as it is read from a file  # fmt: skip
        assert weight.is_contiguous(memory_format=form)
        results.append(weight.detach().clone(memory_format=torch.contiguous_format))
    assert torch.equal(*results)
    assert lies_alike(torch.zeros(4, 3, 1, 1), torch.zeros(4, 3, 1, 1).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_16_bits_are_updated_as_by_pytorch(dtype: torch.dtype) -> None:
    ours, theirs = (nn.Parameter(torch.ones(40, dtype=dtype)) for _ in range(2))
    optimizer = torch.optim.SGD([theirs], 0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    updates, state = Optimizer(Sgd(momentum=0.9, weight_decay=0.01)), dict[str, dict[str, Tensor]]()
    for _ in range(3):
        ours.grad, theirs.grad = (torch.full((40,), 0.5, dtype=dtype) for _ in range(2))
        updates.step({"weight": ours}, state, 0.1)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert float(theirs.detach()[0]) < 0.8


def test_a_run_of_layers_has_the_modules_of_its_stage_and_the_results_of_its_boundary() -> None:
    model = digits()
    count = len(model.chain)
    module = model.stage(0, count).train()
    names = [name for name, _ in module.named_parameters()]
    layers = tuple(MIXED[number % len(MIXED)] for number in range(count))
    run = runs_for(model, module, 0, count, Executions.of(layers))
    inputs = torch.randn(4, 1, 8, 8)
    plain = module(inputs).detach()
    found = run(inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.1)
    found.sum().backward()
    assert [name for name, _ in module.named_parameters()] == names
    assert all(parameter.grad is not None for parameter in module.parameters())
    for start in range(count - 1):  # what leaves a stage is as the boundary says, wherever it is cut
        left = runs_for(model, model.stage(start, start + 1), start, start + 1, Executions.of((BOTH,) * count))
        result = left(*model.chain.boundaries[start].example(2))
        assert result.dtype == torch.float32
        assert result.is_contiguous()
    assert runs_for(model, module, 0, count, Executions.of((PLAIN,) * count)) is module


def test_the_sequence_of_modes_is_the_best_of_all_sequences() -> None:
    model = digits()
    count = len(model.chain)
    modes = [PLAIN, LAST, NARROW]
    trial = _Trial(model, 16, modes)
    trial._rates = (1e-10, 3e-10)
    torch.manual_seed(0)
    times = (torch.rand(3, 7) * 1e-3).tolist()

    def cost(sequence: tuple[int, ...]) -> float:
        own = sum(times[mode][layer] for layer, mode in enumerate(sequence))
        pairs = enumerate(itertools.pairwise(sequence), start=1)
        return own + sum(trial._conversion(layer, modes[a], modes[b]) for layer, (a, b) in pairs)

    best = min(itertools.product(range(3), repeat=7), key=cost)
    assert trial._pick(times, 0) == tuple(modes[mode] for mode in best)
    assert len(set(best)) > 1
    assert count >= 7


def test_a_trial_gives_an_execution_for_each_layer_and_only_of_the_modes() -> None:
    model = digits(16)
    asked: list[float] = []
    found = try_modes(model, 64, [PLAIN, BOTH], lambda seconds: not asked.append(seconds))  # type: ignore[func-returns-value]
    assert len(found.layers) == len(model.chain)
    assert set(found.layers) <= {PLAIN, BOTH}
    assert len(asked) == 1
    assert found.gain > 1 if set(found.layers) != {PLAIN} else found.gain == 1
    assert not try_modes(model, 64, [PLAIN, BOTH], lambda seconds: False).seconds


def test_a_choice_is_remembered_and_only_made_where_it_can_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    model, said = digits(16), list[str]()
    wanted = job(precision="bf16", memory_format="contiguous", model={"options": {"image_size": 16}})
    plain = (PLAIN,) * len(model.chain)
    assert executions_here(wanted, model, 1, 1000, said.append, may_try=False) == plain
    assert executions_here(job(batch_size=8), digits(), 1, 1 << 20, said.append) == (PLAIN,) * len(
        digits().chain
    )  # tiny
    assert executions_here(job(), model, 1, 20, said.append) == plain  # a short run
    assert not said
    host = Host((0,), 1.0, 1e9)
    found = choose_executions(wanted, model, Group(None, 0, 1, 30.0), host, 1000, said.append)
    assert len(said) == 2
    assert executions_here(wanted, model, 1, 1000, said.append, may_try=False) == found
    assert executions_here(wanted, model, 1, 1000, said.append) == found
    assert len(said) == 2
    (path,) = tmp_path.glob("executions/*.json")
    path.write_text("{}")
    assert executions_here(wanted, model, 1, 1000, said.append, may_try=False) == plain


def test_the_gain_of_a_choice_is_that_of_layers_that_run_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    model = digits(16)
    open_one = job(precision="auto", memory_format="contiguous", model={"options": {"image_size": 16}})
    narrow, plain = (NARROW,) * len(model.chain), (PLAIN,) * len(model.chain)
    path = path_of("executions", _key(open_one, model, modes_for("contiguous", "auto", model), _rows(open_one, 1)))
    path.parent.mkdir()
    path.write_text(json.dumps({"layers": to_json(narrow), "seconds": [1.0, 3.0]}))
    assert executions_here(open_one, model, 1, 1000, print, may_try=False) == narrow
    assert untried(open_one, narrow) == plain
    assert untried(job(precision="bf16"), narrow) == narrow
    assert gain_here(open_one, model, 1, narrow) == 3.0
    assert gain_here(open_one, model, 1, plain) == 1.0


def test_a_job_says_which_modes_may_be_tried() -> None:
    model = digits()
    assert modes_for("auto", "fp32", model) == [PLAIN, LAST]
    assert modes_for("auto", "bf16", model) == [PLAIN, LAST, NARROW, BOTH]
    assert modes_for("auto", "auto", model) == [PLAIN, LAST, NARROW, BOTH]
    assert modes_for("channels_last", "fp32", model) == [LAST]
    assert modes_for("contiguous", "bf16", model) == [PLAIN, NARROW]
    forced = executions_here(job(memory_format="channels_last"), model, 1, 10, print)
    assert forced == (LAST,) * len(model.chain)
    layers = [(PLAIN, PLAIN), (PLAIN, NARROW), (LAST, PLAIN)]
    assert "by rank 0, 2:" in str(unused_bf16(job(precision="bf16"), layers))
    assert unused_bf16(job(precision="bf16"), layers[1:2]) is None
    assert unused_bf16(job(), layers) is None


class Gpu(Compute):
    """A GPU that is only described."""

    bf16 = False

    def has_bf16(self) -> bool:
        return self.bf16


class NewGpu(Gpu):
    bf16 = True


@pytest.mark.parametrize(("kind", "layer"), [(Gpu, PLAIN), (NewGpu, NARROW)])
def test_a_gpu_runs_all_layers_in_bf16_only_if_it_has_that(
    monkeypatch: pytest.MonkeyPatch, kind: type[Gpu], layer: Execution
) -> None:
    monkeypatch.setattr(accelerator, "_used", [kind(torch.device("cuda", 0), "a GPU")])
    model, tried = digits(), list[str]()
    assert executions_here(job(), model, 1, 10**9, tried.append) == (PLAIN,) * len(model.chain)
    found = executions_here(job(precision="bf16"), model, 1, 10**9, tried.append)
    assert found == (layer,) * len(model.chain)
    assert tried == []
    executions_here(job(compile="auto"), model, 1, 10, tried.append)
    assert tried == [
        "compile: auto has no effect any more, because compiling never repaid its time; leave the field out"
    ]
    said = unused_bf16(job(precision="bf16"), [found])
    assert (said is None) == (layer == NARROW)


def test_a_device_is_asked_whether_it_computes_in_bf16() -> None:
    assert accelerator._bf16_works(torch.device("cpu"))
    assert not accelerator._bf16_works(torch.device("meta")), "what computes nothing does not"
    assert Compute().has_bf16(), "on a processor, a trial of the layers decides"


def test_profiles_are_measured_as_layers_run_and_say_so(tmp_path: Path) -> None:
    model = digits()
    layers = tuple(MIXED[number % len(MIXED)] for number in range(len(model.chain)))
    profile = measure(model, (4,), layers)
    assert from_json(list(profile.executions)) == layers
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    plain = measure(model, (4,))
    assert plain.executions == ()
    # What autograd keeps of a convolution in 16 bits takes less.
    narrow = measure(model, (4,), (NARROW,) * len(model.chain))
    assert sum(layer.saved_bytes for layer in narrow.layers) < 0.8 * sum(layer.saved_bytes for layer in plain.layers)
    write_profile(profile, {}, tmp_path / "profile.yaml")
    assert read_profile(tmp_path / "profile.yaml", model.chain.names).executions == profile.executions


def test_layers_that_are_not_compiled_do_not_load_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from tests.unit.test_executions import *\n"
        "model = digits()\n"
        "run = runs_for(model, model.stage(0, 5), 0, 5, Executions.of((BOTH,) * len(model.chain)))\n"
        "run(torch.randn(4, 1, 8, 8)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
