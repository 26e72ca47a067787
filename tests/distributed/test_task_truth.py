"""Every built-in task is trained by every plan as one process trains it, and judged as torchmetrics judges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.dataset import DataBatch
from horizonml.engine.clock import Totals
from horizonml.plan.plan import Sync
from horizonml.state.spec import Sgd
from tests.builtin import BUILT_IN, BuiltIn
from tests.distributed.plans import ONE, TWO, Shape
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import distance

FULL, LR, OPTIMIZER = 24, 0.05, Sgd(momentum=0.9, weight_decay=1e-3)
SIZES = (24, 24, 13)  # the last batch of an epoch is smaller
SHAPES = {
    "2 stages": Shape((ONE, ONE), micro_batches=4),
    "3 stages": Shape((ONE, ONE, ONE), micro_batches=3, schedule="zb-h1"),
    "ddp, shares 3:1": Shape(((3.0, 1.0),)),
    "hybrid": Shape((TWO, (1.0, 2.0)), micro_batches=3),
    "members that judge no rows": Shape((ONE, (50.0, 1.0)), micro_batches=2),
}


def batches(one: BuiltIn) -> list[DataBatch]:
    return [DataBatch(one.samples(size), torch.arange(size)) for size in SIZES]


def trained(
    rank: int, world_size: int, store: Store, name: str, shape: Shape
) -> tuple[dict[str, Tensor], list[Totals], Totals]:
    """Train three steps and evaluate; return the rank's state and what it was told."""
    one, group = BUILT_IN[name], Group(store, rank, world_size, 30.0)
    try:
        model = one.model()
        session = session_for(shape.plan(len(model.chain)), model, group, OPTIMIZER, FULL, one.task)
        totals = [session.step(batch, LR).totals for batch in batches(one)]
        return state_of(session), totals, session.evaluate([*batches(one)])
    finally:
        group.close()


def whole(batch: DataBatch) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a batch."""
    inputs, targets = batch.inputs(0, batch.size), batch.targets(0, batch.size)
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)
    return inputs, targets


Judged = tuple[float, dict[str, float]]


def reference(one: BuiltIn) -> tuple[dict[str, Tensor], list[Judged], Judged]:
    """Do the same in one process, with PyTorch's own loss on whole batches, and the metrics of torchmetrics."""
    built = one.model()
    model = built.stage(0, len(built.chain)).train()
    optimizer = torch.optim.SGD(model.parameters(), LR, OPTIMIZER.momentum, weight_decay=OPTIMIZER.weight_decay)
    steps = []
    for batch in batches(one):
        optimizer.zero_grad()
        inputs, targets = whole(batch)
        outputs = model(inputs)
        loss = one.loss(outputs, targets)
        loss.backward()
        optimizer.step()
        steps.append((float(loss.detach()), one.measured(outputs.detach(), targets)))
    pairs = [whole(batch) for batch in batches(one)]
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    with torch.no_grad():
        outputs = model(inputs)
        evaluated = float(one.loss(outputs, targets)), one.measured(outputs, targets)
    return {f"model/{key}": value.detach() for key, value in model.state_dict().items()}, steps, evaluated


def same(found: Totals, expected: Judged) -> bool:
    loss, metrics = expected
    return found.loss == pytest.approx(loss, rel=1e-5) and found.metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


CASES = [  # every task by a hybrid plan, and two of them by each of the others
    (task, shape)
    for place, task in enumerate(BUILT_IN)
    for number, shape in enumerate(SHAPES)
    if shape == "hybrid" or (place + number) % len(BUILT_IN) < 2
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_task_is_trained_and_judged_as_by_one_process(pool: Pool, name: str, kind: str) -> None:
    shape = SHAPES[kind]
    expected, steps, evaluated = reference(BUILT_IN[name])
    seen = set()
    for state, totals, judged in pool.run(shape.world_size, trained, name, shape):
        for found, wanted in zip(totals, steps, strict=True):
            assert same(found, wanted), (found, wanted)
        assert same(judged, evaluated), (judged, evaluated)
        for key, value in state.items():
            if key.startswith("model/"):
                seen.add(key)
                assert distance(value, expected[key]) < 1e-5, key
    assert seen == set(expected)


def test_members_that_split_channels_are_judged_once(pool: Pool) -> None:
    _, steps, evaluated = reference(BUILT_IN["segmentation"])
    for _, totals, judged in pool.run(2, trained, "segmentation", Shape((TWO,), Sync.CHANNELS)):
        assert all(same(found, wanted) for found, wanted in zip(totals, steps, strict=True))
        assert same(judged, evaluated)
