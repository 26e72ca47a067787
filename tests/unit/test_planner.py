import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from horizonml.data.spec import DataSpec
from horizonml.errors import PlanError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Stage
from horizonml.planner import simulate
from horizonml.planner.choose import choose
from horizonml.planner.cost import Ring
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import Constraints, Loading, Problem
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.reasons import remedy
from horizonml.planner.search import equal_split, search
from horizonml.planner.simulate import Prediction
from horizonml.planner.strategies import fixed_plan, needs_profile, problem_for
from horizonml.profiling.probe import tournament
from horizonml.runtime.agreement import loading_for
from tests.records import image_info

FAST = Network(0.0, 1e12)


def chosen(job: Job, profiles: list[Profile], hosts: list[Host], network: Network) -> Candidate:
    return choose(job, problem_for(job, profiles, hosts, network, 0))


def predict(
    plan: Plan, profiles: Profile, batch_size: int, hosts: list[Host], network: Network, copies: int
) -> Prediction:
    return simulate.predict(Problem([profiles] * plan.world_size, hosts, network, batch_size, copies), plan)


def profile(*seconds: float, fixed: float = 0.0, parameters: int = 0, saved: int = 0) -> Profile:
    """Layers that take this long per sample forward, twice as long backward, plus `fixed` seconds each time."""
    sizes = (1, 100)
    layers = tuple(
        LayerProfile(
            f"layer{number}",
            tuple(fixed + second * size for size in sizes),
            tuple(fixed + 2 * second * size for size in sizes),
            parameters,
            saved,
            4,
        )
        for number, second in enumerate(seconds)
    )
    return Profile("test", sizes, 0.0, layers)


def pipeline(ends: list[int], micro_batches: int, schedule: str = "1f1b") -> Plan:
    starts = [0, *ends[:-1]]
    stages = tuple(Stage(a, b, (rank,), (1.0,)) for rank, (a, b) in enumerate(zip(starts, ends, strict=True)))
    return Plan(stages, schedule, micro_batches)


def one_host(ranks: int, cores: float, memory: float = 1e12) -> list[Host]:
    return [Host(tuple(range(ranks)), cores, memory)]


def test_a_pipeline_is_never_predicted_to_be_slower_than_an_equal_split() -> None:
    """The layers are cut by the profile of the first device, of which the others may be the opposite."""
    profiles = [profile(0.003, 0.001, 0.001, 0.001), profile(0.001, 0.001, 0.001, 0.009)]
    job = parse("parallel: {strategy: pipeline, workers: 2, micro_batches: 4}", "job.yaml")
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(2)]
    problem = problem_for(job, profiles, hosts, FAST, 0)
    equal = equal_split(problem, 4)
    assert equal is not None
    by_the_first = pipeline([1, 4], 4)
    assert judge(problem, equal).cost < judge(problem, by_the_first).cost
    assert choose(job, problem).cost <= judge(problem, equal).cost


def test_equal_stages_take_the_bubble_formula() -> None:
    """M + P - 1 times the time of one micro-batch in one stage (Narayanan et al., 2021)."""
    for schedule, stages, micros in (("gpipe", 4, 4), ("1f1b", 1, 4), ("1f1b", 5, 20)):
        plan = pipeline(list(range(1, stages + 1)), micros, schedule)
        found = predict(plan, profile(*[0.001] * stages), 10 * micros, one_host(stages, stages), FAST, 0)
        assert found.seconds == pytest.approx((micros + stages - 1) * 10 * 0.003)


