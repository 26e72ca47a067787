"""How often all ranks wait for one another between the forming of a group and its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.errors import HorizonError, PeerLost
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

STEPS = 4


class Counted(Group):
    """Counts the collectives."""

    count = 0

    def _gather(self, into: Any, own: Any) -> None:
        self.count += 1
        super()._gather(into, own)

    def _broadcast(self, tensor: Any, source: int) -> None:
        self.count += 1
        super()._broadcast(tensor, source)


def counted(store: Store, rank: int, world_size: int) -> Counted:
    """Return a group whose collectives are counted from now on."""
    group = Counted(store, rank, world_size, 30.0, [f"boot{rank}/10.0.0.{rank}" for rank in range(world_size)])
    group.count = 0
    return group


def generation(life: Life, group: Counted, number: int, lost_at: int | None) -> int:
    """Train in one group until a rank is lost; return the collectives before the first step."""
    step, found = Session.step, list[int]()

    def counting(session: Session, *arguments: Any, **options: Any) -> Any:
        found.append(group.count)
        if session.state.step == lost_at:
            raise PeerLost("the last rank is lost")
        return step(session, *arguments, **options)

    names = [f"device {rank}" for rank in range(group.world_size)]
    Session.step = counting  # type: ignore[assignment, method-assign]
    try:
        outcome = Generation(life, group, number, names, lambda: False, True, lambda text: None).run()
        assert (outcome, lost_at) == (Outcome.COMPLETE, None)
    except PeerLost:
        assert lost_at is not None
    finally:
        Session.step = step  # type: ignore[method-assign]
        group.close()
    return found[0]


def life_of(rank: int, world_size: int, folder: Path, **sections: Any) -> Life:
    """What a rank of a short run keeps, in a folder of its own."""
    values = {
        "name": "test", "folder": str(folder / str(rank)), "steps": STEPS, "batch_size": 32,
        "data": {"name": "digits", "samples": 320}, "telemetry": {"divergence_every": 0}, **sections,
    }  # fmt: skip
    job = Job.model_validate(values)
    place = RunFolder(job.run_folder, rank, job.name, True)
    parts = Metrics(rank), StopRequest(), place, False, Lifeline(job.run_folder, rank), Feeds(job.telemetry, folder)
    return Life(job, rank, world_size, *parts)


def reform(rank: int, world_size: int, store: Store, folder: Path) -> tuple[list[int], int]:
    """Train, lose the last rank after some steps, and go on without it; return that of each group, and the steps."""
    life = life_of(rank, world_size, folder, parallel={"strategy": "pipeline", "workers": world_size})
    first = counted(PrefixStore("first", store), rank, world_size)
    found = [generation(life, first, 1, STEPS // 2)]
    if rank < world_size - 1:
        second = counted(PrefixStore("second", store), rank, world_size - 1)
        found.append(generation(life, second, 2, None))
    life.folder.leave()
    life.close()
    assert life.state is not None
    return found, life.state.step


@pytest.mark.slow
def test_few_exchanges_precede_the_first_step_of_a_group(pool: Pool, tmp_path: Path) -> None:
    """Each exchange takes a round trip, which on a slow network costs more than anything else at this point."""
    for counts, steps in pool.run(3, reform, tmp_path)[:2]:
        assert steps == STEPS
        assert counts[1] <= 10


def refused(rank: int, world_size: int, store: Store, folder: Path, section: str, wrong: dict[str, Any]) -> str:
    """Begin with something wrong on rank 1; return what this rank says of it."""
    own = {section: wrong} if rank == 1 else {}
    life = life_of(rank, world_size, folder, parallel={"strategy": "ddp", "workers": world_size}, **own)
    try:
        generation(life, counted(store, rank, world_size), 1, None)
    except HorizonError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        life.folder.leave()
        life.close()
    return "nothing"


@pytest.mark.parametrize(
    ("section", "wrong", "words"),
    [
        ("model", {"name": "tests.models:nothing_of_this_name"}, "ModelError: rank 1: "),
        ("data", {"name": "digits", "samples": 100}, "DataError: data: rank 0 sees 320 training"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_all_with_its_name(
    pool: Pool, tmp_path: Path, section: str, wrong: dict[str, Any], words: str
) -> None:
    (said,) = set(pool.run(2, refused, tmp_path, section, wrong))
    assert said.startswith(words), said
