"""The thread that works beside a group: it lives no longer than the group, or than whoever gives it work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonml.comm.group import Group
from horizonml.errors import Diverged, PeerLost
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.identity import Identity
from horizonml.runtime.worker import Worker
from horizonml.state.saver import Background
from horizonml.state.shards import read_metadata, steps
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.metrics import Metrics
from tests.distributed.processes import wait_for

NAME = "test-background"


def alive() -> int:
    """The number of threads of this test."""
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def group() -> Iterator[Group]:
    """A group of one rank, which nobody closes before the end of the test."""
    assert not alive()
    group = Group(None, 0, 1, 30.0)
    yield group
    group.close()
    wait_for(lambda: not alive(), "the end of the thread", 5)


def test_the_thread_ends_with_the_group(group: Group) -> None:
    background = Background(group, NAME, 30.0)
    done = threading.Event()
    background.start(done.set)
    background.wait(5)
    assert (done.is_set(), background.busy, background.broken, alive()) == (True, False, False, 1)
    group.close()
    assert (alive(), background.broken) == (0, True)


def test_the_thread_ends_when_the_other_ranks_are_lost(group: Group) -> None:
    background = Background(group, NAME, 30.0)

    def work() -> None:
        raise PeerLost("rank 1 is gone")

    background.start(work)
    background.wait(5)
    wait_for(lambda: not alive(), "the end of the thread", 5)
    assert (background.busy, background.broken, group.is_over) == (False, True, False)


def test_a_run_that_diverges_completes_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.1)  # a step takes less
        original(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    values = {
        "name": "test", "folder": str(tmp_path), "data": {"name": "digits", "samples": 100}, "batch_size": 32,
        "parallel": {"strategy": "single"}, "optimizer": {"lr": 1e30}, "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    worker = Worker(Job.model_validate(values), Identity(0, 1, "a test"), None, Metrics(0), StopRequest())
    with pytest.raises(Diverged, match=r"step 1: the loss is .* The newest checkpoint is that of step 1$"):
        worker.run(fresh=False, rejoin=False)
    (saved,) = steps(tmp_path / "checkpoints")
    assert read_metadata(saved).step == 1
    records = read_lines(tmp_path / "rank-0.jsonl")
    assert [record["saved"] for record in records if record["kind"] == "checkpoint"] == [True]
