"""Model truth: what the author wrote is what trains, in every plan, or the plan is refused with the reason."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.data.sampler import name_seed, python_seeded
from horizonml.engine.session import Session
from horizonml.errors import ModelError, PeerLost
from horizonml.models.cutting import Cutting
from horizonml.models.proof import prove
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Plan, Stage
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from tests.awkward_late import LATE, LATE_AFTER
from tests.awkward_models import Base, Block
from tests.awkward_states import ROWS, Row
from tests.distributed.pool import Pool
from tests.distributed.truth import FULL, LR, SHAPE, RandomBatch, distance

STEPS = 3
Members = tuple[tuple[int, ...], ...]  # of each stage
Trained = tuple[dict[str, Tensor], list[float]] | str  # the state and the losses, or why the model is not cut
PLANS: dict[str, Members] = {
    "single": ((0,),),
    "ddp 2": ((0, 1),),
    "pipeline 2": ((0,), (1,)),
    "pipeline 3": ((0,), (1,), (2,)),
    "hybrid 2+1": ((0, 1), (2,)),
}
RANKS = {kind: sum(map(len, members)) for kind, members in PLANS.items()}


@cache
def made(row: Row) -> Model:
    return build(ModelSpec(name=f"{row.model.__module__}:{row.model.__name__}"), 0, 10, InputSpec.of(SHAPE))


def proven(row: Row) -> Cutting | str:
    """How a model may be cut, as rank 0 finds out for all, or why the model stays whole."""
    inputs = RandomBatch(0).inputs(0, 8)
    ordered = inputs[inputs.flatten(1).abs().sum(1).argsort(descending=True)]  # which hides who puts them into order
    try:
        cutting = prove(made(row), (ordered,))
        model = made(row).recut(cutting)
        return cutting if len(model.chain) > 1 else model.note
    except ModelError as error:
        return str(error)


def plan_for(members: Members, layers: int) -> Plan:
    """A plan of this shape, with as many of its stages as there are layers."""
    rest = tuple(rank for ranks in members[layers - 1 :] for rank in ranks)
    used = members if layers >= len(members) else (*members[: layers - 1], rest)
    more = len(used) == 2  # the first of two ends after the block in the middle, where most models have their habit
    cuts = [(layers * place + more) // len(used) for place in range(len(used) + 1)]
    return Plan(
        tuple(
            Stage(start, stop, ranks, (1.0,) * len(ranks))
            for start, stop, ranks in zip(cuts, cuts[1:], used, strict=False)
        )
    )


def train(
    rank: int, world_size: int, store: Store, rows: list[tuple[Row, Cutting]], kinds: list[str]
) -> list[dict[str, Trained]]:
    """What a rank holds of each model after some steps by each plan."""
    groups = {kind: Group(PrefixStore(kind, store), rank, RANKS[kind], 60.0) for kind in kinds}
    found = []
    for row, cutting in rows:
        model = made(row).recut(cutting)
        found.append({kind: _train(model, group, PLANS[kind]) for kind, group in groups.items()})
    for group in groups.values():
        group.close()
    return found


def _train(model: Model, group: Group, members: Members) -> Trained:
    try:
        state = TrainState(model, Sgd(momentum=0.9, weight_decay=1e-3))
        session = Session(plan_for(members, len(model.chain)), state, group, Classification(), FULL)
        losses = [session.step(RandomBatch(step), LR).totals.loss for step in range(STEPS)]
        losses.append(session.evaluate([RandomBatch(9)]).loss)
        found = {name: tensor.clone() for name, tensor in state.tensors().items()}, losses
        session.close()
        return found
    except ModelError as error:  # on all ranks alike
        return str(error)


@cache
def truth(row: Row) -> tuple[dict[str, Tensor], list[float]]:
    """The same with plain PyTorch, from the same initial values."""
    model = made(row)
    net: nn.Module = row.model()
    if any(nn.parameter.is_lazy(one) for one in net.parameters()):
        net(RandomBatch(0).inputs(0, 2))
    start = model.stage(0, len(model.chain)).state_dict()
    net.load_state_dict({**start, **{k: v for k, v in net.state_dict().items() if k not in start}})
    for name, module in net.named_modules():
        if isinstance(module, nn.SyncBatchNorm):  # which needs a process group, and is BatchNorm in one process
            norm = nn.BatchNorm1d(module.num_features)
            norm.load_state_dict(module.state_dict())
            path, _, last = name.rpartition(".")
            net.get_submodule(path)._modules[last] = norm
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)

    def loss_of(step: int) -> Tensor:
        batch = RandomBatch(step)
        result = net(batch.inputs(0, batch.size))
        result = result["logits"] if isinstance(result, dict) else result
        return functional.cross_entropy(result, batch.targets(0, batch.size))

    losses = []
    for step in range(STEPS):
        net.train()
        optimizer.zero_grad()
        with python_seeded(name_seed(0, "python", step, 0)):
            loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    net.eval()
    with torch.no_grad():
        losses.append(float(loss_of(9)))
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return {f"model/{name}": tensor.detach() for name, tensor in tensors}, losses


def wrong(row: Row, found: list[Trained]) -> str | None:
    """What is wrong with what the ranks of a plan have trained, or None."""
    wanted, losses = truth(row)
    seen = set()
    for rank, result in enumerate(found):
        if isinstance(result, str):
            return result
        state, own = result
        if own != pytest.approx(losses, rel=1e-5):
            return f"rank {rank}: losses {own}, not {losses}"
        for key, value in state.items():
            seen.add(key)
            if key in wanted and distance(value, wanted[key]) > 1e-5:
                return f"rank {rank}: {key} {distance(value, wanted[key]):.2g}"
    return f"no rank holds {sorted(wanted.keys() - seen)}" if wanted.keys() - seen else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kinds",
    [
        ["pipeline 2"],
        ["ddp 2"],
        ["pipeline 3", "hybrid 2+1"],
    ],
    ids=str,
)
@pytest.mark.longest
@pytest.mark.slow
def test_what_the_author_wrote_is_what_trains(pool: Pool, kinds: list[str]) -> None:
    problems: dict[str, str | None] = {}
    cut: list[tuple[Row, Cutting]] = []
    for row in ROWS:
        name = row.model.__name__
        problems[f"{name}, single"] = wrong(row, [_train(made(row), Group(None, 0, 1, 1.0), PLANS["single"])])
        cutting = proven(row)
        if isinstance(cutting, Cutting):
            cut.append((row, cutting))
            problems[name] = f"is cut, and not refused with {row.refusal!r}" if row.refusal is not None else None
        elif row.refusal is None or not re.search(row.refusal, cutting) or name not in cutting:
            problems[name] = cutting
    for first in range(0, len(cut), 8):  # the pool answers within its limit, on a busy machine too
        some = cut[first : first + 8]
        results = pool.run(max(RANKS[kind] for kind in kinds), train, some, kinds)
        for (row, _), *ranks in zip(some, *results, strict=True):
            for kind in kinds:
                problems[f"{row.model.__name__}, {kind}"] = wrong(row, [found[kind] for found in ranks])
    told = [f"{name}: {words}" for name, words in problems.items() if words is not None]
    assert not told, "\n".join(told)


class _Clamps(Block):
    def forward(self, value: Tensor) -> Tensor:
        self.inner.weight.data.clamp_(-0.1, 0.1)
        return super().forward(value)


class TiesWhatItClamps(Base):
    block = _Clamps

    def __init__(self) -> None:
        super().__init__()
        self.last.inner.weight = self.middle.inner.weight


class _Codes(Block):
    """Sets a parameter from the data to values of which the norm is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        found = super().forward(value)
        if self.training:
            self.code.data.copy_(found.detach().mean(0).sign())
        return found * self.code


