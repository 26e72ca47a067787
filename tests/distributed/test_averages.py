"""Moving averages of parameters: equal in every plan, used in evaluations, and a part of the state."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.engine.clock import Totals
from horizonml.plan.plan import Sync
from horizonml.state.spec import Ema, Sgd
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.test_gradients import FULL, LR, ONE, Case, RandomBatch, distance

STEPS = 4
CASES = [
    Case("single", (ONE,)),
    Case("ddp 3", ((1.0, 1.0, 1.0),), 2),
    Case("hybrid 2x2, shares 3:1 and 1:2", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1"),
    Case("pipeline 3, tied", (ONE, ONE, ONE), 4, model="LanguageModel"),
    Case("channels", ((2.0, 1.0),), sync=Sync.CHANNELS),
]
CASES = [replace(case, optimizer=Sgd(momentum=0.9)) for case in CASES]
EMAS = {"warm": Ema(decay=0.9), "cold": Ema(decay=0.5, warmup=False), "not evaluated": Ema(decay=0.9, evaluate=False)}


def train(rank: int, world_size: int, store: Store, case: Case, ema: Ema) -> tuple[dict[str, Tensor], Totals, bool]:
    """What a rank holds after some steps, what an evaluation finds, and whether that has changed nothing."""
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    try:
        session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL, ema=ema)
        for step in range(STEPS):
            session.step(RandomBatch(step), LR)
        before = state_of(session)
        judged = session.evaluate([RandomBatch(step) for step in range(2)])
        after = state_of(session)
        return after, judged, all(torch.equal(value, after[key]) for key, value in before.items())
    finally:
        group.close()


def reference(case: Case, ema: Ema) -> tuple[dict[str, Tensor], float]:
    """The averages of one process, by name, and the loss of its evaluation."""
    model = built(f"tests.models:{case.model}")
    whole = model.stage(0, len(model.chain)).train()
    for first, *others in model.ties:
        for name in others:
            path, _, last = name.rpartition(".")
            whole.get_submodule(path).register_parameter(last, whole.get_parameter(first))
    average = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), LR, 0.9, weight_decay=Sgd().weight_decay)
    assert ema.decay is not None
    for step in range(STEPS):
        batch = RandomBatch(step)
        optimizer.zero_grad()
        functional.cross_entropy(whole(batch.inputs(0, batch.size)), batch.targets(0, batch.size)).backward()
        optimizer.step()
        decay = min(ema.decay, (1 + step) / (10 + step)) if ema.warmup else ema.decay
        with torch.no_grad():
            for mean, value in zip(average.parameters(), whole.parameters(), strict=True):
                mean.copy_(decay * mean + (1 - decay) * value)
    judged = (average if ema.evaluate else whole).eval()
    losses = samples = 0.0
    for batch in map(RandomBatch, range(2)):
        with torch.no_grad():
            outputs = judged(batch.inputs(0, batch.size))
        losses += float(functional.cross_entropy(outputs, batch.targets(0, batch.size), reduction="sum"))
        samples += batch.size
    found = {key: value.detach() for key, value in average.named_parameters(remove_duplicate=False)}
    return found, losses / samples


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", EMAS)
def test_averages_are_those_of_one_process_and_are_evaluated(pool: Pool, case: Case, kind: str) -> None:
    expected, loss = reference(case, EMAS[kind])
    seen = set()
    for state, judged, unchanged in pool.run(case.world_size, train, case, EMAS[kind]):
        assert unchanged
        assert judged.loss == pytest.approx(loss, rel=1e-5)
        for name in expected:
            if f"model/{name}" in state:
                seen.add(name)
                assert distance(state[f"optimizer/{name}/average"], expected[name]) < 1e-5, name
                assert not torch.equal(state[f"optimizer/{name}/average"], state[f"model/{name}"])
    assert seen == set(expected)
