"""Which disks keep a copy, and copies that fail or come from groups that are over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.disks import DiskProbe, Disks, FileCopy, find_disks
from horizonml.state.shards import read_metadata, steps
from horizonml.state.spec import Sgd
from horizonml.tasks.task import InputSpec
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import expect_same


def disks_in(folder: Path, group: Group) -> Disks:
    """Find out who shares a folder."""
    probe = DiskProbe(folder)
    return find_disks(probe, group.gather_json(probe.token), group)


def keepers_of(rank: int, world_size: int, store: Store, folder: Path, nodes: list[str]) -> list[list[int]]:
    """The disks that keep the shard of each rank, where every rank has a disk and a stage of its own."""
    group = Group(store, rank, world_size, 30.0, nodes)
    try:
        disks = disks_in(folder / str(rank), group)
        return [disks.keepers([member]) for member in range(world_size)]
    finally:
        group.close()


def test_a_copy_lies_on_another_machine_where_there_is_one(pool: Pool, tmp_path: Path) -> None:
    pods = ["boot1/10.0.0.1", "boot1/10.0.0.2", "boot2/10.0.0.3", "boot2/10.0.0.4"]
    assert pool.run(4, keepers_of, tmp_path / "a", pods)[0] == [[0, 2], [1, 2, 0], [2, 0], [3, 0]]
    one_machine = ["boot1/10.0.0.1", "boot1/10.0.0.2", "boot1/10.0.0.3"]
    assert pool.run(3, keepers_of, tmp_path / "b", one_machine)[0] == [[0, 1], [1, 2, 0], [2, 0]]
    assert pool.run(1, keepers_of, tmp_path / "c", pods[:1]) == [[[0]]]


def copied(rank: int, world_size: int, store: Store, folder: Path, size: int, broken: str) -> tuple[bool, list[str]]:
    """Rank 0 sends a file to the others; one rank's disk is full, or rank 0 cannot read.

    Whether this rank has the file's content, and what went wrong.
    """
    group = Group(store, rank, world_size, 30.0)
    try:
        disks = disks_in(folder / str(rank), group)
        content = bytes(range(251)) * (size // 251 + 1)
        paths = [folder / str(other) / "file" for other in range(world_size)]
        if rank == 0:
            paths[0].write_bytes(content[:size])
        if rank == 0 and broken == "source":
            paths[0].unlink()
            paths[0].mkdir()
        if rank == 1 and broken == "target":
            paths[1].symlink_to("/dev/full")
        # The name is the same on all disks; here each has a folder of its own.
        problems = disks.copy([FileCopy(paths[rank], size, 0, other) for other in range(1, world_size)], group)
        return paths[rank].is_file() and paths[rank].read_bytes() == content[:size], problems
    finally:
        group.close()


@pytest.mark.parametrize("size", [3000, (1 << 20) + 1000])
def test_a_disk_that_fills_up_ends_nobody(pool: Pool, tmp_path: Path, size: int) -> None:
    problem = f"rank 1: {tmp_path / '1' / 'file'} cannot be written: No space left on device"
    results = pool.run(3, copied, tmp_path, size, "target")
    assert results == [(True, [problem]), (False, [problem]), (True, [problem])]


def test_who_receives_a_file_that_its_sender_cannot_read_learns_why(pool: Pool, tmp_path: Path) -> None:
    problem = f"rank 0: {tmp_path / '0' / 'file'} cannot be read: Is a directory"
    assert pool.run(2, copied, tmp_path, 3000, "source") == [(False, [problem])] * 2


BOARDS = ["boot1/10.0.0.1", "boot2/10.0.0.2", "boot3/10.0.0.3"]


def drifting(rank: int, world_size: int, store: Store, folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Save, on a board with a disk of its own, when the last bit of a parameter is another one on rank 1."""
    group = Group(store, rank, world_size, 30.0, BOARDS)
    model = build(ModelSpec(name="tests.models:normed"), 0, 10, InputSpec.of((1, 8, 8)))
    plan = Plan((Stage(0, len(model.chain), tuple(range(world_size)), (1.0,) * world_size),))
    session = session_for(plan, model, group, Sgd(), 64)
    session.state.step = 5
    if rank == 1:
        with torch.no_grad():
            next(session.stages[0].module.parameters()).mul_(1 + 1e-6)
    try:
        names = ["raspberrypi", "raspberrypi", "jetson"]
        problems = Checkpoints(folder / str(rank), group, 2, {}, names).save(session.state, plan, {})
        return problems, state_of(session)
    finally:
        group.close()


def test_members_that_round_differently_are_made_equal_and_saved(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(3, drifting, tmp_path)
    for rank, (problems, state) in enumerate(results):
        assert problems == []
        expect_same(state, results[0][1])
        (saved,) = steps(tmp_path / str(rank))
        assert saved.name == "step-00000005"
        # Two boards of one name are two.
        machines = ["raspberrypi at 10.0.0.1", "raspberrypi at 10.0.0.2", "jetson at 10.0.0.3"]
        assert read_metadata(saved).shards["stage-0.safetensors"].machines == machines


def test_a_group_that_is_over_replaces_no_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """It was held up before its last move, and its hidden folder was cleaned up by the group that runs now."""
    assert pool.run(1, late, tmp_path) == [True]


def late(rank: int, world_size: int, store: Store, folder: Path) -> bool:
    target = folder / "step-00000005"
    target.mkdir(parents=True)
    (target / "checkpoint.json").write_text("of the group that runs now")
    checkpoints = Checkpoints(folder, Group(None, 0, 1, 30.0), 2, {})
    with pytest.raises(FileNotFoundError):
        checkpoints._saver._commit(folder / ".step-00000005-stale", target)
    return (target / "checkpoint.json").read_text() == "of the group that runs now"
