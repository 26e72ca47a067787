"""Unplugs the machine of `horizonml up`, and measures what that costs the others: python -m benchmarks.outlive.

Each device has a network namespace and a folder of its own. The first runs `horizonml up`, so it has the rendezvous
service and rank 0; the others join it. In each round its cable is pulled, without a trace: no connection is closed.
The others elect another service and go on; then the cable is plugged in again, and the device is taken in once more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.accounting import read_records
from benchmarks.chaos.network import Networks
from horizonml.errors import HorizonError
from horizonml.machine.code import python_module
from horizonml.security.token import TOKEN, make_token

ENDLESS = ["--set", "epochs=1000000", "--set", "checkpoint.every_steps=1000000"]
_DEADLINE_SECONDS = 120.0
_BEFORE_STEPS, _BEFORE_SECONDS, _AFTER_SECONDS = 20, 5.0, 8.0


@dataclass(frozen=True)
class Round:
    """What pulling the cable once has cost those who were left."""

    gap_seconds: float  # the longest time between two steps of any of them
    repeated: int  # steps that any of them has done more than once
    back_seconds: float  # until the device trained with them again, once its cable was back


class House:
    """Some devices that train together; used as a context manager, it ends them."""

    def __init__(self, devices: int, folder: Path, train: int | None = None) -> None:
        """Let the first device begin a run, and the others join it, or as many of them that so many `train`."""
        train = train or devices
        self._undo = ExitStack()
        self.networks = self._undo.enter_context(Networks(devices))
        self._folder = folder
        self._env = {**os.environ, TOKEN: make_token().text, "OMP_NUM_THREADS": "1"}
        for name in ("HORIZONML_RENDEZVOUS", "GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE"):
            self._env.pop(name, None)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command_of_up = ["up", "digits", "--workers", str(train), *ENDLESS]
        self.start(0, self.command_of_up)
        try:
            self.wait_for(lambda: "take part" in (self.home(0) / "log").read_text(), "a service to join")
            for device in range(1, train):
                self.join(device, self.networks.address_of(0))
        except BaseException:
            self.__exit__()
            raise

    def join(self, device: int, peer: str | None = None) -> None:
        """Let a device join the run at another one, or look for it on its network."""
        self.start(device, ["join", "--accept-data", *(["--peer", peer] if peer is not None else [])])

    def __enter__(self) -> House:
        return self

    def __exit__(self, *details: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._undo.close()

    def records(self, device: int) -> list[dict[str, Any]]:
        """Return what a device has recorded, whichever rank it has had."""
        found = [
            record
            for path in sorted(self.home(device).glob("runs/digits/rank-*.jsonl"))
            for record in read_records(path)
        ]
        return sorted(found, key=lambda record: float(record.get("time", 0.0)))

    def steps(self, device: int) -> list[dict[str, Any]]:
        """Return the steps of a device."""
        return [record for record in self.records(device) if record["kind"] == "step"]

    def size(self, device: int) -> int:
        """Return how many ranks were in the last group of a device."""
        return next((int(one["world_size"]) for one in reversed(self.records(device)) if one["kind"] == "run"), 0)

    def home(self, device: int) -> Path:
        """Return a device's folder."""
        return self._folder / f"device-{device}"

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Return after how many seconds something was so. Raises HorizonError if it is not in time."""
        begin = time.monotonic()
        while not condition():
            gone = [device for device, process in enumerate(self.processes) if process.poll() is not None]
            if gone or time.monotonic() - begin > _DEADLINE_SECONDS:
                said = "".join(
                    f"--- device {device}\n{(self.home(device) / 'log').read_text()[-3000:]}"
                    for device in gone or range(len(self.processes))
                )
                raise HorizonError(f"{what}: not within {_DEADLINE_SECONDS:.0f} s; ended: {gone or 'none'}\n{said}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def start(self, device: int, words: list[str], again: bool = False) -> None:
        """Start a command of HorizonML on a device, perhaps once `again`."""
        self.home(device).mkdir(parents=True, exist_ok=again)
        with (self.home(device) / "log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    self.networks.at_rank(device, python_module("horizonml", *words)),
                    cwd=self.home(device),
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )


def one_round(house: House, devices: int) -> Round:
    """Pull the first device's cable and plug it in again, and return what that has cost."""
    others = range(1, devices)
    counts = [len(house.steps(device)) for device in others]
    house.wait_for(
        lambda: all(len(house.steps(d)) > before + _BEFORE_STEPS for d, before in zip(others, counts, strict=True)),
        "steps of all devices",
    )
    time.sleep(_BEFORE_SECONDS)
    pulled = time.time()
    house.networks.cut(0)
    house.wait_for(lambda: all(house.size(device) == devices - 1 for device in others), "a group of the others")
    time.sleep(_AFTER_SECONDS)
    house.networks.mend(0)
    back = house.wait_for(lambda: all(house.size(device) == devices for device in others), "the device being back")
    gaps, repeated = [], 0
    for device in others:
        times = [float(one["time"]) for one in house.steps(device) if float(one["time"]) > pulled - 1.0]
        gaps.append(max(after - before for before, after in pairwise(times)))
        done = [int(one["step"]) for one in house.steps(device)]
        repeated = max(repeated, len(done) - len(set(done)))
    return Round(max(gaps), repeated, back)


def main() -> None:
    """Measure, and print the rounds as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="devices, the first of which is unplugged (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--folder", type=Path, help="where devices keep their runs and logs (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.devices < 3:
        parser.error("--devices: two devices have no majority without the first one; take 3 or more")
    rounds = list[Round]()
    with (
        tempfile.TemporaryDirectory() as scratch,
        House(arguments.devices, arguments.folder or Path(scratch)) as house,
    ):
        for number in range(arguments.rounds):
            one = one_round(house, arguments.devices)
            rounds.append(one)
            if not arguments.json:
                print(
                    f"round {number + 1}: no step for {one.gap_seconds:.1f} s, {one.repeated} repeated; back "
                    f"{one.back_seconds:.1f} s after the cable",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps([asdict(one) for one in rounds]))


if __name__ == "__main__":
    try:
        main()
    except HorizonError as error:
        sys.exit(f"error: {error}")
