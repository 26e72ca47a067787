"""What one process computes with plain PyTorch, and what ranks compute by a plan, on the same batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.func import functional_call
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.data.dataset import Inputs
from horizonml.engine.clock import StepResult, Totals
from horizonml.engine.session import Wishes
from horizonml.models.boundary import values_of
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import Batch, Task, Tree
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
    ema: Ema | None = None

    def plan(self, layers: int) -> Plan:
        groups, rank = [], 0
        world = sum(map(len, self.members))
        for shares in self.members:
            ranks = tuple(range(rank, rank + len(shares)))
            groups.append((tuple(world - 1 - r for r in ranks) if self.reversed_ranks else ranks, shares))
            rank += len(shares)
        schedule = SCHEDULES[self.schedule]
        schedule = replace(schedule, stages_per_rank=self.turns or schedule.stages_per_rank)
        held = [groups[number] for number in schedule.around(len(groups))]
        bounds = [layers * number // len(held) for number in range(len(held) + 1)]
        stages = [
            Stage(start, stop, *group, self.sync)
            for (start, stop), group in zip(itertools.pairwise(bounds), held, strict=True)
        ]
        return Plan(tuple(stages), self.schedule, self.micro_batches)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))


class Subject(Protocol):
    """What is trained, the same wherever it is made; it travels to the ranks."""

    @property
    def task(self) -> Task: ...
    @property
    def rate(self) -> float: ...
    def model(self) -> Model: ...
    def batches(self) -> Sequence[Batch]: ...


@dataclass(frozen=True)
class Images:
    """A model for images of [1, 8, 8], and noise with random labels."""

    name: str
    steps: int = 3
    task: Task = field(default_factory=Classification)
    rate: float = LR

    def model(self) -> Model:
        """The model of the tests that has this name."""
        return built(f"tests.models:{self.name}")

    def batches(self) -> list[RandomBatch]:
        """A batch for each step."""
        return [RandomBatch(step) for step in range(self.steps)]


class End(NamedTuple):
    """What a rank holds after some steps, what it reported, and what it found on the same batches then."""

    state: dict[str, Tensor]
    reports: list[StepResult]
    judged: Totals


def trained(rank: int, world_size: int, store: Store, case: Case, subject: Subject) -> End:
    """Take a step with every batch, and evaluate, which changes nothing."""
    model = subject.model()
    group = Group(store, rank, world_size, 30.0)
    plan = case.plan(len(model.chain))
    session = session_for(plan, model, group, case.optimizer, FULL, subject.task, case.ema)
    reports = [session.step(batch, subject.rate, Wishes(measure_divergence=True)) for batch in subject.batches()]
    state = state_of(session)
    judged = session.evaluate(subject.batches())
    assert all(torch.equal(value, state[key]) for key, value in state_of(session).items())
    session.close()
    group.close()
    return End(state, reports, judged)


def train(
    rank: int, world_size: int, store: Store, case: Case, steps: int = 3
) -> tuple[dict[str, Tensor], list[StepResult]]:
    """What a rank holds after some steps on images, and what it reported."""
    end = trained(rank, world_size, store, case, Images(case.model, steps))
    return end.state, end.reports


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


def torchs(spec: Sgd | Adam, parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """PyTorch's own optimizer."""
    if isinstance(spec, Sgd):
        return torch.optim.SGD(
            parameters, lr=rate, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
        )
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=rate, betas=spec.betas, weight_decay=spec.weight_decay)


class Truth(NamedTuple):
    """What one process ends with."""

    state: dict[str, Tensor]  # parameters, buffers, and averages if there are some, by the names that ranks give them
    losses: list[float]  # of every step
    norms: list[float]  # of every step's gradient, where gradients are clipped


