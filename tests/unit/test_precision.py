"""How exact plans are: exact unless a job allows otherwise, and then no less exact than the links make worthwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonml.comm import group
from horizonml.errors import JobError
from horizonml.job.jobfile import changed, parse
from horizonml.plan import syncs
from horizonml.plan.local import Local
from horizonml.plan.plan import FORMATS, SYNCS, Execution, Plan, Stage, Sync
from horizonml.planner.choose import best_plan, choose
from horizonml.planner.cost import Ring, gentlest, outer_cost, summed_bytes, synced_bytes
from horizonml.planner.devices import read_profile, write_profile
from horizonml.planner.evaluator import Evaluator, judge
from horizonml.planner.explain import explain
from horizonml.planner.problem import Objective, Problem
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.reasons import alternatives, chosen_inexact, inexact_parts
from horizonml.planner.search import data_parallel, plain_ddp
from horizonml.planner.strategies import problem_for
from tests.traffic import traffic

CODECS = {"bf16": 3e-11, "int8": 4e-10, "int4": 3e-10, "fp16": 3e-11, "powersgd": 1e-9}
MIB = 1 << 20


def profile(layers: int = 6, parameters: int = MIB, output: int = 1 << 12, speed: float = 1.0) -> Profile:
    """Equal layers, which take 0.1 ms for a sample forward and 0.2 ms backward."""
    layer = LayerProfile(
        "layer", (1e-4 / speed, 6.4e-3 / speed), (2e-4 / speed, 12.8e-3 / speed), parameters, 1, output
    )
    codecs = {name: seconds / speed for name, seconds in CODECS.items()}
    return Profile("device", (1, 64), 0.0, tuple(replace(layer, name=f"layer{n}") for n in range(layers)), codecs)


def problem_on(network: Network, parallel: str = "", ranks: int = 4, own: Profile | None = None) -> Problem:
    """Equal devices, and a job that allows plans that are not exact unless `parallel` says otherwise."""
    fields = f"strategy: auto, workers: {ranks}, schedule: 1f1b{parallel or ', exact: false'}"
    job = parse(f"{{batch_size: 64, parallel: {{{fields}}}}}", "job.yaml")
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(ranks)]
    problem = problem_for(
        job, [own or profile()] * ranks, hosts, network, 1, synced_bytes={"powersgd": (MIB // 50,) * 6}
    )
    return replace(problem, constraints=replace(problem.constraints, micro_batches=(1, 4)))


def replicas(local: Local | None, ranks: int = 2) -> Plan:
    return Plan(
        (Stage(0, 6, tuple(range(ranks)), (1.0,) * ranks, Sync.LOCAL if local else Sync.ALL_REDUCE),), local=local
    )


def test_what_is_chosen_follows_the_speed_of_the_links() -> None:
    """Plans are exact without a word, and where links are fast."""
    assert parse("parallel: {strategy: auto}", "job.yaml").parallel.is_exact
    fast, medium, slow = (best_plan(problem_on(Network(1e-4, rate))) for rate in (1.25e10, 5e7, 2.5e4))
    assert inexact_parts(fast.plan) == []
    assert inexact_parts(medium.plan) != []
    assert medium.plan.local is not None
    assert slow.plan.local is not None
    assert medium.plan.local.every < slow.plan.local.every
    assert slow.exact_seconds is not None
    assert slow.prediction.seconds < 0.2 * slow.exact_seconds


def test_the_slower_the_links_the_more_seldom_members_agree() -> None:
    found = [gentlest(problem_on(Network(1e-4, rate)), replicas(None), 0.05) for rate in (1e9, 1e8, 1e7, 3e6, 1e3)]
    every = [local.every for local in found if local is not None]
    assert every == sorted(every)
    assert (every[0], every[-1]) == (4, 64)
    assert found[0] == Local(4), "a fast link needs neither fewer bits nor a delay"


def test_a_short_run_agrees_often_enough() -> None:
    problem = problem_on(Network(1e-4, 1e3))
    for steps, every in ((10_000, 64), (600, 32), (64, 4), (63, None)):
        found = gentlest(replace(problem, objective=Objective(steps=steps)), replicas(None), 0.05)
        assert (found.every if found is not None else None) == every


def test_a_run_that_is_too_short_for_a_trial_is_planned_without_what_needs_one() -> None:
    free = problem_on(Network(1e-4, 5e6))
    free = replace(free, constraints=replace(free.constraints, every=()))
    lossy = best_plan(free)
    assert "int4" in str(inexact_parts(lossy.plan)) or "powersgd" in str(inexact_parts(lossy.plan))
    short = replace(free, constraints=free.constraints.without_trial("a run of 20 steps is too short to try it"))
    assert short.constraints.formats == ("fp32", "bf16", "int8")
    assert short.constraints.syncs == (Sync.FP16,)
    found = best_plan(short)
    assert inexact_parts(found.plan)
    assert not {"int4", "powersgd"} & {stage.send for stage in found.plan.stages}
    assert not {Sync.INT4, Sync.POWERSGD} & {stage.sync for stage in found.plan.stages}
    for problem, one, due in ((free, lossy, True), (short, found, False)):
        (told,) = (r.text for r in explain(Evaluator(problem), one, ["a", "b", "c", "d"]) if r.about == "accuracy")
        assert ("a run measures on a warm-up what they cost in accuracy" in told) == due
        assert ("is not used, as a run of 20 steps is too short to try it" in told) != due
    named = problem_on(Network(1e-4, 5e6), ", activations: int4, exact: false").constraints.without_trial("it is short")
    assert named.formats == ("int4",)  # as the job says


def test_every_place_that_tells_whether_sums_are_exact_reads_the_same_table() -> None:
    """Horovod's sums of 16-bit floats were once explained as exact gradients."""
    problem = problem_on(Network(1e-4, 1e7), ", exact: true", ranks=2)
    for sync in set(SYNCS.values()) - {Sync.LOCAL, Sync.CHANNELS}:
        found = judge(problem, Plan((Stage(0, 6, (0, 1), (1.0, 1.0), sync),)))
        (told,) = (one for one in explain(Evaluator(problem), found, ["a", "b"]) if one.about == "sum")
        exact = sync.exact
        assert (told.exact, "exact gradients" in told.text, not inexact_parts(found.plan)) == (exact,) * 3, sync
        fields = f"exact: true, stages: [{{ranks: [0, 1], sync: {sync}}}]"
        if exact:
            parse(f"parallel: {{{fields}}}", "job.yaml")
        else:
            with pytest.raises(JobError, match="is not exact"):
                parse(f"parallel: {{{fields}}}", "job.yaml")
    assert not Sync.HOROVOD_FP16.exact


