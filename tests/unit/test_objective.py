"""Plans for time, for energy, and for a deadline; what devices draw; and what is said of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizonml.errors import JobError, PlanError
from horizonml.job.jobfile import from_values, parse, read_devices, read_plan, write_plan
from horizonml.machine.sensors import EnergyMeter
from horizonml.plan.plan import Plan, Stage
from horizonml.plan.spec import Parallel
from horizonml.planner.choose import best_plan, energy_facts, energy_of, fastest_plan, is_better, with_objective
from horizonml.planner.devices import load_cluster
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.explain import explain
from horizonml.planner.problem import FOR_STEPS, Constraints, Objective, Problem, Watts, check_watts
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.reasons import longer
from horizonml.planner.strategies import constraints_of
from horizonml.profiling import watts
from horizonml.profiling.watts import device_watts, measured_watts, stated_watts
from horizonml.text import human_seconds
from tests.unit.test_search import cluster


def drawn(seed: int, ranks: int, objective: Objective) -> Problem:
    """A random cluster whose devices draw random watts."""
    draw = random.Random(seed)
    watts = [Watts(idle := draw.uniform(0.5, 10), idle + 10 ** draw.uniform(0, 2)) for _ in range(ranks)]
    return replace(cluster(seed, ranks, 4), watts=watts, objective=objective)


def joules(problem: Problem, plan: Plan) -> float:
    found = judge(problem, plan)
    energy = energy_of(problem, found.prediction)
    assert energy is not None
    return energy.joules


def said_of(problem: Problem, found: Candidate, names: Sequence[str]) -> list[str]:
    """What a plan says of its energy."""
    return [one.text for one in explain(Evaluator(problem), found, names) if one.about == "energy"]


def test_the_energy_of_a_step_is_what_devices_draw_while_it_lasts_and_what_work_adds() -> None:
    layer = LayerProfile("layer", (0.1,), (0.2,), 0, 0, 1000)
    profiles = [Profile("fast", (4,), 0.0, (layer, layer)), Profile("slow", (4,), 0.0, (layer, layer)).scaled(3)]
    hosts = [Host((rank,), 1.0, 1e9) for rank in range(2)]
    watts = [Watts(5.0, 25.0), Watts(1.0, 3.0)]
    problem = Problem(profiles, hosts, Network(0.5, 1e3), 4, 0, watts=watts)
    alone = Plan((Stage(0, 2, (0,), (1.0,)),), spare=(1,))
    assert judge(problem, alone).prediction.seconds == pytest.approx(0.6)
    assert joules(problem, alone) == pytest.approx(0.6 * (5 + 1) + 0.6 * 20)
    cut = Plan((Stage(0, 1, (0,), (1.0,)), Stage(1, 2, (1,), (1.0,))))
    prediction = judge(problem, cut).prediction  # 0.1 forward, 4.5 to send, 0.9 on the slow one, 4.5 back, 0.2
    assert prediction.seconds == pytest.approx(10.2)
    assert prediction.working == {0: pytest.approx(0.3 + 9.0), 1: pytest.approx(0.9 + 9.0)}
    assert joules(problem, cut) == pytest.approx(10.2 * 6 + 9.3 * 20 + 9.9 * 2)
    both = Plan((Stage(0, 2, (0, 1), (3.0, 1.0)),))  # which has nothing to sum
    assert judge(problem, both).prediction.working == pytest.approx({0: 0.45, 1: 0.45})


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 3), slowdown=st.sampled_from([1.0, 1.2, 2.0]))
def test_the_plan_for_energy_takes_no_more_of_it_than_the_fastest_and_is_fast_enough(
    seed: int, ranks: int, slowdown: float
) -> None:
    problem = drawn(seed, ranks, Objective("energy", slowdown))
    found = with_objective(problem)
    found.plan.check(4, ranks)
    assert found.fastest is not None
    assert found.fastest == fastest_plan(problem, Evaluator(problem))
    assert joules(problem, found.plan) <= joules(problem, found.fastest.plan) * (1 + 1e-9)
    assert found.prediction.seconds <= slowdown * found.fastest.prediction.seconds * (1 + 1e-6)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 3), spare=st.floats(0.5, 3.0))
def test_a_deadline_that_the_fastest_plan_meets_is_met(seed: int, ranks: int, spare: float) -> None:
    timed = cluster(seed, ranks, 4)
    fastest = fastest_plan(timed, Evaluator(timed))
    seconds = spare * 1000 * fastest.prediction.seconds / FOR_STEPS
    problem = drawn(seed, ranks, Objective("deadline", deadline=seconds, steps=1000))
    found = with_objective(problem)
    takes = 1000 * found.prediction.seconds
    if spare >= 1:
        assert takes <= FOR_STEPS * seconds * (1 + 1e-6)
        assert joules(problem, found.plan) <= joules(problem, fastest.plan) * (1 + 1e-9)
    assert takes <= max(FOR_STEPS * seconds, 1000 * fastest.prediction.seconds) * (1 + 1e-6)
    told = said_of(problem, found, [f"box-{rank}" for rank in range(ranks)])
    assert told[1].startswith("No plan was found that meets the deadline") == (takes > FOR_STEPS * seconds * (1 + 1e-6))


def test_a_glutton_is_left_out_and_the_reasons_say_so() -> None:
    problem = drawn(3, 3, Objective("energy", 50.0))
    watts = [Watts(1.0, 500.0), Watts(1.0, 2.0), Watts(1.0, 400.0)]
    problem = replace(problem, watts=watts, network=Network(1e-4, 1e9))
    found = with_objective(problem)
    assert found.plan.spare == (0, 2)
    told = said_of(problem, found, ["a", "b", "c"])
    assert "less energy than the fastest: with that and" in told[1]
    assert "a step may take 50 times as long as the fastest (parallel.slowdown)" in told[1]
    left = next(one.text for one in explain(Evaluator(problem), found, ["a", "b", "c"]) if one.choice == "left out")
    assert left.startswith("Left out are a (rank 0), c (rank 2): the others need fewer joules for the work; while they")
    facts = energy_facts(problem, found)
    assert facts is not None
    assert facts["joules_per_step"] < facts["fastest"]["joules_per_step"] / 5
    assert facts["joules_per_sample"] == pytest.approx(facts["joules_per_step"] / problem.batch_size)
    assert sum(facts["joules_by_rank"]) == pytest.approx(facts["joules_per_step"])
    evaluator = Evaluator(problem)
    assert found.fastest is not None
    assert is_better(problem, found, evaluator.judge(found.fastest.plan), 0.1)
    assert not is_better(problem, found.fastest, evaluator.judge(found.plan), 0.1)


def test_a_machine_that_slows_the_others_down_is_left_out_and_the_reasons_say_so() -> None:
    """Each of the three could do the work; the link of the last one carries a hundredth of what the others' do."""
    layer = LayerProfile("layer", (0.01, 0.04), (0.02, 0.08), 10**6, 0, 10**5)
    profiles = [Profile(f"device{rank}", (8, 32), 0.0, (layer,) * 3) for rank in range(3)]
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(3)]
    problem = Problem(profiles, hosts, Network(1e-4, 1e8, (1e8, 1e8, 1e6)), 32, 0, constraints=FEW)
    evaluator = Evaluator(problem)
    found = with_objective(problem, evaluator)
    assert found.plan.spare == (2,)
    everyone = best_plan(problem)
    assert found.prediction.seconds < 0.95 * everyone.prediction.seconds
    told = [reason.text for reason in explain(evaluator, found, ["a", "b", "c"])]
    seconds = everyone.prediction.seconds
    more = f"{human_seconds(seconds)} ({longer(seconds, found.prediction.seconds)})"
    assert f"Left out is c (rank 2): with all devices a step would take {more}." in told
    quick = replace(problem, network=Network(1e-4, 1e8))
    assert with_objective(quick).plan.spare == ()
    assert with_objective(replace(problem, constraints=constraints_of(Parallel(strategy="ddp")))).plan.spare == ()


