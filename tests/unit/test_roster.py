"""How a group forms, and forms again after a loss."""

from __future__ import annotations

import pytest

from horizonml.rendezvous.members import Formed, Refused
from horizonml.rendezvous.messages import Departure, Ended, Farewell, Fingerprint, Lost
from horizonml.rendezvous.roster import Roster
from tests.rosters import LOST_PEER, alive, beat, come_back, formed, gather, rank, roster_over, survivor


def test_a_complete_group_is_formed_in_the_order_of_ranks() -> None:
    roster = Roster()
    assert gather(roster, rank(2), rank(0)) == []
    assert (roster.present(), roster.missing()) == ([0, 2], [1])
    (verdict,) = gather(roster, rank(1), first=3)
    assert isinstance(verdict, Formed)
    assert (verdict.generation, verdict.joins) == (1, [2, 3, 1])
    assert [member.rank for member in verdict.members] == [0, 1, 2]
    assert roster.decide(1.0) == []


def test_other_world_sizes_jobs_and_versions_are_refused_for_all_naming_both() -> None:
    for changes, words in (
        ({"world_size": 4}, ["rank 0 has world size 3", "rank 1 has world size 4"]),
        ({"digest": "d2"}, ["rank 0 has job digest d1", "rank 1 has job digest d2"]),
        ({"torch": "2.12.0"}, ["PyTorch 2.13.0", "PyTorch 2.12.0"]),
    ):
        roster = Roster()
        (verdict,) = gather(roster, rank(0), rank(1, **changes))
        assert isinstance(verdict, Refused)
        assert verdict.joins == [1, 2]
        assert all(word in verdict.reason for word in words), verdict.reason
        # A rank that comes a little later is told as well; after a while it is a new attempt.
        (late,) = gather(roster, rank(2), at=3.0, first=3)
        assert late == Refused([3], verdict.reason)
        assert gather(roster, rank(2), at=9.0, first=4) == []


def test_a_duplicate_of_a_living_rank_is_refused_for_all_within_seconds() -> None:
    roster = Roster()
    assert (
        gather(roster, rank(0), rank(1), rank(1, hostname="elsewhere", machine="elsewhere")) == []
    )  # perhaps the first one is dead
    roster.beat(2, 1, 0.5)
    (verdict,) = roster.decide(0.6)
    assert isinstance(verdict, Refused)
    assert verdict.joins == [1, 2, 3]
    assert "rank 1 is there twice" in verdict.reason
    assert "host1" in verdict.reason
    assert "elsewhere" in verdict.reason


def test_a_dead_rank_makes_way_for_its_successor() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1), rank(1, pid=200))
    for now in (1.0, 2.0, 3.0):
        roster.beat(1, int(now), now)
        roster.beat(3, int(now), now)
        assert roster.decide(now) == []
    assert roster.missing() == [2]
    roster.join(4, rank(2), 3.0)
    (verdict,) = roster.decide(3.0)
    assert isinstance(verdict, Formed)
    assert verdict.joins == [1, 3, 4]


def test_a_running_group_is_not_disturbed_by_a_newcomer() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1), rank(2))
    beat(roster, 1, 2, 3, count=5, at=9.0)
    roster.join(4, rank(1, hostname="elsewhere", machine="elsewhere"), 10.0)
    beat(roster, 1, 2, 3, count=6, at=10.2)
    (verdict,) = roster.decide(10.3)
    assert isinstance(verdict, Refused)
    assert verdict.joins == [4]
    beat(roster, 1, 2, 3, count=7, at=14.0)
    roster.join(5, rank(0, job="other", digest="d2", pid=200), 15.0)
    beat(roster, 1, 2, 3, count=8, at=15.1)
    (verdict,) = roster.decide(15.2)
    assert isinstance(verdict, Refused)
    assert "came while job digits runs here" in verdict.reason


def test_survivors_wait_for_a_replacement_and_take_it() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    assert gather(roster, survivor(0), survivor(2), at=6.0, first=4) == []
    assert roster.missing() == [1]
    beat(roster, 4, 5, count=1, at=10.0)
    again = formed(roster, rank(1, pid=200), at=10.5, first=6)
    assert (again.generation, again.joins) == (2, [4, 6, 5])


