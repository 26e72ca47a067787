"""Gradient truth: every plan must change the parameters exactly as one process does on the same batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.tasks.classification import Classification
from tests.distributed.plans import ONE
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, SIZES, Case, RandomBatch, distance, reference, train

SHAPES = [
    ("single", (ONE,), 1),
    ("single, 3 micro-batches", (ONE,), 3),
    ("ddp 2", ((1.0, 1.0),), 1),
    ("ddp 5", ((1.0,) * 5,), 1),
    ("ddp 5, 3 micro-batches", ((1.0,) * 5,), 3),
    ("ddp 2, shares 3:1", ((3.0, 1.0),), 2),
    ("ddp 2, shares 50:1", ((50.0, 1.0),), 2),  # one member has no rows in the smaller batches
    ("pipeline 2", (ONE, ONE), 4),
    ("pipeline 3", (ONE, ONE, ONE), 5),
    ("pipeline 5", (ONE,) * 5, 4),
    ("pipeline 5, 1 micro-batch", (ONE,) * 5, 1),
    ("hybrid 2x2", ((1.0, 1.0), (1.0, 1.0)), 3),
    ("hybrid 1+2+1", (ONE, (1.0, 1.0), ONE), 4),
    ("hybrid 2x2, shares 3:1 and 1:2", ((3.0, 1.0), (1.0, 2.0)), 3),
    ("hybrid 2+3", ((1.0, 1.0), (1.0, 1.0, 1.0)), 2),
]


def product(models: tuple[str, ...], *names: str) -> list[Case]:
    """Every shape of these names with every schedule, and every model with both."""
    return [
        Case(f"{name}, {schedule}, {'tied' if model == 'LanguageModel' else model}", members, micros, schedule, model)
        for name, members, micros in SHAPES
        for schedule in SCHEDULES
        for model in models
        if (not names or name in names) and (len(members) > 1 or schedule == "1f1b")
    ]


def pairs(cases: list[Case]) -> list[Case]:
    """Every shape by one schedule and some shapes by every schedule, with the models in turn."""
    numbers = [list(dict.fromkeys(values)) for values in zip(*map(_coordinates, cases), strict=True)]
    return [
        case
        for case in cases
        if (case.schedule == "1f1b" or _coordinates(case)[0] in ("pipeline 3", "hybrid 1+2+1", "hybrid 2+3"))
        and sum(own.index(at) for own, at in zip(numbers, _coordinates(case), strict=True)) % 2 == 0
    ]


def _coordinates(case: Case) -> tuple[str, str, str]:
    return case.name.rpartition(f", {case.schedule}, ")[0], case.schedule, case.model


ALL = product(("plain", "normed"))
CASES = pairs(ALL)
CASES += [
    Case("ddp 2 in buckets", ((1.0, 1.0),), 2, model="wide"),
    Case("ddp 5 in buckets, shares", ((1.0, 2.0, 3.0, 4.0, 5.0),), 1, model="wide"),
    Case("ddp 3 in buckets, a member without samples", ((1.0, 2.0, 1e-9),), 2, model="wide"),
    Case("hybrid 2x2 in buckets", ((3.0, 1.0), (1.0, 1.0)), 2, model="wide"),
    Case("two stages a rank in buckets, shares", ((20.0, 1.0), (1.0, 20.0)), 6, "interleaved", "wide"),
    Case("two stages a rank in buckets, few samples", ((1.0, 1.0), (1.0, 1.0, 1.0)), 12, "1f1b", "wide", turns=2),
    Case("pipeline 2, many micro-batches, interleaved", (ONE, ONE), 24, "interleaved", "normed"),
    Case("pipeline 2, many micro-batches, gpipe with two stages a rank", (ONE, ONE), 24, "gpipe", "normed", turns=2),
    Case("pipeline 3, ranks in reverse", (ONE, ONE, ONE), 3, reversed_ranks=True),
    Case("hybrid 2+3, adamw", ((1.0, 1.0), (1.0, 1.0, 1.0)), 2, optimizer=Adam(name="adamw", weight_decay=0.1)),
    Case("pipeline 3, adam", (ONE, ONE, ONE), 2, optimizer=Adam(name="adam")),
    Case("ddp 2, nesterov", ((1.0, 1.0),), 2, optimizer=Sgd(nesterov=True)),
]
# Several tensors cross each cut.
CASES += pairs(product(("TwoBranches", "UNet"), "ddp 2", "pipeline 3", "hybrid 2x2, shares 3:1 and 1:2"))
# The first and the last layer share a parameter.
ALL_TIED = product(("LanguageModel",), "ddp 2", "pipeline 2", "pipeline 3", "hybrid 2+3")
TIED = [case for case in ALL_TIED if len(case.members) == 2 or case.schedule == "1f1b"]
CASES += TIED
BY_NAME = {case.name: case for case in [*ALL, *ALL_TIED, *CASES]}
REPEATED = [
    BY_NAME[name]
    for name in (
        "ddp 5, 1f1b, plain",
        "hybrid 1+2+1, zb-h1, normed",
        "hybrid 2x2, interleaved, normed",
    )
]
EVALUATED = [
    BY_NAME[name]
    for name in (
        "single, 1f1b, plain",
        "pipeline 2, many micro-batches, interleaved",
        "pipeline 2, many micro-batches, gpipe with two stages a rank",
        "ddp 5, 1f1b, normed",
        "hybrid 1+2+1, 1f1b, normed",
        "hybrid 2x2, interleaved, normed",
    )
]
# Members that split channels see all samples, so BatchNorm, too, must be that of one process.
TENSOR = [
    Case(f"tensor of {model}, {name}", (shares,), model=model, sync=Sync.CHANNELS)
    for model in ("plain", "normed", "wide", "residual", "depthwise")
    for name, shares in (("2", (1.0, 1.0)), ("5", (1.0,) * 5), ("shares 3:1:2", (3.0, 1.0, 2.0)))
]
TENSOR += [Case("tensor 3, nesterov", ((1.0,) * 3,), sync=Sync.CHANNELS, optimizer=Sgd(nesterov=True))]

# Gradients are clipped by their norm over all stages. Most of the language model's parameters are tied.
MOST = 0.1
CLIP = Sgd(momentum=0.9, weight_decay=1e-3, clip_norm=MOST)
CLIPPED = [
    Case("clipped: single", (ONE,), model="LanguageModel", optimizer=CLIP),
    Case("clipped: ddp 3", ((1.0, 1.0, 1.0),), 2, optimizer=CLIP),
    Case("clipped: pipeline 3", (ONE, ONE, ONE), 4, model="LanguageModel", optimizer=CLIP),
    Case("clipped: interleaved 2", (ONE, ONE), 3, "interleaved", optimizer=CLIP),
    Case("clipped: hybrid 2x2", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1", "LanguageModel", CLIP),
    Case("clipped: a member without samples", ((50.0, 1.0), ONE), 2, optimizer=CLIP),
    Case("clipped: hybrid in buckets", ((1.0, 1.0), ONE), 2, model="wide", optimizer=CLIP),
    # Adam divides gradients by their own size, so that the rounding of small ones shows in full.
    Case("clipped: hybrid, adam", ((1.0, 1.0), ONE), 2, optimizer=Adam(name="adam", clip_norm=MOST)),
    Case("clipped: channels", ((2.0, 1.0, 1.0),), model="residual", sync=Sync.CHANNELS, optimizer=CLIP),
]
WARM = Ema(decay=0.9)
AVERAGED = [
    Case("averaged: single", (ONE,), ema=Ema(decay=0.5, warmup=False)),
    Case("averaged: hybrid 2x2", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1", ema=WARM),
    Case("averaged: pipeline 3, tied", (ONE, ONE, ONE), 4, model="LanguageModel", ema=WARM),
    Case("averaged: channels", ((2.0, 1.0),), sync=Sync.CHANNELS, ema=Ema(decay=0.5, warmup=False)),
]


@pytest.mark.parametrize("case", [*CASES, *TENSOR[::2], *CLIPPED, *AVERAGED], ids=lambda case: case.name)
def test_parameters_after_three_steps_equal_those_of_one_process(pool: Pool, case: Case) -> None:
    whole = case if case.sync is Sync.ALL_REDUCE else replace(case, members=(ONE,), sync=Sync.ALL_REDUCE)
    expected, losses, norms = reference(whole)
    bound = 1e-4 if isinstance(case.optimizer, Adam) and norms else 1e-5
    seen, told = set(), set()
    for rank, (state, reports) in enumerate(pool.run(case.world_size, train, case)):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=1e-5), f"rank {rank}"
        for key in state.keys() & expected.keys():
            seen.add(key)
            assert distance(state[key], expected[key]) < bound, f"rank {rank}, {key}"
        found = tuple(report.gradient_norm for report in reports if report.gradient_norm is not None)
        assert found == pytest.approx(norms, rel=1e-5)
        told.add(found)
    assert seen == set(expected)
    assert len(told) == 1, "all ranks know the same norm, bit for bit"
    assert not norms or max(norms) > 2 * MOST, "clipping makes a difference"
    assert any(key.endswith("/average") for key in seen) == (case.ema is not None)


def test_norms_below_the_limit_change_nothing(pool: Pool) -> None:
    case = Case("hybrid", (ONE, (1.0, 1.0)), 2, optimizer=CLIP.model_copy(update={"clip_norm": None}))
    limited = replace(case, optimizer=CLIP.model_copy(update={"clip_norm": 1e6}))
    for (state, reports), (expected, others) in zip(pool.run(3, train, limited), pool.run(3, train, case), strict=True):
        assert all(report.gradient_norm is not None for report in reports)
        assert all(report.gradient_norm is None for report in others)
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_without_batchnorm_every_plan_gives_the_gradient_of_the_whole_batch() -> None:
    for case in CASES:
        if case.model == "plain":
            whole, losses, _ = reference(Case("whole batch", (ONE,), optimizer=case.optimizer))
            parts, own, _ = reference(case)  # which the ranks are compared with above
            assert own == pytest.approx(losses, rel=1e-6), case.name
            assert parts.keys() == whole.keys(), case.name
            for key, value in parts.items():
                assert distance(value, whole[key]) < 1e-5, (case.name, key)


@pytest.mark.parametrize("case", [*REPEATED, *TIED[-2:], TENSOR[10]], ids=lambda case: case.name)
def test_members_of_a_stage_are_equal_and_runs_repeat_bit_for_bit(pool: Pool, case: Case) -> None:
    first, again = (pool.run(case.world_size, train, case) for _ in range(2))
    stages: dict[frozenset[str], dict[str, Tensor]] = {}
    for (state, reports), (state2, reports2) in zip(first, again, strict=True):
        assert state.keys() == state2.keys()
        assert all(torch.equal(state[key], state2[key]) for key in state)
        assert [r.totals for r in reports] == [r.totals for r in reports2]
        other = stages.setdefault(frozenset(state), state)
        assert all(torch.equal(state[key], other[key]) for key in state)


def test_dropout_repeats_bit_for_bit_and_differs_between_steps_and_members(pool: Pool) -> None:
    case = Case("dropout", ((1.0, 1.0), ONE), 2, model="dropping")
    first, again = (pool.run(3, train, case) for _ in range(2))
    for (state, reports), (state2, _) in zip(first, again, strict=True):
        assert all(torch.equal(state[key], state2[key]) for key in state)
        assert len({report.totals.loss for report in reports}) == 3


def test_time_splits_add_up_and_bytes_are_counted(pool: Pool) -> None:
    case = Case("hybrid", (ONE, (1.0, 1.0), ONE), 4, model="normed")
    results = pool.run(4, train, case, 6)
    for _, reports in results:
        for report in reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)
            assert min(report.compute, report.transfer, report.wait) >= 0
            ends = [span.end for span in report.spans]
            assert all(a.end == b.start for a, b in zip(report.spans, report.spans[1:], strict=False))
            assert ends == sorted(ends)
    sent = [sum(report.bytes_sent for report in reports) for _, reports in results]
    received = [sum(report.bytes_received for report in reports) for _, reports in results]
    assert sum(sent) == sum(received)
    model = built("tests.models:normed")
    plan = case.plan(len(model.chain))
    samples = 2 * sum(SIZES)
    entry = model.chain.boundaries[plan.stages[1].start].bytes_per_sample * samples
    left = model.chain.boundaries[plan.stages[2].start].bytes_per_sample * samples
    assert (sent[0], received[0]) == (entry, entry)  # activations out, gradients in
    assert (sent[3], received[3]) == (left, left)
    assert sent[1] + sent[2] > entry + left  # and the sum of gradients between the members


def test_divergence_is_that_of_the_members_gradients_before_reduction(pool: Pool) -> None:
    case = Case("ddp 2, shares 3:1", ((3.0, 1.0),), 1, optimizer=Sgd(momentum=0, weight_decay=0))
    results = pool.run(2, train, case, 1)
    model = built("tests.models:plain")
    stage = model.stage(0, len(model.chain))
    batch = RandomBatch(0)

    def gradient(start: int, stop: int) -> Tensor:
        loss = functional.cross_entropy(stage(batch.inputs(start, stop)), batch.targets(start, stop))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(stage.parameters()))])

    mean = gradient(0, 24)
    expected = [float((gradient(a, b) - mean).norm() / mean.norm()) for a, b in ((0, 18), (18, 24))]
    assert [reports[0].divergence for _, reports in results] == pytest.approx(expected, rel=1e-4)


def evaluate(rank: int, world_size: int, store: Store, case: Case, steps: int = 0) -> Any:
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL, ema=case.ema)
    for step in range(steps):
        session.step(RandomBatch(step), LR)
    before = state_of(session)
    totals = session.evaluate([RandomBatch(step) for step in range(3)])
    assert all(torch.equal(value, before[key]) for key, value in state_of(session).items())
    group.close()
    return totals


def expect_evaluation(pool: Pool, case: Case, values: dict[str, Tensor], steps: int = 0) -> None:
    """Compare with what a whole model finds that has these parameters and buffers."""
    model = built(f"tests.models:{case.model}")
    stage = model.stage(0, len(model.chain)).eval()
    stage.load_state_dict(values, strict=False)
    loss = correct = samples = 0.0
    for step in range(3):
        batch = RandomBatch(step)
        with torch.no_grad():
            logits = stage(batch.inputs(0, batch.size))
        labels = batch.targets(0, batch.size)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        correct += float((logits.argmax(1) == labels).sum())
        samples += batch.size
    for totals in pool.run(case.world_size, evaluate, case, steps):
        assert totals.loss == pytest.approx(loss / samples, rel=1e-5)
        assert (totals.metrics, totals.samples) == ({"accuracy": correct / samples}, samples)


@pytest.mark.parametrize("case", [*EVALUATED, TIED[-1], TENSOR[4]], ids=lambda case: case.name)
def test_evaluation_goes_through_the_same_plan_and_changes_nothing(pool: Pool, case: Case) -> None:
    expect_evaluation(pool, case, {})


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("case", AVERAGED[1:3], ids=lambda case: case.name)
def test_averages_are_evaluated_unless_the_job_says_otherwise(pool: Pool, case: Case, evaluates: bool) -> None:
    own = replace(case, ema=WARM.model_copy(update={"evaluate": evaluates}))
    state = reference(own).state
    values = {key.split("/")[1]: value for key, value in state.items() if key.startswith("model/")}
    if evaluates:
        values |= {key.split("/")[1]: value for key, value in state.items() if key.endswith("/average")}
    expect_evaluation(pool, own, values, 3)


def first_stage_without_parameters(rank: int, world_size: int, store: Store) -> float:
    model = built("tests.models:wide")
    assert model.chain.names[0] == "0"  # flatten
    plan = Plan((Stage(0, 1, (0,), (1.0,)), Stage(1, len(model.chain), (1,), (1.0,))), micro_batches=2)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(plan, model, group, Sgd(), FULL)
    losses = [session.step(RandomBatch(0), LR).totals.loss for step in range(5)]
    group.close()
    assert losses[-1] < losses[0]
    return losses[-1]


def test_a_first_stage_may_have_no_parameters(pool: Pool) -> None:
    results = pool.run(2, first_stage_without_parameters)
    assert results[0] == results[1]


PLANS = {
    "ddp": Plan((Stage(0, 10, (0, 1), (1.0, 1.0)),)),
    "hybrid": Plan((Stage(0, 4, (0,), (1.0,)), Stage(4, 10, (1, 2), (3.0, 1.0))), micro_batches=2),
    "tensor": Plan((Stage(0, 10, (0, 1), (1.0, 1.0), Sync.CHANNELS),)),
}


def counted_and_judged(rank: int, world_size: int, store: Store, plan: Plan, smoothing: float) -> tuple[int, float]:
    model = built("tests.models:plain")
    group = Group(store, rank, world_size, 30.0)
    session = session_for(plan, model, group, Sgd(), FULL, Classification(smoothing))
    loss = session.evaluate([RandomBatch(0)]).loss
    entered = session.step(RandomBatch(0), LR).entered
    group.close()
    return entered, loss


@pytest.mark.parametrize("name", PLANS)
def test_samples_are_counted_once_and_judged_without_label_smoothing(pool: Pool, name: str) -> None:
    plan = PLANS[name]
    plain = pool.run(plan.world_size, counted_and_judged, plan, 0.0)
    smoothed = pool.run(plan.world_size, counted_and_judged, plan, 0.2)
    assert sum(entered for entered, _ in plain) == RandomBatch(0).size
    assert smoothed == plain
