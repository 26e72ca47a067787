"""Which rows of batches replicas train on, where shares do not divide a batch into whole samples."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.session import Wishes
from horizonml.plan.local import Local
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for
from tests.distributed.test_local import PLAIN, Locally, model_of
from tests.distributed.truth import FULL, LR, RandomBatch


class NotedBatch(RandomBatch):
    """Notes which of its rows are read."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.read: set[int] = set()

    def inputs(self, start: int, stop: int) -> Tensor:
        assert self.read.isdisjoint(range(start, stop)), "a row is read twice"
        self.read |= set(range(start, stop))
        return super().inputs(start, stop)


def noted(rank: int, world_size: int, store: Store, case: Locally) -> list[tuple[list[int], list[int]]]:
    """Train, and return of each step which rows are read, and which the session said that it would ask for."""
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    batches, announced = [NotedBatch(step) for step in range(16)], []
    for step, batch in enumerate(batches):
        ranges = session.needs(batch.size, True, step).inputs
        announced.append(sorted(row for start, stop in ranges for row in range(start, stop)))
        session.step(batch, LR, Wishes(full=step == len(batches) - 1))
    session.close()
    group.close()
    return [(sorted(batch.read), rows) for batch, rows in zip(batches, announced, strict=True)]


def test_each_row_is_trained_on_by_the_replica_that_has_announced_it(pool: Pool) -> None:
    case = Locally("on average", ((1.37, 2.7, 5.37),), local=Local(8))
    ranks = pool.run(3, noted, case)
    for step, found in enumerate(zip(*ranks, strict=True)):
        assert all(read == announced for read, announced in found)
        assert sorted(row for read, _ in found for row in read) == list(range(RandomBatch(step).size))
    assert len({len(read) for step, (read, _) in enumerate(ranks[0]) if RandomBatch(step).size == FULL}) > 1
