"""A run that was really recorded: watched in the terminal, and planned again with other devices."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.clock import StepResult, StepSums
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.choose import choose
from horizonml.planner.profile import Host
from horizonml.planner.record import read_planning
from horizonml.planner.strategies import problem_for
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import RunState
from horizonml.report.what_if import what_if
from horizonml.state.spec import Sgd
from tests.commands import command
from tests.distributed.conftest import JOB
from tests.distributed.pool import Pool
from tests.distributed.processes import environment, horizonml
from tests.distributed.sessions import built, session_for
from tests.distributed.truth import FULL, LR, RandomBatch


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three ranks by an automatic plan."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "job.yaml").write_text(JOB.replace("strategy: ddp", "strategy: auto"))
    result = horizonml(
        folder, "train", "job.yaml", "--set", "telemetry.timeline_every=5", "--set", "parallel.replan=false"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "runs" / "test"


@pytest.mark.slow
def test_a_recorded_run_is_read(recorded: Path) -> None:
    run = LiveRun(recorded)
    run.poll()
    assert (run.state, run.step, run.total_steps, run.total_epochs) == (RunState.FINISHED, 20, 20, 2)
    assert run.damaged == 0
    assert [member.rank for member in run.members] == [0, 1, 2]
    for member in run.members:
        assert sum(member.split.values()) == pytest.approx(1, abs=0.05)
        assert member.rss_bytes is not None
        assert member.rss_bytes > 1 << 20
    assert run.timeline is not None
    kinds = [event.kind for event in run.events]
    assert (kinds[0], kinds[-1], {*kinds} - {"formed", "ended", "slow"}) == ("formed", "ended", set())
    assert run.planning is not None
    assert run.planning.seconds == pytest.approx(run.forecast)


def test_no_change_is_the_plan_that_the_run_has_and_its_forecast(recorded: Path) -> None:
    answer = what_if(recorded)
    lead = json.loads((recorded / "rank-0.jsonl").read_text().splitlines()[0])
    assert answer["predicted"]["plan"] == answer["present"]["plan"] == lead["plan"]
    assert answer["predicted"]["seconds"] == answer["present"]["seconds"] == lead["forecast"]
    assert answer["present"]["measured_seconds"] > 0
    assert answer["changes"][-1] == "The plan stays as it is."


def test_without_a_rank_it_is_the_plan_of_the_others_from_scratch(recorded: Path) -> None:
    planning = read_planning(recorded)
    assert planning is not None
    assert planning.problem is not None
    known = planning.problem
    host = known.hosts[0]
    hosts = [Host((0, 1), host.cores, host.memory, contention=host.contention)]
    profiles = [known.profiles[0], known.profiles[2]]
    scratch = problem_for(
        planning.job, profiles, hosts, known.network.among([0, 2]), known.optimizer_copies, known.last_batch,
        loading=known.loading,
    )  # fmt: skip
    expected = choose(planning.job, scratch)
    answer = what_if(recorded, remove=[1])
    assert answer["predicted"]["plan"] == expected.plan.to_json()
    assert answer["predicted"]["seconds"] == expected.prediction.seconds


def test_the_commands(recorded: Path) -> None:
    folder, run = recorded.parent.parent, str(recorded)
    text = command(folder, "plan", run, "--remove", "2", "--rate", "0-1=10Mbit", COLUMNS="100").stdout
    assert "test, predicted plan for 2 ranks" in text
    assert "leaves; the others are numbered anew." in text
    assert "Measured until now: " in text
    answer = json.loads(command(folder, "plan", run, "--json").stdout)
    assert answer["ratio"] == 1
    wrong = command(folder, "plan", run, "--rate", "0-7=10Mbit")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: rate: '7' is not a device of this run; there are 0 (")
    assert "Traceback" not in wrong.stderr
    shown = command(folder, "watch", run, "--once")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("test · finished · step 20 of 20 · epoch 2 of 2")
    assert [line for line in lines if line.startswith("  2 ")]
    assert any("measured: " in line for line in lines)
    assert all(line.isprintable() for line in lines), "no escape sequences without a terminal"
    nowhere = command(folder, "watch", "nowhere", "--terminal")
    assert (nowhere.returncode, nowhere.stderr) == (
        2,
        "error: nowhere is not a folder; name that of a run, such as runs/digits\n",
    )


def test_top_on_a_terminal_ends_with_q_and_restores_it(recorded: Path) -> None:
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "horizonml", "watch", str(recorded), "--terminal", "--every", "0.2"]
    env = environment(TERM="xterm-256color", COLUMNS="80", LINES="24")
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    text, pressed, deadline = b"", False, time.monotonic() + 60
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"top did not end after q: {text[-500:]!r}"
            if select.select([master], [], [], 0.1)[0]:
                with suppress(OSError):  # it has ended
                    text += os.read(master, 1 << 16)
            if not pressed and text.count(b"finished") >= 2:
                os.write(master, b"xq")
                pressed = True
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert process.returncode == 0
    assert pressed
    assert b"\x1b[?1049h" in text, "on a screen of its own"
    assert "ranks   █ compute".encode() in text


def test_a_strategy_that_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    cache = str(tmp_path / "cache")
    short = ("-n", "2", "--set", "steps=1")
    assert horizonml(tmp_path, "train", "job.yaml", *short, HORIZONML_CACHE=cache).returncode == 0
    planning = read_planning(tmp_path / "runs" / "test")
    assert planning is not None
    assert (planning.problem, planning.seconds, planning.measured) == (None, None, False)
    assert len(planning.devices) == 2
    asked = command(tmp_path, "plan", "runs/test", "--add", "like:0")
    assert asked.returncode == 1
    assert asked.stderr.startswith(
        "error: nothing was measured for this run, because its strategy, ddp, leaves nothing"
    )


PLAN = Plan((Stage(0, 5, (0, 1), (1.0, 1.0)), Stage(5, 15, (2,), (1.0,))), micro_batches=2)


def told(rank: int, world_size: int, store: Store, room: int = 16) -> list[StepResult]:
    """Three steps of some ranks, in whose agreements there is room for so many to tell of themselves."""
    group = Group(store, rank, world_size, 30.0)
    model = built("tests.models:normed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("horizonml.engine.verdict._MOST_TELL", room)
        session = session_for(PLAN, model, group, Sgd(), FULL)
    found = [session.step(RandomBatch(step), LR) for step in range(3)]
    session.evaluate([RandomBatch(0)])
    session.close()
    group.close()
    return found


def test_ranks_tell_one_another_of_the_step_before(pool: Pool) -> None:
    results = pool.run(3, told)
    for reports in results:
        assert reports[0].told == (StepSums(),) * 3
        for number in (1, 2):
            for rank, one in enumerate(reports[number].told):
                before = results[rank][number - 1]
                assert one[:4] == (before.wall, before.compute, before.transfer, before.wait)
                assert one.links["members"] == before.traffic.get("members", (0, 0))
                assert one.links["next"] == before.traffic.get("next", (0, 0))
                assert one.rss_bytes > 1 << 20
                assert one.cpu_seconds > 0
                assert one.steps == 1
    for reports in pool.run(3, told, 2):  # two at a time
        assert [[one.steps for one in report.told] for report in reports] == [[0, 0, 0], [0, 0, 1], [2, 2, 0]]