def test_local_steps_that_a_job_asks_for_are_taken_by_whole_replicas() -> None:
    problem = problem_on(Network(1e-4, 1e5), ", sync: {every: 24}")
    found = best_plan(problem)
    found.plan.check(6, 4)
    assert found.plan.local == Local(24)
    assert not chosen_inexact(problem, found.plan)


def test_members_that_take_local_steps_do_not_wait_for_each_other() -> None:
    """Two devices of which one is half as fast: in step, each step takes as long as the slow one's half."""
    fast, slow = profile(), profile(speed=0.5)
    problem = replace(problem_on(Network(0.0, 1e12), ranks=2), profiles=[fast, slow])
    stage = replicas(Local(8)).stages[0]
    even = judge(problem, replicas(Local(8))).prediction
    fair = judge(problem, replace(replicas(Local(8)), stages=(replace(stage, shares=(43.0, 21.0)),))).prediction
    assert fair.seconds < 0.7 * even.seconds
    assert sum(even.parts.values()) == pytest.approx(even.seconds)


def test_only_the_part_of_a_sum_counts_that_outlasts_its_delay() -> None:
    """A ring of two sends 6 MiB once in all: 0.6 s at 10 MiB/s, of which a step takes its part."""
    problem = problem_on(Network(0.0, 10.0 * MIB), ranks=2)
    size = synced_bytes(problem, Sync.ALL_REDUCE, 0, 6)
    assert Ring(problem, (0, 1)).seconds(size) == pytest.approx(0.6)

    def added(**local: Any) -> float:
        return outer_cost(problem, replicas(Local(**local)), 0.1)[0]

    assert added(every=8) == pytest.approx(0.6 / 8)
    assert added(every=16) == pytest.approx(0.6 / 16)
    assert added(every=8, delay=4) == pytest.approx(0.2 / 8)
    assert added(every=8, delay=6) == pytest.approx(0.0)
    assert added(every=8, fragments=4, delay=1) == pytest.approx(4 * 0.05 / 8)
    assert added(every=8, format="int4") == pytest.approx(FORMATS["int4"].ratio * 0.6 / 8)
    together = judge(problem, replicas(None)).prediction.seconds
    assert judge(problem, replicas(Local(8, 4, 1))).prediction.seconds < together


