"""How long the planner searches, and how good its plans are: `python -m benchmarks.planning`.

It plans on paper for random clusters, whose fastest device is ten times as fast as the slowest, and whose links have 25
to 250 Mbit/s. The layers are those of real models, measured on this machine once and kept in the folder `--out`.

- `speed`: what a search takes, and the step that it predicts, for 5, 100 and 1,000 devices: for an exact plan, for one
  that may carry fewer bits (`exact: false`), and for one that takes the least energy
- `quality`: the steps predicted for many clusters, written to a file; `--against FILE` compares with those of another
  version, measured with the same folder
- `profile`: where the time of a search goes, by function
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from horizonml.comm.group import Group
from horizonml.job.jobfile import from_values
from horizonml.plan.spec import Parallel
from horizonml.plan.syncs import SYNCS
from horizonml.planner.choose import with_objective
from horizonml.planner.devices import read_profile, write_profile
from horizonml.planner.problem import Objective, Problem, Watts
from horizonml.planner.profile import Host, Network, Profile
from horizonml.planner.search import search
from horizonml.planner.strategies import constraints_of
from horizonml.profiling.measure import cached_profile
from horizonml.runtime.agreement import describe_together, profile_key, synced_bytes

MODELS = {"resnet18": 32, "mobilenet_v3_small": 64}  # and the size of their images
SAMPLES_PER_DEVICE = 8
ASKED = ("exact", "inexact", "energy")

Measured = tuple[Profile, dict[str, list[int]]]


def profile_of(name: str, folder: Path) -> Measured:
    """Return the profile of a model on one core of this machine, which is measured once, and the bytes of its sums."""
    data = {"name": "synthetic", "image_size": MODELS[name], "samples": 256}
    job = from_values({"name": "planning", "model": {"name": name}, "batch_size": 64, "data": data}, "planning")
    _, model = describe_together(job, Group(None, 0, 1, 60.0))
    path = folder / f"{name}.yaml"
    if not path.exists():
        torch.set_num_threads(1)
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(cached_profile(model, profile_key(job), 64, print), {}, path)
    return read_profile(path, model.chain.names), synced_bytes(model, SYNCS.values())


def cluster(measured: Measured, seed: int, ranks: int, batch: int, asked: str = "exact") -> Problem:
    """Return unequal devices and links, drawn at random, for which a plan of a kind may be made."""
    draw, (profile, synced) = random.Random(seed), measured
    kinds = [profile.scaled(10 ** draw.uniform(0, 1)) for _ in range(min(ranks, 200))]
    profiles = [kinds[rank] if rank < len(kinds) else draw.choice(kinds) for rank in range(ranks)]
    hosts = [Host((rank,), 1.0, 10 ** draw.uniform(8.7, 9.9)) for rank in range(ranks)]
    access = tuple(10 ** draw.uniform(0.5, 1.5) * 1e6 for _ in range(ranks))
    network, constraints = (
        Network(1e-3, 125e6, access),
        constraints_of(Parallel(strategy="auto", exact=asked != "inexact"), ranks),
    )
    problem = Problem(profiles, hosts, network, batch, 1, 0, synced, constraints)
    if asked != "energy":
        return problem
    watts = [Watts(idle, idle + draw.uniform(2, 10)) for idle in (draw.uniform(1, 4) for _ in range(ranks))]
    return replace(problem, watts=watts, objective=Objective("energy"))


def speed(folder: Path, ranks: list[int]) -> None:
    """Print what searches take."""
    print(f"{'model':20} {'plan for':8} {'devices':>7} {'batch':>6} {'CPU':>8} {'plan':>24} {'step':>9}")
    for name, asked, count in itertools.product(MODELS, ASKED, ranks):
        problem = cluster(profile_of(name, folder), count, count, SAMPLES_PER_DEVICE * count, asked)
        began = time.process_time()
        found = with_objective(problem)
        took = time.process_time() - began
        shape = f"{len(found.plan.stages)} stages, {found.plan.micro_batches} micro"
        print(
            f"{name:20} {asked:8} {count:7} {problem.batch_size:6} {took:7.2f}s {shape:>24} "
            f"{found.prediction.seconds:8.3f}s",
            flush=True,
        )


def quality(folder: Path, out: Path, against: Path | None, seeds: dict[int, int]) -> None:
    """Write the predicted steps of many clusters, and compare them with those of another version."""
    found: dict[str, list[float]] = {}
    for name in MODELS:
        profile = profile_of(name, folder)
        for ranks, many in seeds.items():
            for seed in range(many):
                batch = random.Random(seed).choice((64, 320)) if ranks < 100 else SAMPLES_PER_DEVICE * ranks
                problem = cluster(profile, 1000 * ranks + seed, ranks, batch)
                began = time.process_time()
                seconds = search(problem).prediction.seconds
                found[f"{name} {ranks} {seed}"] = [seconds, time.process_time() - began]
            print(f"{name}, {ranks} devices: {many} clusters", flush=True)
    out.write_text(json.dumps(found, indent=1))
    if against is None:
        return
    before = json.loads(against.read_text())
    print(f"{'model':20} {'devices':>7} {'clusters':>8} {'median':>8} {'worst':>8} {'best':>8} {'worse':>6} {'CPU':>7}")
    for name in MODELS:
        for ranks in seeds:
            keys = [key for key in found if key.startswith(f"{name} {ranks} ") and key in before]
            ratios = [found[key][0] / before[key][0] for key in keys]
            work = statistics.median(found[key][1] / before[key][1] for key in keys)
            worse = sum(ratio > 1 + 1e-6 for ratio in ratios)
            print(
                f"{name:20} {ranks:7} {len(keys):8} {statistics.median(ratios):8.4f} {max(ratios):8.4f} "
                f"{min(ratios):8.4f} {worse:6} {work:6.2f}x"
            )


def profiled(folder: Path, name: str, asked: str, ranks: int) -> None:
    """Print the functions that take most of the time of a search."""
    problem = cluster(profile_of(name, folder), ranks, ranks, SAMPLES_PER_DEVICE * ranks, asked)
    profiler = cProfile.Profile()
    profiler.runcall(with_objective, problem)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "quality", "profile"), nargs="?", default="speed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 100, 1000])
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet18", help="of `profile`")
    parser.add_argument("--asked", choices=ASKED, default="exact", help="of `profile`")
    parser.add_argument("--seeds", type=int, nargs=3, default=[20, 10, 5], help="clusters of 5, 20 and 100 devices")
    parser.add_argument("--out", type=Path, default=Path("bench-planning"), help="folder for profiles and results")
    parser.add_argument("--as", dest="version", default="now", help="name of this version's file, NAME.json")
    parser.add_argument("--against", type=Path, help="the file of another version")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "speed":
        speed(arguments.out, arguments.ranks)
    elif arguments.what == "profile":
        profiled(arguments.out, arguments.model, arguments.asked, arguments.ranks[-1])
    else:
        seeds = dict(zip((5, 20, 100), arguments.seeds, strict=True))
        quality(arguments.out, arguments.out / f"{arguments.version}.json", arguments.against, seeds)


if __name__ == "__main__":
    main()
