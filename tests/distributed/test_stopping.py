"""How long a training lasts, when it is evaluated, when it ends early, and which checkpoints stay."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

from horizonml.api.exports.export import export
from horizonml.comm.group import Group
from horizonml.data.dataset import Data
from horizonml.errors import CheckpointError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.trainer import Training
from horizonml.state.saver import find_best
from horizonml.state.shards import STOPPING, Best, read_metadata, step_of, steps
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.recorder import Display, Recorder
from tests.distributed.pool import Pool
from tests.distributed.sessions import agreed_state, session_for
from tests.distributed.test_training import HYBRID3, Kind, equal, run, whole
from tests.records import image_info, run_info
from tests.tasks import KINDS, WeightedRegression

EVERY = {"evaluate": {"every_steps": 3}}


def records(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / f"rank-{rank}.jsonl") if line["kind"] == kind]


def test_a_training_of_so_many_steps_is_evaluated_every_few_of_them_and_after_the_last(
    pool: Pool, tmp_path: Path
) -> None:
    kind = Kind("ddp 2", 2)
    results = pool.run(2, run, kind.job(tmp_path, steps=10, **EVERY))
    assert {outcome for outcome, _, _ in results} == {"complete"}
    assert [line["step"] for line in records(tmp_path, "step")] == list(range(1, 11))
    rates = [line["lr"] for line in records(tmp_path, "step")]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0]  # a cosine over ten steps
    evaluations = records(tmp_path, "evaluation", 1)
    assert [(line["step"], line["epoch"]) for line in evaluations] == [(3, 1), (6, 1), (9, 2), (10, 2)]
    assert all(line["within_epoch"] for line in evaluations)
    metadata = read_metadata(next(iter(steps(tmp_path / "checkpoints"))))
    assert (metadata.step, metadata.complete, metadata.metrics["step"]) == (10, True, 10)


def test_a_model_is_evaluated_after_every_other_epoch_and_after_the_last_step(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, run, Kind("single", 1).job(tmp_path, evaluate={"every_epochs": 2}))  # of three epochs
    assert [(line["step"], line["epoch"]) for line in records(tmp_path, "evaluation")] == [(14, 2), (21, 3)]


def test_a_training_that_gets_no_better_ends_early_and_its_best_checkpoint_stays(pool: Pool, tmp_path: Path) -> None:
    kind = Kind("ddp 2", 2)
    changes = {
        "epochs": 100,
        **EVERY,
        "optimizer": {"lr": 0.4, "momentum": 0.9},
        "lr_schedule": {"name": "constant"},
        "early_stop": {"patience": 2},
        "checkpoint": {"every_steps": 1000, "keep": 1, "keep_best": "held_out_loss"},
    }
    job = kind.job(tmp_path, **changes)
    results = pool.run(2, run, job)
    assert {outcome for outcome, _, _ in results} == {"complete"}
    losses = {line["step"]: line["loss"] for line in records(tmp_path, "evaluation")}
    best = min(losses, key=lambda step: losses[step])
    last = max(losses)
    assert last == best + 2 * 3  # the two evaluations after the best one were worse
    assert last < 100
    assert [line["step"] for line in records(tmp_path, "evaluation") if line["best"]][-1] == best
    assert [step_of(path) for path in steps(tmp_path / "checkpoints")] == [last, best]
    metadata = read_metadata(tmp_path / "checkpoints" / f"step-{last:08d}")
    assert metadata.complete
    assert {purpose: (one.step, one.waited) for purpose, one in metadata.best.items()} == {
        "early_stop": (best, 2),
        "keep_best": (best, 2),
    }
    path, found = find_best(tmp_path)
    assert (step_of(path), found.metrics["held_out_loss"]) == (best, losses[best])
    again = pool.run(2, run, job)
    assert {outcome for outcome, _, _ in again} == {"already complete"}
    # With more patience it goes on from there.
    more = pool.run(2, run, kind.job(tmp_path, **{**changes, "early_stop": {"patience": 3}}))
    assert {(outcome, resumed.step) for outcome, _, resumed in more} == {("complete", last)}
    assert max(line["step"] for line in records(tmp_path, "step")) > last
    losses = {line["step"]: line["loss"] for line in records(tmp_path, "evaluation")}
    best = min(losses, key=lambda step: losses[step])
    assert [step_of(path) for path in steps(tmp_path / "checkpoints")] == [max(losses), best]


def test_the_best_checkpoint_of_an_interrupted_run_is_that_of_an_uninterrupted_one(pool: Pool, tmp_path: Path) -> None:
    kind = Kind("hybrid 2+1", 3, HYBRID3)
    changes = {
        **EVERY,
        "epochs": 2,
        "optimizer": {"lr": 0.1, "momentum": 0.9, "clip_norm": 0.2},
        "ema": {"decay": 0.8},
        "checkpoint": {"keep": 1, "keep_best": "held_out_accuracy"},
    }
    straight = pool.run(3, run, kind.job(tmp_path / "straight", **changes))
    broken = kind.job(tmp_path / "broken", **changes)
    pool.run(3, run, broken, 8, 2)
    second = pool.run(3, run, broken)
    assert {resumed.step for _, _, resumed in second} == {9}
    for (_, state, _), (_, expected, _) in zip(second, straight, strict=True):
        assert equal(state, expected)
    assert any(key.endswith("/average") for key in whole(second))
    paths = [find_best(tmp_path / name)[0] for name in ("straight", "broken")]
    assert paths[0].name == paths[1].name
    norms = [[line["gradient_norm"] for line in records(tmp_path / name, "step")] for name in ("straight", "broken")]
    assert norms[0] == norms[1]
    assert max(norms[0]) > 0.2

    parameters, averages = tmp_path / "parameters.pt", tmp_path / "averages.pt"
    export(tmp_path / "broken", parameters, average=False)
    export(tmp_path / "broken", averages)  # as evaluated
    plain, mean = (torch.load(path, weights_only=True) for path in (parameters, averages))
    assert plain.keys() == mean.keys()
    for name, value in mean.items():
        assert torch.equal(value, whole(second)[f"optimizer/{name}/average"])
        assert not torch.equal(value, plain[name])

    # Other ranks take over the averages; a run that wants none goes on without them, and a later one begins anew.
    state = whole(second)
    for ema, kept in (({"decay": 0.8}, True), ({}, False)):
        single = Kind("single", 1).job(tmp_path / "broken", **{**changes, "ema": ema})
        ((outcome, held, _),) = pool.run(1, run, single)
        assert outcome == "already complete"
        assert equal({key: value for key, value in state.items() if kept or "/average" not in key}, held)


def on_a_slow_disk(rank: int, world_size: int, store: Store, job: Job) -> str:
    """Train while every file takes longer to become durable than a step takes."""
    durable = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(0.05)
        durable(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        return run(rank, world_size, store, job)[0]
    finally:
        os.fsync = durable


def test_the_best_checkpoint_waits_for_a_slow_disk_and_is_not_left_out(pool: Pool, tmp_path: Path) -> None:
    checkpoint = {"every_steps": 1000, "keep": 50, "keep_best": "held_out_loss", "background": True}
    job = Kind("ddp 2", 2).job(tmp_path, steps=5, evaluate={"every_steps": 1}, checkpoint=checkpoint)
    assert set(pool.run(2, on_a_slow_disk, job)) == {"complete"}
    best = {line["step"] for line in records(tmp_path, "evaluation") if line["best"]}
    assert len(best) > 2
    assert {step_of(path) for path in steps(tmp_path / "checkpoints")} == {*best, 5}


def told(rank: int, world_size: int, store: Store, done: list[int]) -> tuple[dict[str, Any], dict[str, Best], int]:
    """What a rank knows of the evaluations when the ranks have met again; `done[r]` are the steps of rank r."""
    group = Group(store, rank, world_size, 30.0)
    state = TrainState(build(ModelSpec(name="tests.models:plain"), 0, 10, InputSpec.of((1, 8, 8))), Sgd())
    state.take([(0, 10)])
    state.step = done[rank]
    if state.step:
        state.metrics = {"step": 6, "held_out_loss": 0.5 + rank}
        state.best = {STOPPING: Best(metric="held_out_loss", value=0.25 + rank, step=3, waited=1)}
    found = agreed_state(state, state.step > 0, group)
    group.close()
    assert found is not None
    return state.metrics, state.best, found.step


def test_ranks_that_meet_again_go_on_counting_where_the_others_were(pool: Pool) -> None:
    best = {STOPPING: Best(metric="held_out_loss", value=1.25, step=3, waited=1)}
    for result in pool.run(3, told, [0, 8, 7]):  # a newcomer, and one that is behind
        assert result == ({"step": 6, "held_out_loss": 1.5}, best, 8)


class Noisy(WeightedRegression):
    """Reports another accuracy on every process."""

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        return {**metrics, "accuracy": random.random()}


def disagreeing(rank: int, world_size: int, store: Store, folder: Path) -> tuple[Outcome, int, dict[str, Best]]:
    """Train with a task whose metrics differ from rank to rank, until its accuracy has not been better for a while."""
    random.seed(rank)
    kind, group = KINDS["integers"], Group(store, rank, world_size, 30.0)
    stop = "early_stop: {patience: 2, metric: held_out_accuracy}"
    job = parse(f"{{epochs: 50, batch_size: 24, {stop}}}", "job", [f"folder={folder}"])
    plan = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 5, (1,), (1.0,))), micro_batches=2)
    data = Data(image_info(2, (1, 1, 1), 61, 13), kind.samples(61), kind.samples(13))
    recorder = Recorder(folder / f"rank-{rank}.jsonl", Display(), run_info(job, plan, rank), 0)
    try:
        session = session_for(plan, kind.model(), group, Sgd(), job.batch_size, Noisy())
        outcome = Training(job, session, data, None, recorder, StopRequest()).run()
        return outcome, session.state.step, session.state.best
    finally:
        recorder.close("done")
        group.close()


def test_ranks_end_together_although_they_compute_differently(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, disagreeing, tmp_path)
    assert first == second
    assert first[0] is Outcome.COMPLETE
    assert first[2][STOPPING].waited == 2


def test_without_a_best_checkpoint_or_averages_that_is_said(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, run, Kind("single", 1).job(tmp_path, steps=3))
    with pytest.raises(CheckpointError, match=r"has no best checkpoint: train with checkpoint\.keep_best"):
        find_best(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no averages of the parameters: train with ema\.decay"):
        export(tmp_path, tmp_path / "model.pt", average=True)
