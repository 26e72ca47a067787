"""Checkpoints that are written while training goes on, on disks that are slow, full, or of a group that is over."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.shards import read_metadata, steps
from horizonml.state.spec import Sgd
from tests.distributed.pool import Pool
from tests.distributed.processes import wait_for
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, RandomBatch

LAYERS = 15
PLANS = {
    "ddp": Plan((Stage(0, LAYERS, (0, 1), (1.0, 1.0)),)),
    "tensor": Plan((Stage(0, LAYERS, (0, 1), (1.0, 1.0), sync=Sync.CHANNELS),)),
    "hybrid": Plan((Stage(0, 6, (0,), (1.0,)), Stage(6, LAYERS, (1, 2), (1.0, 1.0))), micro_batches=3),
}


class SlowCard:
    """Stands for a card that takes its time: in this process, nothing becomes durable before `go_on` is set."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def fsync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.go_on.wait(60)
        SlowCard.original(descriptor)

    original = staticmethod(os.fsync)


@contextmanager
def slow_card() -> Iterator[SlowCard]:
    card = SlowCard()
    os.fsync = card.fsync  # type: ignore[assignment]
    try:
        yield card
    finally:
        card.go_on.set()
        os.fsync = SlowCard.original


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of this process."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keep = Keep(logging.WARNING)
    logging.getLogger("horizonml").addHandler(keep)
    try:
        yield found
    finally:
        logging.getLogger("horizonml").removeHandler(keep)


