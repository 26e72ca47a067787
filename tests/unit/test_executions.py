"""How layers run: as data, in one process, and how it is chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizonml.engine.execution import convert, memory_format
from horizonml.job.schema import Job
from horizonml.machine import accelerator
from horizonml.machine.accelerator import Compute
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import PLAIN, Execution
from horizonml.planner.devices import read_profile, write_profile
from horizonml.planner.profile import Profile
from horizonml.profiling.execution import (
    _key,
    _rows,
    _Trial,
    execution_here,
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


def test_parameters_of_16_bits_are_updated_as_by_pytorch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (nn.Parameter(torch.ones(40, dtype=dtype)) for _ in range(2))
        optimizer = torch.optim.SGD([theirs], 0.1, momentum=0.9, weight_decay=0.01, foreach=False)
        updates, state = Optimizer(Sgd(momentum=0.9, weight_decay=0.01)), dict[str, dict[str, Tensor]]()
        for _ in range(3):
            ours.grad, theirs.grad = (torch.full((40,), 0.5, dtype=dtype) for _ in range(2))
            updates.step({"weight": ours}, state, 0.1)
            optimizer.step()
        torch.testing.assert_close(ours, theirs)
        assert float(theirs.detach()[0]) < 0.8


def test_the_mode_in_which_all_pieces_together_are_fastest_is_chosen_if_it_wins_clearly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = digits()
    clear = {PLAIN: (1.0, 1.0), LAST: (0.5, 2.0), NARROW: (1.0, 0.6)}
    close = {PLAIN: (1.0, 1.0), LAST: (0.5, 1.45), NARROW: (9.0, 0.1)}  # PLAIN is beaten by a fortieth only
    monkeypatch.setattr(_Trial, "_pieces", lambda trial: [(0, 2), (2, len(model.chain))])
    for seconds, chosen in ((clear, NARROW), (close, PLAIN)):

        def takes(_: _Trial, __: object, start: int, ___: int, mode: Execution, taken: Any = seconds) -> float:
            return float(taken[mode][start > 0])

        monkeypatch.setattr(_Trial, "_whole_pass", takes)
        found = try_modes(model, 2, [PLAIN, LAST, NARROW], lambda seconds: True)
        assert found.execution == chosen
        assert (found.seconds, found.plain_seconds) == (sum(seconds[chosen]), 2.0)


def test_a_choice_is_remembered_and_only_made_where_it_can_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    model, said = digits(16), list[str]()
    wanted = job(precision="bf16", memory_format="contiguous", model={"options": {"image_size": 16}})
    assert execution_here(wanted, model, 1, 1000, said.append, may_try=False) == PLAIN
    assert execution_here(job(batch_size=8), digits(), 1, 1 << 20, said.append) == PLAIN, "it is tiny"
    assert execution_here(job(), model, 1, 20, said.append) == PLAIN, "the run is short"
    assert not said
    found = execution_here(wanted, model, 1, 1000, said.append)
    assert len(said) == 2
    assert execution_here(wanted, model, 1, 1000, said.append, may_try=False) == found
    assert execution_here(wanted, model, 1, 1000, said.append) == found
    assert len(said) == 2
    (path,) = tmp_path.glob("executions/*.json")
    path.write_text("{}")
    assert execution_here(wanted, model, 1, 1000, said.append, may_try=False) == PLAIN


def test_the_gain_of_a_choice_is_that_of_layers_that_run_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    model = digits(16)
    open_one = job(precision="auto", memory_format="contiguous", model={"options": {"image_size": 16}})
    path = path_of("executions", _key(open_one, model, modes_for("contiguous", "auto", model), _rows(open_one, 1)))
    path.parent.mkdir()
    path.write_text(json.dumps({"execution": asdict(NARROW), "seconds": [1.0, 3.0]}))
    assert execution_here(open_one, model, 1, 1000, print, may_try=False) == NARROW
    assert untried(open_one, NARROW) == PLAIN
    assert untried(job(precision="bf16"), NARROW) == NARROW
    assert gain_here(open_one, model, 1, NARROW) == 3.0
    assert gain_here(open_one, model, 1, PLAIN) == 1.0


def test_a_job_says_which_modes_may_be_tried() -> None:
    model = digits()
    assert modes_for("auto", "fp32", model) == [PLAIN, LAST]
    assert modes_for("auto", "bf16", model) == [PLAIN, LAST, NARROW, BOTH]
    assert modes_for("auto", "auto", model) == [PLAIN, LAST, NARROW, BOTH]
    assert modes_for("channels_last", "fp32", model) == [LAST]
    assert modes_for("contiguous", "bf16", model) == [PLAIN, NARROW]
    assert execution_here(job(memory_format="channels_last"), model, 1, 10, print) == LAST
    everyone = [PLAIN, NARROW, LAST]
    assert "by rank 0, 2:" in str(unused_bf16(job(precision="bf16"), everyone))
    assert unused_bf16(job(precision="bf16"), everyone[1:2]) is None
    assert unused_bf16(job(), everyone) is None


class Gpu(Compute):
    """A GPU that is only described."""

    bf16 = False

    def has_bf16(self) -> bool:
        return self.bf16


class NewGpu(Gpu):
    bf16 = True


@pytest.mark.parametrize(("kind", "expected"), [(Gpu, PLAIN), (NewGpu, NARROW)])
def test_a_gpu_runs_all_layers_in_bf16_only_if_it_has_that(
    monkeypatch: pytest.MonkeyPatch, kind: type[Gpu], expected: Execution
) -> None:
    monkeypatch.setattr(accelerator, "_used", [kind(torch.device("cuda", 0), "a GPU")])
    model, tried = digits(), list[str]()
    assert execution_here(job(), model, 1, 10**9, tried.append) == PLAIN
    found = execution_here(job(precision="bf16"), model, 1, 10**9, tried.append)
    assert found == expected
    assert tried == []
    assert (unused_bf16(job(precision="bf16"), [found]) is None) == (expected == NARROW)


def test_a_device_is_asked_whether_it_computes_in_bf16() -> None:
    assert accelerator._bf16_works(torch.device("cpu"))
    assert not accelerator._bf16_works(torch.device("meta")), "what computes nothing does not"
    assert Compute().has_bf16(), "on a processor, a trial of the layers decides"


def test_profiles_are_measured_as_layers_run_and_say_so(tmp_path: Path) -> None:
    model = digits()
    plain, last, narrow = (measure(model, (4,), one) for one in (PLAIN, LAST, NARROW))
    assert (plain.execution, last.execution, narrow.execution) == (PLAIN, LAST, NARROW)
    # What autograd keeps of a convolution in 16 bits takes less.
    assert sum(layer.saved_bytes for layer in narrow.layers) < 0.8 * sum(layer.saved_bytes for layer in plain.layers)
    assert Profile.from_json(json.loads(json.dumps(narrow.to_json()))) == narrow
    write_profile(narrow, {}, tmp_path / "profile.yaml")
    assert read_profile(tmp_path / "profile.yaml", model.chain.names).execution == NARROW
