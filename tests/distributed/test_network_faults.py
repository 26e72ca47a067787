"""Faults between devices with networks and disks of their own: machines that come back, and links that are cut."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonml.telemetry.log import read_lines
from tests.distributed.processes import wait_for
from tests.distributed.test_up import Output
from tests.netns import Lab
from tests.programs import need_networks

pytestmark = pytest.mark.slow


class Run:
    """A run of the digits whose ranks are on devices of their own; the service is on one more."""

    def __init__(self, lab: Lab, *options: str) -> None:
        self.lab, self.size, self.options = lab, len(lab.homes) - 1, options
        self.service = self._start(self.size, "rendezvous", "--host", "0.0.0.0")
        self.service.says("rendezvous service on")
        self.ranks = [self.rank(number) for number in range(self.size)]

    def rank(self, number: int) -> Output:
        place = {"RANK": str(number), "WORLD_SIZE": str(self.size)}
        job = (f"parallel.workers={self.size}", "batch_size=32", "epochs=100000", *self.options)
        options = [part for setting in job for part in ("--set", setting)]
        service = f"{self.lab.addresses[self.size]}:29400"
        return self._start(number, "train", "digits", *options, HORIZONML_RENDEZVOUS=service, **place)

    def _start(self, device: int, *arguments: str, **extra: str) -> Output:
        started = self.lab.start(device, sys.executable, "-m", "horizonml", *arguments, HORIZONML_INSECURE="1", **extra)
        return Output(started)

    def step(self, number: int) -> int:
        """The last step that a rank has recorded."""
        file = self.lab.homes[number] / "runs" / "digits" / f"rank-{number}.jsonl"
        lines = read_lines(file) if file.exists() else []
        return max((line["step"] for line in lines if line["kind"] == "step"), default=0)

    def goes_on(self, *numbers: int) -> None:
        """Wait until ranks have done some more steps."""
        before = max(map(self.step, numbers))

        def further() -> bool:
            ended = [self.ranks[number].text for number in numbers if self.ranks[number].process.poll() is not None]
            assert not ended, "\n\n".join(ended)
            return all(self.step(number) > before + 5 for number in numbers)

        try:
            wait_for(further, "further steps")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n" + "\n".join(rank.text for rank in self.ranks)) from None

    def end(self) -> None:
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGTERM)
        codes = [rank.ends() for rank in self.ranks]
        assert codes == [0] * self.size, "\n\n".join(rank.text for rank in self.ranks)


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    need_networks()
    with Lab(tmp_path, request.param) as made:
        yield made


@pytest.mark.parametrize("lab", [5], indirect=True)
def test_survivors_wait_for_the_machines_whose_disks_they_need(lab: Lab) -> None:
    run = Run(lab, "parallel.strategy=pipeline", "checkpoint.every_steps=5")
    run.goes_on(0, 1, 2, 3)
    saved = [lab.homes[number] / "runs" / "digits" / "checkpoints" for number in range(4)]
    wait_for(lambda: all(list(folder.glob("step-*/checkpoint.json")) for folder in saved), "a checkpoint on all disks")
    for number in (0, 1):
        os.killpg(run.ranks[number].process.pid, signal.SIGKILL)
    run.ranks[2].says("waiting for device-0 at")
    assert "stage-0.safetensors is missing (kept by device-0 at" in run.ranks[2].text
    run.ranks[:2] = [run.rank(0), run.rank(1)]
    for rank in run.ranks[2:]:
        assert rank.process.poll() is None, rank.text
    run.ranks[0].says("resumed from step")
    run.goes_on(0, 1, 2, 3)
    run.end()


@pytest.mark.parametrize("lab", [4], indirect=True)
def test_one_of_two_ranks_that_do_not_reach_each_other_is_left_out_until_they_do(lab: Lab) -> None:
    run = Run(lab, "parallel.strategy=ddp")
    run.goes_on(0, 1, 2)

    def cut(*words: str) -> None:
        for one, other in ((1, 2), (2, 1)):
            lab.configure(one, " ".join(["ip neigh", words[0], lab.addresses[other], *words[1:], "dev cable"]))

    cut("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")  # frames go to nobody
    for number in (0, 1, 2):  # long before a step times out
        run.ranks[number].says("rank 2 on device-2 and rank 1 on device-1 do not reach each other", 30)
    run.goes_on(0, 1)
    assert run.ranks[0].text.count("going on with 2 of 3 ranks") == 1
    assert run.ranks[2].process.poll() is None

    before = run.step(2)
    cut("del")
    wait_for(lambda: run.step(2) > before + 5, "steps of the rank that was left out", 60)
    assert run.ranks[0].text.count("meeting the others again") == 1, "the rank that came back has cost nothing"
    run.end()
