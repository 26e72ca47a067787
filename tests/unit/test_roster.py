from dataclasses import replace

from horizonml.cluster.roster import Fingerprint, Formed, Refused, Roster


def rank(number: int, world_size: int = 3, **changes: object) -> Fingerprint:
    base = Fingerprint(number, world_size, "digits", "d1", "0.1.0", "2.13.0", f"host{number}", f"10.0.0.{number}", 100)
    return replace(base, **changes)  # type: ignore[arg-type]


def gather(roster: Roster, *fingerprints: Fingerprint, at: float = 0.0, first: int = 1) -> list[Formed | Refused]:
    for number, fingerprint in enumerate(fingerprints, start=first):
        roster.join(number, fingerprint, at)
    return roster.decide(at)


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
        ({"job": "cifar"}, ["job digits", "job cifar"]),
        ({"torch": "2.12.0"}, ["PyTorch 2.13.0", "PyTorch 2.12.0"]),
        ({"code": "0.2.0"}, ["HorizonML 0.1.0", "HorizonML 0.2.0"]),
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
    assert gather(roster, rank(0), rank(1), rank(1, host="elsewhere")) == []  # perhaps the first one is dead
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
    roster.join(4, rank(1, host="elsewhere"), 10.0)
    roster.beat(2, 1, 10.2)
    (verdict,) = roster.decide(10.3)
    assert isinstance(verdict, Refused)
    assert verdict.joins == [4]
    roster.join(5, rank(0, job="other", digest="d2", pid=200), 20.0)
    roster.beat(1, 5, 20.1)
    (verdict,) = roster.decide(20.2)
    assert isinstance(verdict, Refused)
    assert "came while job digits runs here" in verdict.reason


def test_a_group_forms_again_after_a_loss_with_the_next_generation() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1), rank(2))
    # Rank 2 died; the others come back by themselves, and its successor joins.
    gather(roster, rank(0), rank(1), at=5.0, first=4)
    assert roster.missing() == [2]
    (verdict,) = gather(roster, rank(2, pid=300), at=5.0, first=6)
    assert isinstance(verdict, Formed)
    assert (verdict.generation, verdict.joins) == (2, [4, 5, 6])


def test_ranks_that_leave_or_fall_silent_are_forgotten() -> None:
    roster = Roster()
    gather(roster, rank(0), rank(1))
    roster.leave(1)
    assert roster.present() == [1]
    roster.decide(100.0)
    assert roster.present() == []