FEW = Constraints(micro_batches=(1, 4))  # so that searches take little time


def connected(rates: Sequence[float], ranks_each: int = 1, memory: Sequence[float] = ()) -> Problem:
    """Equal machines whose links have these bytes per second."""
    layer = LayerProfile("layer", (0.01, 0.04), (0.02, 0.08), 10**6, 0, 10**5)
    ranks = [range(number * ranks_each, (number + 1) * ranks_each) for number in range(len(rates))]
    room = memory or [1e12] * len(rates)
    hosts = [Host(tuple(own), float(ranks_each), there) for own, there in zip(ranks, room, strict=True)]
    pairs = {(a, b): (1e-5, 1e9) for own in ranks for a in own for b in own if a != b}
    access = tuple(rate for rate in rates for _ in range(ranks_each))
    profiles = [Profile("device", (8, 32), 0.0, (layer,) * 3) for _ in access]
    return Problem(profiles, hosts, Network(1e-4, 1e8, access, pairs), 32, 0, constraints=FEW)


def test_ranks_of_a_machine_are_left_out_together() -> None:
    found = with_objective(connected([1e8, 1e6, 1e8], 2))
    assert found.plan.spare == (2, 3)


def test_a_device_without_the_memory_for_any_plan_is_left_out() -> None:
    problem = connected([1e8] * 3, memory=[1e12, -1.0, 1e12])
    found = with_objective(problem)
    assert found.usable
    assert found.plan.spare == (1,)
    told = [one.text for one in explain(Evaluator(problem), found, ["a", "b", "c"])]
    assert "Left out is b (rank 1): with all devices the memory or the batch would not suffice." in told


