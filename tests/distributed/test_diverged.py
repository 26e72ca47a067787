"""Values that are not finite: wherever they arise, no rank commits the step, and all tell the same step and rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.engine.sync.compressed import WHOLE_STEPS
from horizonml.errors import Diverged
from horizonml.plan.plan import Sync
from horizonml.state.spec import Sgd
from tests.distributed.plans import ONE, TWO, Shape
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, RandomBatch

NAN, LARGE = float("nan"), 3e38  # the sum of two such values is more than a 32-bit float can hold


@dataclass(frozen=True)
class Case:
    """What breaks on which rank: every gradient of the last stage there becomes `value`, or is multiplied by it."""

    shape: Shape
    rank: int = 0  # -1 stands for all
    value: float = NAN
    model: str = "plain"
    clip_norm: float | None = None
    multiplied: bool = False
    batch: int = 1
    steps: int = 1  # that are done before


TIED = "LanguageModel"
CASES = {
    "ddp": Case(Shape((TWO,)), 1),
    "pipeline": Case(Shape((ONE, ONE)), 1),
    "hybrid, clipped": Case(Shape((TWO, ONE)), 0, float("inf"), clip_norm=1.0),
    "channels": Case(Shape((TWO,), Sync.CHANNELS), 1),
    "ddp, 16-bit sums": Case(Shape((TWO,), Sync.FP16), 1, 1e9, multiplied=True),
    "hybrid, 16-bit sums, clipped": Case(Shape((ONE, TWO), Sync.FP16), 2, 1e9, clip_norm=1.0, multiplied=True),
    "ddp, PowerSGD's first steps": Case(Shape((TWO,), Sync.POWERSGD), 1, model="wide"),
    "hybrid, PowerSGD": Case(Shape((ONE, TWO), Sync.POWERSGD), 2, model="wide", steps=WHOLE_STEPS + 1),
    "ddp, PowerSGD, infinite, clipped": Case(
        Shape((TWO,), Sync.POWERSGD), 1, float("inf"), "wide", clip_norm=1.0, steps=WHOLE_STEPS + 1
    ),
    "ddp, PowerSGD, overflow": Case(Shape((TWO,), Sync.POWERSGD), -1, LARGE, "wide", steps=WHOLE_STEPS + 1),
    "hybrid, 4-bit sums": Case(Shape((ONE, TWO), Sync.INT4), 2),
    "beside a member without rows, 16-bit sums": Case(
        Shape(((50.0, 1.0),), Sync.FP16), value=1e9, multiplied=True, batch=2
    ),
    "tied copies in one of two stages": Case(Shape((ONE, ONE), micro_batches=1), 0, LARGE, "tied_in_front"),
    "tied copies in two stages": Case(Shape((ONE, ONE), micro_batches=1), -1, LARGE, TIED),
    "tied copies in two stages, clipped": Case(Shape((ONE, ONE), micro_batches=1), -1, LARGE, TIED, clip_norm=1.0),
}


def start(store: Store, rank: int, world_size: int, case: Case) -> Session:
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    return session_for(case.shape.plan(len(model.chain)), model, group, Sgd(clip_norm=case.clip_norm), FULL)


def breaking(session: Session, case: Case) -> None:
    """Change the gradients of this rank's last stage as the case says."""

    def changed(gradient: Tensor) -> Tensor:
        return gradient * case.value if case.multiplied else torch.full_like(gradient, case.value)

    for parameter in session.stages[max(session.stages)].parameters.values():
        parameter.register_hook(changed)


def outcome(session: Session, *acts: Callable[[], object]) -> tuple[tuple[str, ...], bool]:
    """What a rank says of each act, and whether its state is unchanged by all of them."""
    before, step, said = state_of(session), session.state.step, []
    for act in acts:
        try:
            act()
        except Diverged as error:
            said.append(str(error))
    after = state_of(session)
    same = step == session.state.step and all(torch.equal(value, before[key]) for key, value in after.items())
    session.close()
    session.group.close()
    return tuple(said), same


