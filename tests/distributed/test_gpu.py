"""Ranks on real GPUs; `make test-gpu` runs these, and elsewhere they are deselected with a word about it.

What can be shown without a GPU is tested on a pretended one, in test_staging.py and test_staging_states.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.sync.allreduce import NcclAllReduce
from horizonml.errors import PlanError
from horizonml.machine import accelerator
from horizonml.machine.accelerator import choose_device, computing
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.profiling.measure import measure
from horizonml.runtime.checks import Capacity, find_hosts, refuse_what_cannot_fit
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import InputSpec
from tests.distributed import test_executions, test_following, test_lossless, test_saving, test_staging
from tests.distributed.plans import ONE
from tests.distributed.pool import Pool
from tests.distributed.processes import environment
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import FULL, LR, SHAPE, Case, RandomBatch, distance, reference

pytestmark = pytest.mark.gpu

ALL = frozenset(range(5))


@contextmanager
def states_on(device: str) -> Iterator[None]:
    """Let every state of this process be on a device, unless it is told otherwise."""
    initialise = TrainState.__init__

    def there(self: TrainState, *arguments: Any, **others: Any) -> None:
        initialise(self, *arguments, **{**others, "device": torch.device(device)})

    TrainState.__init__ = there  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TrainState.__init__ = initialise  # type: ignore[method-assign]


def run_on(
    rank: int, world_size: int, store: Store, where: frozenset[int], function: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a function on each rank; the states of the ranks in `where` are on the first GPU."""
    if rank not in where:
        return function(rank, world_size, store, *arguments)
    with states_on("cuda:0"):
        return function(rank, world_size, store, *arguments)


def train(rank: int, world_size: int, store: Store, case: Case, own: bool = False) -> tuple[Any, list[Any], Any, bool]:
    """What a rank holds after some steps, its reports, an evaluation, and whether NCCL summed its gradients."""
    model = build(ModelSpec(name=f"tests.models:{case.model}"), 0, 10, InputSpec.of(SHAPE))
    group = Group(store, rank, world_size, 60.0, ["here"] * world_size)
    try:
        if own:
            group.devices = {other: f"cuda:{other}" for other in range(world_size)}
        session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
        reports = [session.step(RandomBatch(step), LR) for step in range(3)]
        totals = session.evaluate([RandomBatch(step) for step in range(3)])
        sums = [stage.sync for stage in session.stages.values()]
        by_nccl = any(isinstance(one, NcclAllReduce) and one._nccl is not None for one in sums)
        state = state_of(session)
        session.close()
        return state, reports, totals, by_nccl
    finally:
        group.close()


def expect_truth(case: Case, results: list[Any]) -> None:
    expected, losses, _ = reference(case)
    for rank, (state, reports, _, _) in enumerate(results):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=1e-5), f"rank {rank}"
        for key, value in state.items():
            if key.startswith("model/"):
                assert distance(value, expected[key]) < 1e-5, f"rank {rank}, {key}"
        for report in reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)
            assert all(a.end == b.start for a, b in zip(report.spans, report.spans[1:], strict=False))


EXACT = [(case, where) for case, where in test_staging.CASES if case.sync is Sync.ALL_REDUCE and not case.ema]


@pytest.mark.parametrize(("case", "where"), EXACT, ids=[case.name for case, _ in EXACT])
def test_gradient_truth(pool: Pool, case: Case, where: frozenset[int]) -> None:
    expect_truth(case, pool.run(case.world_size, run_on, where, train, case))


def on_own_gpu(rank: int, world_size: int, store: Store, case: Case) -> Any:
    torch.cuda.set_device(rank)
    with states_on(f"cuda:{rank}"):
        return train(rank, world_size, store, case, own=True)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("model", ["plain", "normed", "wide"])
def test_gradient_truth_with_nccl(pool: Pool, model: str) -> None:
    case = Case("nccl", ((3.0, 1.0),), 2, model=model)
    results = pool.run(2, on_own_gpu, case)
    assert all(by_nccl for *_, by_nccl in results)
    expect_truth(case, results)


class OnGpu:
    """The pool, with some of the ranks on the GPU."""

    def __init__(self, pool: Pool, where: frozenset[int]) -> None:
        self._pool, self._where = pool, where

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._pool.run(world_size, run_on, self._where, function, *arguments)


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}, {way}") for case, ways in test_executions.CASES for way in ways],
)
def test_layers_run_in_the_formats_that_are_chosen_for_them(pool: Pool, case: Case, way: str) -> None:
    """A pretended device can neither lay out weights in another way nor compute in 16 bits."""
    ranks = OnGpu(pool, frozenset((0, 2)))
    test_executions.test_parameters_are_those_of_one_process(ranks, case, way)  # type: ignore[arg-type]


