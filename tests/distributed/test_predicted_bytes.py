"""What the planner says that ranks send is what the engine says that they have sent, for a plan of each kind."""

from __future__ import annotations

from statistics import mean

import pytest
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.local_steps import open_session
from horizonml.engine.sync.compressed import WHOLE_STEPS
from horizonml.models.zoo import Model
from horizonml.plan.local import Local
from horizonml.plan.plan import SYNCS, Plan, Stage, Sync
from horizonml.planner.problem import Problem
from horizonml.planner.profile import LOCAL_NETWORK, Host
from horizonml.profiling.measure import measure
from horizonml.runtime.agreement import synced_bytes
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import built
from tests.distributed.truth import FULL, LR, RandomBatch
from tests.traffic import traffic

RANKS, EVERY = 4, 4
PAIR, ALL = (1.0, 1.0), (1.0,) * RANKS


def two_stages(sync: Sync, send: str, local: Local | None = None) -> Plan:
    return Plan((Stage(0, 3, (0, 1), PAIR, sync, send), Stage(3, 6, (2, 3), PAIR, sync)), "1f1b", 2, local)


def one_stage(sync: Sync, local: Local | None = None) -> Plan:
    return Plan((Stage(0, 6, (0, 1, 2, 3), ALL, sync),), local=local)


PLANS = {
    "exact, in a pipeline": two_stages(Sync.ALL_REDUCE, "fp32"),
    "16 and 8 bits": two_stages(Sync.FP16, "int8"),
    "4 bits": two_stages(Sync.INT4, "int4"),
    "exact": one_stage(Sync.ALL_REDUCE),
    "PowerSGD": one_stage(Sync.POWERSGD),
    "local steps in fragments of 4 bits": one_stage(Sync.LOCAL, Local(EVERY, 2, 1, "int4")),
    "local steps with the largest values only": one_stage(Sync.LOCAL, Local(EVERY, format="topk")),
    "replicas of a pipeline": two_stages(Sync.LOCAL, "bf16", Local(EVERY)),
}


class WholeBatch(RandomBatch):
    """A batch of the full size, whichever step it is for."""

    def __init__(self, step: int) -> None:
        super().__init__(3 * step)


def model_of() -> Model:
    return built("tests.models:wide")


def sent(rank: int, world_size: int, store: Store, plan: Plan) -> float:
    """The bytes that a rank has sent per step, once PowerSGD compresses, and without the last full synchronisation."""
    group = Group(store, rank, world_size, 30.0)
    session = open_session(plan, TrainState(model_of(), Sgd(), None), group, Classification(), FULL)
    warm = WHOLE_STEPS if plan.stages[0].sync is Sync.POWERSGD else 0
    count = 2 * EVERY if plan.local is not None else 2
    steps = [session.step(WholeBatch(step), LR) for step in range(warm + count)]
    group.barrier()  # a fragment may be on its way, which a member that ends here would not receive
    session.close()
    group.close()
    return mean(step.bytes_sent for step in steps[warm:])


@pytest.mark.slow
def test_what_is_predicted_is_sent(pool: Pool) -> None:
    hosts, profile = [Host(tuple(range(RANKS)), 4.0, 1e12)], measure(model_of(), (2,))
    sizes = synced_bytes(model_of(), SYNCS.values())
    problem = Problem([profile] * RANKS, hosts, LOCAL_NETWORK, FULL, 0, synced_bytes=sizes)
    for name, plan in PLANS.items():
        plan.check(6, RANKS)
        predicted = traffic(problem, plan).ranks
        # Besides gradients, members tell each other which parameters have one: a number for each.
        expected = [pytest.approx(predicted[rank], rel=0.01, abs=100) for rank in range(RANKS)]
        assert pool.run(RANKS, sent, plan) == expected, name