def test_links_and_their_latency_are_paid_for() -> None:
    plan, times = pipeline([1, 2], 1), profile(0.001, 0.001)
    fast = predict(plan, times, 10, one_host(2, 2), FAST, 0).seconds
    slow = predict(plan, times, 10, one_host(2, 2), Network(0.5, 40.0), 0).seconds
    assert slow == pytest.approx(fast + 2 * (0.5 + 10 * 4 / 40.0))
    # 40 bytes take 40 ms, and are there every 10 ms: what follows waits for the link.
    sent = predict(pipeline([1, 2], 2), times, 20, one_host(2, 2), Network(0.0, 1e3), 0).messages
    first, second = (one for one in sent if one.sender == 0)
    assert (first.begin, second.begin, second.end) == pytest.approx((0.01, 0.05, 0.09))


def test_1f1b_needs_less_memory_than_gpipe() -> None:
    times = profile(0.001, 0.001, parameters=1000, saved=8)
    memory = {
        name: predict(pipeline([1, 2], 10, name), times, 100, one_host(2, 2), FAST, 1).memory
        for name in ("gpipe", "1f1b")
    }
    assert memory["gpipe"][0] == 3 * 1000 + 10 * 10 * 8
    assert memory["1f1b"] == {0: 3 * 1000 + 2 * 10 * 8, 1: 3 * 1000 + 1 * 10 * 8}


def test_more_stages_than_layers_cannot_be() -> None:
    job = parse("parallel: {strategy: pipeline, workers: 5}\nmodel: {name: tests.models:plain}", "job.yaml")
    with pytest.raises(PlanError, match="at most 2 stages, but the plan needs 5"):
        chosen(job, [profile(1.0, 1.0)] * 5, one_host(5, 5), FAST)
    constraints = Constraints(most_members=1, ordered=True)
    with pytest.raises(PlanError, match="the constraints allow no plan"):
        search(Problem([profile(1.0, 1.0)] * 3, one_host(3, 3), FAST, 8, 0, constraints=constraints))


def in_order(ranks: int, layers: int, shapes: Iterator[tuple[int, ...]], counts: Sequence[int]) -> Iterator[Plan]:
    """Every cut of every shape, which is the number of members of each stage; ranks in order, with equal shares."""
    for shape in shapes:
        for cuts in itertools.combinations(range(1, layers), len(shape) - 1):
            bounds = list(itertools.pairwise([0, *cuts, layers]))
            ends = list(itertools.accumulate(shape))
            stages = tuple(
                Stage(start, stop, tuple(range(end - members, end)), (1.0,) * members)
                for (start, stop), members, end in zip(bounds, shape, ends, strict=True)
            )
            yield from (Plan(stages, "1f1b", count) for count in counts)


@pytest.mark.parametrize("strategy", ["pipeline", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_a_strategy_is_a_constraint_and_its_best_plan_is_found(strategy: str, seed: int) -> None:
    draw, ranks, layers = random.Random(seed), 4, 6
    times = profile(*(draw.uniform(1e-4, 2e-3) for _ in range(layers)), fixed=1e-4, parameters=1 << 18)
    options = [f"parallel.strategy={strategy}", f"parallel.workers={ranks}", "parallel.schedule=1f1b"]
    job = parse("batch_size: 48", "job.yaml", options)
    hosts, network = [Host((rank,), 1.0, 1e12) for rank in range(ranks)], Network(1e-4, 10 ** draw.uniform(6, 8))
    problem = problem_for(job, [times] * ranks, hosts, network, 0)
    shapes = (
        shape
        for stages in range(2, ranks + 1)
        for shape in itertools.product(range(1, ranks), repeat=stages)
        if sum(shape) == ranks and (max(shape) == 1) == (strategy == "pipeline")
    )
    evaluator = Evaluator(problem)
    best = min(evaluator.judge(plan).prediction.seconds for plan in in_order(ranks, layers, shapes, (1, 2, 4, 8, 16)))
    found = choose(job, problem)
    assert found.prediction.seconds <= 1.02 * best
    members = [stage.ranks for stage in found.plan.stages]
    assert [rank for ranks in members for rank in ranks] == list(range(4))
    assert (max(map(len, members)) == 1) == (strategy == "pipeline")
    assert all(len(set(stage.shares)) == 1 for stage in found.plan.stages)


def test_explicit_stages_keep_ranks_shares_and_layers() -> None:
    text = "parallel: {stages: [{ranks: [2, 0], shares: [3, 1], layers: [0, 1]}, {ranks: [1], layers: [2, 3]}]}"
    job = parse(text, "job.yaml", ["parallel.micro_batches=4"])
    assert not needs_profile(job.parallel, 3)
    plan = fixed_plan(job, 4, 3)
    assert plan.stages == (Stage(0, 2, (2, 0), (3.0, 1.0)), Stage(2, 4, (1,), (1.0,)))
    with pytest.raises(PlanError, match="ends at layer 3, but the model has 6"):
        fixed_plan(job, 6, 3)


def test_explicit_stages_without_layers_are_cut_by_time_and_share() -> None:
    job = parse("parallel: {stages: [{ranks: [0, 1], shares: [1, 1]}, {ranks: [2]}]}\nbatch_size: 100", "job.yaml")
    assert needs_profile(job.parallel, 3)
    plan = chosen(job, [profile(*[0.001] * 6)] * 3, one_host(3, 3), FAST).plan
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 4), (4, 6)]


