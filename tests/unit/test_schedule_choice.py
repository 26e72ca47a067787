"""The planner and its choice of a schedule: a split backward pass, and several stages on each rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from horizonml.job.jobfile import parse
from horizonml.plan.plan import Plan, Stage
from horizonml.plan.schedules import SCHEDULES, Kind
from horizonml.planner.choose import choose
from horizonml.planner.evaluator import Evaluator, judge
from horizonml.planner.problem import Constraints, Problem
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.planner.search import search, widened
from horizonml.planner.simulate import predict
from horizonml.planner.strategies import fixed_plan, needs_profile, problem_for

NETWORK = Network(1e-6, 1e10)


OF_FIXTURES = {"zero_bubble": "zb-h1", "interleaved": "interleaved"}


@pytest.fixture(autouse=True)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that names schedules has those beside 1F1B and GPipe; others have all."""
    asked = {name for fixture, name in OF_FIXTURES.items() if fixture in request.fixturenames}
    for name in list(SCHEDULES):
        if asked and name not in {"1f1b", "gpipe", *asked}:
            monkeypatch.delitem(SCHEDULES, name)


@pytest.fixture
def zero_bubble() -> str:
    """The schedule's name."""
    return OF_FIXTURES["zero_bubble"]


@pytest.fixture
def interleaved() -> str:
    """The schedule's name."""
    return OF_FIXTURES["interleaved"]


def profile(layers: int, seconds: float = 1e-3, saved: int = 1000, output: int = 4) -> Profile:
    """Equal layers; the backward pass takes twice as long as the forward pass."""
    layer = LayerProfile("layer", (seconds, 100 * seconds), (2 * seconds, 200 * seconds), 1 << 20, saved, output)
    return Profile("device", (1, 100), 0.0, tuple(replace(layer, name=f"layer{n}") for n in range(layers)))


def problem_of(strategy: str, schedule: str, ranks: int = 4, layers: int = 8, batch: int = 8) -> Problem:
    overrides = [f"parallel.strategy={strategy}", f"parallel.workers={ranks}", f"batch_size={batch}"]
    job = parse("parallel: {micro_batches: 4}", "job.yaml", overrides)
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(ranks)]
    problem = problem_for(job, [profile(layers)] * ranks, hosts, NETWORK, 1)
    names = tuple(SCHEDULES) if schedule == "auto" else (schedule,)
    names = ("1f1b", *(name for name in names if name != "1f1b")) if schedule == "auto" else names
    return replace(problem, constraints=replace(problem.constraints, schedules=names))


def cyclic(ranks: int, turns: int, each: int, schedule: str, micro_batches: int) -> Plan:
    """A pipeline in which every rank holds `turns` stages of `each` layers."""
    stages = (Stage(s * each, (s + 1) * each, (s % ranks,), (1.0,)) for s in range(ranks * turns))
    return Plan(tuple(stages), schedule, micro_batches)


def test_auto_means_every_schedule_that_is_registered() -> None:
    job = parse("parallel: {strategy: pipeline, workers: 2}", "job.yaml")
    assert job.parallel.schedule == "auto"
    problem = problem_for(job, [profile(4)] * 2, [Host((0, 1), 2.0, 1e12)], NETWORK, 1)
    assert problem.constraints.schedules == ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-interleaved", "zb-v")
    text = "parallel: {micro_batches: 4, stages: [{ranks: [0], layers: [0, 3]}, {ranks: [1], layers: [4, 7]}]}"
    fixed = parse(text, "job.yaml")
    assert not needs_profile(fixed.parallel, 2)
    assert fixed_plan(fixed, 8, 2).schedule == "1f1b", "where nothing is measured"


def test_a_split_backward_pass_is_predicted_to_fill_bubbles(zero_bubble: str) -> None:
    """1F1B takes (M + P - 1) (F + B + W); ZB-H1 saves what its bubbles lose of (P - 1) W (Qi et al., ICLR 2024)."""
    ranks, micros = 4, 8
    times, network = profile(ranks), Network(0.0, 1e15)
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(ranks)]
    problem = Problem([times] * ranks, hosts, network, micros, 0)
    seconds = {
        name: judge(problem, cyclic(ranks, 1, 1, name, micros)).prediction.seconds for name in ("1f1b", zero_bubble)
    }
    assert seconds["1f1b"] == pytest.approx((micros + ranks - 1) * 3e-3)
    least = micros * 3e-3  # of a rank that is never idle
    assert least < seconds[zero_bubble] < 0.93 * seconds["1f1b"]


