"""Gradient truth for layers that run in other memory formats and precisions, in every strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.execution import PLAIN, Execution, Executions
from horizonml.plan.plan import Sync
from horizonml.state.optim import lies_alike
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.log import read_lines
from tests.distributed.pool import Pool
from tests.distributed.processes import horizonml
from tests.distributed.sessions import state_of
from tests.distributed.test_gradients import FULL, LR, ONE, SHAPE, Case, RandomBatch, distance, reference

LAST, NARROW, BOTH = Execution(True), Execution(False, "bf16"), Execution(True, "bf16")
# Of how far a rank's parameters have moved in three steps, all together. How much rounding is amplified depends on the
# initial values: with torch's own autocast in one process, the residual network ends 0.04 to 0.20 apart (eight seeds).
BF16_BOUND = 0.25

# How the layers run, by rank: whole models, layers that alternate, and members of a stage that differ.
WAYS: dict[str, list[tuple[Execution, ...]]] = {
    "channels_last": [(LAST,)],
    "alternating": [(LAST, LAST, PLAIN)],
    "different members": [(LAST, PLAIN, LAST, LAST), (LAST, LAST, PLAIN)],
    "bf16": [(NARROW,)],
    "all mixed": [(BOTH, LAST, NARROW, PLAIN, NARROW), (LAST, NARROW)],
}
EXACT = ("channels_last", "alternating", "different members")

CASES = [
    (Case("single", (ONE,), 3, model="residual"), ("channels_last", "bf16", "all mixed")),
    (Case("ddp 2, shares", ((3.0, 1.0),), 2, model="normed"), ("different members", "all mixed")),
    (Case("pipeline 3", (ONE, ONE, ONE), 4, model="normed"), ("alternating", "bf16")),
    (Case("pipeline 3, zero bubble", (ONE, ONE, ONE), 4, "zb-h1", "depthwise"), ("alternating", "all mixed")),
    (Case("hybrid 2x2, shares", ((3.0, 1.0), (1.0, 2.0)), 3, model="residual"), ("different members", "all mixed")),
]


def executions(layers: int, way: str, rank: int, world_size: int) -> Executions:
    """How a rank runs the layers of a model, among all ranks."""
    patterns = WAYS.get(way, [(PLAIN,)])
    everyone = [
        tuple(pattern[layer % len(pattern)] for layer in range(layers))
        for number in range(world_size)
        for pattern in [patterns[number % len(patterns)]]
    ]
    return Executions.among(everyone[rank], everyone)


def train(rank: int, world_size: int, store: Store, case: Case, way: str) -> tuple[dict[str, Tensor], list[Any], Any]:
    """What a rank holds after some steps, what it reported, and what it found on held-out data."""
    model = build(ModelSpec(name=f"tests.models:{case.model}"), 0, 10, InputSpec.of(SHAPE))
    layers = len(model.chain)
    group = Group(store, rank, world_size, 30.0)
    chosen = executions(layers, way, rank, world_size)
    state = TrainState(model, case.optimizer)
    session = Session(case.plan(layers), state, group, Classification(), FULL, chosen)
    reports = []
    for step in range(3):
        reports.append(session.step(RandomBatch(step), LR))
        for stage in session.stages.values():
            for name, parameter in stage.parameters.items():
                gradient = parameter.grad
                assert gradient is not None
                assert parameter.dtype == gradient.dtype == torch.float32
                assert lies_alike(parameter, gradient), name
    names = model.parameter_names()
    for name, tensor in state.tensors().items():
        if name.endswith("weight") and tensor.dim() == 4 and not tensor.is_contiguous():
            assert names[name.split("/")[1]] in chosen.channels_last_weights, name
    judged = session.evaluate([RandomBatch(step) for step in range(2)])
    whole = state_of(session)
    group.close()
    return whole, reports, judged


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}, {way}") for case, ways in CASES for way in ways],
)
def test_parameters_are_those_of_one_plain_process(pool: Pool, case: Case, way: str) -> None:
    expected, losses = reference(case)
    model = build(ModelSpec(name=f"tests.models:{case.model}"), 0, 10, InputSpec.of(SHAPE))
    whole = model.stage(0, len(model.chain))
    initial = {f"model/{name}": value.detach().clone() for name, value in whole.named_parameters()}
    whole.load_state_dict({key.removeprefix("model/"): value for key, value in expected.items()})
    bound = 1e-5 if way in EXACT else BF16_BOUND
    for rank, (state, reports, judged) in enumerate(pool.run(case.world_size, train, case, way)):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=bound), f"rank {rank}"
        assert judged.loss == pytest.approx(held_out(whole), rel=bound)
        for key in expected.keys() & state.keys() if way in EXACT else ():
            assert distance(state[key], expected[key]) < bound, f"rank {rank}, {key}"
        trained = sorted(state.keys() & initial.keys())
        assert trained
        missed = torch.cat([(state[key] - expected[key]).flatten() for key in trained])
        moved = torch.cat([(expected[key] - initial[key]).flatten() for key in trained])
        assert float(missed.norm()) < bound * float(moved.norm()), f"rank {rank}"


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """The loss of a plain model on the batches of the evaluation."""
    batches = [RandomBatch(step) for step in range(2)]
    sums = [
        functional.cross_entropy(model.eval()(batch.inputs(0, batch.size)), batch.targets(0, batch.size)) * batch.size
        for batch in batches
    ]
    return float(sum(sums)) / sum(batch.size for batch in batches)


@pytest.mark.parametrize("sync", [Sync.FP16, Sync.POWERSGD, Sync.CHANNELS])
def test_every_way_to_agree_on_gradients_gives_what_it_gives_for_plain_layers(pool: Pool, sync: Sync) -> None:
    case = replace(CASES[1][0], members=((1.0, 1.0),), sync=sync)
    plain, last = (pool.run(2, train, case, way) for way in ("plain", "channels_last"))
    for (state, _, _), (other, _, _) in zip(plain, last, strict=True):
        for key, value in state.items():
            assert distance(other[key], value) < (1e-5 if sync is Sync.CHANNELS else 1e-3), key


def final_loss(folder: Path) -> float:
    """The held-out loss after the last step of a run."""
    found = [line for line in read_lines(folder / "rank-0.jsonl") if line["kind"] == "evaluation"]
    return float(found[-1]["loss"])


def test_a_checkpoint_is_resumed_in_another_memory_format(folder: Path) -> None:
    always = ("parallel={strategy: ddp, workers: 2, threads: 1}", "lr_schedule.name=constant")

    def run(name: str, *settings: str) -> str:
        pairs = [part for setting in (*always, *settings) for part in ("--set", setting)]
        done = horizonml(folder, "train", "job.yaml", "--set", f"folder={folder / name}", *pairs)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("plain", "memory_format=contiguous")
    run("changing", "memory_format=contiguous", "epochs=1")
    run("changing", "memory_format=channels_last")
    assert final_loss(folder / "changing") == pytest.approx(final_loss(folder / "plain"), rel=1e-4)
    # The layers are tiny, so nothing is tried.
    assert "precision: bf16 is not used by rank 0, 1: " in run("narrow", "precision=bf16")
