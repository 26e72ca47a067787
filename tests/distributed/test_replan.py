"""A plan that no longer fits its devices: told, and replaced while the training goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.plan.plan import Plan, Stage
from horizonml.report.live import LiveRun
from horizonml.report.what_if import what_if
from horizonml.runtime.stragglers import slowdowns
from horizonml.state.carry import holders, move, senders
from horizonml.state.spec import Sgd
from horizonml.tasks.classification import Classification
from horizonml.telemetry.log import read_lines
from tests.distributed.pool import Pool
from tests.distributed.processes import horizonml, steps, wait_for
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, RandomBatch

pytestmark = pytest.mark.slow

ONE = (1.0,)
PIPELINE = Plan((Stage(0, 5, (0,), ONE), Stage(5, 9, (1,), ONE), Stage(9, 15, (2,), ONE)), micro_batches=3)
SHIFTED = Plan((Stage(0, 3, (0,), ONE), Stage(3, 9, (1,), ONE), Stage(9, 15, (2,), ONE)), micro_batches=4)
HYBRID = Plan((Stage(0, 6, (0, 2), (1.0, 1.0)), Stage(6, 15, (1,), ONE)), micro_batches=2)
DDP = Plan((Stage(0, 15, (0, 1, 2), (1.0, 1.0, 1.0)),))


def test_slowdowns_are_told_apart_from_a_plan_that_is_wrong_for_all() -> None:
    assert slowdowns([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == (1.0, 1.0, 1.0)
    assert slowdowns([1.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == (1.0, 3.0, 1.0)
    assert slowdowns([1.0, 3.0], [1.0, 1.0]) == (1.0, 3.0)
    assert slowdowns([0.1, 3.0, 3.0], [0.0, 1.0, 3.0]) == (1.0, 3.0, 1.0)
    assert slowdowns([0.02, 1.0, 1.5], [0.0001, 1.0, 1.5]) == (1.0, 1.0, 1.0)  # hardly any work
    assert slowdowns([1.05, 1.0], [1.0, 1.0]) == (1.0, 1.0)


def test_only_layers_that_change_hands_travel_and_senders_take_turns() -> None:
    assert senders(holders(PIPELINE), PIPELINE) == []
    assert senders(holders(PIPELINE), SHIFTED) == [(3, 0, 1), (4, 0, 1)]
    assert [(layer, receiver) for layer, _, receiver in senders(holders(DDP), PIPELINE)] == []
    after = senders(holders(HYBRID), DDP)
    assert [(layer, receiver) for layer, _, receiver in after[:6]] == [(layer, 1) for layer in range(6)]
    assert [sender for _, sender, _ in after[:6]] == [0, 2, 0, 2, 0, 2]
    assert {(sender, receiver) for _, sender, receiver in after[6:]} == {(1, 0), (1, 2)}


def through(rank: int, world_size: int, store: Store, plans: list[Plan]) -> tuple[dict[str, Tensor], list[int]]:
    """Two steps by each of some plans; what a rank holds in the end, and the bytes it received on the way."""
    model = built("tests.models:normed")
    assert len(model.chain) == 15
    group = Group(store, rank, world_size, 30.0)
    received: list[int] = []
    session = session_for(plans[0], model, group, Sgd(momentum=0.9), FULL)
    for number, plan in enumerate(plans):
        if number:
            before, addresses = state_of(session), {k: v.data_ptr() for k, v in session.state.tensors().items()}
            session.close()
            received.append(move(session.state, senders(holders(session.plan), plan), group))
            session = Session(plan, session.state, group, Classification(), FULL)
            assert all(torch.equal(value, before[key]) for key, value in state_of(session).items() if key in before)
            # Layers that stay are the same tensors, not copies.
            now = {k: v.data_ptr() for k, v in session.state.tensors().items()}
            assert all(now[key] == addresses[key] for key in now.keys() & addresses.keys())
        for step in range(2):
            session.step(RandomBatch(2 * number + step), LR)
    state = state_of(session)
    group.close()
    return state, received


def test_moved_parameters_and_optimizer_state_are_the_same_bit_for_bit(pool: Pool) -> None:
    """Where the plans in between do not change how a step is computed, a move is nothing at all."""
    straight = pool.run(3, through, [PIPELINE, PIPELINE, PIPELINE])
    same_micro_batches = Plan(SHIFTED.stages, SHIFTED.schedule, PIPELINE.micro_batches)
    moved = pool.run(3, through, [PIPELINE, same_micro_batches, PIPELINE])
    for (state, received), (other, none) in zip(moved, straight, strict=True):
        assert none == [0, 0]
        assert state.keys() == other.keys()
        assert any(key.startswith("optimizer/") for key in state)
        assert all(torch.equal(state[key], other[key]) for key in state)
        assert (sum(received) > 0) == bool(received[0] or received[1])
    layers = built("tests.models:normed").stage(3, 5)
    size = sum(2 * value.nbytes for value in layers.parameters()) + sum(value.nbytes for value in layers.buffers())
    assert [received for _, received in moved] == [[0, size], [size, 0], [0, 0]]


def test_any_plan_follows_any_other(pool: Pool) -> None:
    results = pool.run(3, through, [PIPELINE, HYBRID, DDP, SHIFTED])
    names = {key for state, _ in results for key in state}
    whole = built("tests.models:normed").stage(0, 15)
    assert {f"model/{name}" for name in whole.state_dict()} <= names
    assert all(value.isfinite().all() for state, _ in results for value in state.values())


# A search may take seconds beside other tests, and ten times its own length passes until the next. Both ranks have a
# core to themselves on any machine for tests, so that no plan leaves one of them with nothing to be measured by.
JOB = """name: test
epochs: 80
batch_size: 48
model: {name: "tests.models:slow"}
data: {name: digits, samples: 480}
optimizer: {lr: 0.01}
"""


@pytest.mark.longest
def test_a_device_that_slows_down_gets_less_to_do(
    folder: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (folder / "job.yaml").write_text(JOB)
    slow = tmp_path / "slow"
    process = start("train", "job.yaml", "-n", "2", "--set", "parallel.strategy=auto", HORIZONML_TEST_SLOW=str(slow))
    wait_for(lambda: steps(folder) >= 8, "eight steps")
    lines = read_lines(folder / "runs" / "test" / "rank-0.jsonl")
    stages = next(line["plan"]["stages"] for line in lines if line["kind"] == "run")
    busiest = max(range(2), key=lambda rank: sum(_share(stage, rank) for stage in stages))
    slow.write_text(str(busiest))
    at = steps(folder)
    wait_for(lambda: len(_plans(folder)) > 1, "another plan", 60)
    replanned = steps(folder)
    wait_for(lambda: steps(folder) >= replanned + 20, "twenty steps by it")
    slow.write_text("")
    freed = steps(folder)
    wait_for(lambda: process.poll() is not None or len(_plans(folder)) > 2, "a third plan", 60)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"rank {busiest} computes " in out, out
    assert " times as long as planned, compared with the others" in out
    records = [list(read_lines(folder / "runs" / "test" / f"rank-{rank}.jsonl")) for rank in range(2)]
    plans = [[line["plan"] for line in lines if line["kind"] == "run"] for lines in records]
    assert plans[0] == plans[1]
    assert len(plans[0]) > 2
    looks = [[line["slowdowns"] for line in lines if line["kind"] == "slowdowns"] for lines in records]
    assert looks[0] == looks[1]
    assert max(look[busiest] for look in looks[0]) > 2
    assert [line["step"] for line in records[0] if line["kind"] == "step"] == list(range(1, 801))
    assert "changed hands" in out
    run = LiveRun(folder / "runs" / "test")
    run.poll()
    assert "replanned" in [event.kind for event in run.events]
    assert run.planning is not None
    begun = [line["resumed_at"] for line in records[0] if line["kind"] == "run"]
    assert [*(one.step for one in run.planning.earlier), run.planning.step] == begun
    answer = what_if(run.folder)
    assert answer["predicted"]["plan"] == answer["present"]["plan"] == plans[0][-1], "made of what was measured last"
    assert answer["predicted"]["seconds"] == answer["present"]["seconds"] == run.forecast
    work = [sum(_share(stage, busiest) for stage in plan["stages"]) for plan in plans[0]]
    assert work[1] < 0.7 * work[0], plans[0]
    assert work[-1] > 1.2 * work[1], plans[0]
    walls = [line["wall"] for line in records[0] if line["kind"] == "step"]
    held_up = max(median(walls[place : place + 8]) for place in range(at, replanned - 8))
    assert median(walls[freed - 10 : freed]) < 0.8 * held_up
    # It is still the training of one process on the same batches.
    own = ["parallel.strategy=single", "name=alone", "model.options.pause=0"]
    alone = horizonml(folder, "train", "job.yaml", *(part for one in own for part in ("--set", one)))
    assert alone.returncode == 0, alone.stderr
    for run in ("test", "alone"):
        assert horizonml(folder, "export", f"runs/{run}", f"{run}.pt").returncode == 0
    one, other = (torch.load(folder / f"{run}.pt", weights_only=True) for run in ("test", "alone"))
    for name, value in one.items():
        assert float((value - other[name]).norm() / other[name].norm()) < 1e-4, name


def _plans(folder: Path) -> list[dict[str, Any]]:
    lines = read_lines(folder / "runs" / "test" / "rank-0.jsonl")
    return [line["plan"] for line in lines if line["kind"] == "run"]


def _share(stage: dict[str, list[float]], rank: int) -> float:
    """A rank's part of the work of a stage, in layers."""
    if rank not in stage["ranks"]:
        return 0.0
    layers = int(stage["stop"]) - int(stage["start"])  # type: ignore[call-overload]
    return layers * stage["shares"][stage["ranks"].index(rank)] / sum(stage["shares"])
