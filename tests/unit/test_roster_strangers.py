"""Whom a roster refuses, does not believe, or does not wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horizonml.rendezvous.members import Formed, Refused
from horizonml.rendezvous.messages import Fingerprint
from horizonml.rendezvous.roster import Roster
from tests.rosters import LOST_PEER, alive, beat, formed, gather, long_after, rank, survivor


def test_a_rank_of_another_world_is_no_newcomer() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    roster.join(4, rank(3, world_size=5), 1.0)
    beat(roster, 1, 2, 3, count=1, at=1.0)
    assert roster.decide(1.0) == []
    assert roster.newcomers(100.0) == []


def test_who_may_not_go_on_without_the_others() -> None:
    # A first meeting needs everyone.
    roster = Roster()
    gather(roster, rank(0, replace_timeout=10.0), rank(2, replace_timeout=10.0))
    assert long_after(roster, 1, 2, start=1) == []
    # A group that another job's ranks come to before it has met again.
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    alive(roster, 1, 2, 3, start=0.25, end=1.0)
    roster.leave(1, LOST_PEER, 1.0)
    gather(roster, rank(0, 2, job="cifar", pid=300), rank(1, 2, job="cifar", pid=301), at=1.0, first=11)
    assert not any(isinstance(verdict, Formed) for verdict in alive(roster, 2, 3, 11, 12, start=1.25, end=3.0))


def test_after_a_restart_of_the_service_only_a_majority_goes_on_alone() -> None:
    roster = Roster()
    gather(roster, survivor(0, generation=4))
    assert long_after(roster, 1, start=1) == []
    roster = Roster()
    gather(roster, *(survivor(number, 4, size=4, world_size=4) for number in (0, 1)))
    assert long_after(roster, 1, 2, start=1) == [], "the other half may go on, too"
    roster = Roster()
    gather(roster, survivor(0, generation=4), survivor(1, generation=4))
    (verdict,) = long_after(roster, 1, 2, start=1)
    assert isinstance(verdict, Formed)
    assert verdict.generation == 5  # generations never repeat


def test_a_stranger_is_refused_alone_and_those_who_wait_are_told() -> None:
    for changes, words in (
        ({"job": "cifar"}, "rank 2 has job cifar"),
        ({"job": "cifar", "world_size": 5}, "rank 2 has job cifar"),
        ({"digest": "d2", "world_size": 5}, "rank 2 has world size 5"),
        ({"digest": "d2", "rank": 1, "pid": 666}, "rank 1 has job digest d2"),  # rank 1 is there already
    ):
        roster = Roster()
        (verdict,) = gather(roster, rank(0), rank(1), rank(2, **changes))
        assert isinstance(verdict, Refused)
        assert verdict.joins == [3]
        assert words in verdict.reason
        assert roster.missing() == [2]
        assert roster.refused(1.0) == [verdict.reason]
        assert roster.refused(1000.0) == []
        again = formed(roster, rank(2), at=1.0, first=4)
        assert again.joins == [1, 2, 4]


def test_where_one_rank_waits_for_one_job_and_one_for_another_the_next_rank_decides() -> None:
    roster = Roster()
    assert gather(roster, rank(0, job="cifar"), rank(0, machine="m7"), at=0.0) == []
    beat(roster, 1, 2, count=1, at=1.0)
    (verdict,) = gather(roster, rank(1), at=1.0, first=3)
    assert isinstance(verdict, Refused)
    assert verdict.joins == [1]
    # If no other comes in time, the one that was there first is right.
    roster = Roster()
    gather(roster, rank(0, job="cifar"), rank(1))
    verdicts = long_after(roster, 1, 2, start=1)
    assert [verdict.joins for verdict in verdicts] == [[2]]


def test_ranks_that_were_killed_do_not_speak_against_those_that_come_after_them() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1))
    news = [rank(number, pid=200, digest="d2") for number in range(3)]
    verdict = gather(roster, *news, at=1.0, first=3)[-1]
    assert isinstance(verdict, Formed)
    assert verdict.members == news


def test_a_rank_that_withdraws_is_gone_only_if_its_group_has_not_formed() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1))
    assert roster.withdraw(1)
    assert roster.missing() == [0, 2]
    formed(roster, rank(0), rank(2), first=3)
    assert not roster.withdraw(3)
    assert roster.running() == [2, 3, 4]


def test_nobody_who_misstates_where_it_was_disturbs_the_group_that_runs() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    claims = [
        replace(rank(1, pid=999), generation=1, group_size=3),  # of this generation, as another process
        replace(rank(1, pid=999), generation=2, group_size=3),  # of a newer one
        replace(rank(7, 8, pid=999, job="other"), generation=1, group_size=8),  # of another run
    ]
    for number, claim in enumerate(claims, start=50):
        with pytest.raises(ValueError, match=r"which this service did not form|is of another run .*job other"):
            roster.resume(number, claim, range(claim.group_size), 1.0)
        with pytest.raises(ValueError, match="did not meet at this service, so it is of another run"):
            roster.join(number, claim, 1.0)
    with pytest.raises(ValueError, match="did not meet at this service"):
        Roster().join(1, replace(rank(0), generation=1 << 40, group_size=3), 0.0)
    # A container may have the number of a process in another one on the same machine.
    roster.join(60, replace(rank(3, machine="m1", address="10.0.0.1"), pid=rank(1).pid), 1.0)
    beat(roster, 1, 2, 3, count=1, at=1.1)
    roster.decide(1.2)
    assert (roster.running(), roster.endings()) == ([1, 2, 3], {})


def test_a_report_that_contradicts_the_others_is_not_believed() -> None:
    def running(number: int, **changes: object) -> Fingerprint:
        return replace(survivor(number, 2, size=3), pid=500 + number, **changes)  # type: ignore[arg-type]

    roster = Roster(settled=3.0)
    roster.resume(11, running(0), [0, 1, 2], 1.0)
    for claim, beside, words in (
        (running(1), [0, 1], "misstates"),
        (running(7, world_size=9), [0, 1, 2], "of another run"),
        (running(1, generation=1 << 40), [0, 1, 2], "misstates"),
        (running(1, generation=9, job="other"), [0, 1, 2], "of another run"),
        (running(1), [1, 2, 5], "something else"),
        (running(0, hostname="other", machine="other"), [0, 1, 2], "something else"),
    ):
        with pytest.raises(ValueError, match=words):
            roster.resume(20, claim, beside, 1.0)
    assert roster.running() == [11]
    for number in (1, 2):
        assert roster.resume(11 + number, running(number), [0, 1, 2], 1.5)
    assert roster.running() == [11, 12, 13]


def test_a_new_roster_learns_of_the_group_that_runs() -> None:
    def running(number: int, generation: int = 2) -> Fingerprint:
        return replace(survivor(number, generation, size=2), pid=500 + number)

    roster = Roster(settled=3.0)
    strangers = [rank(number, machine=f"other{number}") for number in range(3)]
    assert gather(roster, *strangers, at=0.0) == []  # a group may run here already
    roster.resume(11, running(0), [0, 2], 1.0)
    assert roster.newcomers(100.0) == [1]  # rank 2 has not reported yet, but it runs
    roster.resume(12, running(2), [0, 2], 1.0)
    roster.resume(12, running(2), [0, 2], 1.2)  # twice is once
    beat(roster, 1, 2, 3, 11, 12, count=1, at=2.0)
    verdicts = roster.decide(2.5)
    assert [verdict.joins for verdict in verdicts] == [[1], [3]]  # ranks 0 and 2 are there; rank 1 was lost
    assert all("is there twice" in verdict.reason for verdict in verdicts if isinstance(verdict, Refused))
    # What is over stays over.
    with pytest.raises(ValueError, match="generation 1, which is over"):
        roster.resume(30, running(1, generation=1), [0, 1, 2], 4.0)
    # There is no second group beside it; when it meets again with the newcomer, it goes on counting generations.
    assert gather(roster, rank(5, world_size=6, job="other"), at=4.0, first=20) == []
    beat(roster, 2, count=2, at=4.4)
    for number in (11, 12):
        roster.leave(number, LOST_PEER, 4.5)
    verdict = gather(roster, running(0), running(2), at=4.5, first=40)[-1]
    assert isinstance(verdict, Formed)
    assert (verdict.generation, [member.rank for member in verdict.members]) == (3, [0, 1, 2])