def broken(rank: int, world_size: int, store: Store, case: Case) -> tuple[tuple[str, ...], bool]:
    session = start(store, rank, world_size, case)
    for step in range(case.steps):
        session.step(RandomBatch(step), LR)
    if case.rank in (rank, -1):
        breaking(session, case)
    return outcome(session, lambda: session.step(RandomBatch(case.batch), LR))


@pytest.mark.parametrize("name", CASES)
def test_no_rank_commits_a_step_whose_gradients_are_not_finite(pool: Pool, name: str) -> None:
    case = CASES[name]
    results = pool.run(case.shape.world_size, broken, case)
    assert len({message for message, _ in results}) == 1, results
    told = rf"step {case.steps}: the gradient of \S+ \(stage (\d), rank (\d)\) is not finite"
    ((message,), _) = results[0]
    found = re.match(told, message)
    assert found is not None, message
    stage, rank = map(int, found.groups())
    assert rank in members(case)[stage]
    assert case.rank < 0 or case.rank in members(case)[stage]  # all members have the sum
    assert all(unchanged for _, unchanged in results)
    lossy = case.shape.sync in (Sync.FP16, Sync.POWERSGD, Sync.INT4)
    assert message.endswith("or set parallel.gradient_compression: none") == lossy


def members(case: Case) -> list[tuple[int, ...]]:
    """The ranks of each stage."""
    return [stage.ranks for stage in case.shape.plan(10).stages]


def spoiled(rank: int, world_size: int, store: Store, case: Case) -> tuple[tuple[str, ...], bool]:
    """Evaluate and train on a batch with a bad row, which only the last member of the first stage reads."""
    session = start(store, rank, world_size, case)
    session.step(RandomBatch(0), LR)
    good, bad = RandomBatch(0), RandomBatch(1)
    bad._inputs[-1] = NAN
    return outcome(session, lambda: session.evaluate([good, bad]), lambda: session.step(bad, LR))


@pytest.mark.parametrize(
    ("shape", "rank", "clip_norm"),  # the plan, and the rank that judges the bad row
    [
        (Shape((ONE,)), 0, None),
        (Shape((TWO,)), 1, 1.0),
        (Shape((ONE, TWO)), 2, None),
        (Shape((TWO,), Sync.CHANNELS), 0, None),  # the first member speaks for all
    ],
    ids=["single", "ddp, clipped", "hybrid", "channels"],
)
def test_a_loss_that_is_not_finite_is_told_with_step_and_rank(
    pool: Pool, shape: Shape, rank: int, clip_norm: float | None
) -> None:
    results = pool.run(shape.world_size, spoiled, Case(shape, clip_norm=clip_norm))
    assert len({messages for messages, _ in results}) == 1
    held_out, trained = results[0][0]
    assert held_out.startswith(f"after step 1: the loss on held-out data is nan (rank {rank}).")
    assert trained.startswith(f"step 1: the loss is nan (rank {rank}). Parameters are as they were")
    assert all(unchanged for _, unchanged in results)


def huge(rank: int, world_size: int, store: Store, case: Case) -> tuple[float, float]:
    """The norm of huge gradients on the last rank, and how far the parameters have moved there."""
    session = start(store, rank, world_size, case)
    before = state_of(session)
    if rank == case.rank:
        breaking(session, case)
    norm = session.step(RandomBatch(0), LR).gradient_norm
    after = state_of(session)
    session.close()
    session.group.close()
    assert norm is not None
    moved = [float((after[key] - before[key]).abs().max()) for key in before if key.startswith("model/")]
    return norm, max(moved)


def test_huge_gradients_whose_squares_no_32_bit_float_holds_are_clipped(pool: Pool) -> None:
    case = Case(Shape((ONE, ONE)), 1, 1e30, clip_norm=1.0)
    (norm, _), (other, moved) = pool.run(2, huge, case)
    assert norm == other
    assert 1e31 < norm < 1e33
    assert 0 < moved <= LR
