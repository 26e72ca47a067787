"""Who may go on when the service is gone, or some of the ranks; and where the ranks find each other then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from horizonml.machine.network import listen
from horizonml.rendezvous.client import Endpoint, ServiceError
from horizonml.rendezvous.members import STANDBY_SECONDS, Formed
from horizonml.rendezvous.messages import Departure, Farewell, Fingerprint, NumberRequest
from horizonml.rendezvous.places import MeetingPlaces, Standby
from horizonml.rendezvous.roster import Roster
from horizonml.rendezvous.service import Service
from tests.distributed.processes import wait_for
from tests.rosters import LOST_PEER, alive, beat, formed, gather, rank

LOCAL = "127.0.0.1"


def of_five(number: int, generation: int = 1, **changes: object) -> Fingerprint:
    """A rank that was in a group of five, in which all had connected."""
    own = {"generation": generation, "group_size": 5, "trained": generation, "trained_size": 5}
    return rank(number, 5, **(own | changes))


def five() -> Roster:
    roster = Roster()
    formed(roster, *(rank(number, 5) for number in range(5)))
    return roster


def test_at_the_service_that_formed_the_group_half_of_it_goes_on_and_less_does_not() -> None:
    for silent, goes_on in (([3, 4], True), ([2, 3, 4], False)):
        roster = five()
        for number in set(range(5)) - set(silent):
            roster.leave(number + 1, LOST_PEER, 6.0)
        alive(roster, start=6.0, end=6.0)
        there = [number for number in range(5) if number not in silent]
        for join, number in enumerate(there, start=10):
            roster.join(join, of_five(number), 6.0)
        verdicts = alive(roster, *range(10, 10 + len(there)), start=6.0, end=30.0)
        assert bool(verdicts) is goes_on, silent
        if not goes_on:
            assert (
                roster.short(30.0) == "fewer than half of the group before are here; waiting for rank 2, 3, 4 to join"
            )


def test_ranks_that_are_certain_to_be_gone_do_not_count() -> None:
    # Three have said goodbye: the two that are left are all that there is.
    roster = five()
    for number in (2, 3, 4):
        roster.leave(number + 1, Farewell("its disk is broken", Departure.OTHER), 1.0)
    for join, number in ((10, 0), (11, 1)):
        roster.leave(number + 1, LOST_PEER, 1.0)
        roster.join(join, of_five(number), 1.1)
    (verdict,) = roster.decide(1.2)
    assert isinstance(verdict, Formed)
    assert len(verdict.members) == 2

    # Three processes were killed, and their machines say so to those that are left.
    roster = five()
    for join, number in ((10, 0), (11, 1)):
        roster.leave(number + 1, LOST_PEER, 1.0)
        roster.join(join, of_five(number), 1.1)
    for quarter in range(5, 30):
        beat(roster, 10, count=quarter, at=quarter / 4)
        roster.beat(11, quarter, quarter / 4, [2, 3, 4])
        verdicts = roster.decide(quarter / 4)
        if verdicts:
            break
    (verdict,) = verdicts
    assert isinstance(verdict, Formed)
    assert [member.rank for member in verdict.members] == [0, 1]


def test_one_that_was_away_does_not_go_on_alone_because_all_are_dead_who_went_on_without_it() -> None:
    roster, of_three = Roster(), {"generation": 1, "group_size": 3, "trained": 1, "trained_size": 3}
    formed(roster, rank(0), rank(1), rank(2))
    for number in (0, 1):
        roster.leave(number + 1, LOST_PEER, 6.0)
    assert formed(roster, *(rank(number, **of_three) for number in (0, 1)), at=6.0, first=4).generation == 2
    roster.join(6, rank(2, **of_three), 20.0)  # the others are silent since then
    for quarter in range(80, 160):
        roster.beat(6, quarter, quarter / 4, [0, 1])
        assert roster.decide(quarter / 4) == []
    again = formed(roster, rank(0, pid=200), rank(1, pid=200), at=40.0, first=7)  # from the newest checkpoint
    assert again.generation == 3


def test_at_a_standby_more_than_half_go_on_and_nobody_else() -> None:
    for there, goes_on in (([1, 2], False), ([1, 2, 3], True)):
        roster = Roster(standby=True)
        for join, number in enumerate(there, start=10):
            roster.join(join, of_five(number), 0.0)
        joins = range(10, 10 + len(there))
        assert alive(roster, *joins, start=0.0, end=STANDBY_SECONDS - 0.25) == []  # the others may be on their way
        verdicts = alive(roster, *joins, start=STANDBY_SECONDS, end=60.0)
        assert [verdict.generation for verdict in verdicts if isinstance(verdict, Formed)] == [2] * goes_on

    # Half of four are not more than half. One that is dead may have been in another group before; the other may be now.
    for dead, goes_on in (([], False), ([0], False), ([0, 3], True)):
        roster = Roster(standby=True)
        for join, number in ((10, 1), (11, 2)):
            roster.join(join, of_five(number, group_size=4, trained_size=4), 0.0)
        verdicts = []
        for quarter in range(40):
            for join in (10, 11):
                roster.beat(join, quarter, quarter / 4, dead)
            verdicts += roster.decide(quarter / 4)
        assert bool(verdicts) is goes_on


def test_a_standby_forms_no_first_group_and_gives_no_numbers_before_one_is_there() -> None:
    roster = Roster(standby=True)
    assert gather(roster, rank(0), rank(1), rank(2)) == []
    assert alive(roster, 1, 2, 3, start=0.0, end=60.0) == []


def test_numbers_of_ranks_that_may_be_cut_off_are_not_given_to_others() -> None:
    ask = NumberRequest("elsewhere", 1, "d1", 3, 3)
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    with pytest.raises(ValueError, match="takes at most 3 ranks"):
        roster.give_number(ask, 1.0)
    roster.leave(1, LOST_PEER, 2.0)
    roster.join(4, rank(0, generation=1, group_size=3, trained=1, trained_size=3), 2.0)
    alive(roster, 4, start=2.0, end=10.0)  # the others are silent, and it alone is less than half of the group
    assert roster.generation == 1
    assert roster.give_number(ask, 10.0) is None
    free = roster.give_number(replace(ask, most=4), 10.0)
    assert free is not None
    assert free.rank == 3
    alive(roster, start=10.0, end=20.0)  # the last of them is gone, too: those who come begin anew
    again = roster.give_number(ask, 20.0)
    assert again is not None
    assert again.rank == 0


def test_a_standby_declares_lost_who_has_not_reported_once_most_have() -> None:
    ranks = range(5)
    for there, lost in (([1, 2], []), ([1, 2, 3], [0, 4])):
        roster = Roster(standby=True)
        for join, number in enumerate(there, start=10):
            roster.resume(join, of_five(number), ranks, 0.0)
        joins = range(10, 10 + len(there))
        alive(roster, *joins, start=0.0, end=STANDBY_SECONDS + 0.25)
        assert sorted(one.rank for ended in roster.endings().values() for one in ended.lost) == lost


def test_a_service_with_the_state_of_an_earlier_generation_takes_a_newer_group_only_if_it_has_none() -> None:
    roster = five()
    with pytest.raises(ValueError, match="which this service did not form"):
        roster.resume(10, of_five(1, generation=2), range(5), 3.0)
    for number in range(5):
        roster.leave(number + 1, Farewell("takes in a newcomer", Departure.AGAIN), 3.0)
    roster.join(20, of_five(0), 3.1)
    with pytest.raises(ValueError, match="which this service did not form"):  # the group is about to meet again
        roster.resume(10, of_five(1, generation=2), range(5), 3.2)
    roster = five()
    alive(roster, start=0.0, end=7.0)  # all are silent, and forgotten
    assert roster.resume(10, of_five(1, generation=2), range(5), 8.0)
    assert roster.generation == 2


def test_a_group_that_has_never_connected_does_not_count_as_the_last_one() -> None:
    """Two of five that form a group with one that never comes are still two of five, and not two of three."""
    roster = five()
    for number in (0, 1, 2):
        roster.leave(number + 1, LOST_PEER, 1.0)
    for join, number in ((10, 0), (11, 1), (12, 2)):
        roster.join(join, of_five(number), 1.1)
    verdicts = alive(roster, 10, 11, 12, start=1.25, end=10.0)
    assert [len(verdict.members) for verdict in verdicts if isinstance(verdict, Formed)] == [3]
    for join in (10, 11):
        roster.leave(join, LOST_PEER, 11.0)
    for join, number in ((20, 0), (21, 1)):
        roster.join(join, of_five(number, generation=2, group_size=3, trained=1, trained_size=5), 11.0)
    assert alive(roster, 20, 21, start=11.0, end=60.0) == []


@contextmanager
def serving(port: int = 0) -> Iterator[Endpoint]:
    service, over = Service(listen(LOCAL, port)), threading.Event()
    thread = threading.Thread(target=service.run, args=(over.is_set,), daemon=True)
    thread.start()
    try:
        yield Endpoint(LOCAL, service.port)
    finally:
        over.set()
        thread.join(5.0)


def members_at(told: Endpoint) -> tuple[list[MeetingPlaces], list[Fingerprint]]:
    """The places of two members of a group that meet at a service, and what they say of themselves."""
    places, members = [MeetingPlaces(told, Standby(None)) for _ in range(2)], []
    for number, place in enumerate(places):
        assert place.standby is not None
        port, key = place.standby.listen(LOCAL, 0), place.standby.key
        members.append(rank(number, address=LOCAL, standby_port=port, standby_key=key))
    for place in places:
        place.know(members)
    return places, members


def test_ranks_go_to_the_standby_of_the_lowest_rank_that_is_there_and_back() -> None:
    with serving() as told:
        places = [MeetingPlaces(told, Standby(None)) for _ in range(3)]
        ports = [place.standby.listen(LOCAL, 0) for place in places if place.standby is not None]
        members = [rank(number, address=LOCAL, standby_port=port) for number, port in enumerate(ports)]
        for place in places:
            place.know(members)
            place.connect().close()
        assert not any(place.away for place in places)
        settled = [place.now for place in places]
        for place, now in zip(places, settled, strict=True):
            place.connect().close()
            assert not place.follow()  # all others are here, too
            assert place.now is now
        # Who comes to a standby by its address is led to where the ranks meet.
        client = Endpoint(LOCAL, ports[1]).connect()
        assert client.address == str(told)
        client.close()
    try:
        first = places[0].standby
        assert first is not None
        first.close()
        for place in places[1:]:
            with pytest.raises(ServiceError):  # it may be back in a moment
                place.connect()
            wait_for(lambda place=place: went(place), "a rank at a standby", 20)
            assert place.now.port == ports[1]
            assert not place.answers_again()
        client = Endpoint(LOCAL, ports[2]).connect()
        assert client.address == f"{LOCAL}:{ports[1]}"
        client.close()
        # Ranks that have chosen differently come together at the lower one, and do not change places.
        places[2].now = Endpoint(LOCAL, ports[2])
        assert not places[1].follow()
        assert places[2].follow()
        assert places[2].now.port == ports[1]
        with serving(told.port):
            wait_for(lambda: places[1].answers_again(), "the service being back", 20)
            assert not places[1].go_back(refuse)
            assert places[1].away
            assert places[1].go_back(lambda client: None)
            assert not places[1].away
    finally:
        for place in places:
            place.close()


def test_who_was_told_of_a_standby_learns_of_the_service_and_follows_the_others() -> None:
    with serving() as told:
        places, members = members_at(told)
        for place in places:
            place.connect().close()
        first, second = (Endpoint(LOCAL, member.standby_port) for member in members)
        early = MeetingPlaces(second)
        early.connect().close()
        assert early.told == early.now == told
        assert not early.away
    try:
        wait_for(lambda: went(places[0]), "a rank at a standby", 20)
        assert places[0].now == first
        places[1].now = second
        late = MeetingPlaces(second)
        late.connect().close()
        assert late.now == second
        assert not late.follow()
        assert places[1].follow()
        assert late.follow()  # although it has been in no group yet
        assert late.now == first
        later = MeetingPlaces(second)
        later.connect().close()
        for place in (late, later):
            assert place.now == first
            assert place.told == told
            assert not place.answers_again()
        with serving(told.port):
            wait_for(lambda: later.answers_again(), "the service being back", 20)
            assert later.go_back(lambda client: None)
            assert later.now == told
    finally:
        for place in places:
            place.close()


def test_a_rank_that_wakes_up_at_its_own_standby_goes_where_a_group_runs() -> None:
    with serving() as told:
        places, members = members_at(told)
        for place in places:
            place.connect().close()
    try:
        first, second = (Endpoint(LOCAL, member.standby_port) for member in members)
        places[0].now, places[1].now = first, second
        assert not places[0].follow()  # the others come here
        assert places[1].standby is not None
        places[1].standby._roster.resume(7, rank(1, 3, generation=2, group_size=2), (1, 2), time.monotonic())
        assert places[0].follow()
        assert places[0].now == second
    finally:
        for place in places:
            place.close()


def test_who_was_let_in_by_a_service_takes_no_standby_for_it() -> None:
    with serving() as told, serving() as other:
        place = MeetingPlaces(told)
        place.connect().close()
        stranger = MeetingPlaces(other, Standby(None))
    try:
        assert stranger.standby is not None
        assert stranger.standby.listen(LOCAL, told.port) == told.port
        with pytest.raises(ServiceError, match="another process has that port now"):
            place.connect()
        assert place.now == told
    finally:
        stranger.close()


def test_a_standby_of_another_run_that_has_the_port_of_a_lost_rank_leads_nobody_astray() -> None:
    with serving() as told, serving() as other:
        places, members = members_at(told)
        assert places[0].standby is not None
        places[0].standby.close()
        stranger = MeetingPlaces(other, Standby(None))  # its standby says that its ranks meet at the other service
        assert stranger.standby is not None
        assert stranger.standby.listen(LOCAL, members[0].standby_port) == members[0].standby_port
    try:
        wait_for(lambda: went(places[1]), "a rank at a standby", 20)
        assert places[1].now.port == members[1].standby_port
        assert not places[1].follow()
    finally:
        for place in (*places, stranger):
            place.close()


def went(place: MeetingPlaces) -> bool:
    try:
        place.connect().close()
    except ServiceError:
        return False
    return place.away


def refuse(client: object) -> None:
    raise ServiceError("it has the state of an earlier generation")


def test_a_standby_takes_another_port_where_the_service_s_own_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        standby = Standby(None)
        try:
            port = standby.listen(LOCAL, taken.getsockname()[1])
            assert port not in (0, taken.getsockname()[1])
            assert standby.listen(LOCAL, 0) == port  # it stays there
        finally:
            begin = time.monotonic()
            standby.close()
            assert time.monotonic() - begin < 5.0
