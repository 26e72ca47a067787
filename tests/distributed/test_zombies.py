"""A rank that was taken for lost wakes up with an old state when nobody else has a newer one in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

from benchmarks.chaos.cluster import Cluster
from horizonml.comm.group import Group
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.spec import Sgd
from tests.distributed.pool import Pool
from tests.distributed.processes import ours, wait_for
from tests.distributed.sessions import built, session_for
from tests.distributed.test_saving import PLANS
from tests.distributed.truth import FULL

pytestmark = pytest.mark.slow


def test_a_checkpoint_that_is_newer_than_all_memory_is_taken(folder: Path) -> None:
    def groups(rank: int) -> list[dict[str, Any]]:
        return [record for record in cluster.records(rank) if record["kind"] == "run"]

    def made(rank: int) -> list[int]:
        return [record["step"] for record in cluster.records(rank) if "lr" in record]

    def saved() -> int:
        return max((int(path.name[5:]) for path in cluster.run_folder.glob("checkpoints/step-*")), default=0)

    options = ["--set", "epochs=100000", "--set", "checkpoint.every_steps=20"]
    with Cluster(folder / "job.yaml", 3, folder / "out", {"HORIZONML_TEST": str(folder)}, options) as cluster:
        wait_for(lambda: len(made(2)) > 10, "the first steps")
        cluster.pause(2)
        wait_for(lambda: len(groups(0)) == 2, "the others going on")
        old = made(2)[-1]
        wait_for(lambda: saved() > old + 20, "a checkpoint of theirs")
        # All who have trained since then are lost, and come back with nothing.
        for rank in (0, 1):
            cluster.kill(rank)
        newest = saved()
        for rank in (0, 1):
            cluster.start_rank(rank)
        cluster.resume(2)
        wait_for(
            lambda: all(groups(rank)[-1]["resumed_at"] == newest for rank in range(3)),
            "all going on from the checkpoint",
        )
        wait_for(lambda: min(made(rank)[-1] for rank in range(3)) > newest + 5, "steps of all three")
        assert [groups(rank)[-1]["world_size"] for rank in range(3)] == [3, 3, 3]
        records = cluster.records(2)
        again = records.index(groups(2)[-1])
        first = next(record["step"] for record in records[again:] if "lr" in record)
        assert first == newest + 1, "steps were repeated although a checkpoint has them"
        assert f": going on from the checkpoint of step {newest} instead" in cluster.log(0).read_text()
    assert cluster.hung == []
    assert "Traceback" not in "".join(cluster.log(rank).read_text() for rank in range(3))
    assert not ours(folder)


def newer(rank: int, world_size: int, store: Store, folder: Path) -> list[int | None]:
    """Which of two checkpoints, the second of which is damaged, are newer than some steps."""
    group = Group(store, rank, world_size, 30.0)
    checkpoints = Checkpoints(folder, group, 2, {"seed": 0})
    model = built("tests.models:normed")
    session = session_for(PLANS["ddp"], model, group, Sgd(), FULL)
    for step in (10, 20):
        session.state.step = step
        assert checkpoints.save(session.state, PLANS["ddp"], {}) == []
    found = [checkpoints.newer_than(step) for step in (9, 10, 19, 20)]
    if rank == 0:
        damaged = folder / "step-00000020" / "stage-0.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    group.barrier()
    found += [checkpoints.newer_than(step) for step in (9, 10)]
    found.append(Checkpoints(folder, group, 2, {"seed": 1}).newer_than(9))
    group.close()
    return found


def test_what_counts_as_a_newer_checkpoint(pool: Pool, tmp_path: Path) -> None:
    intact, damaged, of_another_run = [20, 20, 20, None], [10, None], [None]
    assert pool.run(2, newer, tmp_path) == [[*intact, *damaged, *of_another_run]] * 2
