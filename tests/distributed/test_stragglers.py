"""When ranks compare their times with the plan, and when they make another one, by clocks that the test sets."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.machine.sensors import Condition, ProcessorClock
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.choose import fastest_plan, with_objective
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import Constraints, Objective, Problem, Watts
from horizonml.planner.profile import LOCAL_NETWORK, Host, Network
from horizonml.planner.reasons import inexact_parts
from horizonml.planner.search import search
from horizonml.runtime.stragglers import Forecast, StragglerDetector
from tests.distributed.pool import Pool
from tests.unit.test_planner import profile
from tests.unit.test_precision import problem_on

RANKS = 3
STEPS = 100_000  # that are left to do
LATE_STEPS = 250  # of a run that has a deadline
COOL, HOT = ProcessorClock(2e9, 2e9, 50.0, 85.0), ProcessorClock(1e9, 2e9, 90.0, 85.0)

# Until when each part of a run lasts, in seconds, how many times as long each rank computes, and whether rank 1 is hot.
Part = tuple[float, tuple[float, float, float], bool]


@functools.cache
def problem() -> Problem:
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(RANKS)]
    layers = profile(*[1e-3] * 12, parameters=1000)
    return Problem([layers] * RANKS, hosts, LOCAL_NETWORK, 96, 0, constraints=Constraints(micro_batches=(1, 4)))


@functools.cache
def first_plan() -> Candidate:
    """The plan with which runs begin; each process looks for it once."""
    return search(problem())


def on_paper(*arguments: Any, **more: Any) -> StragglerDetector:
    """A detector that measures nothing of this machine, whose pace depends on what else runs there."""
    detector = StragglerDetector(*arguments, **more)
    detector._pace = None
    return detector


def run(
    rank: int, world_size: int, store: Store, wall: float, parts: list[Part], replan: bool = True, steps: int = STEPS
) -> dict[str, Any]:
    """Train on paper: steps of `wall` seconds, in which ranks compute as the plan says, or longer."""
    group = Group(store, rank, world_size, 30.0)
    known = problem()
    found = first_plan()
    now, hot = [0.0], [False]
    # Rank 1 has a device with sensors; nothing else uses the processors.
    sensors = Condition(lambda: HOT if hot[0] and rank == 1 else COOL, lambda _: (now[0], 0.0, 0.0), lambda: now[0])
    forecast = Forecast.of(found)
    detector = on_paper(group, found.plan, forecast, known if rank == 0 else None, 1.5, replan, sensors, lambda: now[0])
    at_first = forecast.computing
    looks, plans, told = [], [], []
    for end, factors, heat in parts:
        hot[0] = heat
        while now[0] < end:
            due = any(group.gather_json(detector.due()))  # as the agreement on a step has it
            now[0] += wall
            detector.note(detector.forecast.computing[rank] / detector.factors[rank] * factors[rank])
            if not due:
                continue
            look = detector.look()
            looks.append(now[0])
            if look.news:
                told.append((now[0], look.stragglers, look.reasons))
            if detector.better_plan(look, steps):
                plans.append((now[0], detector.forecast.computing))
    group.close()
    return {"looks": looks, "plans": plans, "told": told, "first": at_first}


def run_late(rank: int, world_size: int, store: Store, wall: float, deadline: float) -> dict[str, Any]:
    """Train on paper for the least energy with which the run ends in time, in steps `wall` times as long as planned."""
    group = Group(store, rank, world_size, 30.0)
    steps, now, spent = LATE_STEPS, [0.0], 0.2 * deadline
    known = replace(
        problem(),
        watts=[Watts(0.01, 5.0 + rank) for rank in range(RANKS)],
        objective=Objective("deadline", 2.0, deadline - spent, steps),
    )
    found = with_objective(known)
    forecast = Forecast.of(found)
    whole = known if rank == 0 else None
    detector = on_paper(
        group, found.plan, forecast, whole, 1.5, True, None, lambda: now[0], deadline=deadline, spent=spent
    )
    evaluator, plans = Evaluator(known), [found.plan]
    for left in range(steps, 0, -1):
        due = any(group.gather_json(detector.due()))
        really = evaluator.judge(detector.plan).prediction
        now[0] += wall * really.seconds
        detector.note(wall * really.computing[rank])
        if due and detector.better_plan(detector.look(), left):
            plans.append(detector.plan)
    group.close()
    return {"plans": [(evaluator.judge(plan).prediction.seconds, plan.spare) for plan in plans], "took": now[0]}


def run_alone(rank: int, world_size: int, store: Store) -> list[tuple[float, tuple[int, ...]]]:
    """Train on paper on rank 0 alone, as links are slow, which after a minute computes 50 times as long."""
    group, now = Group(store, rank, world_size, 30.0), [0.0]
    known = replace(problem(), network=Network(20.0, 1e4))
    found = fastest_plan(known, Evaluator(known))
    forecast = Forecast.of(found)
    detector = on_paper(group, found.plan, forecast, known if rank == 0 else None, 1.5, True, None, lambda: now[0])
    plans = [(0.0, found.plan.spare)]
    while now[0] < 2000 and len(plans) == 1:
        due = any(group.gather_json(detector.due()))
        factor = 1.7 if now[0] < 60 else 85.0  # what is predicted is too low, too
        now[0] += factor * forecast.seconds
        detector.note(factor * forecast.computing[rank])
        if due and detector.better_plan(detector.look(), STEPS):
            plans.append((now[0], detector.plan.spare))
    group.close()
    return plans


def on_all(pool: Pool, *arguments: Any) -> dict[str, Any]:
    found = pool.run(RANKS, run, *arguments)
    assert all(one == found[0] for one in found), "the ranks decide alike"
    first: dict[str, Any] = found[0]
    return first


EVEN, SLOW = (1.0, 1.0, 1.0), (1.0, 3.0, 1.0)


def test_ranks_compare_by_time_and_short_steps_often_enough_for_a_median(pool: Pool) -> None:
    for wall, most, end in ((0.1, 1.5, 20.0), (5.0, 20.0, 100.0), (30.0, 60.0, 200.0)):
        looks = on_all(pool, wall, [(end, EVEN, False)])["looks"]
        gaps = [after - before for before, after in itertools.pairwise(looks)]
        assert max(gaps) <= most, wall
        assert min(gaps) >= min(1.0, wall), wall


@pytest.mark.slow
def test_there_is_another_plan_within_a_minute_and_the_first_one_again_afterwards(pool: Pool) -> None:
    for wall in (0.5, 10.0):
        found = on_all(pool, wall, [(100.0, EVEN, False), (200.0, SLOW, False), (320.0, EVEN, False)])
        (slow_at, slow), (free_at, free) = found["plans"]
        assert 100 < slow_at <= 160, wall
        assert 200 < free_at <= 300, wall
        first = found["first"]
        assert slow[1] / SLOW[1] < first[1], "the slow rank has less to do"
        assert max(slow) < 0.9 * SLOW[1] * first[1], "no rank takes as long as the slow one did with the first plan"
        assert free == first, "the plan is the one from before"
        assert found["told"][0][1] == (1,)


def test_a_device_that_says_that_it_is_too_hot_is_believed_at_once(pool: Pool) -> None:
    hot = (1.0, 2.0, 1.0)  # which shows in its times only later
    parts = [(30.0, EVEN, False), (42.0, EVEN, True), (80.0, hot, True), (110.0, EVEN, False)]
    found = on_all(pool, 0.5, parts)
    (hot_at, _), (cool_at, cool) = found["plans"]
    assert 30 < hot_at <= 42
    assert 80 < cool_at <= 100
    assert cool == found["first"]
    reasons = [reasons[1] for _, _, reasons in found["told"]]
    assert "its processor is too hot: 90 °C, its clock is held at 1.0 of 2.0 GHz" in reasons


def test_a_moment_and_a_small_difference_change_nothing(pool: Pool) -> None:
    moments = [part for start in (10, 18, 26) for part in ((start, EVEN, False), (start + 2, SLOW, False))]
    assert on_all(pool, 0.1, moments)["plans"] == []
    assert on_all(pool, 0.5, [(60.0, (1.0, 1.3, 1.0), False)])["plans"] == []


def test_plans_do_not_flap(pool: Pool) -> None:
    parts = [(float(end), SLOW if end % 20 else EVEN, False) for end in range(10, 300, 10)]
    found = on_all(pool, 0.5, parts)["plans"]
    assert 1 <= len(found) <= 7, "each one lets the next one wait for longer"


def test_a_move_must_save_more_than_it_costs(pool: Pool) -> None:
    parts = [(20.0, EVEN, False), (60.0, SLOW, False)]
    assert len(on_all(pool, 0.5, parts)["plans"]) == 1
    assert on_all(pool, 0.5, parts, True, 1)["plans"] == [], "with one step left"
    assert on_all(pool, 0.5, parts, False)["plans"] == [], "where nobody wants new plans"


def run_with_searches(rank: int, world_size: int, store: Store, steps: int, seconds: float) -> list[float]:
    """Train on paper while rank 1's speed changes all the time; searches take so many seconds, and are in vain."""
    group = Group(store, rank, world_size, 30.0)
    known, now, hot, searches = problem(), [0.0], [False], []
    found = first_plan()
    sensors = Condition(lambda: HOT if hot[0] and rank == 1 else COOL, lambda _: (now[0], 0.0, 0.0), lambda: now[0])
    detector = on_paper(
        group, found.plan, Forecast.of(found), known if rank == 0 else None, 1.5, True, sensors, lambda: now[0]
    )

    def in_vain(left: int, at: float) -> tuple[None, None]:
        searches.append(at)
        now[0] += seconds
        return None, None

    detector._search = in_vain  # type: ignore[method-assign]
    while now[0] < 600:
        hot[0] = now[0] > 500
        due = any(group.gather_json(detector.due()))
        now[0] += 2.0
        factor = (3.0, 6.0)[int(now[0] / 40) % 2] if rank == 1 else 1.0
        detector.note(detector.forecast.computing[rank] * factor)
        if due:
            detector.better_plan(detector.look(), steps)
            now[0] = max(group.gather_json(now[0]))  # all have waited for the search
    group.close()
    return searches