def trained(plan: Plan, group: Group, done: int) -> Session:
    session = session_for(plan, built("tests.models:normed"), group, Sgd(), FULL)
    for step in range(done):
        session.step(RandomBatch(step), LR)
    return session


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def without_words(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, without the words that are unique to each group."""
    return sorted(re.sub(r"^(\..*)-\w+$", r"\1", path.name) for path in folder.iterdir())


def threads(before: set[threading.Thread]) -> list[str]:
    """The threads that save and were not there before: the process has served other tests."""
    return [thread.name for thread in threading.enumerate() if thread.name == "checkpoints" and thread not in before]


def going_on(rank: int, world_size: int, store: Store, plan: Plan, folder: Path, own_disks: bool) -> dict[str, Any]:
    """Train on while a slow card writes, twice; what was said, counted and saved."""
    others = set(threading.enumerate())
    group = Group(PrefixStore("first", store), rank, world_size, 30.0)
    session = trained(plan, group, 3)
    folder = folder / str(rank) if own_disks else folder
    checkpoints = Checkpoints(folder, group, 5, {})
    with told() as messages, slow_card() as card:
        before = state_of(session)
        checkpoints.begin(session.state, plan, {})
        for step in (3, 4):  # nothing can be written meanwhile
            session.step(RandomBatch(step), LR)
            checkpoints.begin(session.state, plan, {})
        unfinished = checkpoints.finished(), steps(folder), checkpoints.newest
        card.go_on.set()
        session.step(RandomBatch(5), LR)
        problems = checkpoints.save(session.state, plan, {})
    after, found = state_of(session), checkpoints.finished()
    group.close()

    again = Group(PrefixStore("second", store), rank, world_size, 30.0)
    resumed = trained(plan, again, 0)
    loaded = []
    for step in (6, 3):
        metadata = Checkpoints(folder, again, 5, {}).resume(resumed.state, plan)
        loaded.append(
            (metadata.step if metadata is not None else None, equal(state_of(resumed), (before, after)[step == 6]))
        )
        again.barrier()
        if rank == 0 or own_disks:
            (folder / "step-00000006" / "checkpoint.json").unlink(missing_ok=True)
        again.barrier()
    again.close()
    return {
        "unfinished": unfinished,
        "problems": problems,
        "found": [(one.step, one.problems, one.writing > 0) for one in found],
        "skipped": checkpoints.skipped,
        "messages": [message for message in messages if "there will be no checkpoint" in message],
        "loaded": loaded,
        "threads": threads(others),
    }


@pytest.mark.parametrize(("name", "world_size", "own_disks"), [("tensor", 2, False), ("hybrid", 3, True)])
def test_a_slow_disk_does_not_stop_steps_and_what_it_writes_is_of_one_step(
    pool: Pool, tmp_path: Path, name: str, world_size: int, own_disks: bool
) -> None:
    for result in pool.run(world_size, going_on, PLANS[name], tmp_path, own_disks):
        assert result["unfinished"] == ([], [], None)
        assert result["problems"] == []
        assert result["found"] == [(3, [], True), (6, [], False)]
        assert result["skipped"] == 2
        (message,) = result["messages"]
        reason = "the one before is still being written by ranks 0, 1"
        assert message.startswith(f"there will be no checkpoint of step 4: {reason}")
        assert result["loaded"] == [(6, True), (3, True)]
        assert result["threads"] == []


def awake(rank: int, world_size: int, store: Store, folder: Path) -> dict[str, Any]:
    """A group is held up while it writes; a newer one saves the same step; then the old one wakes up."""
    old, new = (Group(PrefixStore(name, store), rank, world_size, 30.0) for name in ("old", "new"))
    session = trained(PLANS["ddp"], old, 2)
    stale = Checkpoints(folder, old, 2, {}, generation=1)
    with slow_card() as card:
        stale.begin(session.state, PLANS["ddp"], {"by": "old"})
        if rank == 0:
            assert card.reached.wait(30)
        old.barrier()
        hidden = [path.name.rpartition("-")[0] for path in folder.glob(".step-*")]
        os.fsync = SlowCard.original  # for the newer group; the old one's thread is in its call
        problems = Checkpoints(folder, new, 2, {}, generation=2).save(session.state, PLANS["ddp"], {"by": "new"})
        card.go_on.set()
        late = stale.save(session.state, PLANS["ddp"], {"by": "old"})
    first = stale.finished()[0].problems
    left = without_words(folder)
    metadata = read_metadata(folder / "step-00000002").model_dump()
    old.close()
    new.close()
    return {
        "hidden": hidden, "problems": problems, "first": first, "late": late, "left": left,
        "by": (metadata["by"], metadata["generation"]),
    }  # fmt: skip


def test_a_group_that_wakes_up_writes_nothing_into_the_folder_of_a_newer_one(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(2, awake, tmp_path):
        assert result["hidden"] == [".step-00000002-g1"]
        assert result["problems"] == []
        assert result["first"]  # its hidden folder was taken away
        (late,) = result["late"]
        assert f"generation 2 has begun in {tmp_path}, and generation 1, which is over, may not write there" in late
        assert result["left"] == [".generation-0-2", "step-00000002"]
        assert result["by"] == ("new", 2)


def abandoned(rank: int, world_size: int, store: Store, folder: Path) -> tuple[list[str], list[str], bool]:
    """Rank 1 is held up in the middle of writing, and its group ends; the threads and files that are left."""
    others = set(threading.enumerate())
    group = Group(store, rank, world_size, 30.0)
    session = trained(PLANS["ddp"], group, 2)
    checkpoints = Checkpoints(folder / str(rank), group, 2, {})
    with slow_card() as card:
        if rank == 0:
            card.go_on.set()
        checkpoints.begin(session.state, PLANS["ddp"], {})
        assert card.reached.wait(30)
        group.abort()  # which is what both do when a rank is lost
        group.close()
        at_once = [] if rank else threads(others)
    wait_for(lambda: not threads(others), "the end of the thread, once its disk answers", 10)
    files = without_words(folder / str(rank))
    return at_once, files, checkpoints.newest is None


def test_a_group_that_ends_gives_up_what_it_was_writing(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, abandoned, tmp_path) == [([], [".generation-0-0"], True)] * 2


def filling_up(rank: int, world_size: int, store: Store, folder: Path) -> dict[str, Any]:
    """Train on while the disk of rank 1 is full, and then has room again."""
    group = Group(store, rank, world_size, 30.0)
    session = trained(PLANS["ddp"], group, 1)
    checkpoints = Checkpoints(folder / str(rank), group, 5, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved = []
    with told() as messages:
        for step, room in enumerate((True, False, False, True), 1):
            # No file can become longer, as on a disk that is full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if room or rank == 0 else 100, limits[1]))
            checkpoints.begin(session.state, PLANS["ddp"], {})
            session.step(RandomBatch(step), LR)
            wait_for(lambda: not checkpoints._background.busy, "the thread", 30)
            group.barrier()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            saved += [(one.step, not one.problems) for one in checkpoints.finished()]
    group.close()
    names = [path.name for path in steps(folder / str(rank))]
    return {"saved": saved, "messages": messages, "step": session.state.step, "names": names}


def test_a_full_disk_is_told_once_and_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(2, filling_up, tmp_path):
        assert result["saved"] == [(1, True), (2, False), (3, False), (4, True)]
        assert result["step"] == 5
        full, again = result["messages"]
        assert full.startswith("the checkpoint of step 2 was not saved: rank 1: ")
        assert "File too large" in full
        assert again == "checkpoints are saved again: that of step 4 is"
        assert result["names"] == ["step-00000004", "step-00000001"]


HELD_UP = """
import sys, threading, time
from pathlib import Path
from horizonml.comm.group import Group
from horizonml.state.checkpoint import Checkpoints
from tests.distributed.test_saving import SINGLE, trained

group = Group(None, 0, 1, 30.0)
session = trained(SINGLE, group, 1)
checkpoints = Checkpoints(Path(sys.argv[1]), group, 2, {})
assert checkpoints.save(session.state, SINGLE, {}) == []
session.state.step = 2
reached = threading.Event()

def held_up(path, target):
    reached.set()
    time.sleep(600)

Path.rename = held_up
checkpoints.begin(session.state, SINGLE, {})
assert reached.wait(30)
group.close()
"""
SINGLE = Plan((Stage(0, LAYERS, (0,), (1.0,)),))


@pytest.mark.slow
def test_a_process_that_ends_between_writing_and_renaming_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """It waits for no disk; one that is killed there leaves the same files."""
    ended = subprocess.run(
        [sys.executable, "-c", HELD_UP, str(tmp_path)], capture_output=True, timeout=240, check=False, cwd=Path.cwd()
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob(".step-*")] == [".step-00000002-g0"]

    group = Group(None, 0, 1, 30.0)
    metadata = Checkpoints(tmp_path, group, 2, {}).resume(trained(SINGLE, group, 0).state, SINGLE)
    group.close()
    assert metadata is not None
    assert metadata.step == 1
    assert without_words(tmp_path) == [".generation-1-0", "step-00000001"]
