"""Faults injected into a training on this machine, and what each costs: `python -m benchmarks.faults kill --plan ddp`.

- kill: kill -9 of each rank in turn; seconds until the survivors step again without it, and how many steps they repeat
- silent: a rank is stopped by SIGSTOP, and its connections stay; seconds until noticed, and until the others step again
- cut: a rank is cut off from the network (a namespace of its own), and no connection is closed; the same is measured
- replace: a replacement starts 3 s after the kill; seconds from its start until all step again
- join: a rank returns once the others step without it; how long they stand still for it
- grow: the same for one more rank than the job began with
- goodput: a kill every 30 s, each rank restarted at once; samples per second against those before and after
- finish: the same until so many steps are done; the seconds that this takes, and that it would take without faults
- soak: faults of all kinds for hours, on devices with networks and disks of their own (see `benchmarks.soak`)
- mirror: the cost of mirroring state to another rank's memory while nothing is lost, switched on and off in turn

The model is ResNet-18 at 32 px on the embedded digits, with one thread for each rank. Every round has a cluster of its
own. Results are printed, and written as JSON, from which `python -m benchmarks.faults_table` makes the README's table.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import soak
from benchmarks.faults_cluster import BATCH_SIZE, Cluster, HorizonML, NeverHappened, wait_for
from benchmarks.faults_peers import Torchft, Torchrun
from benchmarks.faults_read import Trace, gaps, progress, repeated_steps, window
from benchmarks.faults_table import show, summary, text
from benchmarks.harness import machine
from horizonml.errors import HorizonError
from horizonml.files import write_atomically

START_SECONDS = 120.0  # for all ranks to step after their start
WARM_UP_SECONDS = 4.0
REPLACED_AFTER = 3.0
_LOOK_SECONDS = 1.0  # between two looks at how far the ranks have come
Round = dict[str, Any]  # what one round has measured; a number that never came is None


@contextmanager
def stepping(options: argparse.Namespace, *settings: str) -> Iterator[Cluster]:
    """A new cluster, all of whose ranks have trained for a little while."""
    with tempfile.TemporaryDirectory(prefix="horizonml-faults-") as scratch:
        folder = Path(scratch)
        made: Cluster
        if options.library == "horizonml":
            isolated = options.fault == "cut" or bool(options.link)
            made = HorizonML(folder, options.ranks, options.plan, [*options.set, *settings], isolated)
        else:
            peers: dict[str, Callable[..., Cluster]] = {"torchrun": Torchrun, "torchft": Torchft}
            made = peers[options.library](folder, options.ranks, options.python)
        with made as cluster:
            problem = _in_vain("all ranks step", lambda: _trains(cluster), START_SECONDS)
            if problem is not None:
                raise SystemExit(f"{problem}; rank 0 said:\n{cluster.said(0)}")
            time.sleep(WARM_UP_SECONDS)
            yield cluster


def _trains(cluster: Cluster) -> bool:
    """Whether all ranks have stepped together. Raises SystemExit if one has ended instead."""
    for rank in cluster.ranks:
        if not cluster.alive(rank):
            raise SystemExit(f"rank {rank} has ended before it trained; it said:\n{cluster.said(rank)}")
    return all(trace.again(0.0, cluster.world_size) for trace in cluster.traces())


def kill(options: argparse.Namespace, number: int) -> Round:
    """Kill a rank, stop it, or cut it off, and see the others go on."""
    with stepping(options) as cluster:
        victim = number % options.ranks
        time.sleep(random.Random(number).uniform(0, 2))
        inject = {"kill": cluster.kill, "silent": cluster.pause, "cut": cluster.cut}[options.fault]
        before, at = max(seen.step for seen in cluster.trace(victim).steps), time.time()
        inject(victim)
        others = [rank for rank in cluster.ranks if rank != victim]

        def caught_up() -> bool:
            """Whether all others have stepped without the victim, and are where they were."""
            traces = [cluster.trace(rank) for rank in others]
            return all(trace.again(at) and trace.steps[-1].step > before for trace in traces)

        problem = _in_vain("the others step again", caught_up, options.deadline)
        if problem is not None:
            print(f"rank {others[0]} said:\n{cluster.said(others[0])}", flush=True)
        time.sleep(1.5)  # records reach the disk within a second
        traces = [cluster.trace(rank) for rank in others]
        return {
            "rank": victim,
            "noticed": _latest([trace.noticed(at) for trace in traces], at),
            "again": _latest([trace.again(at) for trace in traces], at),
            "repeated": max(repeated_steps([trace]) for trace in traces) if problem is None else None,
            "problem": problem,
        }


def replace(options: argparse.Namespace, number: int) -> Round:
    """Kill a rank, start its replacement 3 s later, and see all of them step."""
    with stepping(options) as cluster:
        victim = number % options.ranks
        cluster.kill(victim)
        time.sleep(REPLACED_AFTER)
        at = time.time()
        cluster.start(victim)
        return {"rank": victim, **_all_step(cluster, at, options.ranks, options)}


def join(options: argparse.Namespace, number: int) -> Round:
    """Let a rank return once the others step without it, and see how long they stand still for it."""
    with stepping(options) as cluster:
        joining = number % options.ranks
        others = [rank for rank in cluster.ranks if rank != joining]
        at = time.time()
        cluster.kill(joining)
        problem = _in_vain(
            "the others step again", lambda: all(cluster.trace(rank).again(at) for rank in others), options.deadline
        )
        if problem is not None:
            return {"rank": joining, "problem": problem}
        if options.link:
            cluster.slow(joining, options.link * 1e6)
        time.sleep(options.calm)
        return {"rank": joining, **_stall(cluster, others, lambda: cluster.start(joining), options.ranks, options)}


def grow(options: argparse.Namespace, number: int) -> Round:
    """Let one more rank join than the job began with, and see how long the others stand still for it."""
    del number
    with stepping(options, f"parallel.max_workers={options.ranks + 1}") as cluster:
        time.sleep(options.calm)
        others = list(cluster.ranks)
        return {"rank": options.ranks, **_stall(cluster, others, cluster.add, options.ranks + 1, options)}


def _stall(
    cluster: Cluster, others: list[int], enter: Callable[[], None], members: int, options: argparse.Namespace
) -> Round:
    """Let a rank enter, and see how long the others stand still for it."""
    at = time.time()
    enter()
    found = _all_step(cluster, at, members, options)
    time.sleep(2.0)
    times = [[seen.time for seen in cluster.trace(rank).steps] for rank in others]
    end = at + (found["all"] or options.deadline) + 1
    calm = [gap for one in times for gap in gaps(one, at - options.calm + 1, at)]
    return {
        **found,
        "longest gap": max(gap for one in times for gap in gaps(one, at, end)),
        "longest gap before": max(calm),
        "median step": statistics.median(calm),
    }


def goodput(options: argparse.Namespace, number: int) -> Round:
    """Kill a rank at regular times and restart it at once; compare with the time before and after."""
    del number
    with stepping(options) as cluster:
        begin = time.time()
        time.sleep(options.reference)
        faulted = time.time()
        kills, restarts = _churn(cluster, options, lambda: time.time() > faulted + options.seconds)
        calm = time.time()
        problem = _in_vain(
            "all step again", lambda: all(trace.again(faulted, options.ranks) for trace in cluster.traces()),
            options.deadline,
        )  # fmt: skip
        time.sleep(WARM_UP_SECONDS)
        after = time.time()
        time.sleep(options.reference + 1.5)
        traces = cluster.traces()
    parts = [(begin, faulted), (faulted, calm), (after, after + options.reference)]
    before, during, later = (window(traces, *part) for part in parts)
    reference = (before.worked_per_second + later.worked_per_second) / 2
    return {
        "goodput": during.gained_per_second / reference,
        "kills": kills,
        "restarts": restarts,
        "repeated": during.repeated,
        "steps": during.steps,
        "stalled": during.stalled / during.seconds,
        "before": before.to_json(),
        "during": during.to_json(),
        "after": later.to_json(),
        "problem": problem,
    }


def finish(options: argparse.Namespace, number: int) -> Round:
    """Kill a rank at regular times and restart it at once, until the samples of so many steps are trained on.

    Samples are counted, because a library may go on with smaller batches while a rank is missing.
    """
    del number
    with stepping(options) as cluster:
        begin = time.time()
        time.sleep(options.reference)
        traces, faulted = cluster.traces(), time.time()
        usual, wanted = window(traces, begin, faulted), options.steps * BATCH_SIZE

        def over() -> bool:
            done = _worked(cluster.traces(), faulted)
            return bool(done and done[-1][1] >= wanted) or time.time() > faulted + options.seconds

        kills, _ = _churn(cluster, options, over)
        traces = cluster.traces()
    done = _worked(traces, faulted)
    return {
        "steps": min(options.steps, done[-1][1] // BATCH_SIZE if done else 0),
        "took": next((when - faulted for when, samples in done if samples >= wanted), None),
        "without": wanted / usual.worked_per_second,
        "kills": kills,
        "repeated": repeated_steps(traces),
    }


def _worked(traces: list[Trace], since: float) -> list[tuple[float, int]]:
    """When each step ended, and on how many samples was trained by then, each step counted once."""
    seen = [one for one in progress(traces) if one.time > since]
    return list(zip((one.time for one in seen), accumulate(one.batch for one in seen), strict=True))


def _churn(cluster: Cluster, options: argparse.Namespace, over: Callable[[], bool]) -> tuple[int, int]:
    """Kill a rank every so many seconds and restart it at once; return how many were killed, and restarted."""
    begin, kills, restarts = time.time(), 0, 0
    while not over():
        until = time.time() + _LOOK_SECONDS
        while time.time() < until:
            time.sleep(0.1)
            if kills * options.every < time.time() - begin:
                cluster.kill(kills % options.ranks)
                kills += 1
            for rank in cluster.ranks:
                if not cluster.alive(rank):
                    cluster.start(rank)
                    restarts += 1
    return kills, restarts


def mirror(options: argparse.Namespace, number: int) -> Round:
    """Train with and without mirroring, in an order that changes from round to round."""
    found: Round = {"rank": "-"}
    for on in (True, False) if number % 2 else (False, True):
        with stepping(options, f"recovery.mirrors={int(on)}") as cluster:
            begin = time.time()
            time.sleep(options.reference + 1.5)
            seen = window([cluster.trace(0)], begin, begin + options.reference)
        found["with" if on else "without"] = BATCH_SIZE / seen.worked_per_second
    return {**found, "cost": found["with"] / found["without"] - 1}


def _all_step(cluster: Cluster, since: float, members: int, options: argparse.Namespace) -> Round:
    """Wait until all ranks step in a group of so many, and say how long that took."""

    def times() -> list[float | None]:
        return [cluster.trace(rank).again(since, members) for rank in range(members)]

    problem = _in_vain("all step again", lambda: None not in times(), options.deadline)
    return {"all": _latest(times(), since), "problem": problem}


def _in_vain(what: str, condition: Callable[[], bool], deadline: float) -> str | None:
    """Wait for the condition; what to say if it never came."""
    try:
        wait_for(what, condition, deadline)
    except NeverHappened as error:
        return str(error)
    return None


def _latest(times: list[float | None], since: float) -> float | None:
    """Seconds until the last of the times, if all are known."""
    known = [time for time in times if time is not None]
    return max(known) - since if known and len(known) == len(times) else None


FAULTS = {
    "kill": kill,
    "silent": kill,
    "cut": kill,
    "replace": replace,
    "join": join,
    "grow": grow,
    "goodput": goodput,
    "finish": finish,
    "mirror": mirror,
}


def main() -> None:
    """Measure one fault, print it and write it."""
    if sys.argv[1:2] == ["soak"]:
        try:
            soak.main(sys.argv[2:])
        except HorizonError as error:
            sys.exit(f"error: {error}")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--plan", choices=("ddp", "hybrid", "pipeline"), default="ddp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="default: 5; 1 for goodput and finish")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds after which a round has failed")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of faults, at most (goodput, finish)")
    parser.add_argument("--steps", type=int, default=3000, help="until which a rank is killed now and then (finish)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills (goodput, finish)")
    parser.add_argument(
        "--reference", type=float, default=30.0, help="seconds without faults (goodput, finish, mirror)"
    )
    parser.add_argument("--calm", type=float, default=8.0, help="seconds of calm before a rank comes (join, grow)")
    parser.add_argument("--link", type=float, help="Mbit/s of the link of the rank that comes (join)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job")
    parser.add_argument("--library", choices=("horizonml", "torchrun", "torchft"), default="horizonml")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has torchft")
    parser.add_argument("--label", help="column of the README's table: before, or (default) the library")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    if options.library != "horizonml" and (options.plan != "ddp" or options.fault in ("grow", "mirror")):
        parser.error(f"{options.library} has data parallelism only here, and neither grows nor mirrors")
    rounds = []
    for number in range(options.rounds or (1 if options.fault in ("goodput", "finish") else 5)):
        rounds.append(FAULTS[options.fault](options, number))
        told = [f"{key} {text(value)}" for key, value in rounds[-1].items() if not isinstance(value, dict)]
        print(f"round {number + 1}: " + ", ".join(told), flush=True)
    print("\n" + show(rounds))
    label = options.label or options.library
    about = {"fault": options.fault, "plan": options.plan, "ranks": options.ranks, "label": label}
    about |= {"deadline": options.deadline, "machine": machine()}
    result = {**about, "summary": summary(rounds), "rounds": rounds}
    path = options.out / f"{label}-{options.fault}-{options.plan}.json"
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    print(f"written to {path}")


if __name__ == "__main__":
    main()
