"""How often all ranks wait for one another between the forming of a group and its first step."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.runtime.generation import Generation
from horizonml.runtime.life import Life
from horizonml.runtime.outcome import Outcome
from horizonml.state.runfolder import RunFolder
from horizonml.telemetry.lifeline import Lifeline
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.sinks import Feeds
from tests.distributed.pool import Pool

STEPS = 6


class Counted(Group):
    """Counts the collectives, which `delay` seconds each hold up, until the group's first step."""

    counts: Counter[str]
    delay: float

    def _gather(self, into: Any, own: Any) -> None:
        self._count("gather")
        super()._gather(into, own)

    def _broadcast(self, tensor: Any, source: int) -> None:
        self._count("broadcast")
        super()._broadcast(tensor, source)

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1
        time.sleep(self.delay)


def counted(store: Store, rank: int, world_size: int, delay: float) -> Counted:
    """Return a group whose collectives are counted from now on."""
    group = Counted(store, rank, world_size, 30.0, [f"boot{rank}/10.0.0.{rank}" for rank in range(world_size)])
    group.counts, group.delay = Counter(), delay
    return group


def generation(life: Life, group: Counted, number: int, lost_at: int | None) -> tuple[int, float]:
    """Train in one group until a rank is lost; return the collectives before the first step, and their seconds."""
    step, began, found = Session.step, time.monotonic(), list[tuple[int, float]]()

    def counting(session: Session, *arguments: Any, **options: Any) -> Any:
        if not found:
            found.append((sum(group.counts.values()), time.monotonic() - began))
            group.delay = 0.0
        if session.state.step == lost_at:
            raise PeerLost("the last rank is lost")
        return step(session, *arguments, **options)

    ranks = list(range(group.world_size))
    names = [f"device {rank}" for rank in ranks]
    Session.step = counting  # type: ignore[assignment, method-assign]
    try:
        outcome = Generation(life, group, number, names, ranks, lambda: False, True, lambda text: None).run()
        assert (outcome, lost_at) == (Outcome.COMPLETE, None)
    except PeerLost:
        assert lost_at is not None
    finally:
        Session.step = step  # type: ignore[method-assign]
        group.close()
    return found[0]


def reform(
    rank: int, world_size: int, store: Store, folder: Path, strategy: str, delay: float
) -> tuple[list[tuple[int, float]], int]:
    """Train, lose the last rank after some steps, and go on without it; return that of each group, and the steps."""
    job = Job.model_validate({
        "name": "test", "folder": str(folder / str(rank)), "steps": STEPS, "batch_size": 32,
        "data": {"name": "digits", "samples": 320}, "parallel": {"strategy": strategy, "workers": world_size},
        "telemetry": {"divergence_every": 0},
    })  # fmt: skip
    place = RunFolder(job.run_folder, rank, job.name, True)
    parts = Metrics(rank), StopRequest(), place, False, Lifeline(job.run_folder, rank), Feeds(job.telemetry, folder)
    life = Life(job, rank, world_size, *parts)
    first = counted(PrefixStore("first", store), rank, world_size, delay)
    found = [generation(life, first, 1, STEPS // 2)]
    if rank < world_size - 1:
        second = counted(PrefixStore("second", store), rank, world_size - 1, delay)
        found.append(generation(life, second, 2, None))
    place.leave()
    life.close()
    assert life.state is not None
    return found, life.state.step


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_few_exchanges_precede_the_first_step_of_a_group(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Each exchange takes a round trip, which on a slow network costs more than anything else at this point."""
    for counts, steps in pool.run(4, reform, tmp_path, strategy, 0.0)[:3]:
        assert steps == STEPS
        assert counts[1][0] <= {"ddp": 22, "pipeline": 40}[strategy]