def test_searches_that_take_long_are_seldom_unless_a_device_has_news(pool: Pool) -> None:
    searches = pool.run(RANKS, run_with_searches, STEPS, 30.0)[0]
    first, *others = searches
    assert first < 40
    early = [at for at in others if at < 500]
    assert all(at >= first + 280 for at in early), searches
    assert any(500 < at < 520 for at in others), "the device that became too hot"
    nearly_over = round(20 / Forecast.of(first_plan()).seconds)
    after_one = pool.run(RANKS, run_with_searches, nearly_over, 30.0)[0]
    assert len(after_one) == 1, "a search takes longer than what is left"


def test_a_short_search_does_not_put_off_the_next(pool: Pool) -> None:
    first, second, *others = pool.run(RANKS, run_with_searches, STEPS, 4.0)[0]
    assert second - first < 40, "ten times as long as a search takes"
    early = [at for at in (first, second, *others) if at < 500]
    assert (len(early) - 1) * 44 - 50 <= early[-1] - first, "a tenth of the time, and five seconds"


def searched(rank: int, world_size: int, store: Store) -> tuple[bool, bool]:
    """Whether a new plan on a slow link is exact, where everything is allowed and where only exact plans are."""
    group = Group(store, rank, world_size, 30.0)
    open_one = problem_on(Network(1e-4, 2e6), ranks=2)
    open_one = replace(open_one, constraints=replace(open_one.constraints, every=()))
    present = Plan((Stage(0, 6, (0, 1), (1.0, 1.0)),))
    forecast = Forecast.of(judge(open_one, present))
    answers = []
    for allowed in (lambda constraints: constraints, Constraints.exactly):
        detector = on_paper(group, present, forecast, open_one, 1.5, True, allowed=allowed)
        detector._found, detector._pause = (1.0, 2.0), 0.0
        answer, _ = detector._search(STEPS, 0.0)
        assert answer is not None
        answers.append(not inexact_parts(answer.plan))
    group.close()
    return answers[0], answers[1]