def test_what_members_keep_to_agree_needs_memory() -> None:
    problem = problem_on(Network(0.0, 1e9), ranks=2)
    whole = 6 * MIB

    def copies(sync: Sync, local: Local | None = None) -> float:
        plan = Plan((Stage(0, 6, (0, 1), (1.0, 1.0), sync),), local=local)
        return (judge(problem, plan).prediction.memory[0] - 6 * 32) / whole

    in_step = copies(Sync.ALL_REDUCE)
    assert in_step == 4, "parameters, gradients, momentum, and buckets"
    assert copies(Sync.INT4) == in_step + 1.5, "error feedback: of all numbers, and of the half that it sums"
    assert copies(Sync.POWERSGD) == in_step + 1
    alone = in_step - 1 + 2  # without buckets, but with the parameters of the last agreement and the outer momentum
    assert copies(Sync.LOCAL, Local(8)) == alone + 4, "what is on its way, and what it leads to"
    assert copies(Sync.LOCAL, Local(8, 4, 1, "int4")) == alone + 1 + 1.5, "a quarter is on its way at a time"


def test_well_connected_devices_form_a_replica() -> None:
    """Two sites with a slow link between them, and a model that no device can hold alone."""
    fast = dict.fromkeys(((0, 2), (2, 0), (1, 3), (3, 1)), (0.0001, 1000000000.0))
    problem = problem_on(Network(1e-3, 1e5, pairs=fast))
    need = judge(replace(problem, constraints=replace(problem.constraints, sync=Sync.LOCAL)), replicas(Local(8), 4))
    hosts = [replace(host, memory=0.7 * max(need.prediction.memory.values())) for host in problem.hosts]
    found = best_plan(replace(problem, hosts=hosts))
    assert found.prediction.fits
    assert found.plan.local is not None
    assert sorted(found.plan.replicas) == [(0, 2), (1, 3)]


def test_bytes_are_those_of_the_links_and_of_the_sums() -> None:
    problem = problem_on(Network(0.0, 1e9), ranks=3)
    pipeline = Plan(
        (Stage(0, 3, (0,), (1.0,), send="int8"), Stage(3, 6, (1, 2), (1.0, 1.0), Sync.FP16)), micro_batches=2
    )
    found = traffic(problem, pipeline)
    assert found.boundaries == (64 * 2 * 1024,)
    assert found.sums == ((0.0,), (1.5 * MIB, 1.5 * MIB))
    assert found.ranks == {0: 64 * 1024, 1: 32 * 1024 + 1.5 * MIB, 2: 32 * 1024 + 1.5 * MIB}
    local = replicas(Local(8, format="int4"), 3)
    assert (
        summed_bytes(problem, local, local.stages[0])
        == [pytest.approx(4 / 3 * 6 * MIB * FORMATS["int4"].ratio / 8)] * 3
    )
    small = replace(problem, profiles=[profile(parameters=1000)] * 3, hosts=[Host((0, 1, 2), 3.0, 1e12)])
    assert traffic(small, replicas(None, 3)).sums == ((12000.0, 6000.0, 6000.0),), "along a tree"
    assert group._ARITY == syncs.TREE_ARITY


