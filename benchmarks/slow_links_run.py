"""One training of `benchmarks.slow_links`: ranks in networks of their own, with shaped cables whose bytes are counted.

Each rank has a core to itself (if there are as many) and one thread. The bytes are those that the ranks' network
interfaces have sent, whoever sent them: handshakes, encryption and the rendezvous are counted, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.accounting import read_records
from benchmarks.chaos.network import Networks
from benchmarks.slow_links_ways import TASKS, Way
from horizonml.machine.signals import LAUNCHER, launcher_name
from horizonml.security.token import TOKEN, make_token

ROOT = Path(__file__).resolve().parent.parent
HELPER_PORT = 29400  # of what runs at the switch: our rendezvous service, torchft's lighthouse
_LOOK_SECONDS = 0.1
_STALLED_SECONDS = 180.0  # without a step, after which a run has failed
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HORIZONML_TOGETHER", "HORIZONML_METRICS")


STOP = threading.Event()  # set when the study is interrupted: runs end at once


class Failed(Exception):
    """Says why a way cannot train."""


@dataclass(frozen=True)
class Wanted:
    """What to run: a way on a task from a seed, on links of `rate` Mbit/s (0: as fast as the machine).

    The run ends after `seconds` of training, if these are given, but not before `least` steps are done.
    """

    task: str
    way: Way
    seed: int
    rate: float
    seconds: float | None = None
    least: int = 0


def run(wanted: Wanted, folder: Path, python: str) -> dict[str, Any]:
    """Train, and return what was measured. Raises Failed with what a rank said."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    way = wanted.way
    with Networks(way.ranks) as networks, ExitStack() as started:
        if wanted.rate:
            for rank in range(way.ranks):
                networks.slow_down(rank, wanted.rate * 1e6)
        env = _environment(folder)
        ranks = [_rank(wanted, rank, networks, folder, python, env, started) for rank in range(-1, way.ranks)][1:]
        counted = _watch(wanted, [one for one in ranks if one is not None], networks, folder)
    records = read_records(_records(folder, way))
    return condense(wanted, records, counted)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {
        **kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "cable",
        TOKEN: make_token().text, LAUNCHER: launcher_name(), "HORIZONML_CACHE": str(folder.parent / "cache"),
    }  # fmt: skip


