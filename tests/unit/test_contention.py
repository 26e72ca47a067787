"""Ranks that compute at once on a machine: how long each takes, and how that is measured, written down and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonml.plan.plan import Plan, Stage
from horizonml.planner.choose import best_plan, fastest_plan
from horizonml.planner.devices import load_cluster, write_cluster
from horizonml.planner.evaluator import Evaluator, judge
from horizonml.planner.explain import explain
from horizonml.planner.problem import Constraints, Problem
from horizonml.planner.profile import LOCAL_NETWORK, Host, slowdown
from horizonml.planner.reasons import compare, drawback
from horizonml.planner.search import plain_ddp
from horizonml.profiling.probe import crowds, levels, turns, with_contention
from tests.unit.test_planner import FAST, one_host, predict, profile

CURVE = ((1.0, 1.0), (2.0, 1.1), (4.0, 1.5))


def all_at_once(hosts: list[Host], ranks: int) -> float:
    """Seconds of a step in which each rank has a layer's work of 0.3 s to do."""
    plan = Plan((Stage(0, 1, tuple(range(ranks)), (1.0,) * ranks),))
    return predict(plan, profile(0.001), 100 * ranks, hosts, FAST, 0).seconds


def test_a_slowdown_is_interpolated_and_never_a_speedup() -> None:
    found = [slowdown(CURVE, cores) for cores in (0.2, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)]
    assert found == pytest.approx([1.0, 1.0, 1.05, 1.1, 1.3, 1.5, 1.5])
    assert slowdown((), 4.0) == 1.0


def test_ranks_that_outnumber_the_cores_share_some_until_a_core_is_idle() -> None:
    assert all_at_once(one_host(4, 4.0), 4) == pytest.approx(0.3)
    # Two of five have half a core until the others are done, and then a whole one for the half that is left.
    assert all_at_once(one_host(5, 4.0), 5) == pytest.approx(0.45)
    assert all_at_once(one_host(4, 2.0), 4) == pytest.approx(0.6)
    containers = [Host((rank,), 1.0, 1e12, "here", 4.0) for rank in range(5)]
    assert all_at_once(containers, 5) == pytest.approx(0.45)


def test_work_takes_longer_while_others_fill_the_caches() -> None:
    hosts = [Host((0, 1, 2, 3), 4.0, 1e12, contention=CURVE)]
    assert all_at_once(hosts, 4) == pytest.approx(0.45)
    alone = [Host((rank,), 4.0, 1e12) for rank in range(4)]
    assert all_at_once(alone, 4) == pytest.approx(0.3)


def test_machines_with_several_ranks_are_measured_at_a_few_numbers_of_them() -> None:
    hosts = [Host((0, 3), 4.0, 1e12), Host((1,), 4.0, 1e12), *(Host((r,), 0.4, 1e12, "box", 4.0) for r in (2, 4))]
    assert crowds(hosts) == [[0, 3], [2, 4]]
    assert [levels(ranks) for ranks in (2, 5, 6)] == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert levels(64)[0] == 1
    assert levels(64)[-1] == 64
    assert len(levels(64)) == 6
    found = with_contention(hosts, [CURVE, (), CURVE, CURVE, CURVE])
    assert [host.contention for host in found] == [CURVE, (), CURVE, CURVE]


def test_containers_of_one_machine_measure_their_devices_one_after_the_other() -> None:
    boxes = [Host((rank,), 0.4, 1e12, "box", 4.0) for rank in (2, 3, 4)]
    assert turns([Host((0, 1), 4.0, 1e12), *boxes, Host((5,), 4.0, 1e12)]) == [[0, 2, 5], [3], [4]]


def test_files_of_devices_say_which_machine_is_shared_and_how_it_slows_down(tmp_path: Path) -> None:
    hosts = [Host((0, 1, 2), 2.0, 2**30, contention=CURVE), Host((3,), 0.4, 2**29)]
    path = write_cluster(tmp_path, ["pc", "pc", "pc", "pi"], hosts, LOCAL_NETWORK, [profile(0.001)] * 4)
    read = load_cluster(path).hosts()
    assert read[:3] == [Host((rank,), 1.0, 2**30, "pc-0", 2.0, CURVE) for rank in range(3)]
    assert read[3] == Host((3,), 0.4, 2**29)
    # What is planned for the file is what was planned for the ranks.
    assert all_at_once(read[:3], 3) == pytest.approx(all_at_once(hosts[:1], 3))


def test_auto_leaves_out_ranks_that_only_share_a_core_down_to_one_and_says_so() -> None:
    """Five ranks on two cores were given a plan that was "slower than rank 0 alone: do not distribute this job"."""
    own = profile(*[2e-5] * 3, parameters=1 << 16)
    hosts = [Host((0, 1, 2, 3, 4), 1.0, 1e12)]
    problem = Problem([own] * 5, hosts, LOCAL_NETWORK, 16, 1, constraints=Constraints(micro_batches=(1, 2)))
    names = [f"rank {rank}" for rank in range(5)]
    ddp = judge(problem, plain_ddp(problem))
    assert compare(problem, ddp, names).text.endswith("; do not distribute this job.")
    found = fastest_plan(problem, Evaluator(problem))
    found.plan.check(3, 5)
    assert [stage.ranks for stage in found.plan.stages] == [(0,)]
    assert found.plan.spare == (1, 2, 3, 4)
    (told,) = (one.text for one in explain(Evaluator(problem), found, names) if one.choice == "left out")
    assert told.startswith("Left out are rank 1, rank 2, rank 3, rank 4: with all devices a step would take ")
    assert "do not distribute" not in compare(problem, found, names).text
    # What the job insists on is not changed, but its drawbacks are told.
    assert drawback(problem, found, names) is None
    assert str(drawback(problem, ddp, names)).endswith("a step: do not distribute this job")


def test_ranks_that_outnumber_the_cores_are_left_out_though_nothing_is_predicted_to_be_lost_by_them() -> None:
    """Five ranks on two cores took eleven times as long as predicted: they wait for one another to be scheduled."""
    problem = Problem(
        [profile(*[1e-3] * 4)] * 4, [Host((0, 1, 2, 3), 2.0, 1e12)], LOCAL_NETWORK, 16, 1,
        constraints=Constraints(micro_batches=(1, 4)),
    )  # fmt: skip
    assert best_plan(problem).prediction.seconds < 1.02 * fastest_plan(problem, Evaluator(problem)).prediction.seconds
    found = fastest_plan(problem, Evaluator(problem))
    assert len(found.plan.spare) == 2
    assert "do not distribute" not in compare(problem, found, ["a", "b", "c", "d"]).text