class SetsWhatItSees(Base):
    block = _Codes


DRIFTS = [
    ("ddp 2", SetsWhatItSees, "parameter middle.code is no longer the same on all members"),
    ("pipeline 3", TiesWhatItClamps, "middle.inner.weight and last.inner.weight are one parameter"),
]


def train_drifting(rank: int, world_size: int, store: Store, kind: str, name: str) -> tuple[int, str]:
    group = Group(store, rank, world_size, 60.0)
    model = build(ModelSpec(name=name), 0, 10, InputSpec.of(SHAPE))
    plan = plan_for(PLANS[kind], len(model.chain))
    session = Session(plan, TrainState(model, Sgd()), group, Classification(), FULL)
    try:
        for step in range(20):
            session.step(RandomBatch(step), LR)
    except (ModelError, PeerLost) as error:
        return session.state.step, str(error)
    finally:
        session.close()
        group.close()
    return 20, "nothing was noticed"


@pytest.mark.parametrize(("model", "words"), LATE)
def test_what_a_model_does_later_ends_a_training_in_parts_that_would_not_see_it(
    pool: Pool, model: type[nn.Module], words: str
) -> None:
    found = pool.run(3, train_drifting, "pipeline 3", f"{model.__module__}:{model.__name__}")
    named = [one for step, one in found if one.startswith(words) and step <= LATE_AFTER + 1]
    assert named, found
    assert all(one in named or "closed its connection" in one for _, one in found), found


@pytest.mark.parametrize(("kind", "model", "words"), DRIFTS)
def test_copies_that_the_models_own_code_sets_apart_are_named(
    pool: Pool, kind: str, model: type[nn.Module], words: str
) -> None:
    """A rank without any of them learns of it from the others, which end."""
    found = pool.run(RANKS[kind], train_drifting, kind, f"{model.__module__}:{model.__name__}")
    named = [one for step, one in found if one.startswith(words) and step <= 8]
    assert len(named) == 2, found
    assert all(one in named or "closed its connection" in one for _, one in found), found