def test_the_planner_takes_a_zero_bubble_schedule_where_it_saves_time(zero_bubble: str) -> None:
    for strategy in ("pipeline", "hybrid"):
        found = search(problem_of(strategy, "auto"))
        usual = search(problem_of(strategy, "1f1b"))
        assert found.plan.schedule == zero_bubble
        assert found.prediction.seconds <= 0.98 * usual.prediction.seconds


def test_a_schedule_that_saves_next_to_nothing_is_not_taken(zero_bubble: str) -> None:
    """With many micro-batches the bubble is small, and so is what can be saved."""
    problem = problem_of("pipeline", "auto", ranks=2, layers=8, batch=256)
    problem = replace(problem, constraints=replace(problem.constraints, micro_batches=(64,)))
    assert search(problem).plan.schedule == "1f1b"


def test_activations_are_held_until_the_weight_part(zero_bubble: str) -> None:
    ranks, micros = 3, 6
    problem = Problem([profile(ranks)] * ranks, [Host((0, 1, 2), 3.0, 1e12)], NETWORK, micros, 0)
    usual, split = (judge(problem, cyclic(ranks, 1, 1, name, micros)).prediction for name in ("1f1b", zero_bubble))
    held = [(usual.memory[rank] - 2 * (1 << 20)) / 1000 for rank in range(ranks)]
    assert held == [3, 2, 1]
    assert [(split.memory[rank] - 2 * (1 << 20)) / 1000 for rank in range(ranks)] == [3, 3, 3]


def test_ranks_that_hold_two_stages_get_them_cyclically(interleaved: str) -> None:
    for strategy in ("pipeline", "hybrid"):
        found = search(problem_of(strategy, interleaved))
        plan = found.plan
        plan.check(8, 4)
        assert plan.schedule == interleaved
        groups = [stage.ranks for stage in plan.stages]
        half = len(groups) // 2
        assert groups[:half] == groups[half:]
        assert all(len(plan.stages_of(rank)) == 2 for rank in range(4))
    assert [stage.ranks for stage in search(problem_of("pipeline", interleaved)).plan.stages] == [
        (0,), (1,), (2,), (3,), (0,), (1,), (2,), (3,)
    ]  # fmt: skip


def test_two_stages_on_each_rank_are_chosen_where_that_shrinks_the_bubble(interleaved: str) -> None:
    found = search(problem_of("pipeline", "auto"))
    assert found.plan.schedule == interleaved
    assert len(found.plan.stages) == 8
    usual = search(problem_of("pipeline", "1f1b"))
    assert found.prediction.seconds <= 0.98 * usual.prediction.seconds


def test_unequal_layers_are_cut_well_for_two_stages_on_each_rank(interleaved: str) -> None:
    for seed in range(2):
        draw, ranks, layers = random.Random(seed), 2 + seed, 9
        base = profile(layers)
        factors = [16.0 if seed == 0 and layer == 0 else draw.uniform(0.2, 4) for layer in range(layers)]
        unequal = tuple(
            replace(
                layer,
                forward=tuple(factor * seconds for seconds in layer.forward),
                backward=tuple(factor * seconds for seconds in layer.backward),
            )
            for factor, layer in zip(factors, base.layers, strict=True)
        )
        problem = problem_of("pipeline", interleaved, ranks, layers, batch=16)
        problem = replace(problem, profiles=[replace(base, layers=unequal)] * ranks)
        evaluator, groups = Evaluator(problem), [[rank] for rank in range(ranks)] * 2
        every = itertools.combinations(range(1, layers), 2 * ranks - 1)
        best = min(evaluator.judge(evaluator.plan(cuts, groups, 4)).prediction.seconds for cuts in every)
        assert search(problem).prediction.seconds <= 1.05 * best


