"""Rosters at their bounds, worlds that grow, numbers that the service gives, and ranks that die again and again."""

from dataclasses import replace
from typing import Any

import pytest

from horizonml.rendezvous.members import Complete, Formed
from horizonml.rendezvous.messages import Departure, Farewell, GivenNumber, NumberRequest
from horizonml.rendezvous.refusals import Crashes
from horizonml.rendezvous.roster import Roster
from tests.rosters import LOST_PEER, alive, come_back, formed, gather, rank, survivor


def test_a_first_meeting_begins_with_the_least_number_of_ranks_when_no_further_one_comes() -> None:
    roster = Roster()
    gather(roster, *(rank(number, 4, begin_with=2) for number in (0, 2)))
    assert alive(roster, 1, 2, start=0.0, end=5.0) == []
    assert roster.short(5.0) == "waiting for rank 1, 3 to join, for 5 s at most (parallel.min_workers)"
    roster.join(3, rank(3, 4, begin_with=2), 5.0)
    assert alive(roster, 1, 2, 3, start=5.25, end=14.75) == []
    (verdict,) = alive(roster, 1, 2, 3, start=15.0, end=15.0)
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 2, 3]
    # Of ranks that differ, as those with and without a checkpoint do, one that would begin is enough.
    roster = Roster()
    gather(roster, rank(0, 4), rank(2, 4, begin_with=1, begin_after=3.0))
    (verdict,) = alive(roster, 1, 2, start=0.0, end=3.0)
    assert isinstance(verdict, Formed)
    # One rank is too few, however long it waits.
    roster = Roster()
    gather(roster, rank(0, 4, begin_with=2))
    assert alive(roster, 1, start=0.0, end=60.0) == []


def test_a_rank_that_asks_for_the_world_size_learns_that_of_the_others_or_else_the_services() -> None:
    roster = Roster(workers=3)
    own = question(rank=7)
    assert roster.give_number(own, 0.0) == GivenNumber(7, 3)
    gather(roster, rank(0, 4))
    assert roster.give_number(own, 0.5) == GivenNumber(7, 4)
    assert Roster().give_number(own, 0.0) == GivenNumber(7, 5)
    # Those that the service was told of have numbers, though they may not have come yet; others get further ones.
    assert Roster(workers=3).give_number(question(), 0.0) == GivenNumber(3, 3)


def test_a_world_grows_beyond_its_beginning() -> None:
    roster = Roster()
    wide = {"max_world_size": 5}
    (verdict,) = gather(roster, *(rank(number, **wide) for number in (0, 1, 4)))  # three ranks, of whatever numbers
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1, 4]
    roster.join(9, rank(3, **wide), 1.0)
    alive(roster, 1, 2, 3, 9, start=1.0, end=2.0)
    assert roster.newcomers(100.0) == [3]
    for number in (1, 2, 3):
        roster.leave(number, Farewell("meets again", Departure.AGAIN), 2.0)
    come_back(roster, 0, 1, 4, generation=1, size=3, at=2.0, first=11, **wide)
    (verdict,) = alive(roster, 9, 11, 12, 13, start=2.25, end=2.25)
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1, 3, 4]


def question(pid: int = 7, host: str = "m9", **changes: Any) -> NumberRequest:
    return replace(NumberRequest(host, pid, "d1", 5, 4), **changes)


def test_a_process_without_a_rank_is_given_the_lowest_that_nobody_living_holds() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    assert roster.give_number(question(), 0.0) == GivenNumber(3, 3)  # the world size is that of the run
    assert roster.give_number(question(), 1.0) == GivenNumber(3, 3)  # the same process asks again
    with pytest.raises(ValueError, match=r"at most 4 ranks \(parallel.max_workers\)"):
        roster.give_number(question(8), 1.0)
    assert roster.give_number(question(8), 62.0) == GivenNumber(3, 3)  # the first process has not come
    alive(roster, 1, 3, start=62.0, end=62.0)
    assert roster.give_number(question(9), 62.0) == GivenNumber(1, 3)  # rank 1 is lost
    # Where nobody is yet, the question itself says what the world size is.
    roster = Roster()
    assert [roster.give_number(question(n), 0.0) for n in (1, 2, 3)] == [GivenNumber(rank, 5) for rank in (0, 1, 2)]


