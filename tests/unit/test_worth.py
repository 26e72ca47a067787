"""What connecting devices is worth: together, and each of them alone, predicted and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.host import available_cores
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import PLAIN
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.profile import Host, Network
from horizonml.planner.search import data_parallel
from horizonml.planner.strategies import problem_for
from horizonml.planner.worth import Worth, predicted_worth
from horizonml.profiling import alone
from horizonml.profiling.alone import samples_per_second
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.task import InputSpec
from tests.unit.test_planner import profile


def digits() -> Model:
    """The digits' network."""
    return build(ModelSpec(), 0, 10, InputSpec.of((1, 8, 8)))


def job_of(batch_size: int, workers: int) -> Job:
    """A job for so many ranks."""
    return parse(
        "{}", "job.yaml", [f"batch_size={batch_size}", f"parallel.workers={workers}", "parallel.strategy=auto"]
    )


def test_efficiency_and_speed_up_compare_with_the_devices_alone() -> None:
    worth = Worth(300.0, [200.0, 100.0, 100.0], ["laptop", "pi-1", "pi-2"])
    assert (worth.speed_up, worth.efficiency) == (1.5, 0.75)
    assert worth.words == (
        "3 devices train 1.50 times as fast as the fastest of them alone (laptop); their efficiency is 75% of what "
        "each of them does alone, added up"
    )
    small = Worth(300.0, [200.0, None, 100.0], ["pi", "pi", "pi"])
    assert small.speed_up == 1.5
    assert small.efficiency is None, "what one of them would do is not known"
    assert small.words.endswith("of them alone; 1 of them has not the memory to train it alone")
    none = Worth(300.0, [None, None])
    assert (none.speed_up, none.efficiency) == (None, None)
    assert none.words == "none of the 2 devices has the memory to train this alone"
    assert Worth(50.0, [100.0], ["laptop"]).words == (
        "the ranks of this device train 0.50 times as fast as one process would"
    )


def test_a_prediction_counts_devices_and_not_ranks() -> None:
    hosts, seconds = [Host((0, 1), 2.0, 1e12), Host((2,), 1.0, 1e12)], [0.001] * 4
    problem = problem_for(job_of(24, 3), [profile(*seconds)] * 3, hosts, Network(0.0, 1e12), 0)
    evaluator = Evaluator(problem)
    worth = predicted_worth(problem, evaluator, evaluator.judge(data_parallel(problem)), ["a", "a", "b"])
    assert worth is not None
    assert worth.names == ["a", "b"]
    one = 24 / (3 * 0.004 * 24)
    assert worth.alone == pytest.approx([2 * one, one])
    assert worth.together == pytest.approx(3 * one, rel=1e-3)
    assert worth.efficiency == pytest.approx(1.0, rel=1e-3)
    assert worth.to_json()["speed_up"] == pytest.approx(1.5, rel=1e-3)


def test_a_device_without_the_memory_for_all_layers_has_no_speed_alone() -> None:
    hosts = [Host((0,), 1.0, 1e12), Host((1,), 1.0, 1e5)]
    problem = problem_for(job_of(8, 2), [profile(0.001, 0.001, parameters=1 << 20)] * 2, hosts, Network(0.0, 1e12), 0)
    evaluator = Evaluator(problem)
    roomy = [Host((0,), 1.0, 1e12), Host((1,), 1.0, 1e12)]
    found = Evaluator(replace(problem, hosts=roomy)).judge(data_parallel(problem))
    worth = predicted_worth(problem, evaluator, found, ["pi", "nano"])
    assert worth is not None
    assert worth.alone[1] is None
    assert worth.alone[0] is not None


@pytest.mark.parametrize("optimizer", [Sgd(momentum=0.9), Adam(name="adamw")])
def test_a_device_is_measured_alone(optimizer: Sgd | Adam, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = digits(), torch.get_num_threads()
    before = torch.get_rng_state()
    rate = samples_per_second(model, PLAIN, optimizer, 64, {1})
    assert rate is not None
    assert 50 < rate < 1e7
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before), "the training's random numbers are its own"
    monkeypatch.setattr(alone, "memory_left", lambda: 1000)
    assert samples_per_second(model, PLAIN, optimizer, 64, {1}) is None


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [
        (0.4, 0.01, 16),  # each larger micro-batch gains, until the next one would take more than a second
        (0.0, 0.1, 2),  # nothing to gain, and every pass is long
        (0.001, 0.001, 64),  # short passes, up to the most
    ],
)
def test_a_device_alone_has_the_micro_batches_that_suit_it_best(
    fixed: float, each: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = alone._Alone(digits(), PLAIN, Sgd())
    monkeypatch.setattr(device, "_pass", lambda rows: fixed + each * rows)
    monkeypatch.setattr(device, "_update", lambda: 0.0)
    assert device.rate(256, 1) == pytest.approx(expected / (fixed + each * expected))


def test_a_device_alone_tries_no_micro_batch_that_it_may_have_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, held = alone._Alone(digits(), PLAIN, Sgd()), 0

    def once(rows: int) -> float:
        nonlocal held
        held = max(held, rows)
        return 0.01

    monkeypatch.setattr(device, "_pass", once)
    monkeypatch.setattr(alone, "memory_left", lambda: 40.0 - held)
    device.rate(256, 1)
    assert held == 16, "32 would leave 8 of 40"


def test_a_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = samples_per_second(digits(), PLAIN, Sgd(), 64, {1})
    monkeypatch.setattr(alone, "has_quota", lambda: True)
    monkeypatch.setattr(alone, "available_cores", lambda: 0.01)
    held_back = samples_per_second(digits(), PLAIN, Sgd(), 64, {1})
    assert free is not None
    assert held_back is not None
    assert held_back < free / 10
    assert available_cores() > 0.01


def test_a_model_that_fails_on_made_up_tensors_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise KeyError("of the model's own code")

    monkeypatch.setattr(alone, "runs_for", fail)
    assert samples_per_second(digits(), PLAIN, Sgd(), 64, {1}) is None
