import itertools
import math
from dataclasses import replace

import pytest

from horizonml.errors import PlanError
from horizonml.plan.plan import NO_ROWS, PARTS_REPEAT, Plan, Route, Stage, Sync, routes


def stage(*shares: float) -> Stage:
    return Stage(0, 1, tuple(range(len(shares))), shares)


def test_rows_cover_a_micro_batch_in_order_and_follow_the_shares() -> None:
    for samples, shares in itertools.product((0, 2, 7, 65), ((1.0,), (3.0, 1.0), (1.0, 2.0, 1.0), (0.1,) * 7)):
        rows = stage(*shares).rows(samples)
        assert [start for start, _ in rows] == [0, *[stop for _, stop in rows][:-1]]
        assert rows[-1][1] == samples
        for (start, stop), share in zip(rows, shares, strict=True):
            assert abs((stop - start) - samples * share / sum(shares)) <= 1


def test_parts_that_vary_from_step_to_step_follow_the_shares_on_average() -> None:
    for things, shares in itertools.product((0, 2, 16, 65), ((3.0, 1.0), (5.37, 2.7, 2.7, 1.37, 1.37), (0.1,) * 7)):
        steps = [stage(*shares).parts(things, step) for step in range(PARTS_REPEAT)]
        assert all([0, *[stop for _, stop in parts]] == [*[start for start, _ in parts], things] for parts in steps)
        for place, share in enumerate(shares):
            wanted = things * share / sum(shares)
            taken = [parts[place][1] - parts[place][0] for parts in steps]
            assert {math.floor(wanted + 1e-9), math.ceil(wanted - 1e-9)} >= set(taken)
            for count in (16, PARTS_REPEAT):
                assert sum(taken[:count]) / count == pytest.approx(wanted, abs=2 / count)


def test_a_member_without_a_share_never_has_rows() -> None:
    for shares in ((3.0, NO_ROWS, 125.0), (3.0 / 128, NO_ROWS / 128, 125.0 / 128)):
        members = replace(stage(*shares), sync=Sync.LOCAL)
        for things, step in itertools.product(range(20), (None, *range(PARTS_REPEAT))):
            first, end = members.parts(things, step)[1]
            assert first == end
        assert members.paces[1] == 0
        assert members.mean_rows(20)[1][0] == members.mean_rows(20)[1][1]


def test_members_whose_shares_hardly_differ_update_alike() -> None:
    assert stage(129.0, 127.0).paces == [1.0, 1.0]
    assert stage(3.0, 1.0).paces == [1.5, 0.5]


def test_micro_batches_of_full_and_small_batches() -> None:
    for batch, full, micros, sizes in (
        (64, 64, 5, [13, 13, 13, 13, 12]),
        (29, 64, 5, [10, 10, 9]),
        (1, 64, 5, [1]),
        (3, 3, 5, [1, 1, 1]),
    ):
        assert Plan((stage(1.0),), micro_batches=micros).micro_sizes(batch, full) == sizes


def test_routes_connect_exactly_the_rows_both_hold() -> None:
    sender, receiver = Stage(0, 1, (0, 1), (3.0, 1.0)), Stage(1, 2, (2, 3), (1.0, 1.0))
    assert routes(sender.rows(8)[0], receiver, 8) == [Route(2, 0, 4), Route(3, 4, 6)]
    assert routes(sender.rows(8)[1], receiver, 8) == [Route(3, 0, 2)]
    assert routes(receiver.rows(8)[1], sender, 8) == [Route(0, 0, 2), Route(1, 2, 4)]


def test_what_one_side_sends_the_other_expects() -> None:
    one, other = Stage(0, 1, (0, 1, 2), (2.0, 1.0, 2.0)), Stage(1, 2, (3, 4), (1.0, 3.0))
    for samples in range(12):
        sent = {
            (rank, route.peer, route.stop - route.start)
            for rank, rows in zip(one.ranks, one.rows(samples), strict=True)
            for route in routes(rows, other, samples)
        }
        expected = {
            (route.peer, rank, route.stop - route.start)
            for rank, rows in zip(other.ranks, other.rows(samples), strict=True)
            for route in routes(rows, one, samples)
        }
        assert sent == expected
        assert sum(rows for _, _, rows in sent) == samples


def test_a_plan_reads_back_from_json() -> None:
    plan = Plan((Stage(0, 3, (0, 1), (3.0, 1.0)), Stage(3, 5, (2,), (1.0,))), "gpipe", 4)
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.world_size, plan.layers, plan.stages_of(1)) == (3, 5, (0,))
    assert "rank 0 (share 3)" in plan.describe()


def test_a_plan_that_does_not_fit_is_refused() -> None:
    for stages, words in (
        ([Stage(0, 2, (0,), (1.0,)), Stage(3, 5, (1,), (1.0,))], "must start at layer 2"),
        ([Stage(0, 5, (0,), (1.0,)), Stage(5, 5, (1,), (1.0,))], "hold at least one"),
        ([Stage(0, 4, (0, 1), (1.0, 1.0))], "ends at layer 3, but the model has 5"),
        ([Stage(0, 5, (0, 2), (1.0, 1.0))], r"for ranks \[0, 2\], but the world size is 2"),
        ([Stage(0, 5, (0, 1), (1.0,))], "a share above 0"),
    ):
        with pytest.raises(PlanError, match=words):
            Plan(tuple(stages)).check(5, 2)