def test_the_number_of_a_rank_that_restarts_is_given_last() -> None:
    roster = Roster()
    formed(roster, *(rank(number, 3, max_world_size=5) for number in range(3)))
    alive(roster, 1, 2, start=0.0, end=5.5)
    assert [str(lost.rank) for lost in roster.endings()[1].lost] == ["2"]
    for number in (1, 2):
        roster.leave(number, LOST_PEER, 5.5)
    come_back(roster, 0, 1, generation=1, size=3, at=5.5, first=11, max_world_size=5)
    (verdict,) = alive(roster, 11, 12, start=5.75, end=5.75)
    assert isinstance(verdict, Formed)
    asked = [roster.give_number(question(n, most=5), 6.0) for n in (21, 22, 23)]
    assert asked == [GivenNumber(3, 3), GivenNumber(4, 3), GivenNumber(2, 3)]
    # Numbers that the service has given are free again: who held them asks anew. Rank 2 is still the last one.
    asked = [roster.give_number(question(n, most=5), 70.0) for n in (24, 25, 26)]
    assert asked == [GivenNumber(3, 3), GivenNumber(4, 3), GivenNumber(2, 3)]


def test_no_number_is_given_as_long_as_members_of_an_older_group_may_report() -> None:
    roster = Roster(settled=4.0)
    assert roster.give_number(question(), 3.0) is None
    roster.resume(11, survivor(0, generation=2), [0, 1, 2], 3.5)
    assert roster.give_number(question(), 5.0) is None
    for number, one in ((12, 1), (13, 2)):
        roster.resume(number, survivor(one, generation=2), [0, 1, 2], 5.0)
    assert roster.give_number(question(), 5.0) == GivenNumber(3, 3)


def test_members_that_do_not_report_to_a_new_service_are_lost_in_the_end() -> None:
    roster = Roster(settled=4.0)
    for number, one in ((11, 0), (12, 1)):
        roster.resume(number, survivor(one, generation=2), [0, 1, 2], 1.0)
    alive(roster, 11, 12, start=1.0, end=20.75)
    assert roster.endings() == {}
    alive(roster, 11, 12, start=21.0, end=21.0)
    assert roster.endings()[2].reason == "rank 2 has not reported to the rendezvous service"
    assert roster.give_number(question(), 21.5) == GivenNumber(3, 3), "its own is given last"


def test_a_rank_that_dies_soon_after_each_start_waits_ever_longer() -> None:
    crashes, now, waits = Crashes(), 0.0, []
    for pid in range(1, 11):
        crashes.joined(rank(2, pid=pid), now)
        crashes.died(rank(2, pid=pid), "has run out of memory", now + 5)
        crashes.died(rank(2, pid=pid), "killed", now + 5)  # told twice
        waits.append(crashes.left(rank(2, pid=pid), now + 5))
        now += 5 + waits[-1]
    assert waits == [0, 0, 10, 20, 40, 80, 160, 300, 300, 300]
    assert crashes.words(rank(2)) == (
        "rank 2 on host2 has ended 10 times within 30 s of joining, last: has run out of memory; it is taken in again "
        "after 300 s"
    )
    assert crashes.left(rank(1), now) == crashes.left(rank(2, digest="d2"), now) == 0
    # A process that runs for a minute clears its rank, and so does one that dies only after a while.
    crashes.joined(rank(2, pid=90), now)
    crashes.ran(rank(2, pid=90), now + 60)
    crashes.died(rank(2, pid=90), "killed", now + 61)
    assert crashes.left(rank(2, pid=90), now + 61) == 0
    for pid, lasted in ((91, 5), (92, 5), (93, 40), (94, 5), (95, 5)):
        crashes.joined(rank(2, pid=pid), now)
        crashes.died(rank(2, pid=pid), "killed", now + lasted)
        assert crashes.left(rank(2, pid=pid), now + lasted) == 0