def reference(
    case: Case, steps: int = 3, as_run: Callable[[Model, nn.Module, Stage, int], Callable[..., Any]] = plainly
) -> Truth:
    """The same in one process with plain PyTorch.

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
    optimizer = torchs(case.optimizer, parameters, LR)
    averages = [parameter.detach().clone() for parameter in parameters]
    losses, norms = [], []
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
        if case.optimizer.clip_norm is not None:
            norms.append(float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double().norm()))
            nn.utils.clip_grad_norm_(parameters, case.optimizer.clip_norm)  # which takes the norm in 32 bits
        optimizer.step()
        if case.ema is not None and case.ema.decay is not None:
            decay = min(case.ema.decay, (1 + step) / (10 + step)) if case.ema.warmup else case.ema.decay
            for average, parameter in zip(averages, parameters, strict=True):
                average.mul_(decay).add_(parameter.detach(), alpha=1 - decay)
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
    state = {f"model/{key}": value.detach() for stage in stages for key, value in stage.state_dict().items()}
    if case.ema is not None:
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        for stage in stages:
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                state[f"optimizer/{name}/average"] = averages[places[id(parameter)]]
    return Truth(state, losses, norms)


def distance(one: Tensor, other: Tensor) -> float:
    """Relative difference of two tensors."""
    return float((one.double() - other.double()).norm() / max(1e-30, float(other.double().norm())))


Judged = tuple[float, dict[str, float] | None]  # a loss, and the metrics if they are known


class Ordinary(Subject, Protocol):
    """What can be trained as an ordinary module on whole batches."""

    def call(self, module: nn.Module, inputs: Inputs) -> Any: ...
    def loss(self, outputs: Any, targets: Tree, training: bool) -> Tensor: ...
    def measure(self, outputs: Any, targets: Tree) -> dict[str, float] | None: ...


def alone(subject: Ordinary, module: nn.Module, optimizer: Sgd | Adam) -> tuple[dict[str, Tensor], list[Judged]]:
    """Train a module in one process with plain PyTorch on whole batches; its state, and what is said of each of them.

    The last word is on all batches at once, after the training.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    steps, judged, batches = torchs(optimizer, parameters, subject.rate), list[Judged](), subject.batches()
    for batch in batches:
        steps.zero_grad()
        targets = batch.targets(0, batch.size)
        outputs = subject.call(module, batch.inputs(0, batch.size))
        loss = subject.loss(outputs, targets, True)
        loss.backward()
        steps.step()
        judged.append((float(loss.detach()), subject.measure(outputs, targets)))
    with torch.no_grad():
        outputs = joined([subject.call(module, batch.inputs(0, batch.size)) for batch in batches])
    targets = joined([batch.targets(0, batch.size) for batch in batches])
    judged.append((float(subject.loss(outputs, targets, False)), subject.measure(outputs, targets)))
    return {f"model/{key}": value.detach() for key, value in module.state_dict().items()}, judged


def joined(trees: Sequence[Any]) -> Any:
    """The rows of all of them."""
    if isinstance(trees[0], Mapping):
        return {key: joined([tree[key] for tree in trees]) for key in trees[0]}
    return torch.cat(list(trees)) if isinstance(trees[0], Tensor) else None


def expect_truth(
    pool: Pool,
    case: Case,
    subject: Subject,
    expected: dict[str, Tensor],
    judged: Sequence[Judged],
    norms: Sequence[float] = (),
    tolerance: float = 1e-5,
) -> list[End]:
    """Ranks end with the state of one process, and say the same of every step and of the evaluation, if it is given.

    All ranks say the same, every sample enters once, and the members of a stage hold the same bits.
    """
    ends: list[End] = pool.run(case.world_size, trained, case, subject)
    seen, members = set[str](), dict[frozenset[str], dict[str, Tensor]]()
    for rank, (state, reports, found) in enumerate(ends):
        totals = [*(report.totals for report in reports), found]
        assert len(judged) in (len(reports), len(totals))
        for one, (loss, metrics) in zip(totals, judged, strict=False):
            assert one.loss == pytest.approx(loss, rel=tolerance), f"rank {rank}"
            assert one.unit == subject.task.unit
            if metrics is not None:
                assert one.metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7), f"rank {rank}"
        assert found.samples == sum(batch.size for batch in subject.batches())
        own = [report.gradient_norm for report in reports if report.gradient_norm is not None]
        assert own == pytest.approx(norms, rel=1e-5)
        assert own == [one.gradient_norm for one in ends[0].reports if own], "all know the same norm, bit for bit"
        for key in state.keys() & expected.keys():
            seen.add(key)
            # The bias of an attention's keys has no effect: its gradient is the rounding error of zero.
            near = float((state[key] - expected[key]).double().norm()) < 1e-12
            assert near or distance(state[key], expected[key]) < tolerance, f"rank {rank}, {key}"
        other = members.setdefault(frozenset(state), state)
        assert all(torch.equal(state[key], other[key]) for key in state)
    assert seen == set(expected)
    for number, batch in enumerate(subject.batches()):
        assert sum(end.reports[number].entered for end in ends) == batch.size
    return ends


def expect_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Both hold the same tensors, bit for bit."""
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