def test_a_new_plan_is_no_less_exact_than_the_run_may_be(pool: Pool) -> None:
    assert pool.run(2, searched) == [(False, True)] * 2


@pytest.mark.slow
def test_a_run_that_would_miss_its_deadline_has_a_faster_plan(pool: Pool) -> None:
    """The plan with the least energy leaves devices out; where steps take longer than planned, these have to help."""
    alone = sum(
        sum(pair) for pair in ((layer.forward[-1], layer.backward[-1]) for layer in problem().profiles[0].layers)
    )
    seconds = alone * 96 / problem().profiles[0].sizes[-1]  # of a step on one device
    in_time, late = (pool.run(RANKS, run_late, wall, 1.6 * LATE_STEPS * seconds) for wall in (1.0, 1.4))
    assert all(one == found[0] for found in (in_time, late) for one in found), "the ranks decide alike"
    assert len(in_time[0]["plans"]) == 1
    assert in_time[0]["plans"][0][1], "one device is enough, and needs least energy"
    (slow, left_out), *_, (fast, fewer) = late[0]["plans"]
    assert fast < 0.9 * slow
    assert len(fewer) < len(left_out)
    assert late[0]["took"] < 0.8 * 1.6 * LATE_STEPS * seconds


def test_a_rank_that_works_alone_is_compared_with_itself(pool: Pool) -> None:
    found = pool.run(RANKS, run_alone)
    assert all(one == found[0] for one in found), "the ranks decide alike"
    (_, alone), (at, others) = found[0]
    assert len(alone) == 2
    assert at > 60
    assert others != alone