def test_times_between_measured_sizes_are_interpolated() -> None:
    found = Profile("x", (4, 16), 0.0, (LayerProfile("a", (1.0, 2.0), (2.0, 4.0), 0, 0, 0),))
    assert found.seconds(0, 10) == (1.5, 3.0)
    assert found.seconds(0, 32) == (4.0, 8.0)
    assert found.seconds(0, 4) == (1.0, 2.0)
    assert 0 < found.seconds(0, 1)[0] < 1.0
    assert Profile.from_json(found.to_json()) == found


def test_a_tournament_lets_every_pair_meet_once_and_nobody_twice_in_a_round() -> None:
    for players in (2, 5, 8):
        rounds = tournament(players)
        met = [pair for pairs in rounds for pair in pairs]
        assert sorted(met) == sorted(itertools.combinations(range(players), 2))
        assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
        assert len(rounds) == players - 1 + players % 2


def test_sums_overlap_with_the_backward_pass() -> None:
    """The last layers' gradients travel while the first layers compute; the rest is waited for."""
    plan = Plan((Stage(0, 2, (0, 1), (1.0, 1.0)),))
    hosts = [Host((0,), 1.0, 1e12), Host((1,), 1.0, 1e12)]
    layers = profile(0.01, 0.01, parameters=20 << 20)
    bandwidth = (20 << 20) / 0.05  # so that a layer's ring takes 50 ms, which the other's backward pass hides
    found = predict(plan, layers, 10, hosts, Network(0.0, bandwidth), 0)
    assert found.seconds == pytest.approx(5 * 2 * 0.03 + 0.05)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_a_quota_slows_the_processor_down_and_not_the_link() -> None:
    plan = Plan((Stage(0, 1, (0, 1), (1.0, 1.0)),))
    layers, network = profile(0.01, parameters=20 << 20), Network(0.0, 20 << 20)
    times = []
    for cores in (1.0, 0.2):
        hosts = [Host((0,), cores, 1e12), Host((1,), cores, 1e12)]
        times.append(predict(plan, layers, 10, hosts, network, 0).seconds)
    # While the link works the quota's allowance of 20 ms grows back, and lets the first 25 ms run at full speed.
    assert times == [pytest.approx(5 * 0.03 + 1), pytest.approx(0.025 + (5 * 0.03 - 0.025) / 0.2 + 1)]


