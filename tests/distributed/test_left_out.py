"""Devices that a plan for time leaves out: they wait while the others train, and step in when these are lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import wait_for
from tests.distributed.test_up import Devices
from tests.netns import Lab
from tests.programs import need_networks

pytestmark = pytest.mark.slow

JOB = """
name: digits
epochs: 5000
batch_size: 64
data: {name: digits}
parallel: {strategy: auto, workers: 3}
checkpoint: {every_steps: 100}
"""


@pytest.mark.longest
def test_a_device_that_is_left_out_trains_when_the_one_that_worked_is_lost(tmp_path: Path) -> None:
    """One device alone trains this small network faster than three with such links, on a busy machine, too."""
    need_networks()
    with Lab(tmp_path, 3) as lab:
        devices = Devices(lab)
        for device, home in enumerate(lab.homes):
            (home / "job.yaml").write_text(JOB)
            lab.slow_down(device, 4e6)
        lab.start(0, sys.executable, "-m", "horizonml", "rendezvous", "--host", "0.0.0.0", "--port", "29400")
        address = f"{lab.addresses[0]}:29400"
        ranks = [
            devices.start(n, "train", "job.yaml", RANK=str(n), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=address)
            for n in range(3)
        ]
        wait_for(lambda: len(devices.records(0, 0, "step")) > 400, "four hundred steps, and some checkpoints")
        planning = json.loads((lab.homes[0] / "runs/digits/planning.json").read_text())
        assert len(planning["plan"]["spare"]) == 2
        assert any(one.startswith("Left out ") for one in planning["reasons"])
        working = planning["plan"]["stages"][0]["ranks"][0]
        others = [rank for rank in range(3) if rank != working]
        assert all("is left out by this plan, and waits" in ranks[rank].text for rank in others if rank)

        ranks[working].process.kill()
        left = others[0]
        wait_for(lambda: devices.records(left, left, "run")[-1]["world_size"] == 2, "a group of two")
        again = devices.records(left, left, "run")[-1]
        assert again["resumed_at"] >= 200, "the state was lost with the only rank that used it"
