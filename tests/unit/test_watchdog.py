"""A rank whose main thread hangs leaves its group by itself, and its process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from horizonml.comm.group import Group
from horizonml.runtime import watchdog
from horizonml.runtime.watchdog import HUNG, Stillness, Watchdog
from tests.distributed.processes import wait_for


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "LEAVE_SECONDS", 0.1)
    group = Group(None, 0, 1, 30.0)
    yield group
    group.close()


@pytest.fixture
def hang() -> Iterator[Callable[[Watchdog, Group], None]]:
    """Hang in the user's code, which a group calls, until the end of the test."""
    go_on, threads = threading.Event(), list[threading.Thread]()

    def forward() -> None:
        go_on.wait()

    def begin(dog: Watchdog, group: Group) -> None:
        def run() -> None:
            dog._thread = threading.get_ident()
            with dog:
                group.agree(forward)

        threads.append(threading.Thread(target=run))
        threads[0].start()

    yield begin
    go_on.set()
    threads[0].join()


@pytest.mark.parametrize("patient", [True, False])
def test_a_thread_that_does_not_return_from_a_group_that_is_over_leaves_it_and_ends(
    group: Group, hang: Callable[[Watchdog, Group], None], patient: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    left, ended = SimpleQueue[str](), SimpleQueue[int]()
    tidied = threading.Event()
    hang(Watchdog(group, 0.5, patient, left.put, tidied.set, ended.put), group)
    assert not left.qsize()
    group.abort()
    reason = left.get(timeout=30)
    assert reason.startswith("its main thread has made no progress for ")
    assert "rendezvous.step_timeout (0.5 s); it is at " in reason
    assert "(in forward)" in reason
    assert ended.get(timeout=30) == HUNG
    assert tidied.is_set()
    assert left.empty()
    said = capfd.readouterr().err
    assert f"error: {reason.partition(' for ')[0]}" in said
    assert ("WARNING: the other ranks go on without this one" in said) is patient
    assert "in agree" in said  # the stacks


def test_a_thread_that_returns_or_whose_group_lives_is_left_alone(group: Group) -> None:
    left = SimpleQueue[str]()
    with Watchdog(group, 0.05, False, left.put, end=lambda code: left.put(str(code))):
        threading.Event().wait(0.4)  # a long computation, for which nobody waits in vain
        group.abort()
        wait_for(lambda: group.is_over, "the end")
    threading.Event().wait(0.2)
    assert left.empty()


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    one = Stillness(10.0)
    for now in (10.25, 10.5, 100.0):
        one.look(0, now > 10.4, now)
    assert (one.still, one.over) == (1.5, 1.25)
    one.look(1, True, 100.25)
    assert (one.still, one.over) == (0.0, 1.5)
    one.look(1, False, 100.5)
    assert (one.still, one.over) == (0.25, 0.0)
