"""Faults that are injected into real ranks: what comes out, and that nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.faults import FAULTS
from tests.distributed.processes import horizonml, ours, wait_for
from tests.programs import need_networks

CHAOS = "benchmarks.chaos"

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]


def test_a_job_that_is_killed_and_paused_goes_on_and_its_goodput_is_measured(folder: Path) -> None:
    done = horizonml(
        folder, CHAOS, "job.yaml", "--faults", "kill,pause", "--every", "10s", "--for", "20s", "--reference", "2s",
        "--restart-after", "500ms", "--out", "out", "--set", "checkpoint.every_steps=20", HORIZONML_TEST=str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((folder / "out" / "chaos.json").read_text())
    found = {fault["fault"]: fault for fault in numbers["faults"]}
    assert set(found) == {"kill", "pause"}
    assert numbers["goodput"] > 0
    assert 0 <= found["kill"]["seconds_to_notice"] < found["kill"]["seconds_to_step"]
    assert found["kill"]["generations"] >= 1
    assert found["pause"]["seconds_to_step"] > 0.5
    assert [(end["rank"], end["code"]) for end in numbers["exits"] if end["killed"]] == [
        (found["kill"]["rank"], -signal.SIGKILL)
    ]
    assert (folder / "out" / "chaos.png").stat().st_size > 10_000
    assert "kill,pause" not in done.stdout
    assert "goodput" in done.stdout
    assert not ours(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_whatever_ends_it_nothing_is_left_behind(folder: Path, start: Start, number: int, code: int) -> None:
    process = start(CHAOS, "job.yaml", "--faults", "pause", "--every", "60s", "--for", "2m", "--reference", "1s")

    def paused() -> bool:
        for other in ours(folder):
            with suppress(psutil.NoSuchProcess):  # some last for a moment only
                if other.status() == psutil.STATUS_STOPPED:
                    return True
        return False

    wait_for(paused, "a rank that is paused")
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    wait_for(lambda: not ours(folder), "the end of all that was started", 20)


def test_a_rank_is_cut_off_and_its_disk_is_full_and_both_pass(folder: Path) -> None:
    need_networks()

    def made() -> list[dict[str, Any]]:
        return [record for rank in range(2) for record in cluster.records(rank) if "lr" in record]

    def newest() -> int:
        return max((record["step"] for record in made()), default=0)

    options = ["--set", "epochs=100000", "--set", "checkpoint.every_steps=20"]
    with Cluster(
        folder / "job.yaml", 2, folder / "out", {"HORIZONML_TEST": str(folder)}, options, None, True
    ) as cluster:
        wait_for(lambda: newest() > 50, "the first steps")
        interfaces = set(psutil.net_if_addrs())
        cluster.partition(1)
        cut = time.time()
        time.sleep(3)
        healed, before = time.time(), newest()
        assert cluster.alive == [0, 1], "no connection was closed, so neither can know yet"
        cluster.heal(1)
        wait_for(lambda: newest() > before + 50, "steps after the network is back")
        # What was under way has come to its end within the first second.
        together = [record["step"] for record in made() if cut + 1 < record["time"] < healed]
        assert not together, "two ranks made steps together although nothing gets from one to the other"
        assert set(psutil.net_if_addrs()) == interfaces, "the network of this machine is not touched"
        FAULTS["disk"].begin(cluster, 0)
        wait_for(
            lambda: "records cannot be written" in cluster.log(0).read_text(), "rank 0 saying that its disk is full"
        )
        FAULTS["disk"].end(cluster, 0)
        recorded = len(cluster.records(0))
        wait_for(lambda: len(cluster.records(0)) > recorded + 20, "records after the disk has room again")
    assert cluster.hung == []
    assert not ours(folder)


def test_a_mistake_is_named_before_anything_starts(folder: Path) -> None:
    for arguments, said in (
        ("--faults kill,paus", "--faults: 'paus' is not one of kill, pause, partition, oom, disk; did you mean"),
        ("--every 30", "--every: '30' has no unit; did you mean 30s"),
        ("--every 1h", "--every: 1h is longer than --for 10m"),
        ("--set parallel.strategy=single --set parallel.workers=1", "on one rank"),
        ("--out .", "--out: . is there already"),
    ):
        done = horizonml(folder, CHAOS, "job.yaml", *arguments.split())
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert [path.name for path in folder.iterdir()] == ["job.yaml"]


def test_the_side_that_reaches_the_service_goes_on_and_the_other_writes_nothing(folder: Path) -> None:
    need_networks()

    def worlds(rank: int) -> list[int]:
        return [record["world_size"] for record in cluster.records(rank) if record["kind"] == "run"]

    options = ["--set", "epochs=100000", "--set", "checkpoint.every_steps=20"]
    with Cluster(
        folder / "job.yaml", 3, folder / "out", {"HORIZONML_TEST": str(folder)}, options, None, True
    ) as cluster:
        wait_for(lambda: all(len(cluster.records(rank)) > 50 for rank in range(3)), "the first steps")
        cluster.partition(2)
        cut = time.time()
        wait_for(lambda: worlds(0)[-1] == 2, "the others going on")
        together, wanted = time.time(), len(cluster.records(0)) + 50
        wait_for(lambda: len(cluster.records(0)) > wanted, "steps of the others")
        healed = time.time()
        cluster.heal(2)
        wait_for(lambda: worlds(0)[-1] == 3 and worlds(2)[-1] == 3, "all three together again")
        alone = [record for record in cluster.records(2) if "lr" in record and cut + 1 < record["time"] < healed]
        assert not alone, "a rank that reaches nobody has made steps"
        assert any("lr" in record and together < record["time"] < healed for record in cluster.records(0))
        assert worlds(0) == [3, 2, 3], "a group fell apart that nothing was done to"
        latest = json.loads((max(cluster.run_folder.glob("checkpoints/step-*")) / "checkpoint.json").read_text())
        assert latest["generation"] >= 2
    assert cluster.hung == []
    assert "Traceback" not in "".join(cluster.log(rank).read_text() for rank in range(3))