def test_dropout_repeats_bit_for_bit(pool: Pool) -> None:
    case = Case("dropout", ((1.0, 1.0), ONE), 2, model="dropping")
    first, again = (pool.run(3, run_on, frozenset((0, 2)), train, case) for _ in range(2))
    for (state, *_), (state2, *_) in zip(first, again, strict=True):
        assert all(torch.equal(state[key], state2[key]) for key in state)


@pytest.mark.parametrize(("name", "where"), [("int8", ALL), ("tied", frozenset((1,)))])
def test_a_lost_stage_is_rebuilt(pool: Pool, name: str, where: frozenset[int]) -> None:
    plan = test_lossless.PLANS[name]
    lost = test_lossless.owners(plan)[-1]
    results = pool.run(plan.world_size, run_on, where, test_lossless.lose, name, lost, 9, 12_000.0, 0.5)
    (rebuilt,) = [found for rank, found in enumerate(results) if rank != lost and found]
    assert not isinstance(rebuilt, str), rebuilt
    # Who rebuilds may compute on another kind of device than who was lost.
    assert all(distance(rebuilt[key], results[lost][key]) < 1e-5 for key in rebuilt)


def test_a_newcomer_follows(pool: Pool) -> None:
    case = next(case for case in test_following.CASES if "clipped" in case.name)
    found = pool.run(3, run_on, frozenset((1,)), test_following.joins, case, 3, False)
    new, old = found[case.newcomer][1], found[2][1]
    assert all(distance(new[key], old[key]) < 1e-5 for key in old)


def test_checkpoints_are_saved_and_resumed(pool: Pool, tmp_path: Path) -> None:
    plan = test_saving.PLANS["hybrid"]
    for result in pool.run(3, run_on, frozenset((0, 2)), test_saving.going_on, plan, tmp_path, False):
        assert result["problems"] == []
        assert [step for step, _ in result["loaded"]] == [6, 3]


def test_a_plan_that_does_not_fit_the_memory_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = choose_device("cuda", 0)
    monkeypatch.setattr(accelerator, "_used", [gpu])
    model = build(ModelSpec(name="resnet18"), 0, 10, InputSpec.of((3, 32, 32)))
    plan = Plan((Stage(0, len(model.chain), (0,), ONE),))
    group = Group(None, 0, 1, 60.0)
    refuse_what_cannot_fit(plan, model, 1, find_hosts(group, [Capacity.here(group, 0.0)]), ["here"])
    torch.cuda.set_per_process_memory_fraction(1e-4, gpu.device)
    try:
        with pytest.raises(PlanError, match="the plan cannot fit into memory: on here"):
            refuse_what_cannot_fit(plan, model, 1, find_hosts(group, [Capacity.here(group, 0.0)]), ["here"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu.device)


def test_a_profile_is_measured_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_used", [choose_device("cuda", 0)])
    model = build(ModelSpec(name="tests.models:normed"), 0, 10, InputSpec.of(SHAPE))
    with computing().device:
        profile = measure(model, (4, 16))
    assert profile.device == torch.cuda.get_device_name(0)
    assert profile.transfer_seconds_per_byte > 0
    assert all(seconds > 0 for layer in profile.layers for seconds in layer.forward)


def records(folder: Path, rank: int) -> tuple[str, list[float]]:
    """The device of a rank, and the losses of its evaluations."""
    lines = [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "evaluation"]
    return next(line["device"] for line in lines if line["kind"] == "run"), losses


@pytest.mark.parametrize("strategy", ["pipeline", "auto"])
def test_a_run_of_a_gpu_and_processors(tmp_path: Path, strategy: str) -> None:
    """`auto` gives each GPU to one rank, and the other ranks compute on processors."""
    found = {}
    for device in ("auto", "cpu"):
        folder = tmp_path / device
        command = [
            sys.executable, "-m", "horizonml", "train", "digits", "--workers", "3", "--device", device,
            "--set", f"parallel.strategy={strategy}", "--set", "epochs=2", "--set", f"folder={folder}",
        ]  # fmt: skip
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        found[device] = [records(folder, rank) for rank in range(3)]
    gpus = min(3, torch.cuda.device_count())
    assert [bool(device) for device, _ in found["auto"]] == [rank < gpus for rank in range(3)]
    assert not any(device for device, _ in found["cpu"])
    assert found["auto"][0][1] == pytest.approx(found["cpu"][0][1], rel=0.05)


def test_messages_overlap_with_compute_on_streams_of_their_own() -> None:
    """A copy to the host is not waited for, and does not see what the device writes later."""
    from horizonml.engine.staging import CudaStaging

    staging, seen = CudaStaging(torch.device("cuda:0")), list[Tensor]()
    big = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        big = big @ big / 4096
    source = big[0].clone()
    staging.send(source, seen.append)
    staging.drain()
    assert len(seen) == 1
    assert seen[0].is_pinned() == bool(staging.host)
    assert torch.allclose(seen[0], torch.ones(4096), rtol=1e-3)
