"""What is lossy in a way of training, and how it is made more precise."""

from __future__ import annotations

import json

from horizonml.job.jobfile import parse
from horizonml.plan.lossy import LINK, PRECISION, SUMS, LossyChoice, Setting, Tried, tried_from
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.problem import Constraints, Problem
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.search import search
from horizonml.runtime.checks import trial_steps
from horizonml.runtime.guarding import Score, guarded_kinds

ONE, TWO = (1.0,), (1.0, 1.0)


def plan(first: str, second: str, sync: Sync = Sync.ALL_REDUCE) -> Plan:
    return Plan((Stage(0, 3, (0,), ONE, send=first), Stage(3, 5, (1, 2), TWO, sync, second), Stage(5, 9, (3,), ONE)))


def test_lossy_choices_are_made_more_precise_one_by_one() -> None:
    setting = Setting(plan("int4", "bf16", Sync.INT4), "bf16")
    link, other, sums, precision = setting.lossy
    assert [str(one) for one in setting.lossy] == [
        "stage 0 sends int4",
        "stage 1 sends bf16",
        "stage 1 sums gradients as int4",
        "layers are computed in bf16",
    ]
    assert setting.raised(link) == Setting(plan("int8", "bf16", Sync.INT4), "bf16")
    assert setting.raised(other) == Setting(plan("int4", "fp32", Sync.INT4), "bf16")
    assert setting.raised(sums) == Setting(plan("int4", "bf16", Sync.FP16), "bf16")
    assert setting.raised(precision) == Setting(plan("int4", "bf16", Sync.INT4))
    assert setting.exact() == Setting(plan("fp32", "fp32"))
    assert setting.only(sums) == Setting(plan("fp32", "fp32", Sync.INT4))
    assert setting.only(precision) == Setting(plan("fp32", "fp32"), "bf16")
    assert setting.cautious() == Setting(plan("int8", "bf16", Sync.FP16))


def test_what_a_job_has_named_stays_as_it_is() -> None:
    setting = Setting(plan("int4", "int8", Sync.POWERSGD), "bf16", frozenset({SUMS}))
    assert setting.lossy == [LossyChoice(SUMS, 1, "powersgd")]
    assert setting.exact().plan == plan("int4", "int8")
    assert setting.exact().precision == "bf16"


def test_a_verdict_holds_for_later_plans() -> None:
    tried = Tried.of(7, 40, Setting(plan("int4", "int8", Sync.FP16)), ("a text",))
    assert tried_from(json.loads(json.dumps(tried.to_json()))) == tried
    allowed = tried.allowed(Setting(plan("int4", "int4", Sync.INT4), "bf16"))
    assert allowed == Setting(plan("int4", "int8", Sync.FP16))
    assert tried.allowed(Setting(plan("bf16", "fp32"))) == Setting(plan("bf16", "fp32"))
    elsewhere = Plan((Stage(0, 4, (0,), ONE, send="int4"), Stage(4, 9, (1,), ONE)))
    assert tried.allowed(Setting(elsewhere)).plan.stages[0].send == "int8"  # as precise as all that were tried
    alone = Setting(Plan((Stage(0, 9, (0, 1), TWO),)))
    assert Tried.of(0, 40, alone, ()).allowed(Setting(elsewhere)).plan.stages[0].send == "fp32"
    assert Tried.of(0, 0, alone, ()).allowed(Setting(elsewhere)).plan.stages[0].send == "int8"  # which needs no trial


def test_a_verdict_that_makes_no_sense_is_none() -> None:
    good = Tried.of(0, 40, Setting(plan("int4", "int8")), ()).to_json()
    assert tried_from(good) is not None
    for value in (None, 3, {}, {**good, "links": {"x": "int4"}}, {**good, "links": {"3": "int3"}}):
        assert tried_from(value) is None


def test_only_what_a_job_leaves_open_is_tried() -> None:
    kinds: dict[str, set[str]] = {
        "{strategy: auto}": set(),
        "{strategy: auto, exact: false}": {LINK, SUMS},
        "{strategy: auto, exact: false, activations: int4}": {SUMS},
        "{strategy: auto, exact: false, gradient_compression: int4}": {LINK},
        "{strategy: pipeline, activations: int4}": set(),
    }
    for parallel, found in kinds.items():
        assert guarded_kinds(parse(f"parallel: {parallel}\nprecision: bf16", "job.yaml")) == found
        assert guarded_kinds(parse(f"parallel: {parallel}\nprecision: auto", "job.yaml")) == found | {PRECISION}


def test_a_trial_costs_at_most_a_twentieth_of_a_run() -> None:
    job = parse("{epochs: 30}", "job.yaml")
    assert trial_steps(job, 156, 0) == 43  # 4 of these, and evaluations of a third of the time, are 5% of 4,680 steps
    assert trial_steps(job, 156, 2600) == 0
    assert trial_steps(job, 10**6, 0) == 200
    assert trial_steps(job, 71, 0) == 0


def test_a_warm_up_is_worse_only_by_more_than_chance() -> None:
    exact = Score("accuracy", 0.9, 359)
    assert not Score("accuracy", 0.86, 359).loses(exact)  # the standard error of the difference is 2.3 points
    assert Score("accuracy", 0.83, 359).loses(exact)
    assert Score("accuracy", 0.88, 100_000).loses(Score("accuracy", 0.9, 100_000))
    assert Score("accuracy", 0.14, 359).shows_nothing(10)
    assert not Score("accuracy", 0.2, 359).shows_nothing(10)
    assert not Score("loss", 2.3, 359).shows_nothing(10)
    assert Score("loss", 1.2, 359).loses(Score("loss", 1.0, 359))
    assert not Score("loss", 1.05, 359).loses(Score("loss", 1.0, 359))


def test_the_search_keeps_to_the_format_that_a_job_names() -> None:
    layers = tuple(LayerProfile(str(n), (1e-3,), (2e-3,), 1000, 8, 10_000) for n in range(9))
    profile = Profile("test", (32,), 1e-10, layers, {"int4": 1e-6})  # which costs much more than it saves
    host = Host((0, 1, 2), 3.0, 1e12)
    constraints = Constraints(most_members=1, ordered=True, formats=("int4",), schedules=("1f1b", "zb-h1"))
    problem = Problem([profile] * 3, [host], Network(1e-5, 1e9), 32, 0, constraints=constraints)
    found = search(problem, evaluator=Evaluator(problem)).plan
    assert len(found.stages) > 1
    assert {stage.send for stage in found.stages[:-1]} == {"int4"}
