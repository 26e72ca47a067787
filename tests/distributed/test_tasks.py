"""The seam between the engine and what is learned: regressions are trained as exactly as image classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataBatch
from horizonml.engine.clock import Totals
from horizonml.job.jobfile import parse
from horizonml.machine.signals import StopRequest
from horizonml.plan.plan import Plan, Stage
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.trainer import Training
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.spec import Sgd
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.progress import Silent
from horizonml.telemetry.recorder import Recorder
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import distance
from tests.records import image_info, run_info
from tests.tasks import KINDS, Kind

FULL, LR, OPTIMIZER = 24, 0.05, Sgd(momentum=0.9, weight_decay=1e-3)
SIZES = (24, 24, 13)  # the last batch of an epoch is smaller
PLANS = {
    "ddp, shares 3:1": Plan((Stage(0, 5, (0, 1), (3.0, 1.0)),), micro_batches=2),
    "pipeline": Plan(
        (Stage(0, 1, (0,), (1.0,)), Stage(1, 3, (1,), (1.0,)), Stage(3, 5, (2,), (1.0,))), micro_batches=4
    ),
    "hybrid": Plan((Stage(0, 2, (0, 1), (1.0, 1.0)), Stage(2, 5, (2, 3), (1.0, 2.0))), "gpipe", 3),
}


def batches(kind: Kind) -> list[DataBatch]:
    return [DataBatch(kind.samples(size), torch.arange(size)) for size in SIZES]


def trained(
    rank: int, world_size: int, store: Store, name: str, plan: Plan
) -> tuple[dict[str, Tensor], list[Totals], Totals]:
    """Train three steps and evaluate; return the rank's state and what it was told."""
    kind, group = KINDS[name], Group(store, rank, world_size, 30.0)
    try:
        session = session_for(plan, kind.model(), group, OPTIMIZER, FULL, kind.task)
        totals = [session.step(batch, LR).totals for batch in batches(kind)]
        evaluated = session.evaluate([*batches(kind)])
        return state_of(session), totals, evaluated
    finally:
        group.close()


def reference(kind: Kind) -> tuple[dict[str, Tensor], list[Totals], Totals]:
    """Do the same in one process, with plain PyTorch on whole batches."""
    model = kind.model().stage(0, 5).train()
    optimizer = torch.optim.SGD(model.parameters(), LR, OPTIMIZER.momentum, weight_decay=OPTIMIZER.weight_decay)
    steps = []
    for batch in batches(kind):
        optimizer.zero_grad()
        outputs, targets = model(batch.inputs(0, batch.size)), batch.targets(0, batch.size)
        loss = kind.task.loss(outputs, targets, training=True) / (batch.size * kind.task.units_per_sample)
        loss.backward()
        optimizer.step()
        steps.append(means(kind, float(loss.detach()), kind.task.judge(outputs.detach(), targets), batch.size))
    samples, sums, total = sum(SIZES), torch.zeros(len(kind.task.metrics), dtype=torch.float64), 0.0
    with torch.no_grad():
        for batch in batches(kind):
            outputs, targets = model(batch.inputs(0, batch.size)), batch.targets(0, batch.size)
            sums += kind.task.judge(outputs, targets)
            total += float(kind.task.loss(outputs, targets, training=False))
    evaluated = means(kind, total / samples / kind.task.units_per_sample, sums, samples)
    return {f"model/{key}": value.detach() for key, value in model.state_dict().items()}, steps, evaluated


def means(kind: Kind, loss: float, sums: Tensor, samples: int) -> Totals:
    values = (sums / (samples * kind.task.units_per_sample)).tolist()
    return Totals(loss, dict(zip(kind.task.metrics, values, strict=True)), samples)


def close(found: Totals, expected: Totals) -> bool:
    return (
        found.loss == pytest.approx(expected.loss, rel=1e-5)
        and found.metrics == pytest.approx(expected.metrics, rel=1e-5)
        and found.samples == expected.samples
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_regression_is_trained_as_by_one_process(pool: Pool, name: str, plan: Plan) -> None:
    expected, steps, evaluated = reference(KINDS[name])
    seen = set()
    for state, totals, judged in pool.run(plan.world_size, trained, name, plan):
        assert all(close(found, wanted) for found, wanted in zip(totals, steps, strict=True))
        assert close(judged, evaluated)
        for key, value in state.items():
            if key.startswith("model/"):
                seen.add(key)
                assert distance(value, expected[key]) < 1e-5, key
    assert seen == set(expected)


def run(rank: int, world_size: int, store: Store, name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Train two epochs with the training loop, or go on from a checkpoint; return what its metadata would say."""
    kind, group = KINDS[name], Group(store, rank, world_size, 30.0)
    job = parse("{epochs: 2, batch_size: 24}", "job", [f"folder={folder}"])
    plan = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 5, (1,), (1.0,))), micro_batches=2)
    data = Data(image_info(2, (1, 1, 1), 61, 13), kind.samples(61), kind.samples(13))
    recorder = Recorder(folder / f"rank-{rank}.jsonl", Silent(), run_info(job, plan, rank), 0)
    try:
        session = session_for(plan, kind.model(), group, OPTIMIZER, job.batch_size, kind.task)
        checkpoints = Checkpoints(folder / "checkpoints", group, 2, {})
        outcome = Training(job, session, data, checkpoints, recorder, StopRequest()).run()
        reached = dict(session.state.metrics)
        metadata = checkpoints.resume(session.state, plan)
        assert metadata is not None
        assert metadata.metrics == reached
        return outcome, reached
    finally:
        recorder.close("done")
        group.close()


def test_the_training_loop_records_and_saves_the_metrics_of_any_task(pool: Pool, tmp_path: Path) -> None:
    for outcome, metrics in pool.run(2, run, "integers", tmp_path):
        assert outcome is Outcome.COMPLETE
        assert set(metrics) == {"step", "epoch", "held_out_loss", "held_out_mean_absolute_error", "held_out_accuracy"}
    lines = list(read_lines(tmp_path / "rank-1.jsonl"))
    steps, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("step", "evaluation"))
    assert (len(steps), len(evaluations)) == (6, 2)
    assert all(line["mean_absolute_error"] > 0 for line in [*steps, *evaluations])
    assert evaluations[1]["loss"] < evaluations[0]["loss"] * 1.5