def test_survivors_go_on_without_a_rank_that_does_not_come_back() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    assert gather(roster, survivor(0), survivor(2), at=6.0, first=4) == []
    assert alive(roster, 4, 5, start=6.0, end=15.75) == []  # their replace_timeout is 10 s
    (verdict,) = alive(roster, 4, 5, start=16.0, end=17.0)
    assert isinstance(verdict, Formed)
    assert (verdict.generation, [member.rank for member in verdict.members]) == (2, [0, 2])

    # When it comes after all, it waits, and the group can learn of it.
    roster.join(6, rank(1, pid=200), 18.0)
    beat(roster, 4, 5, count=1800, at=18.0)
    assert roster.decide(18.1) == []
    assert roster.newcomers(18.1) == [1]
    for number in (4, 5):
        roster.leave(number, Farewell("meets again", Departure.AGAIN), 18.2)
    assert roster.decide(18.3) == []  # the newcomer waits until both are back
    assert roster.short(18.3) == "waiting for rank 0, 2 to meet the others again"
    assert roster.endings() == {1: roster_over(1)}  # nobody has told anyone that generation 2 was over: all agreed
    again = formed(roster, survivor(0, generation=2, size=2), survivor(2, generation=2, size=2), at=18.5, first=7)
    assert (again.generation, [member.rank for member in again.members]) == (3, [0, 1, 2])
    assert roster.newcomers(100.0) == []


def test_without_a_replace_timeout_survivors_go_on_as_soon_as_those_that_live_are_back() -> None:
    roster = Roster()
    gather(roster, *(rank(number, 4) for number in range(4)))
    alive(roster, 1, 2, 3, 4, start=0.25, end=10.0)
    # Rank 3 is killed; ranks 0 and 1 notice, and come back at once, and rank 2 comes when its forward pass is over.
    for number in (1, 2):
        roster.leave(number, LOST_PEER, 10.25)
    come_back(roster, 0, 1, generation=1, size=4, at=10.25, first=11, world_size=4)
    assert alive(roster, 3, 11, 12, start=10.5, end=14.0) == []
    assert roster.short(14.0) == "waiting for rank 2 to meet the others again"
    roster.leave(3, LOST_PEER, 14.25)
    come_back(roster, 2, generation=1, size=4, at=14.25, first=13, world_size=4)
    (verdict,) = alive(roster, 11, 12, 13, start=14.25, end=14.25)
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1, 2]
    assert set(roster.farewells()) == {4}  # what it writes counts no more


def test_a_rank_that_is_killed_is_done_without_three_beats_after_its_last_sign_of_life() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    alive(roster, 1, 2, 3, start=0.25, end=10.0)
    for number in (1, 2):
        roster.leave(number, LOST_PEER, 10.25)
    come_back(roster, 0, 1, generation=1, size=3, at=10.25, first=11)
    assert alive(roster, 11, 12, start=10.25, end=10.5) == []
    (verdict,) = alive(roster, 11, 12, start=10.75, end=10.75)
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1]


def test_a_rank_that_said_it_comes_back_is_awaited_for_a_while() -> None:
    roster = Roster()
    gather(roster, rank(0, 2), rank(1, 2))
    for number in (1, 2):
        roster.leave(number, LOST_PEER, 5.0)
    come_back(roster, 0, generation=1, size=2, at=5.0, first=11, world_size=2)
    assert alive(roster, 11, start=5.0, end=7.75) == []
    assert [verdict.joins for verdict in alive(roster, 11, start=8.0, end=8.0)] == [[11]]


def test_a_rank_that_lives_but_does_not_come_back_is_done_without_in_the_end() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    alive(roster, 1, 2, 3, start=0.25, end=1.0)
    roster.leave(1, LOST_PEER, 1.0)
    roster.leave(2, LOST_PEER, 1.0)
    come_back(roster, 0, 1, generation=1, size=3, at=1.0, first=11)
    assert alive(roster, 3, 11, 12, start=1.0, end=30.75) == []
    (verdict,) = alive(roster, 3, 11, 12, start=31.0, end=31.0)
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1]
    assert "has not come back" in roster.farewells()[3].reason


def test_fewer_survivors_than_the_job_needs_wait_and_say_for_whom() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    come_back(roster, 0, 2, generation=1, size=3, at=5.0, first=11, min_world_size=3)
    assert alive(roster, 11, 12, start=5.0, end=60.0) == []
    assert roster.short(60.0) == (
        "2 of the 3 ranks that the job needs are here (parallel.min_workers); waiting for rank 1 to join"
    )
    roster.join(13, rank(1, pid=200, min_world_size=3), 60.0)
    assert [verdict.joins for verdict in alive(roster, 11, 12, 13, start=60.25, end=60.25)] == [[11, 13, 12]]


