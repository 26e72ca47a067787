"""A launcher that is interrupted or killed while its ranks start, at any moment, leaves no process behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from horizonml.runtime import local
from horizonml.runtime.forkserver import SERVER, ForkServer
from horizonml.runtime.local import LocalRun, RankFailed
from tests.distributed.processes import ours, rank_process, server, steps, wait_for

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
ENDLESS = ["--set", "epochs=10000", "-n", "2"]
# A rank in the background of a script: a terminal's Ctrl-C does not reach it, and its parent does not pass it on.
SCRIPT = """
RANK=0 WORLD_SIZE=1 "$@" --set name=scripted &
wait
"""
TRAIN = [sys.executable, "-m", "horizonml", "train", "job.yaml", *ENDLESS]
ALONE = [*TRAIN[:-1], "1", "--set", "parallel.strategy=single"]
COMMANDS = [["train", "job.yaml", *ENDLESS], ["rendezvous", "--", "bash", "-c", SCRIPT, "bash", *ALONE]]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would what it starts, until that asks for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", [0.0, 1.8])
def test_a_launcher_that_ends_early_leaves_nothing(folder: Path, start: Start, moment: float) -> None:
    asked, killed = ([start(*command, **{SERVER: ""}) for command in COMMANDS] for _ in range(2))
    time.sleep(moment)  # whatever has been reached by then: the busier the machine, the earlier
    for launcher in asked:
        launcher.send_signal(signal.SIGINT)
    for launcher in killed:
        launcher.send_signal(signal.SIGKILL)
    for launcher in (*asked, *killed):
        launcher.wait(60)
    wait_for(lambda: ours(folder) == [], "the end of all processes")


def test_ranks_are_forked_from_one_process_and_end_with_it(folder: Path, start: Start) -> None:
    launcher = start(*COMMANDS[0], **{SERVER: ""})
    wait_for(lambda: steps(folder) > 1, "a step")
    ranks = [rank_process(folder, rank) for rank in range(2)]
    (forking,) = {rank.ppid() for rank in ranks}
    assert psutil.Process(forking).ppid() == launcher.pid
    assert all("train" in rank.cmdline() for rank in ranks)
    assert len(ours(folder)) == 5  # with the launcher and the service
    psutil.Process(forking).kill()
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 1
    assert "the process from which the ranks are forked was killed by SIGKILL" in output
    wait_for(lambda: ours(folder) == [], "the end of all ranks", 10)  # nobody is left who could wait for them


def test_what_cannot_be_loaded_for_the_ranks_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ForkServer", partial(ForkServer, preload=("no_such_module",)))
    with pytest.raises(RankFailed, match="No module named 'no_such_module'"), LocalRun(2, TRAIN, tmp_path, {}):
        pass


def test_ctrl_c_in_a_script_s_middle_saves_a_checkpoint(folder: Path, start: Start) -> None:
    launcher = start(*COMMANDS[1])
    run = folder / "runs" / "scripted"
    wait_for(lambda: (run / "rank-0.jsonl").exists() and '"step"' in (run / "rank-0.jsonl").read_text(), "a step")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=120)
    assert ours(folder) == []
    assert "stopped as asked: a checkpoint is saved" in output
    assert list((run / "checkpoints").iterdir())


def test_a_second_ctrl_c_kills_what_does_not_end(folder: Path, start: Start) -> None:
    # Neither the command nor what it starts in a session of its own listens.
    deaf = "trap '' TERM INT; setsid sh -c 'trap \"\" TERM INT; echo ready; while :; do sleep 1; done'"
    launcher = start("rendezvous", "--", "sh", "-c", deaf)
    assert launcher.stdout is not None
    while launcher.stdout.readline() != "ready\n":
        continue
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 128 + signal.SIGKILL
    assert ours(folder) == []


def test_who_dies_of_an_instruction_that_the_processor_lacks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER, server().address)  # so that none has to load PyTorch
    die = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    with pytest.raises(RankFailed, match="rank 0 was killed by SIGILL; its processor lacks an instruction"):
        run(1, die, tmp_path)
    with pytest.raises(RankFailed, match=r"the rendezvous service was killed by SIGKILL"):
        run(2, [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, kill_service=signal.SIGKILL)


def test_who_repeats_what_another_rank_said_names_that_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER, server().address)
    monkeypatch.setattr(local, "_GRACE_SECONDS", 0.5)
    says = 'test "$RANK" = 0 && exec sleep 60; printf "rank 0: there is no data" > "$HORIZONML_ENDING"; exit 2'
    command = ["sh", "-c", says]
    with pytest.raises(RankFailed, match=r"^rank 0: there is no data\n\(all .*rank-1\.log\)"):
        run(2, command, tmp_path)


def test_a_second_ctrl_c_ends_a_local_run_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deaf = ["sh", "-c", "trap '' TERM; touch ready; while :; do sleep 1; done"]
    ready, began = tmp_path / "ready", time.monotonic()
    with LocalRun(1, ["env", "-C", str(tmp_path), *deaf], tmp_path, {}) as cluster:

        def interrupt() -> None:
            if ready.exists() and not cluster._stop.at_once:
                cluster._stop.note(signal.SIGINT)

        cluster.wait(interrupt)
    assert time.monotonic() - began < 20, "they were given the time that one Ctrl-C gives"
    said = capfd.readouterr().out
    assert said.count("all ranks end at once, as asked; what came after the newest checkpoint is lost") == 1


def run(world_size: int, command: list[str], logs: Path, kill_service: signal.Signals | None = None) -> None:
    """Run a local cluster to its end."""
    with LocalRun(world_size, command, logs, {}) as cluster:
        if kill_service is not None:
            assert cluster._service is not None
            cluster._service.send_signal(kill_service)
        cluster.wait()


def test_a_launcher_goes_on_when_the_folder_of_its_logs_is_deleted(folder: Path, start: Start) -> None:
    launcher = start("train", "job.yaml", "-n", "2", "--set", "epochs=3")
    wait_for(lambda: steps(folder) > 5, "the first steps")
    shutil.rmtree(folder / "runs" / "test", ignore_errors=True)
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert "please report this" not in output