def _rank(
    wanted: Wanted, rank: int, networks: Networks, folder: Path, python: str, env: dict[str, str], started: ExitStack
) -> subprocess.Popen[bytes] | None:
    """Start a rank, or for -1 what runs at the switch; it is killed when the stack unwinds."""
    way, switch = wanted.way, f"{networks.address}:{HELPER_PORT}"
    world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(way.ranks), "HORIZONML_RENDEZVOUS": switch}
    if rank < 0:
        command = _helper(way, networks.address, python)
        if command is None:
            return None
        placed, world = networks.at_switch(command), {}
    elif way.peer is None:
        command = [sys.executable, "-m", "horizonml", "train", str(_job(wanted, folder))]
        placed = networks.at_rank(rank, _pinned(rank, command))
    else:
        config = {"task": wanted.task, "seed": wanted.seed, "peer": way.peer, "folder": str(folder), **way.options}
        config["every"] = TASKS[wanted.task].every
        script = [python if way.package else sys.executable, "-m", "benchmarks.slow_links_peers", json.dumps(config)]
        placed = networks.at_rank(rank, _pinned(rank, script))
    with (folder / f"{'switch' if rank < 0 else f'rank-{rank}'}.log").open("wb") as log:
        process = subprocess.Popen(
            placed, env={**env, **world}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    started.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started, whatever sessions that has made."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def _helper(way: Way, address: str, python: str) -> list[str] | None:
    """Return the command of what ranks need at the switch, beside the network itself."""
    if way.peer is None:
        return [sys.executable, "-m", "horizonml", "rendezvous", "--host", address, "--port", str(HELPER_PORT)]
    if way.package == "torchft":
        quick = ["--min_replicas", str(way.ranks), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        return [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"[::]:{HELPER_PORT}", *quick]
    return None


def _pinned(rank: int, command: list[str]) -> list[str]:
    """Return the command on a core of its own, so that a rank is a device with one core."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(cores[rank % len(cores)]), *command]


def _job(wanted: Wanted, folder: Path) -> Path:
    """Write the job file of one of our own ways, and return it."""
    path = folder / "job.yaml"
    path.write_text(json.dumps(job_of(wanted, folder / "run")))
    return path


def job_of(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Return the job of one of our own ways, whose run lies in a folder."""
    job: dict[str, Any] = json.loads(json.dumps(TASKS[wanted.task].job))
    settings = {"seed": wanted.seed, "folder": str(folder)}
    settings |= {"parallel.threads": 1, "parallel.workers": wanted.way.ranks}
    for name, value in (settings | wanted.way.settings).items():
        place = job
        *sections, last = name.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = dict(value) if isinstance(value, dict) else value
    if wanted.way.local:
        job["parallel"]["sync"]["every"] = TASKS[wanted.task].every
    return job


def _watch(
    wanted: Wanted, ranks: list[subprocess.Popen[bytes]], networks: Networks, folder: Path
) -> list[tuple[float, int]]:
    """Wait until the ranks have trained enough; return what the ranks had sent, in bytes, again and again."""
    counted: list[tuple[float, int]] = []
    first = moved = time.monotonic()
    steps, records = 0, _records(folder, wanted.way)
    while not STOP.is_set():
        counted.append((time.time(), sum(networks.sent_bytes(rank) for rank in range(wanted.way.ranks))))
        for rank, process in enumerate(ranks):
            if process.poll() not in (None, 0):
                raise Failed(f"rank {rank} ended with code {process.returncode}:\n{_said(folder, rank)}")
        if ranks[0].poll() == 0:
            break
        done = _steps(records)
        if done > steps:
            first, moved = (time.monotonic() if steps == 0 else first), time.monotonic()
            steps = done
        if time.monotonic() - moved > _STALLED_SECONDS:
            raise Failed(f"no step for {_STALLED_SECONDS:.0f} s:\n{_said(folder, 0)}")
        if wanted.seconds is not None and steps >= wanted.least and time.monotonic() - first > wanted.seconds:
            break
        time.sleep(_LOOK_SECONDS)
    return counted


def _records(folder: Path, way: Way) -> Path:
    """Return the file of rank 0's records."""
    return (folder / "run" if way.peer is None else folder) / "rank-0.jsonl"


def _steps(path: Path) -> int:
    """Return how many steps are recorded."""
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


def _said(folder: Path, rank: int) -> str:
    text = (folder / f"rank-{rank}.log").read_text(errors="replace")
    return "\n".join(text.splitlines()[-12:])


def condense(wanted: Wanted, records: list[dict[str, Any]], counted: list[tuple[float, int]]) -> dict[str, Any]:
    """Return what counts of a run's records and of the bytes on its cables."""
    steps = [one for one in records if one["kind"] == "step"]
    evaluations = [one for one in records if one["kind"] == "evaluation"]
    if not steps:
        raise Failed("no step was recorded")
    began = steps[0]["time"] - steps[0]["wall"]
    paused = {one["step"]: one["seconds"] for one in evaluations}

    def trained(count: int) -> float:
        """The seconds until so many steps were done, without the evaluations between them."""
        return float(steps[count - 1]["time"] - began - sum(s for at, s in paused.items() if at < count))

    skip, cycle = min(wanted.way.skip(wanted.task), len(steps) - 1), wanted.way.cycle(wanted.task)
    last = skip + (len(steps) - skip) // cycle * cycle if len(steps) - skip >= cycle else len(steps)
    batch = TASKS[wanted.task].job["batch_size"]
    total = TASKS[wanted.task].job["steps"]
    whole = steps[-1]["step"] >= total
    until = len(steps) if whole else last
    sent = _sent(counted, counted[-1][0] if whole else steps[last - 1]["time"]) - _sent(counted, began)
    messages = [one for one in records if one["kind"] == "run"]
    return {
        "task": wanted.task,
        "way": wanted.way.name,
        "seed": wanted.seed,
        "rate": wanted.rate,
        "steps": len(steps),
        "whole": whole,
        "seconds": trained(len(steps)),
        "skipped_steps": skip,
        "skipped_seconds": trained(skip),
        "step_seconds": (trained(last) - trained(skip)) / (last - skip),
        "bytes_per_sample": sent / (until * batch),
        "start_bytes": _sent(counted, began),
        "accuracies": {str(one["step"]): one["accuracy"] for one in evaluations},
        "reached": {str(one["step"]): trained(one["step"]) for one in evaluations if one["step"] <= len(steps)},
        "plan": messages[-1].get("plan") if messages else None,
    }


def _sent(counted: list[tuple[float, int]], at: float) -> int:
    """Return the bytes that had been sent at a time."""
    return counted[max(0, bisect_right(counted, at, key=lambda one: one[0]) - 1)][1]
