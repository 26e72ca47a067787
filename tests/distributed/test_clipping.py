"""Gradients are clipped by their norm over all stages, in every plan as in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.plan.plan import Sync
from horizonml.state.spec import Adam, Sgd
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.test_gradients import FULL, LR, ONE, Case, RandomBatch, distance

STEPS, MOST = 3, 0.1
SGD = Sgd(momentum=0.9, weight_decay=1e-3, clip_norm=MOST)
CASES = [
    Case(f"{name}, {model}", members, micros, schedule, model, optimizer=SGD)
    for name, members, micros, schedule in (
        ("single", (ONE,), 1, "1f1b"),
        ("ddp 3", ((1.0, 1.0, 1.0),), 2, "1f1b"),
        ("pipeline 3", (ONE, ONE, ONE), 4, "1f1b"),
        ("interleaved 2", (ONE, ONE), 3, "interleaved"),
        ("hybrid 2x2, shares 3:1 and 1:2", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1"),
    )
    for model in ("plain", "LanguageModel")  # the second has tied parameters
]
CASES += [
    Case("a member without samples", ((50.0, 1.0), ONE), 2, optimizer=SGD),
    Case("hybrid in buckets", ((1.0, 1.0), ONE), 2, model="wide", optimizer=SGD),
    Case("hybrid, adam", ((1.0, 1.0), ONE), 2, optimizer=Adam(name="adam", clip_norm=MOST)),
    Case("channels", ((2.0, 1.0, 1.0),), model="residual", sync=Sync.CHANNELS, optimizer=SGD),
]


def train(rank: int, world_size: int, store: Store, case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """What a rank holds after some steps, and the norms that it was told."""
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    try:
        session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
        norms = [session.step(RandomBatch(step), LR).gradient_norm for step in range(STEPS)]
        return state_of(session), [norm for norm in norms if norm is not None]
    finally:
        group.close()


def reference(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """The same in one process, clipped by PyTorch."""
    model: Any = built(f"tests.models:{case.model}")
    whole, names = model.stage(0, len(model.chain)).train(), {}
    for first, *others in model.ties:
        for name in others:
            path, _, last = name.rpartition(".")
            whole.get_submodule(path).register_parameter(last, whole.get_parameter(first))
            names[name] = first
    spec, parameters = case.optimizer, list(whole.parameters())
    optimizer: torch.optim.Optimizer
    if isinstance(spec, Sgd):
        optimizer = torch.optim.SGD(parameters, LR, spec.momentum, weight_decay=spec.weight_decay)
    else:
        optimizer = torch.optim.Adam(parameters, LR, weight_decay=spec.weight_decay)
    norms = []
    for step in range(STEPS):
        batch = RandomBatch(step)
        optimizer.zero_grad()
        functional.cross_entropy(whole(batch.inputs(0, batch.size)), batch.targets(0, batch.size)).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double().norm()))
        torch.nn.utils.clip_grad_norm_(parameters, MOST)  # which takes the norm in 32 bits
        optimizer.step()
    return {f"model/{key}": value.detach() for key, value in whole.state_dict().items()}, norms


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_plan_clips_as_one_process_does(pool: Pool, case: Case) -> None:
    expected, norms = reference(case)
    assert max(norms) > 2 * MOST  # it matters
    # Adam divides gradients by their own size, so that the rounding of small ones shows in full.
    bound = 1e-4 if isinstance(case.optimizer, Adam) else 1e-5
    told = set()
    for state, found in pool.run(case.world_size, train, case):
        assert found == pytest.approx(norms, rel=1e-5)
        told.add(tuple(found))
        for key, value in state.items():
            if key.startswith("model/"):
                assert distance(value, expected[key]) < bound, key
    assert len(told) == 1  # bit for bit the same on all ranks


def test_norms_below_the_limit_change_nothing(pool: Pool) -> None:
    case = Case("hybrid", (ONE, (1.0, 1.0)), 2, optimizer=replace_clip(None))
    plain = pool.run(3, train, case)
    for (state, norms), (expected, none) in zip(
        pool.run(3, train, replace(case, optimizer=replace_clip(1e6))), plain, strict=True
    ):
        assert (len(norms), none) == (STEPS, [])
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def replace_clip(norm: float | None) -> Sgd:
    return SGD.model_copy(update={"clip_norm": norm})
