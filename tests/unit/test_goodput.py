from __future__ import annotations

import pytest

from horizonml.telemetry.goodput import Goodput


def steps(account: Goodput, numbers: range, now: float, each: float = 1.0) -> float:
    """Do steps one after the other, and return when the last one has ended."""
    for number in numbers:
        now += each
        account.step(number, each, now)
    return now


def test_an_undisturbed_run_loses_nothing_to_evaluations_and_pauses() -> None:
    account = Goodput()
    account.broke()  # the ranks meet for the first time
    assert account.ratio(50) is None
    now = steps(account, range(1, 5), 100)
    account.got_on(now + 7)  # an evaluation
    now = steps(account, range(5, 9), now + 9)
    assert account.ratio(now) == 1
    assert account.lost(now) == {"outage": 0, "repeated": 0}


def test_an_outage_lasts_from_the_last_whole_step_to_the_beginning_of_the_next() -> None:
    account = Goodput()
    now = steps(account, range(1, 11), 0)
    now += 0.5  # into step 11, when the group breaks
    account.broke()
    assert account.lost(now)["outage"] == 0.5
    now += 2
    account.broke()  # and is formed again
    assert account.lost(now)["outage"] == 2.5
    now = steps(account, range(11, 16), now + 1)
    assert account.lost(now) == {"outage": 3.5, "repeated": 0}
    assert account.ratio(now) == pytest.approx(15 / 18.5)
    assert account.lost(now + 100)["outage"] == 3.5  # a long step is no outage


def test_a_loss_after_an_evaluation_does_not_cost_the_evaluation() -> None:
    account = Goodput()
    now = steps(account, range(1, 3), 0)
    account.got_on(now + 8)
    account.broke()
    account.got_on(now + 9)  # what ends in an outage does not shorten it
    assert account.lost(now + 10)["outage"] == 2


def test_steps_that_are_done_again_are_lost_and_later_ones_are_not() -> None:
    account = Goodput()
    now = steps(account, range(1, 11), 0)
    account.broke()
    now = steps(account, range(7, 13), now, each=2.0)  # 7 to 10 again, then 11 and 12
    assert account.lost(now) == {"outage": 0, "repeated": 8}
    account.broke()
    now = steps(account, range(1, 14), now)  # from the beginning: 12 steps again
    assert account.lost(now)["repeated"] == 20
    assert account.ratio(now) == pytest.approx(1 - 20 / 35)


def test_the_account_is_closed_when_the_job_is_complete() -> None:
    account = Goodput()
    now = steps(account, range(1, 4), 0)
    account.broke()
    now = steps(account, range(4, 10), now + 1)
    account.complete(now)
    account.complete(now + 50)
    assert account.ratio(now + 1000) == account.ratio(now) == pytest.approx(0.9)


def test_a_process_that_comes_later_begins_an_account_of_its_own() -> None:
    account = Goodput()
    now = steps(account, range(500, 510), 1000)
    assert account.ratio(now) == 1
    assert account.lost(now) == {"outage": 0, "repeated": 0}