def test_a_silent_member_is_lost_after_four_seconds_and_a_slow_one_is_not() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    for count in range(20):  # rank 1 beats each 3 s only
        alive(roster, 1, 3, start=3 * count, end=3 * count + 2.75)
        beat(roster, 2, count=count, at=3 * count + 2.75)
        assert roster.endings() == {}
    alive(roster, 1, 3, start=60.0, end=63.75)
    assert roster.endings() == {}
    assert len(roster.running()) == 3
    alive(roster, 1, 3, start=64.0, end=64.0)
    reason = "rank 1 on host1 gives no sign of life (4.2 s)"
    assert roster.endings() == {1: Ended(reason, (Lost(1, "host1", "gives no sign of life", 4.25),))}
    assert roster.running() == []
    assert roster.farewells() == {2: Farewell("rank 1 on host1 gives no sign of life (4.2 s)", Departure.SILENT)}
    assert (roster.endings(), roster.farewells()) == ({}, {})  # said once


def test_a_service_that_was_away_itself_takes_nobody_for_lost() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    roster.slept(60.0, 60.2)
    assert roster.decide(60.0) == []
    assert len(roster.running()) == 3
    assert roster.endings() == {}


def test_which_departures_end_a_generation() -> None:
    for departure, lost in (
        (Departure.COMPLETE, None),
        (Departure.DONE, None),
        (Departure.AGAIN, None),
        (Departure.LOST_PEER, []),
        (Departure.FAILED, [1]),
        (Departure.OTHER, [1]),
    ):
        roster = Roster()
        formed(roster, rank(0), rank(1), rank(2))
        roster.leave(2, Farewell("has run out of memory", departure), 1.0)
        endings = roster.endings()
        if lost is None:
            assert endings == {}
            continue
        assert [one.rank for one in endings[1].lost] == lost
        assert "rank 1 on host1" in endings[1].reason
        assert "has run out of memory" in endings[1].reason


def test_a_member_that_joins_anew_ends_its_generation() -> None:
    for changes, words in (
        ({"generation": 1, "group_size": 3}, "joins anew"),
        ({"generation": 0}, "was started anew"),  # a container has the same process ids again
    ):
        roster = Roster()
        formed(roster, rank(0), rank(1), rank(2))
        roster.join(4, rank(1, **changes), 1.0)
        assert words in roster.endings()[1].reason


def test_what_was_declared_lost_is_fenced_off() -> None:
    def waking(generation: int, **changes: object) -> Fingerprint:
        return rank(1, generation=generation, group_size=3, **changes)

    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    alive(roster, 1, 3, start=0.25, end=5.25)
    roster.farewells()
    for number in (1, 3):
        roster.leave(number, LOST_PEER, 5.25)
    come_back(roster, 0, 2, generation=1, size=3, at=5.25, first=11)
    assert [verdict.joins for verdict in alive(roster, 11, 12, start=5.5, end=5.5)] == [[11, 12]]
    # It wakes: it is no member any more, whatever it sends.
    roster.endings()
    assert not roster.leave(2, Farewell("done", Departure.FAILED), 60.0)
    with pytest.raises(ValueError, match="generation 1, which is over"):
        roster.resume(2, waking(1), [0, 1, 2], 60.0)
    beat(roster, 2, count=100, at=60.0)
    assert roster.running() == [11, 12]
    assert roster.farewells()[2].kind is Departure.SILENT
    # Its number is free: it is a newcomer like any other.
    alive(roster, 11, 12, start=59.0, end=60.0)
    roster.join(20, waking(1), 60.0)
    alive(roster, 11, 12, 20, start=60.25, end=61.0)
    assert roster.newcomers(100.0) == [1]
    # Once another process has its number, it is refused.
    roster.withdraw(20)
    roster.join(21, rank(1, pid=300), 61.0)
    for number in (11, 12):
        roster.leave(number, Farewell("meets again", Departure.AGAIN), 61.0)
    come_back(roster, 0, 2, generation=2, size=2, at=61.0, first=31)
    assert [verdict.joins for verdict in alive(roster, 21, 31, 32, start=61.25, end=61.25)] == [[31, 21, 32]]
    roster.join(22, waking(1), 62.0)
    (refused,) = alive(roster, 21, 22, 31, 32, start=62.25, end=62.25)
    assert isinstance(refused, Refused)
    assert refused.joins == [22]
    assert "comes from generation 1, which has lost it" in refused.reason
    assert "process 300 on host1" in refused.reason


def test_who_waits_beside_a_rank_that_may_be_dead_waits_until_that_is_clear() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1))
    alive(roster, 1, 2, start=0.25, end=1.0)
    assert alive(roster, 1, start=1.25, end=4.0) == []
    roster.join(3, rank(2), 4.0)
    assert alive(roster, 1, 3, start=4.25, end=5.0) == []
    assert roster.short(5.0) == "waiting for rank 1 to join"
    assert alive(roster, 1, 3, start=5.25, end=7.0) == []
    assert roster.present() == [0, 2]