def test_a_quota_lets_short_work_pass_and_slows_down_long_work() -> None:
    layers, hosts = profile(0.001), [Host((0,), 0.2, 1e12)]
    plan = Plan((Stage(0, 1, (0,), (1.0,)),))
    # In the steady state of a step that never waits, an allowance does not help.
    assert predict(plan, layers, 100, hosts, FAST, 0).seconds == pytest.approx(0.3 / 0.2)
    # Two devices take turns; what either needs is less than its allowance of 20 ms has grown to meanwhile.
    pair = [Host((0,), 0.5, 1e12), Host((1,), 0.5, 1e12)]
    found = predict(pipeline([1, 2], 1), profile(0.001, 0.001), 5, pair, FAST, 0)
    assert found.seconds == pytest.approx(2 * 5 * 0.003)


def test_samples_that_are_loaded_ahead_need_memory_where_they_are_read() -> None:
    kib, info = 1 << 10, image_info(10, (3, 32, 32), 1000, 100)  # 12 KiB a sample, and 8 bytes for its class
    stages = (Stage(0, 1, (0, 1), (3.0, 1.0)), Stage(1, 2, (2,), (1.0,)), Stage(2, 3, (3,), (1.0,)))
    plan = Plan(stages, micro_batches=4)
    plain = Problem([profile(0.001, 0.001, 0.001, saved=100)] * 4, one_host(4, 4), FAST, 64, 0)

    def extra(**data: Any) -> list[float]:
        spec = DataSpec(**{"name": "folder", "folder": "here", **data})
        found = [judge(problem, plan) for problem in (plain, replace(plain, loading=loading_for(spec, info)))]
        return [found[1].prediction.memory[rank] - found[0].prediction.memory[rank] for rank in range(4)]

    # The batch that is trained on and two more; the members of the first stage read three quarters and one.
    assert extra() == [3 * 48 * 12 * kib, 3 * 16 * 12 * kib, 0, 3 * 64 * 8]
    assert extra(memory=100 * kib) == [48 * 12 * kib + 100 * kib, 16 * 12 * kib + 100 * kib, 0, 3 * 64 * 8]
    assert extra(prefetch=1) == [2 * 48 * 12 * kib, 2 * 16 * 12 * kib, 0, 2 * 64 * 8]
    assert extra(workers=0) == extra(name="cifar10") == [0, 0, 0, 0]
    assert extra(name="cifar10", workers=1) == extra()
    tight = replace(plain, hosts=one_host(4, 4, 1.5 * (1 << 20)), loading=Loading(12 * kib, 8, 2, 256 << 20))
    found = judge(tight, plan)
    assert found.prediction.lacking.keys() == {0}
    assert remedy(tight, found).startswith("With data.memory: 524288 the plan fits")


def test_what_crosses_machines_costs_the_processor_more() -> None:
    """Of 10 samples, 40 bytes cross each way; both ends encrypt, or decrypt, what they send and receive."""
    protected = replace(profile(0.001, 0.001), crossing_seconds_per_byte=1e-3)
    apart = [Host((rank,), 1.0, 1e12) for rank in range(2)]
    free = predict(pipeline([1, 2], 1), profile(0.001, 0.001), 10, apart, FAST, 0).seconds
    assert predict(pipeline([1, 2], 1), protected, 10, apart, FAST, 0).seconds == pytest.approx(free + 4 * 0.04)
    assert predict(pipeline([1, 2], 1), protected, 10, one_host(2, 2), FAST, 0).seconds == pytest.approx(free)


def test_a_sum_over_machines_costs_the_processor_more() -> None:
    protected = replace(profile(0.001), crossing_seconds_per_byte=1e-3)
    for hosts, expected in (
        ([Host((rank,), 1.0, 1e12) for rank in range(4)], 3000 * 1e-3),  # all of 4 * 3/4 of the bytes
        ([Host((0, 1), 2.0, 1e12), Host((2, 3), 2.0, 1e12)], 1500 * 1e-3),  # one neighbour of each is elsewhere
    ):
        problem = Problem([protected] * 4, hosts, FAST, 10, 0)
        assert Ring(problem, range(4)).seconds(1000.0) == pytest.approx(expected)