def test_a_process_that_was_only_silent_or_joins_again_has_not_died() -> None:
    silent, again = Crashes(), Crashes()
    for second in range(10):
        for crashes in (silent, again):
            crashes.joined(rank(2, generation=second), second)
        silent.died(rank(2, generation=second), "killed", second + 0.5)
    silent.joined(rank(2, generation=10), 10.0)
    assert silent.left(rank(2), 10.0) == 0
    again.died(rank(2, generation=9), "killed", 29.0)
    assert again.closed("d1", 29.0) == set()


def test_the_others_go_on_without_a_rank_that_is_held_back() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1))
    for pid in (201, 202, 203):  # rank 2 is killed at each start, before the others have begun with it
        roster.join(pid, rank(2, pid=pid), 8.0 * (pid - 201))
        roster.withdraw(1)  # so that the group is not complete
        alive(roster, 2, start=8.0 * (pid - 201), end=8.0 * (pid - 201) + 7.75)
    roster.join(3, rank(0), 24.0)
    roster.join(204, rank(2, pid=204), 24.0)
    assert alive(roster, 2, 3, 204, start=24.0, end=28.0) == []
    assert roster.present() == [0, 1, 2]
    ((number, held),) = roster.held_back(28.0).items()
    assert number == 204
    assert "rank 2 on host2 has ended 3 times" in held.reason
    assert "last: it was killed or lost its power" in held.reason
    assert roster.give_number(question(digest="d1"), 28.0) == GivenNumber(3, 3)
    verdicts = alive(roster, 2, 3, 204, start=28.25, end=36.0)
    assert [verdict.joins for verdict in verdicts] == [[3, 2, 204]]
    assert roster.held_back(36.0) == {}


def test_a_roster_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizonml.rendezvous.roster._MOST_JOINS", 8)
    roster = Roster()
    for number in range(8):
        roster.join(number, rank(0, world_size=4096, pid=1 + number), 0.0)
    with pytest.raises(ValueError, match="8 ranks wait already"):
        roster.join(8, rank(1, world_size=4096), 0.0)


def test_who_was_on_the_way_when_the_job_ended_is_told_and_a_new_attempt_is_not() -> None:
    end = Farewell("the job is complete", Departure.COMPLETE)
    roster = Roster()
    wide = {"max_world_size": 5}
    first = formed(roster, rank(0, **wide), rank(1, **wide), rank(2, **wide))
    assert first.generation == 1
    roster.join(11, rank(3, up=4.0, **wide), 10.0)  # while they train
    roster.join(12, rank(4, up=4.0, digest="d2", **wide), 10.0)  # another job
    alive(roster, 1, 2, 3, 11, start=10.0, end=11.0)
    assert roster.newcomers(11.0) == [3]
    assert roster.leave(1, end, 11.0)
    assert roster.decide(11.0) == [Complete([11])]
    assert roster.leave(2, end, 11.1)
    assert roster.leave(3, end, 11.2)
    roster.join(13, rank(3, up=3.0, **wide), 14.0)  # was started at 11.0
    assert Complete([13]) in roster.decide(14.0)
    # The same job again, by processes that were started after its end.
    again = [(21, rank(0, up=2.0, pid=200, **wide)), (22, rank(1, up=2.5, pid=200, **wide))]
    for number, fingerprint in again:
        roster.join(number, fingerprint, 14.0)
    assert not [verdict for verdict in roster.decide(14.0) if isinstance(verdict, Complete)]
    roster.join(23, rank(2, up=1.0, pid=200, **wide), 14.0)
    assert any(isinstance(verdict, Formed) for verdict in roster.decide(14.0))


def test_a_rank_that_stops_has_not_completed_the_job() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    roster.join(11, rank(0, pid=200), 1.0)
    alive(roster, 1, 2, 3, 11, start=1.0, end=2.0)
    for number in (1, 2, 3):
        roster.leave(number, Farewell("done", Departure.DONE), 2.0)
    assert roster.decide(2.0) == []
