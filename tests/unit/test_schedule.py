import pytest

from horizonml.plan.schedule import SCHEDULES, Action, in_flight

SHAPES = [(stages, micros) for stages in (1, 2, 3, 5) for micros in (1, 2, 5, 8)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), SHAPES)
def test_every_micro_batch_goes_forward_then_backward_once(name: str, stages: int, micros: int) -> None:
    for stage in range(stages):
        actions = SCHEDULES[name](stage, stages, micros)
        assert sorted(actions, key=lambda a: (a.kind, a.micro)) == sorted(
            [Action(kind, micro) for micro in range(micros) for kind in ("forward", "backward")],  # type: ignore[arg-type]
            key=lambda a: (a.kind, a.micro),
        )
        for micro in range(micros):
            assert actions.index(Action("forward", micro)) < actions.index(Action("backward", micro))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), SHAPES)
def test_no_schedule_deadlocks_and_both_keep_the_bubble(name: str, stages: int, micros: int) -> None:
    """Run the stages in unit time: forward 1, backward 1; the step must take 2 (M + P - 1)."""
    queues = [list(SCHEDULES[name](stage, stages, micros)) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    for time in range(1, 10 * (stages + micros)):
        now = {}
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            action = queue[0]
            before = stage - 1 if action.kind == "forward" else stage + 1
            ready = before in (-1, stages) or done.get((action.kind, before, action.micro), time) < time
            if ready:
                now[action.kind, stage, action.micro] = time
                queue.pop(0)
        done.update(now)
        if not any(queues):
            assert time == 2 * (micros + stages - 1)
            return
    pytest.fail("deadlock")


def test_1f1b_holds_no_more_than_the_stages_behind_it() -> None:
    assert [in_flight("1f1b", stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("gpipe", stage, 4, 16) for stage in range(4)] == [16] * 4