def test_a_model_with_too_few_layers_has_one_stage_on_each_rank(interleaved: str) -> None:
    assert search(problem_of("pipeline", "auto", layers=5)).plan.schedule != interleaved
    found = search(problem_of("auto", interleaved, layers=2))
    assert found.plan.schedule == interleaved
    found.plan.check(2, 4)


def test_what_a_rank_sends_itself_is_free(interleaved: str) -> None:
    """Two stages on one rank cost what one stage with both their layers does."""
    slow = Network(1.0, 1.0)
    costly = replace(profile(2), message_seconds=1.0, transfer_seconds_per_byte=1.0)
    problem = Problem([costly], [Host((0,), 1.0, 1e12)], slow, 4, 0)
    two = predict(problem, cyclic(1, 2, 1, interleaved, 2))
    assert two.messages == []
    assert two.seconds == pytest.approx(judge(problem, cyclic(1, 1, 2, "1f1b", 2)).prediction.seconds)


def test_memory_and_updates_count_all_stages_of_a_rank(interleaved: str) -> None:
    times = replace(profile(4), update_seconds_per_byte=1e-8)
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(2)]
    found = predict(Problem([times] * 2, hosts, NETWORK, 2, 1), cyclic(2, 2, 1, interleaved, 2))
    updates = [span for span in found.spans if span.kind is Kind.UPDATE]
    assert sorted((span.rank, span.stage) for span in updates) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert found.parts["updating parameters"] == pytest.approx(2 * (1 << 20) * 1e-8)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    parameters = 2 * 3 * (1 << 20)
    assert [found.memory[rank] - parameters for rank in range(2)] == [4 * 1000, 3 * 1000]


def test_gradients_of_two_stages_are_summed_one_after_the_other(interleaved: str) -> None:
    """Four ranks, two members to a stage, each a member of two stages, on a link that makes sums dominate."""
    groups: Sequence[tuple[int, ...]] = ((0, 1), (2, 3), (0, 1), (2, 3))
    stages = tuple(Stage(n, n + 1, ranks, (1.0, 1.0)) for n, ranks in enumerate(groups))
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(4)]
    slow = Network(0.0, float(1 << 20))
    problem = Problem([profile(4, seconds=1e-6, output=0)] * 4, hosts, slow, 4, 0)
    found = judge(problem, Plan(stages, interleaved, 2)).prediction
    assert found.seconds == pytest.approx(2 * 1.0, rel=0.01)  # a ring of two sends its megabyte once in all


def test_every_constraint_works_with_every_schedule(zero_bubble: str, interleaved: str) -> None:
    for strategy, schedule in zip(itertools.cycle(("hybrid", "auto", "pipeline")), SCHEDULES, strict=False):
        found = search(problem_of(strategy, schedule))
        found.plan.check(8, 4)
        assert found.plan.schedule == schedule


def test_explicit_stages_are_judged_with_every_schedule(zero_bubble: str) -> None:
    stages = ", ".join(f"{{ranks: [{rank}], layers: [{2 * rank}, {2 * rank + 1}]}}" for rank in range(4))
    job = parse(f"batch_size: 8\nparallel: {{stages: [{stages}]}}", "job.yaml")
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(4)]
    found = choose(job, problem_for(job, [profile(8)] * 4, hosts, NETWORK, 1))
    assert found.plan.schedule == zero_bubble
    assert [(stage.start, stage.stop) for stage in found.plan.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert Constraints().schedules == ("1f1b",)


def test_the_predicted_picture_has_a_row_for_each_rank(interleaved: str, zero_bubble: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from horizonml.report.run_plots import predicted

    for schedule in (interleaved, zero_bubble):
        found = search(problem_of("pipeline", schedule))
        path = predicted(found.plan, found.prediction, [f"rank {rank}" for rank in range(4)], tmp_path / "plan.png")
        assert path.stat().st_size > 10_000
    wide = widened(found.plan, range(4), 6)
    more = problem_of("pipeline", zero_bubble, ranks=6)
    six = predicted(wide, predict(more, wide), [f"rank {rank}" for rank in range(6)], tmp_path / "six.png")
    heights = [int.from_bytes(picture.read_bytes()[20:24], "big") for picture in (path, six)]
    assert heights[1] > 1.25 * heights[0], "what a plan leaves out has a row, too"
