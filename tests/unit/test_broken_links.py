"""Ranks that do not reach each other although all of them reach the service: who is left out, and for how long."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing

from horizonml.machine.network import AddressProbe
from horizonml.rendezvous.members import Formed, Member
from horizonml.rendezvous.messages import Departure, Farewell
from horizonml.rendezvous.refusals import BrokenLinks, left_out
from horizonml.rendezvous.roster import Roster
from tests.rosters import LOST_PEER, alive, come_back, formed, rank


def links(*pairs: tuple[int, int]) -> set[frozenset[str]]:
    return {frozenset((rank(one).host_id, rank(other).host_id)) for one, other in pairs}


def test_who_is_left_out_has_most_broken_links_or_least_to_lose() -> None:
    members = {10 + number: Member(rank(number, 5), 0.0, 0.0) for number in range(5)}

    def ranks(broken: set[frozenset[str]], *newcomers: int, staying: tuple[int, ...] = ()) -> list[int]:
        found = left_out(members, broken, lambda one: 7 if one.rank in newcomers else 1, staying)
        return sorted(members[number].fingerprint.rank for number in found)

    assert ranks(set()) == []
    assert ranks(links((1, 2))) == [2], "rank 0 keeps most, and so on"
    assert ranks(links((1, 2)), 1) == [1]
    cut_off = links((0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4))
    assert ranks(cut_off) == [0, 1]
    assert ranks(cut_off, 2, 3, 4) == [2, 3, 4], "three newcomers do not drive out two who train"
    assert ranks(links((0, 1), (0, 2), (0, 3), (0, 4)), 4) == [0], "its cable is broken"
    assert ranks(links((1, 2)), staying=(12,)) == [1], "it runs, and the other one waits"
    assert ranks(links((1, 2), (1, 3), (1, 4))) == [1], "without it, all others reach each other"
    assert ranks(links((1, 2), (3, 4))) == [2, 4]
    assert ranks(links((0, 1), (0, 2), (0, 3), (0, 4))) == [0]
    assert left_out(members, links((1, 2)), lambda one: 1)[12] == [rank(1, 5)]


def pair_is_cut(roster: Roster, at: float) -> None:
    """Ranks 1 and 2 of four do not reach each other, and all meet again; their joins are 21 to 24."""
    roster.unreached(2, [2], at)
    assert roster.decide(at) == []
    assert roster.endings() == {}, "the other end may report, too"
    roster.unreached(3, [1], at + 0.25)
    alive(roster, 1, 2, 3, 4, start=at + 0.25, end=at + 0.5)
    (ended,) = roster.endings().values()
    assert [one.rank for one in ended.lost] == [2]
    link = "rank 2 on host2 and rank 1 on host1 do not reach each other (10.0.0.2 and 10.0.0.1)"
    assert ended.reason.startswith(link)
    for number in (1, 2, 3, 4):
        roster.leave(number, LOST_PEER, at + 0.5)


def test_one_of_a_pair_is_left_out_and_comes_back_when_the_link_does() -> None:
    roster = Roster()
    formed(roster, *(rank(number, 4) for number in range(4)))
    alive(roster, 1, 2, 3, 4, start=0.25, end=10.0)
    pair_is_cut(roster, 10.0)
    come_back(roster, 0, 1, 2, 3, generation=1, size=4, at=10.75, first=21, world_size=4)
    (again,) = alive(roster, 21, 22, 23, 24, start=10.75, end=10.75)
    assert isinstance(again, Formed)
    assert [one.rank for one in again.members] == [0, 1, 3]

    assert alive(roster, 21, 22, 23, 24, start=11.0, end=50.0) == [], "it is left out once, and nobody meets again"
    assert (roster.endings(), roster.newcomers(50.0)) == ({}, [])
    ((number, held),) = roster.held_back(50.0).items()
    assert (number, held.probe) == (23, (("10.0.0.1", 29401),))
    assert held.reason.endswith("rank 2 is left out until they do")

    roster.reached(23)
    assert roster.newcomers(50.25) == [2]
    assert roster.held_back(50.25) == {}
    for number in (21, 22, 24):
        roster.leave(number, Farewell("meets again", Departure.AGAIN), 50.5)
    come_back(roster, 0, 1, 3, generation=2, size=3, at=50.75, first=31, world_size=4)
    (whole,) = alive(roster, 23, 31, 32, 33, start=50.75, end=50.75)
    assert [one.rank for one in whole.members] == [0, 1, 2, 3]


def test_a_link_that_fails_again_and_again_is_tried_less_and_less_and_again_in_the_end() -> None:
    links, waits, now = BrokenLinks(), [], 0.0
    for _ in range(7):
        links.report(rank(1), rank(2), now)
        links.works(rank(2))
        waits.append(next(seconds for seconds in range(100) if not links.broken(now + seconds)))
        now += 100
    assert waits == [0, 0, 10, 20, 40, 60, 60]
    links.report(rank(1), rank(2), now + 200)
    links.works(rank(1))
    assert links.broken(now + 200) == set(), "it was good for minutes"
    links.report(rank(1), rank(2), now + 400)
    assert links.broken(now + 699)
    assert not links.broken(now + 701), "perhaps only a firewall hides that it works"


def test_a_rank_that_is_silent_is_lost_and_no_link_is_blamed() -> None:
    roster = Roster()
    formed(roster, rank(0), rank(1), rank(2))
    alive(roster, 1, 2, 3, start=0.25, end=10.0)
    alive(roster, 1, 2, start=10.25, end=14.0)
    roster.unreached(1, [2], 14.0)
    alive(roster, 1, 2, start=14.25, end=15.25)
    (ended,) = roster.endings().values()
    assert str(ended.lost[0]) == "rank 2 on host2 gives no sign of life (4.2 s)"
    roster.unreached(99, [1], 15.5)  # a stranger blames nobody


def test_a_probe_takes_any_answer_for_one_and_no_answer_for_none() -> None:
    with ExitStack() as stack:
        listening, full = (stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)) for _ in range(2))
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        for _ in range(3):  # then the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        probe = stack.enter_context(closing(AddressProbe([one.getsockname() for one in (listening, full, closed)])))
        until = time.monotonic() + 10
        while len(probe.silent) > 1 and time.monotonic() < until:
            probe.look()
            time.sleep(0.01)
        assert probe.silent == {full.getsockname()}