def test_for_many_devices_other_plans_are_derived_from_the_exact_one() -> None:
    problem = replace(problem_on(Network(1e-4, 1e6), ranks=201), batch_size=402)
    evaluator, exactly = Evaluator(problem), replace(problem, constraints=problem.constraints.exactly())
    found = best_plan(problem, evaluator)
    assert evaluator.evaluations <= 40
    exact = judge(exactly, plain_ddp(exactly))
    assert found.usable
    assert found.prediction.seconds < exact.prediction.seconds


def test_layers_in_fewer_bits_are_among_what_is_not_exact() -> None:
    lossy = replace(profile(), execution=Execution(precision="bf16"))
    problem = problem_on(Network(1e-4, 1e9), ", exact: true", own=lossy)
    told = [one.text for one in explain(Evaluator(problem), judge(problem, plain_ddp(problem)), list("abcd"))]
    assert "Not everything is exact, because the job asks for this: layers in bf16." in told


def test_ddp_as_a_baseline_is_exact_whatever_the_job_asks_for() -> None:
    problem = problem_on(Network(1e-4, 1e6), ", sync: {every: 8}")
    asked = replace(problem, constraints=replace(problem.constraints, sync=Sync.LOCAL))
    assert judge(asked, data_parallel(asked)).plan.local is not None
    ddp = alternatives(asked, ["a", "b", "c", "d"])["ddp and equal shares"]
    assert ddp.plan.local is None
    assert ddp.plan.stages[0].sync is Sync.ALL_REDUCE


def test_profiles_in_files_keep_what_formats_take(tmp_path: Path) -> None:
    made = profile()
    layers = tuple(replace(layer, coded={"int8": (1040, 1040), "int4": (544, 0)}) for layer in made.layers)
    made = replace(made, layers=layers, execution=Execution(True), gain=1.5)
    write_profile(made, {}, tmp_path / "pi.yaml")
    assert read_profile(tmp_path / "pi.yaml", [layer.name for layer in layers]) == made
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_only_strategy_auto_chooses() -> None:
    named = "{strategy: auto, exact: false, activations: fp32, gradient_compression: fp16}"
    for parallel, inexact in (
        ("{strategy: auto, exact: false}", True),
        ("{strategy: pipeline, exact: false}", False),
        (named, False),
    ):
        job = parse(f"{{batch_size: 64, parallel: {parallel}}}", "job.yaml", ["parallel.workers=2"])
        hosts = [Host((rank,), 1.0, 1e12) for rank in range(2)]
        problem = problem_for(job, [profile()] * 2, hosts, Network(1e-3, 1e5), 1)
        assert problem.constraints.is_exact != inexact
        assert choose(job, problem).plan.world_size == 2
    with pytest.raises(JobError, match=r"parallel\.exact"):
        parse("parallel: {exact: perhaps}", "job.yaml")


def test_a_job_that_is_to_be_exact_names_nothing_else() -> None:
    for parallel, field in (
        ("{strategy: ddp, sync: {every: 8}}", "sync"),
        ("{strategy: ddp, gradient_compression: int4}", "gradient_compression"),
        ("{strategy: pipeline, activations: bf16}", "activations"),
        ("{stages: [{ranks: [0, 1]}, {ranks: [2, 3], sync: fp16}]}", "stages[1].sync"),
        ("{stages: [{ranks: [0], send: int8}, {ranks: [1]}]}", "stages[0].send"),
    ):
        job = parse(f"parallel: {parallel}", "job.yaml")
        assert changed(job, {"name": "again"}).parallel == job.parallel  # what was not named stays open
        with pytest.raises(JobError) as error:
            parse(f"parallel: {parallel}", "job.yaml", ["parallel.exact=true"])
        assert f"exact: true, but parallel.{field} (" in str(error.value)
        assert f"leave out one of parallel.exact and parallel.{field}" in str(error.value)
    for parallel in (
        "{stages: [{ranks: [0, 1], sync: all-reduce, send: fp32}]}",
        "{strategy: pipeline, activations: fp32}",
    ):
        assert parse(f"parallel: {parallel}", "job.yaml", ["parallel.exact=true"]).parallel.is_exact
