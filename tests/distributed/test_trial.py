"""Lossy formats are tried on a warm-up before they are used, and what costs accuracy is made more precise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.plan.lossy import Setting, Tried
from horizonml.plan.plan import PLAIN, Plan, Stage, Sync
from horizonml.planner.choose import best_plan
from horizonml.planner.evaluator import judge
from horizonml.planner.profile import Network
from horizonml.planner.reasons import inexact_parts
from horizonml.runtime.agreement import Agreed, describe_together
from horizonml.runtime.guarding import Guard, Trial
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import Forecast
from horizonml.state.runfolder import RunFolder
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.telemetry.lifeline import Lifeline
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.sinks import Feeds
from tests.distributed.pool import Pool
from tests.unit.test_precision import problem_on

ONE, STEPS = (1.0,), 24
BOUNDS = [(0, 4), (4, 8), (8, 9)]
PIPELINE = Plan(tuple(Stage(*bounds, (r,), ONE, send="int4") for r, bounds in enumerate(BOUNDS)), micro_batches=2)
DDP = Plan((Stage(0, 9, (0, 1, 2), (2.0, 1.0, 1.0), Sync.INT4),))


def job(**parallel: Any) -> Job:
    return Job.model_validate(
        {
            "name": "trial",
            "epochs": 200,  # 4,600 steps, of which a trial has 172 in its four warm-ups
            "model": {"name": "tests.models:loud"},
            "data": {"name": "digits"},
            "batch_size": 64,
            "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9},
            "ema": {"decay": 0.99},
            "parallel": parallel,
        }
    )


@dataclass(frozen=True)
class End:
    """What a rank has after a trial."""

    tried: list[Tried | None]
    same: bool  # whether the state is what it was, bit for bit
    lost: bool = False


def whole(state: TrainState) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.tensors().items()}


def try_out(
    rank: int, world_size: int, store: Store, plan: Plan, cache: Path, repeats: int, breaks: str, steps: int | None
) -> End:
    """Train three steps exactly, and then try a plan. `breaks` says what rank 1 does in the middle of a warm-up."""
    torch.set_num_threads(1)
    own = job()
    group = Group(store, rank, world_size, 20.0)
    info, model = describe_together(own, group)
    data, task = load(own.data, info, cache), task_for(own, info)
    state, asked = TrainState(model, own.optimizer, own.ema), 0

    def session(setting: Setting) -> Session:
        return Session(setting.plan, state, group, task, own.batch_size)

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if rank == 1 and asked == STEPS + 7 and breaks == "loses the others":
            group.abort()
        return rank == 1 and asked == STEPS + 7 and breaks == "stops"

    with closing(session(Setting(plan).exact())) as first:
        for number in range(3):
            first.step(data.batch(True, torch.arange(64) + 64 * number, number), 0.1)
    before, found, lost = whole(state), [], False
    trial = Trial(own, data, state, group, session, stop)
    try:
        found = [trial.run(Setting(plan), steps) for _ in range(repeats)]
    except PeerLost:
        lost = True
    after = whole(state)
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    end = End(found, same and state.step == 3 and state.valid and state.prepared is None, lost)
    group.close()
    return end


def test_only_links_that_cost_accuracy_are_made_more_precise(pool: Pool, tmp_path: Path) -> None:
    ends = pool.run(3, try_out, PIPELINE, tmp_path, 1, "", STEPS)
    assert all(end.same for end in ends)
    tried = ends[0].tried[0]
    assert all(end.tried == [tried] for end in ends)
    assert tried is not None
    assert (dict(tried.links), tried.step, tried.steps) == ({4: "bf16", 8: "int4"}, 3, STEPS)
    first, second, third = tried.texts
    assert first.startswith("stages 0 and 1 send int4; on a warm-up of 24 steps held-out accuracy was ")
    assert "so stage 0 sends int8 (int4 alone changes gradients by " in first
    assert second.startswith("stage 0 sends int8, stage 1 sends int4; on a warm-up")
    assert "so stage 0 sends bf16 (int8 alone" in second
    assert third.startswith("stage 0 sends bf16, stage 1 sends int4; on a warm-up of 24 steps held-out accuracy was ")
    assert " with that and " in third
    assert " so " not in third


def test_sums_that_cost_no_accuracy_stay_as_they_are(pool: Pool, tmp_path: Path) -> None:
    ends = pool.run(3, try_out, DDP, tmp_path, 2, "", STEPS)
    assert all(end.same for end in ends)
    tried = ends[0].tried[0]
    assert all(end.tried == [tried, tried] for end in ends)  # on all ranks, and when it is repeated
    assert tried is not None
    assert (tried.sums, tried.steps) == ("int4", STEPS)
    assert tried.texts[0].startswith("stage 0 sums gradients as int4; on a warm-up of 24 steps held-out accuracy was ")


def test_a_rank_that_is_asked_to_stop_ends_the_trial_of_all(pool: Pool, tmp_path: Path) -> None:
    ends = pool.run(3, try_out, PIPELINE, tmp_path, 1, "stops", STEPS)
    assert ends == [End([None], True)] * 3


def test_a_rank_that_is_lost_in_a_trial_costs_the_others_nothing(pool: Pool, tmp_path: Path) -> None:
    ends = pool.run(3, try_out, PIPELINE, tmp_path, 1, "loses the others", STEPS)
    assert ends == [End([], True, lost=True)] * 3


def test_what_cannot_be_tried_is_used_with_caution(pool: Pool, tmp_path: Path) -> None:
    (end,) = {str(end) for end in pool.run(3, try_out, PIPELINE, tmp_path, 1, "", 0)}
    assert "is too short to try it; so stages 0 and 1 send int8" in end


def test_a_run_that_tries_nothing_says_why_also_where_that_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    bounded = Plan(tuple(replace(stage, send="int8") for stage in PIPELINE.stages), micro_batches=2)
    (end,) = {str(end) for end in pool.run(3, try_out, bounded, tmp_path, 1, "", 0)}
    assert "nothing is tried on a warm-up, as a run of 4,600 steps is too short to try it; stages 0 and 1 send" in end


def guard_for(group: Group, rank: int, world_size: int, folder: Path, said: list[str]) -> tuple[Guard, Life]:
    """The guard of a job that leaves the formats open."""
    own = job(strategy="auto", exact=False)
    _, model = describe_together(own, group)
    place, lifeline = RunFolder(folder / str(rank), rank, "test", False), Lifeline(folder, rank)
    life = Life(
        own, rank, world_size, Metrics(rank), StopRequest(), place, False, lifeline, Feeds(own.telemetry, folder)
    )
    life.state = TrainState(model, own.optimizer, own.ema)
    say: Callable[[str], None] = said.append
    return Guard(life, group, PLAIN, say), life


def guard(rank: int, world_size: int, store: Store, folder: Path) -> list[Any]:
    """What a run may use of two plans, with a job that leaves the formats open; on rank 0, the verdict is known."""
    own, said = job(strategy="auto", exact=False), list[str]()
    group = Group(store, rank, world_size, 20.0)
    info, _ = describe_together(own, group)
    made, life = guard_for(group, rank, world_size, folder, said)
    assert life.state is not None
    exact = made.allowed(PIPELINE)  # as long as nothing is known
    following = made.settle(PIPELINE, load(own.data, info, folder), following=True)
    if rank == 0:
        life.state.tried = Tried(0, STEPS, {4: "bf16", 8: "int4"}, "fp16", "fp32", ("a text",))
    settled = made.settle(PIPELINE, load(own.data, info, folder), following=False)
    sums = made.allowed(DDP)
    group.close()
    applies = [made.applies(plan) for plan in (PIPELINE, DDP, exact)]
    return [applies, *([stage.send for stage in p.stages] for p in (exact, following, settled)), sums, said]


def test_a_verdict_that_one_rank_knows_holds_for_all(pool: Pool, tmp_path: Path) -> None:
    for applies, exact, following, settled, sums, said in pool.run(3, guard, tmp_path):
        assert applies == [True, True, False]
        assert exact[:2] == following[:2] == ["fp32", "fp32"]
        assert settled[:2] == ["bf16", "int4"]
        assert sums.stages[0].sync is Sync.FP16
        assert said == []


def plan_again(rank: int, world_size: int, store: Store, folder: Path, verdict: Tried) -> list[Any]:
    """What becomes of a plan for slow links after a verdict; rank 0 knows what it was made for."""
    group, said = Group(store, rank, world_size, 20.0), list[str]()
    made, life = guard_for(group, rank, world_size, folder, said)
    assert life.state is not None
    problem = problem_on(Network(1e-4, 2e6))
    before = made.constraints(problem.constraints)
    problem = replace(problem, constraints=replace(problem.constraints, every=()))
    first = best_plan(problem)
    life.state.tried = verdict
    agreed = Agreed(first.plan, Forecast.of(first), problem if rank == 0 else None)
    after = made.plan_again(agreed, made.allowed(first.plan), search=True)
    same = made.plan_again(after, after.plan, search=True)
    judged = judge(problem, made.allowed(first.plan)).prediction.seconds
    exact = best_plan(replace(problem, constraints=problem.constraints.exactly())).prediction.seconds
    true = judge(problem, after.plan).prediction.seconds
    group.close()
    assert after.forecast is not None
    return [
        before.is_exact, inexact_parts(first.plan), after.plan, same.plan == after.plan, after.forecast.seconds, true,
        made.allowed(after.plan) == after.plan, judged, exact, made.constraints(problem.constraints),
    ]  # fmt: skip


def test_after_a_verdict_that_refuses_formats_the_plan_is_made_again(pool: Pool, tmp_path: Path) -> None:
    verdict = Tried(0, STEPS, {}, "all-reduce", "fp32", ("a text",))
    found = pool.run(4, plan_again, tmp_path, verdict)
    assert len({str(one[2]) for one in found}) == 1, "the ranks go on with the same plan"
    before, lossy, plan, same, forecast, true, allowed, lowered, exact, constraints = found[0]
    assert before, "nothing lossy is planned before there is a verdict"
    assert lossy
    assert not inexact_parts(plan)
    assert same
    assert allowed
    assert forecast == pytest.approx(true)
    assert forecast <= min(lowered, 1.06 * exact)
    assert constraints.is_exact
