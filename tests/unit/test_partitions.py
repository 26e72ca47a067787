"""Whatever is lost, cut off and comes back, and whenever: there are never two groups that train.

The services decide with the real rosters. Ranks, their network and their clock are simulated in steps of a quarter of a
second, in the way of `meeting`, `membership` and `places`: a rank whose service does not answer goes to the standby of
the lowest member that it reaches, one that misses a member of its group meets the others again, and all go back to the
service that they were told of when it takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from horizonml.rendezvous.members import Formed
from horizonml.rendezvous.messages import Departure, Farewell, Fingerprint
from horizonml.rendezvous.roster import Over, Roster
from tests.programs import NIGHTLY
from tests.rosters import rank

RANKS = 5
TOLD = -1  # the machine of the service that all were told of
TICK = 0.25
AGAIN = Farewell("lost a peer", Departure.LOST_PEER)
joins = count(1)


@dataclass
class Group:
    joins: list[int]  # two services may give the same number to two groups
    generation: int
    members: list[Fingerprint]
    since: float

    def ranks(self) -> set[int]:
        return {one.rank for one in self.members}


@dataclass
class Rank:
    number: int
    pid: int
    alive: bool = True
    place: int = TOLD  # the machine whose service it uses
    join: int = 0
    group: Group | None = None  # in which it is a member, connected or not
    connected: bool = False
    last: Group | None = None  # the group before
    trained: Group | None = None
    missing_since: float | None = None
    lost_since: float | None = None
    look_at: float = 0.0

    def fingerprint(self) -> Fingerprint:
        own = rank(self.number, RANKS, pid=self.pid)
        if self.last is not None and self.trained is not None:
            own = replace(
                own, generation=self.last.generation, group_size=len(self.last.members),
                trained=self.trained.generation, trained_size=len(self.trained.members),
            )  # fmt: skip
        return own


@dataclass
class World:
    now: float = 0.0
    pids: int = 100
    parts: dict[int, int] = field(default_factory=dict)  # the part of the network that each machine is in
    services: dict[int, Roster] = field(default_factory=dict)
    verdicts: dict[int, dict[int, Formed]] = field(default_factory=dict)  # of each service, by join
    over: dict[int, set[int]] = field(default_factory=dict)  # generations that each service has declared over
    ranks: list[Rank] = field(default_factory=list)
    largest: int = 0

    def __post_init__(self) -> None:
        self.parts = dict.fromkeys(range(TOLD, RANKS), 0)
        for machine in range(TOLD, RANKS):
            self.serve(machine)
        for number in range(RANKS):
            self.ranks.append(Rank(number, self.pids))

    def serve(self, machine: int) -> None:
        self.services[machine] = Roster(self.now + 4.0 if machine == TOLD else 0.0, standby=machine != TOLD)
        self.verdicts[machine], self.over[machine] = {}, set()

    def reach(self, one: int, other: int) -> bool:
        return self.parts[one] == self.parts[other]

    def serves(self, machine: int) -> bool:
        return machine in self.services and (machine == TOLD or self.ranks[machine].alive)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            for one in self.ranks:
                if one.alive:
                    self.live(one)
            for machine, roster in self.services.items():
                if self.serves(machine):
                    for verdict in roster.decide(self.now):
                        if isinstance(verdict, Formed):
                            self.verdicts[machine] |= dict.fromkeys(verdict.joins, verdict)
                    self.over[machine] |= roster.endings().keys()
                    roster.farewells()
            self.check()

    def training(self) -> dict[frozenset[int], int]:
        """The groups whose ranks are all there, connected and reach each other: they could make steps."""
        found = {}
        for one in self.ranks:
            if one.alive and one.group is not None and one.connected and self.whole(one.group):
                found[frozenset(one.group.ranks())] = one.group.generation
        return found

    def whole(self, group: Group) -> bool:
        there = [self.ranks[other.rank] for other in group.members]
        return (
            all(
                one.alive and one.group is not None and one.group.joins == group.joins and one.pid == member.pid
                for one, member in zip(there, group.members, strict=True)
            )
            and len({self.parts[one.number] for one in there}) == 1
        )

    def check(self) -> None:
        training = self.training()
        assert len(training) <= 1, f"two groups train at {self.now}: {training}"
        self.largest = max([self.largest, *map(len, training)])

    def live(self, one: Rank) -> None:
        if not (self.serves(one.place) and self.reach(one.number, one.place)):
            self.go_elsewhere(one)
            return
        one.lost_since = None
        roster = self.services[one.place]
        dead = [
            other.rank
            for other in (one.trained.members if one.trained is not None else ())
            if self.reach(one.number, other.rank) and not self.ranks[other.rank].alive
        ]
        roster.beat(one.join, int(self.now / TICK), self.now, dead)
        if one.group is None:
            self.meet(one, roster)
        else:
            self.stay(one, one.group, roster)
        if one.alive and one.place != TOLD and self.now >= one.look_at and self.reach(one.number, TOLD):
            self.go_back(one)

    def meet(self, one: Rank, roster: Roster) -> None:
        verdict = self.verdicts[one.place].get(one.join)
        if verdict is not None:
            one.group, one.connected = Group(verdict.joins, verdict.generation, verdict.members, self.now), False
            one.missing_since = None
            if one.trained is None:
                one.trained = one.group
        elif one.join not in roster._members:
            self.join(one, roster)

    def join(self, one: Rank, roster: Roster) -> None:
        one.join = next(joins)
        try:
            roster.join(one.join, one.fingerprint(), self.now)
        except ValueError:  # the state of an earlier generation
            one.look_at = self.now + 20.0
            self.elect(one)

    def stay(self, one: Rank, group: Group, roster: Roster) -> None:
        others = [self.ranks[other.rank] for other in group.members]
        whole = self.whole(group)
        if whole:
            one.connected, one.trained, one.missing_since = True, group, None
        if not whole and one.missing_since is None:
            one.missing_since = self.now
        here = one.join in roster._members and one.join in roster.running()
        ended = group.generation in self.over[one.place] and (one.join not in roster.running())
        killed = any(not other.alive and self.reach(one.number, other.number) for other in others)
        late = one.missing_since is not None and self.now - one.missing_since > 60.0
        if ended or killed or late or (not whole and not one.connected and self.now - group.since > 5.0):
            self.leave(one, roster)
        elif not here:
            try:
                roster.resume(one.join, self.now_in(one, group), [other.rank for other in group.members], self.now)
            except Over:
                self.leave(one, roster)
            except ValueError:
                self.elect(one)

    def now_in(self, one: Rank, group: Group) -> Fingerprint:
        return replace(one.fingerprint(), generation=group.generation, group_size=len(group.members))

    def leave(self, one: Rank, roster: Roster) -> None:
        roster.leave(one.join, AGAIN, self.now)
        one.last, one.group, one.connected, one.missing_since = one.group, None, False, None
        self.join(one, roster)

    def go_elsewhere(self, one: Rank) -> None:
        one.lost_since = self.now if one.lost_since is None else one.lost_since
        if self.now - one.lost_since >= 0.75:
            self.elect(one)
        group = one.group
        if group is not None and any(
            not self.ranks[other.rank].alive and self.reach(one.number, other.rank) for other in group.members
        ):
            one.last, one.group, one.connected, one.join = group, None, False, 0  # it joins anew

    def elect(self, one: Rank) -> None:
        known = one.group or one.last or one.trained
        for member in known.members if known is not None else ():
            if self.ranks[member.rank].alive and self.reach(one.number, member.rank):
                one.place, one.look_at = member.rank, max(one.look_at, self.now + 2.0)
                return

    def go_back(self, one: Rank) -> None:
        one.look_at = self.now + 2.0
        if not self.serves(TOLD):
            return
        roster = self.services[TOLD]
        if one.group is None:
            self.services[one.place].withdraw(one.join)
            one.place = TOLD
            self.join(one, roster)
            return
        try:
            roster.resume(one.join, self.now_in(one, one.group), [other.rank for other in one.group.members], self.now)
        except ValueError:
            one.look_at = self.now + 20.0
            return
        before, one.place = one.place, TOLD
        if before != TOLD:
            self.serve(before)  # all go back at once

    def kill(self, number: int) -> None:
        self.ranks[number].alive = False

    def revive(self, number: int) -> None:
        if not self.ranks[number].alive:
            self.pids += 1
            self.ranks[number] = Rank(number, self.pids)
            self.serve(number)


Event = st.one_of(
    st.tuples(st.just("kill"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("revive"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("cut"), st.sets(st.integers(TOLD, RANKS - 1), min_size=1, max_size=RANKS)),
    st.tuples(st.just("heal"), st.none()),
    st.tuples(st.just("stop the service"), st.none()),
    st.tuples(st.just("start the service"), st.none()),
)
Story = st.lists(st.tuples(Event, st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 15.0, 40.0])), max_size=12)


# The stories are the same each time, because of random ones about 1 in 30,000 fails still: see the known fault below.
# Those of every night are random.
@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=not NIGHTLY, suppress_health_check=[HealthCheck.too_slow])
@given(Story)
# The first one of a group back at a service that had not seen it kept the second one out.
@example([(("kill", 1), 1.0), (("cut", {TOLD}), 0.25), (("kill", 2), 2.0), (("kill", 0), 0.25)])
# The only survivor of a newer group, which met elsewhere, had been taken for dead with it.
@example(
    [
        (("cut", {TOLD, 0, 1, 2}), 15.0), (("cut", {TOLD, 2, 3}), 5.0), (("heal", None), 8.0), (("kill", 1), 20.0),
        (("kill", 0), 5.0), (("stop the service", None), 5.0), (("start the service", None), 3.0),
    ]
)  # fmt: skip
def test_there_are_never_two_groups_that_train_and_what_is_left_comes_together_again(story: object) -> None:
    tell(story)


# Rank 0 is cut off from rank 3, which goes on with ranks 2 and 4 and dies. All that rank 0 learns at its standby is
# that the only other member of its group is dead, so it goes on alone, beside ranks 2 and 4.
DIED_ELSEWHERE: list[Any] = [
    (("revive", 4), 1.0), (("cut", {TOLD, 0, 1, 3}), 7.0), (("kill", 1), 40.0), (("cut", {TOLD, 1, 2, 3, 4}), 7.0),
    (("kill", 3), 7.0), (("heal", None), 5.0), (("stop the service", None), 7.0), (("cut", {2, 4}), 5.0),
]  # fmt: skip


@pytest.mark.xfail(reason="the dead do not tell in which later group they were", raises=AssertionError, strict=True)
def test_a_rank_whose_group_died_elsewhere_does_not_go_on_alone() -> None:
    tell(DIED_ELSEWHERE)


def tell(story: object) -> None:
    world = World()
    world.run(10.0)
    assert world.training().keys() == {frozenset(range(RANKS))}
    assert isinstance(story, list)
    for (what, which), seconds in story:
        match what:
            case "kill":
                world.kill(which)
            case "revive":
                world.revive(which)
            case "cut":
                world.parts = {machine: int(machine in which) for machine in world.parts}
            case "heal":
                world.parts = dict.fromkeys(world.parts, 0)
            case "stop the service":
                world.services.pop(TOLD, None)
            case "start the service" if TOLD not in world.services:
                world.serve(TOLD)
        world.run(seconds)
    # In the end all is well again, and all train together.
    world.parts = dict.fromkeys(world.parts, 0)
    if TOLD not in world.services:
        world.serve(TOLD)
    for number in range(RANKS):
        world.revive(number)
    world.run(120.0)
    assert world.training(), "nobody trains any more"
