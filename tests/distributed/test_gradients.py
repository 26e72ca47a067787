"""Gradient truth: every plan must change the parameters exactly as one process does on the same batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.func import functional_call
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.errors import Diverged
from horizonml.models.boundary import values_of
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of

SHAPE, FULL, LR = (1, 8, 8), 24, 0.1
SIZES = (24, 24, 13)  # the last batch of an epoch is smaller


class RandomBatch:
    """Noise with random labels, the same wherever it is made."""

    def __init__(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.size = SIZES[step % len(SIZES)]
        self._inputs = torch.randn(self.size, *SHAPE, generator=generator)
        self._targets = torch.randint(0, 10, (self.size,), generator=generator)

    def inputs(self, start: int, stop: int) -> Tensor:
        return self._inputs[start:stop]

    def targets(self, start: int, stop: int) -> Tensor:
        return self._targets[start:stop]


@dataclass(frozen=True)
class Case:
    """A plan by its members per stage, and what it trains."""

    name: str
    members: tuple[tuple[float, ...], ...]  # the shares of each stage's members
    micro_batches: int = 1
    schedule: str = "1f1b"
    model: str = "plain"
    optimizer: Sgd | Adam = field(default_factory=lambda: Sgd(momentum=0.9, weight_decay=1e-3))
    reversed_ranks: bool = False
    sync: Sync = Sync.ALL_REDUCE
    turns: int | None = None  # stages for each rank; by default as many as the schedule wants

    def plan(self, layers: int) -> Plan:
        groups, rank = [], 0
        world = sum(map(len, self.members))
        for shares in self.members:
            ranks = tuple(range(rank, rank + len(shares)))
            groups.append((tuple(world - 1 - r for r in ranks) if self.reversed_ranks else ranks, shares))
            rank += len(shares)
        count = len(groups) * (self.turns or SCHEDULES[self.schedule].stages_per_rank)
        bounds = [layers * number // count for number in range(count + 1)]
        stages = [
            Stage(bounds[number], bounds[number + 1], *groups[number % len(groups)], self.sync)
            for number in range(count)
        ]
        return Plan(tuple(stages), self.schedule, self.micro_batches)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))


ONE = (1.0,)
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
    """Half of a product: each pair of a shape, a schedule, and a model is in it, if not each three of them."""
    numbers = [list(dict.fromkeys(values)) for values in zip(*map(_coordinates, cases), strict=True)]
    return [
        case
        for case in cases
        if len(case.members) == 1
        or sum(own.index(at) for own, at in zip(numbers, _coordinates(case), strict=True)) % 2 == 0
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
FOUR = ("ddp 2", "pipeline 2", "pipeline 3", "hybrid 2x2, shares 3:1 and 1:2")
CASES += pairs(product(("UNet", "TwoBranches"), *FOUR))
# The first and the last layer share a parameter.
ALL_TIED = product(("LanguageModel",), *FOUR, "hybrid 2+3")
TIED = pairs(ALL_TIED)
CASES += TIED
BY_NAME = {case.name: case for case in [*ALL, *ALL_TIED, *CASES]}
REPEATED = [
    BY_NAME[name]
    for name in (
        "ddp 5, 1f1b, plain",
        "hybrid 2x2, 1f1b, plain",
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


def train(rank: int, world_size: int, store: Store, case: Case, steps: int = 3) -> tuple[dict[str, Tensor], list[Any]]:
    """What a rank holds after some steps, and what it reported."""
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
    reports = [session.step(RandomBatch(step), LR, measure_divergence=True) for step in range(steps)]
    state = state_of(session)
    group.close()
    return state, reports


class Called(nn.Module):
    """A stage that is called in some way, so that `functional_call` can give it other buffers."""

    def __init__(self, stage: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.stage = stage
        self.call = call

    def forward(self, *values: Tensor) -> Any:
        return self.call(*values)


def plainly(model: Model, stage: nn.Module, spec: Stage, rank: int) -> Callable[..., Any]:
    """A stage as PyTorch runs it."""
    return stage


def reference(
    case: Case, steps: int = 3, as_run: Callable[[Model, nn.Module, Stage, int], Callable[..., Any]] = plainly
) -> tuple[dict[str, Tensor], list[float]]:
    """The same in one process with plain PyTorch, and the loss of every step.

    BatchNorm sees what the members see: each member's part of each micro-batch, its own running statistics from the
    same start, averaged by samples after the step. A stage of the model is called `as_run` by each rank.
    """
    model = built(f"tests.models:{case.model}")
    plan = case.plan(len(model.chain))
    stages = [model.stage(stage.start, stage.stop).train() for stage in plan.stages]
    for first, *others in model.ties:
        shared = next(stage.get_parameter(first) for stage in stages if first in dict(stage.named_parameters()))
        for name in others:
            owner = next(stage for stage in stages if name in dict(stage.named_parameters()))
            path, _, last = name.rpartition(".")
            owner.get_submodule(path).register_parameter(last, shared)
    called = [
        [Called(stage, as_run(model, stage, spec, rank)) for rank in spec.ranks]
        for stage, spec in zip(stages, plan.stages, strict=True)
    ]
    parameters = list({id(value): value for stage in stages for value in stage.parameters()}.values())
    if isinstance(case.optimizer, Sgd):
        spec = case.optimizer
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, lr=LR, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
        )
    else:
        kind = torch.optim.AdamW if case.optimizer.name == "adamw" else torch.optim.Adam
        optimizer = kind(parameters, lr=LR, betas=tuple(case.optimizer.betas), weight_decay=case.optimizer.weight_decay)
    losses = []
    for step in range(steps):
        batch = RandomBatch(step)
        optimizer.zero_grad()
        buffers = [
            [{f"stage.{key}": value.clone() for key, value in stage.named_buffers()} for _ in spec.ranks]
            for stage, spec in zip(stages, plan.stages, strict=True)
        ]
        total, first = torch.zeros(()), 0
        for size in plan.micro_sizes(batch.size, FULL):
            values = (batch.inputs(first, first + size),)
            for ranks, spec, own in zip(called, plan.stages, buffers, strict=True):
                parts = [
                    values_of(functional_call(ranks[member], own[member], tuple(value[a:b] for value in values)))
                    for member, (a, b) in enumerate(spec.rows(size))
                    if b > a
                ]
                values = tuple(map(torch.cat, zip(*parts, strict=True)))
            total = total + functional.cross_entropy(values[0], batch.targets(first, first + size), reduction="sum")
            first += size
        (total / batch.size).backward()
        optimizer.step()
        losses.append(float(total.detach() / batch.size))
        for stage, spec, own in zip(stages, plan.stages, buffers, strict=True):
            rows = [
                sum(b - a for a, b in parts)
                for parts in zip(*map(spec.rows, plan.micro_sizes(batch.size, FULL)), strict=True)
            ]
            for key, buffer in stage.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(
                        sum(values[f"stage.{key}"] * n / batch.size for values, n in zip(own, rows, strict=True))
                    )
                else:
                    buffer.copy_(own[0][f"stage.{key}"])
    return {f"model/{key}": value.detach() for stage in stages for key, value in stage.state_dict().items()}, losses


def distance(one: Tensor, other: Tensor) -> float:
    """Relative difference of two tensors."""
    return float((one.double() - other.double()).norm() / max(1e-30, float(other.double().norm())))


@pytest.mark.parametrize("case", [*CASES, *TENSOR], ids=lambda case: case.name)
def test_parameters_after_three_steps_equal_those_of_one_process(pool: Pool, case: Case) -> None:
    expected, losses = reference(
        case if case.sync is Sync.ALL_REDUCE else replace(case, members=(ONE,), sync=Sync.ALL_REDUCE)
    )
    results = pool.run(case.world_size, train, case)
    seen = set()
    for rank, (state, reports) in enumerate(results):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=1e-5), f"rank {rank}"
        for key, value in state.items():
            if key.startswith("model/"):
                seen.add(key)
                assert distance(value, expected[key]) < 1e-5, f"rank {rank}, {key}"
    assert seen == set(expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.model == "plain"], ids=lambda case: case.name)
def test_without_batchnorm_every_plan_gives_the_gradient_of_the_whole_batch(case: Case) -> None:
    whole, losses = reference(Case("whole batch", (ONE,), optimizer=case.optimizer))
    parts, own = reference(case)  # which the ranks are compared with above
    assert own == pytest.approx(losses, rel=1e-6)
    assert parts.keys() == whole.keys()
    for key, value in parts.items():
        assert distance(value, whole[key]) < 1e-5, key


@pytest.mark.parametrize("case", [*REPEATED, *TIED[-4:], TENSOR[10]], ids=lambda case: case.name)
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


def evaluate(rank: int, world_size: int, store: Store, case: Case) -> Any:
    model = built(f"tests.models:{case.model}")
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
    before = state_of(session)
    totals = session.evaluate([RandomBatch(step) for step in range(3)])
    assert all(torch.equal(value, before[key]) for key, value in state_of(session).items())
    group.close()
    return totals


@pytest.mark.parametrize("case", [*EVALUATED, TIED[-4], TENSOR[4]], ids=lambda case: case.name)
def test_evaluation_goes_through_the_same_plan_and_changes_nothing(pool: Pool, case: Case) -> None:
    model = built(f"tests.models:{case.model}")
    stage = model.stage(0, len(model.chain)).eval()
    loss = correct = samples = 0.0
    for step in range(3):
        batch = RandomBatch(step)
        with torch.no_grad():
            logits = stage(batch.inputs(0, batch.size))
        labels = batch.targets(0, batch.size)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        correct += float((logits.argmax(1) == labels).sum())
        samples += batch.size
    for totals in pool.run(case.world_size, evaluate, case):
        assert totals.loss == pytest.approx(loss / samples, rel=1e-5)
        assert (totals.metrics, totals.samples) == ({"accuracy": correct / samples}, samples)


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


BROKEN = {
    "ddp": Plan((Stage(0, 10, (0, 1), (1.0, 1.0)),)),
    "pipeline": Plan((Stage(0, 4, (0,), (1.0,)), Stage(4, 10, (1,), (1.0,))), micro_batches=2),
    "hybrid": Plan((Stage(0, 4, (0,), (1.0,)), Stage(4, 10, (1, 2), (3.0, 1.0))), micro_batches=2),
    "tensor": Plan((Stage(0, 10, (0, 1), (1.0, 1.0), Sync.CHANNELS),)),
}


def broken(rank: int, world_size: int, store: Store, plan: Plan, factor: float | None, sync: Sync) -> tuple[str, bool]:
    """Train a step, then one whose last gradient is multiplied by `factor`, or one with a sample that is no number."""
    model = built("tests.models:plain")
    group = Group(store, rank, world_size, 30.0)
    plan = replace(plan, stages=tuple(replace(s, sync=sync if len(s.ranks) > 1 else s.sync) for s in plan.stages))
    session = session_for(plan, model, group, Sgd(), FULL)
    session.step(RandomBatch(0), LR)
    before, batch = state_of(session), RandomBatch(1)
    if factor is None:
        batch._inputs[3] = float("nan")
    elif rank == world_size - 1:
        last = session.stages[max(session.stages)]
        next(last.module.parameters()).register_hook(lambda gradient: gradient * factor)
    try:
        session.step(batch, LR)
    except Diverged as error:
        return str(error), all(torch.equal(value, before[key]) for key, value in state_of(session).items())
    finally:
        group.close()
    return "nothing", False


@pytest.mark.parametrize(
    ("name", "factor", "sync"),
    [
        *((name, float("nan"), Sync.CHANNELS if name == "tensor" else Sync.ALL_REDUCE) for name in BROKEN),
        ("ddp", 1e9, Sync.FP16),  # which no 16-bit float can hold
    ],
)
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_update(
    pool: Pool, name: str, factor: float, sync: Sync
) -> None:
    plan = BROKEN[name]
    results = pool.run(plan.world_size, broken, plan, factor, sync)
    assert len({message for message, _ in results}) == 1
    assert re.match(r"step 1: the gradient of \S+ \(stage \d, rank \d\) is not finite", results[0][0])
    assert ("gradient_compression" in results[0][0]) == (sync is Sync.FP16)
    assert all(unchanged for _, unchanged in results)


def counted_and_judged(rank: int, world_size: int, store: Store, plan: Plan, smoothing: float) -> tuple[int, float]:
    model = built("tests.models:plain")
    group = Group(store, rank, world_size, 30.0)
    session = session_for(plan, model, group, Sgd(), FULL, Classification(smoothing))
    loss = session.evaluate([RandomBatch(0)]).loss
    entered = session.step(RandomBatch(0), LR).entered
    group.close()
    return entered, loss


@pytest.mark.parametrize("name", BROKEN)
def test_samples_are_counted_once_and_judged_without_label_smoothing(pool: Pool, name: str) -> None:
    plan = BROKEN[name]
    plain = pool.run(plan.world_size, counted_and_judged, plan, 0.0)
    smoothed = pool.run(plan.world_size, counted_and_judged, plan, 0.2)
    assert sum(entered for entered, _ in plain) == RandomBatch(0).size
    assert smoothed == plain


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(pool: Pool) -> None:
    results = pool.run(3, broken, BROKEN["hybrid"], None, Sync.ALL_REDUCE)
    assert len({message for message, _ in results}) == 1
    assert results[0][0].startswith("step 1: the loss is nan")
    assert all(unchanged for _, unchanged in results)