def test_plans_that_leave_devices_out_have_no_local_steps_and_are_compared_with_exact_ones() -> None:
    for rates in ([1e7, 1e7, 1e5], [1e6, 1e5, 1e5]):
        for sync in ("exact: false", "sync: {every: 16}"):
            parallel = parse(f"parallel: {{strategy: auto, {sync}}}", "job").parallel
            problem = replace(connected(rates), constraints=constraints_of(parallel, 3))
            problem = replace(problem, constraints=replace(problem.constraints, micro_batches=FEW.micro_batches))
            found = with_objective(problem)
            assert found.plan.local is None or not found.plan.spare
            best = with_objective(replace(problem, constraints=FEW)).prediction.seconds
            if sync == "exact: false":
                assert found.prediction.seconds <= best * (1 + 1e-6)
                assert found.exact_seconds is None or found.exact_seconds <= best * 1.06


def test_unknown_watts_are_an_error_and_not_a_guess() -> None:
    problem = replace(drawn(1, 3, Objective("energy")), watts=[Watts(1, 2), None, None])
    assert energy_of(problem, best_plan(problem).prediction) is None
    with pytest.raises(PlanError, match=r"energy needs .* those of b and 1 more are not known.*HORIZONML_WATTS"):
        check_watts(problem.objective, problem.watts, ["a", "b", "c"])
    check_watts(Objective(), (), ["a", "b", "c"])


def test_objectives_that_cannot_be_are_refused_by_field() -> None:
    for values, said in (
        ({"strategy": "ddp", "objective": "energy"}, "objective: only strategy auto plans for energy, not ddp"),
        ({"objective": "deadline"}, "deadline: objective deadline needs one, such as 2h"),
        ({"deadline": "2h"}, "deadline: 2h is for objective deadline, not time"),
        ({"objective": "deadline", "deadline": "2"}, "deadline: '2' has no unit"),
        ({"slowdown": 1.5}, "slowdown: 1.5 is for objective energy, not time"),
        ({"objective": "energy", "slowdown": 0.5}, "slowdown"),
    ):
        with pytest.raises(JobError, match=said):
            from_values({"name": "job", "parallel": {"strategy": "auto", **values}}, "job.yaml")
    values = {"strategy": "auto", "objective": "deadline", "deadline": "1h30m"}
    assert from_values({"name": "job", "parallel": values}, "job.yaml").parallel.deadline_seconds == 5400


def test_stated_watts_that_cannot_be_are_refused() -> None:
    for text in ("5", "6/5", "-1/5", "a/b", "1/2/3", "nan/5", "1/inf"):
        with pytest.raises(JobError, match=r"HORIZONML_WATTS: .* is not IDLE/BUSY in watts, such as 2\.5/6"):
            stated_watts({"HORIZONML_WATTS": text})


def test_watts_are_shared_by_the_ranks_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = EnergyMeter(tmp_path)
    assert stated_watts({}) is None
    assert device_watts(meter, 2, True) is None
    monkeypatch.setenv("HORIZONML_WATTS", " 2.5/6 ")
    assert device_watts(meter, 2, False) == Watts(1.25, 3.0)
    monkeypatch.delenv("HORIZONML_WATTS")
    monkeypatch.setattr(watts, "measured_watts", lambda meter: Watts(3.0, 8.0))
    assert device_watts(meter, 4, True) == Watts(0.75, 5.75), "what it adds by itself"


class Meter:
    """A machine that draws 3 W, and 50 W more while this process computes."""

    available = True

    def joules(self) -> float:
        return 3 * time.monotonic() + 50 * time.process_time()


def test_watts_are_measured_while_a_device_waits_and_while_it_works() -> None:
    found = measured_watts(cast(EnergyMeter, Meter()), 0.1, 0.2)
    assert found is not None
    assert 1 < found.idle < found.busy < 250


def test_a_file_of_devices_states_watts(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(
        "devices: [{name: pi, count: 2, memory: 1GiB, watts: {idle: 2.5, busy: 6}}, {name: pc, memory: 1GiB}]"
    )
    assert load_cluster(path).watts() == [Watts(2.5, 6.0), Watts(2.5, 6.0), None]
    path.write_text("devices: [{name: pi, memory: 1GiB, watts: {idle: 6, busy: 2}}]")
    with pytest.raises(JobError, match=r"watts.*busy: 2 is less than idle, 6"):
        load_cluster(path)


def test_a_plan_on_paper_is_for_the_ranks_that_work(tmp_path: Path) -> None:
    plan = Plan((Stage(0, 2, (3,), (1.0,)), Stage(2, 4, (1,), (1.0,))), spare=(0, 2))
    plan.check(4, 4)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    write_plan(plan, tmp_path / "plan.yaml", ["a", "b", "c", "d"])
    job = read_plan(from_values({"name": "job"}, "job.yaml"), tmp_path / "plan.yaml")
    assert job.parallel.stages is not None
    assert [stage.ranks for stage in job.parallel.stages] == [[1], [0]]
    assert read_devices(tmp_path / "plan.yaml") == ["b", "d"]
    for spare in ((0, 2, 2), (0, 1, 2), (0,)):
        with pytest.raises(PlanError, match=r"spare ranks|the plan is for ranks"):
            replace(plan, spare=spare).check(4, 4)
