"""The thread that works beside a group: it lives no longer than the group, or than whoever gives it work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from horizonml.comm.group import Group
from horizonml.errors import PeerLost
from horizonml.state.background import Background
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


def test_the_thread_ends_with_its_owner_though_the_group_is_never_closed(group: Group) -> None:
    background = Background(group, NAME, 30.0)
    gc.disable()  # whoever drops it last ends the thread at once, without the collector
    try:
        del background
        wait_for(lambda: not alive(), "the end of the thread", 5)
    finally:
        gc.enable()


def test_a_group_that_is_dropped_without_being_closed_leaves_no_thread() -> None:
    background = Background(Group(None, 0, 1, 30.0), NAME, 30.0)
    assert alive() == 1
    del background
    wait_for(lambda: not alive(), "the end of the thread", 5)


def test_work_is_done_to_its_end_though_its_owner_is_gone(group: Group) -> None:
    background = Background(group, NAME, 30.0)
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def work(owner: Background = background) -> None:  # whose last reference is the thread's own in the end
        begun.set()
        assert go_on.wait(30)
        seen.append(owner.busy)

    background.start(work)
    assert begun.wait(5)
    del work
    del background
    assert alive() == 1
    go_on.set()
    wait_for(lambda: not alive(), "the end of the thread", 5)
    assert seen == [True]


def test_the_thread_ends_when_the_other_ranks_are_lost(group: Group) -> None:
    background = Background(group, NAME, 30.0)

    def work() -> None:
        raise PeerLost("rank 1 is gone")

    background.start(work)
    background.wait(5)
    wait_for(lambda: not alive(), "the end of the thread", 5)
    assert (background.busy, background.broken, group.is_over) == (False, True, False)
