"""Gradient truth for layers that run in other memory formats and precisions, in every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from horizonml.models.boundary import values_of
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution, Stage, Sync
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.optim import lies_alike
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.plans import ONE
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, state_of
from tests.distributed.truth import FULL, LR, Case, RandomBatch, distance, reference

LAST, NARROW, BOTH = Execution(True), Execution(False, "bf16"), Execution(True, "bf16")
# How the layers run, by rank, again from the first for further ranks: in one mode on all, or in several.
WAYS: dict[str, list[Execution]] = {
    "plain": [PLAIN],
    "channels_last": [LAST],
    "different formats": [LAST, PLAIN],
    "bf16": [NARROW],
    "both": [BOTH],
    "different modes": [BOTH, LAST, NARROW, PLAIN],
}
EXACT = ("plain", "channels_last", "different formats")

CASES = [
    (Case("single", (ONE,), 3, model="residual"), ("channels_last", "both")),
    (Case("ddp 2, shares", ((3.0, 1.0),), 2, model="normed"), ("different formats", "different modes")),
    (Case("pipeline 3", (ONE, ONE, ONE), 4, model="normed"), ("bf16",)),
    (Case("pipeline 3, zero bubble", (ONE, ONE, ONE), 4, "zb-h1", "depthwise"), ("channels_last",)),
    (
        Case("hybrid 2x2, shares", ((3.0, 1.0), (1.0, 2.0)), 3, model="residual"),
        ("different modes",),
    ),
]


def execution(way: str, rank: int, world_size: int) -> Execution:
    """How a rank runs the layers of a model, among all ranks."""
    everyone = [WAYS[way][number % len(WAYS[way])] for number in range(world_size)]
    return everyone[rank].among(everyone)


def train(rank: int, world_size: int, store: Store, case: Case, way: str) -> tuple[dict[str, Tensor], list[Any], Any]:
    """What a rank holds after some steps, what it reported, and what it found on held-out data."""
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    chosen = execution(way, rank, world_size)
    state = TrainState(model, case.optimizer)
    session = Session(case.plan(len(model.chain)), state, group, Classification(), FULL, chosen)
    reports = []
    for step in range(3):
        reports.append(session.step(RandomBatch(step), LR))
        for stage in session.stages.values():
            for name, parameter in stage.parameters.items():
                gradient = parameter.grad
                assert gradient is not None
                assert parameter.dtype == gradient.dtype == torch.float32
                assert lies_alike(parameter, gradient), name
    lying = [value for name, value in state.tensors().items() if name.endswith("weight") and value.dim() == 4]
    assert all(value.is_contiguous() for value in lying) or chosen.channels_last_weights
    judged = session.evaluate([RandomBatch(step) for step in range(2)])
    whole = state_of(session)
    group.close()
    return whole, reports, judged


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes of a pool: in 16 bits, a sum that threads divide among them is rounded in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rounded(way: str, world_size: int) -> Callable[[Model, nn.Module, Stage, int], Callable[..., Any]]:
    """How PyTorch itself runs a rank's layers: in its memory format, and in 16 bits by an autocast of its own."""

    def as_run(model: Model, stage: nn.Module, spec: Stage, rank: int) -> Callable[..., Any]:
        chosen = execution(way, rank, world_size)
        narrow = chosen.precision == "bf16"
        form = torch.channels_last if chosen.channels_last else torch.contiguous_format
        for weight in stage.parameters() if chosen.channels_last_weights else ():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)

        def call(*values: Tensor) -> Any:
            entered = [value.contiguous(memory_format=form) if value.dim() == 4 else value for value in values]
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                left = tuple(value.float().contiguous() for value in values_of(stage(*entered)))
            return left if len(left) > 1 else left[0]

        return call

    return as_run


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}, {way}") for case, ways in CASES for way in ways],
)
@pytest.mark.usefixtures("one_thread")
def test_parameters_are_those_of_one_process(pool: Pool, case: Case, way: str) -> None:
    """Of plain PyTorch, or where layers run in 16 bits, of PyTorch's autocast around the same layers."""
    expected, losses, _ = reference(case) if way in EXACT else reference(case, as_run=rounded(way, case.world_size))
    model = built(f"tests.models:{case.model}")
    whole = model.stage(0, len(model.chain))
    initial = {f"model/{name}": value.detach().clone() for name, value in whole.named_parameters()}
    whole.load_state_dict({key.removeprefix("model/"): value for key, value in expected.items()})
    for rank, (state, reports, judged) in enumerate(pool.run(case.world_size, train, case, way)):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=1e-5), f"rank {rank}"
        assert judged.loss == pytest.approx(held_out(whole), rel=1e-5 if way in EXACT else 1e-3)
        for key in expected.keys() & state.keys():
            assert distance(state[key], expected[key]) < 1e-5, f"rank {rank}, {key}"
        trained = sorted(state.keys() & initial.keys())
        assert trained
        missed = torch.cat([(state[key] - expected[key]).flatten() for key in trained])
        moved = torch.cat([(expected[key] - initial[key]).flatten() for key in trained])
        assert float(missed.norm()) < 1e-5 * float(moved.norm()), f"rank {rank}"


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """The loss of a plain model on the batches of the evaluation."""
    batches = [RandomBatch(step) for step in range(2)]
    sums = [
        functional.cross_entropy(model.eval()(batch.inputs(0, batch.size)), batch.targets(0, batch.size)) * batch.size
        for batch in batches
    ]
    return float(sum(sums)) / sum(batch.size for batch in batches)


def test_every_way_to_agree_on_gradients_gives_what_it_gives_for_plain_layers(pool: Pool) -> None:
    for sync in (Sync.FP16, Sync.CHANNELS):
        case = replace(CASES[1][0], members=((1.0, 1.0),), sync=sync)
        plain, last = (pool.run(2, train, case, way) for way in ("plain", "channels_last"))
        for (state, _, _), (other, _, _) in zip(plain, last, strict=True):
            for key, value in state.items():
                assert distance(other[key], value) < (1e-5 if sync is Sync.CHANNELS else 1e-3), key


def resumed(rank: int, world_size: int, store: Store, folder: Path) -> list[dict[str, Tensor]]:
    """What a rank holds after four steps in one format, and after two that go on from a checkpoint in the other."""
    group, case = Group(store, rank, world_size, 30.0), CASES[1][0]
    model = built(f"tests.models:{case.model}")
    plan, found = case.plan(len(model.chain)), []
    for begun, execution in ((0, PLAIN), (2, LAST)):
        state = TrainState(model, case.optimizer)
        session = Session(plan, state, group, Classification(), FULL, execution)
        checkpoints = Checkpoints(folder, group, 2, {})
        if begun:
            assert checkpoints.resume(state, plan) is not None
        for step in range(begun, 4):
            session.step(RandomBatch(step), LR)
            if step == 1:
                assert checkpoints.save(state, plan, {}) == []
        found.append(state_of(session))
        session.close()
    group.close()
    return found


def test_a_checkpoint_is_resumed_in_another_memory_format(pool: Pool, tmp_path: Path) -> None:
    for straight, changed in pool.run(2, resumed, tmp_path):
        assert straight.keys() == changed.keys()
        assert any(key.startswith("optimizer/") for key in changed)
        for key, value in straight.items():
            assert distance(changed[key], value) < 1e-5, key
