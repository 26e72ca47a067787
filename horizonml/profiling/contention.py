"""Measures how much ranks of one machine slow one another down when they compute at the same time.

They share the caches and the memory's bandwidth, whatever their containers' quotas are. So a rank of each machine
trains the model, or as many layers as there is room for, first alone and then beside more and more of the others, and
compares the processor time that this takes. Waiting for a core is not in that: the planner simulates it. Layers that
wait for something else, such as a disk, do not wait longer for it: only the time in which they compute grows. Single
layers would not do, because what they leave behind is still in the caches when they need it again.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from horizonml.comm.expected import boolean, fields, items, number, optional
from horizonml.comm.group import Group
from horizonml.data.seeds import name_seed
from horizonml.engine.backward import backward
from horizonml.errors import PeerLost
from horizonml.files import cache_folder, write_atomically
from horizonml.machine.accelerator import computing
from horizonml.machine.host import processor_name
from horizonml.models.boundary import flat
from horizonml.models.zoo import Model
from horizonml.planner.hardware import Contention, Host
from horizonml.profiling.measure import has_quota

_FORMAT = 3
_ROWS = 64  # of a micro-batch, at most
_MOST_BYTES = 128 << 20  # of the parameters of the layers that are trained
_LOOPS = 2  # in which every rank of a level trains them once each
_ROUNDS = 2
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 2.0  # of a level, whatever the quotas are
_MOST_LEVELS = 6
_MOST_FACTOR = 20.0  # more than that is no contention

_log = logging.getLogger(__name__)
_read_curve = optional(items(fields(number, number)))


def crowds(hosts: Sequence[Host]) -> list[list[int]]:
    """Return the ranks of each machine that has several of them."""
    found: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host.machine or f" {place}", []).extend(host.ranks)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def turns(hosts: Sequence[Host]) -> list[list[int]]:
    """Return which ranks measure their devices at once: the first of each host, one host of each machine at a time."""
    found: list[list[int]] = []
    before: Counter[str] = Counter()
    for place, host in enumerate(hosts):
        name = host.machine or f" {place}"
        if before[name] == len(found):
            found.append([])
        found[before[name]].append(host.ranks[0])
        before[name] += 1
    return found


def levels(ranks: int) -> list[int]:
    """Return how many of a machine's ranks compute at once in each measurement: 1, all, and some numbers between."""
    between = set(range(2, ranks))
    if len(between) > _MOST_LEVELS - 2:
        steps = _MOST_LEVELS - 1
        between = {round(1 + (ranks - 1) * step / steps) for step in range(1, steps)}
    return sorted({1, *between, ranks})


def measure_contention(group: Group, hosts: Sequence[Host], model: Model, batch_size: int) -> list[Contention]:
    """Return the contention on each rank's machine, empty where a rank is alone; all ranks of the group call this."""
    found: list[Contention] = [()] * group.world_size
    # Ranks on accelerators do not compute with the cores of their machine.
    with_cores = group.gather_json(not computing().accelerates, boolean)
    machines = [ranks for ranks in crowds(hosts) if all(with_cores[rank] for rank in ranks)]
    if not machines:
        return found
    own = next((ranks for ranks in machines if group.rank in ranks), [])
    cores = {rank: host.demand for host in hosts for rank in host.ranks}
    rows = max(2, min(_ROWS, batch_size // group.world_size))
    path = _path(model, rows, [cores[rank] for rank in own])
    leads = [ranks[0] for ranks in machines]
    kept = group.gather_json(_kept(path) if group.rank in leads else None, _read_curve)
    if any(kept[lead] is None for lead in leads):
        measured = _measure(group, machines, own, cores, model, rows)
        if group.rank in leads:
            _keep(path, measured)
        kept = group.gather_json(measured if group.rank in leads else None, _read_curve)
    for ranks in machines:
        points = kept[ranks[0]]
        if points is None:
            raise PeerLost(f"rank {ranks[0]} did not send what it has measured")
        curve: Contention = ()
        for one, factor in sorted(points):  # more ranks cannot make it better, so what looks like that is noise
            curve += ((one, min(_MOST_FACTOR, max(curve[-1][1] if curve else 1.0, factor))),)
        for rank in ranks:
            found[rank] = curve
    return found


def with_contention(hosts: Sequence[Host], found: Sequence[Contention]) -> list[Host]:
    """Return the hosts with what was measured for their ranks."""
    return [replace(host, contention=found[host.ranks[0]]) for host in hosts]


def _measure(
    group: Group,
    machines: Sequence[Sequence[int]],
    own: Sequence[int],
    cores: dict[int, float],
    model: Model,
    rows: int,
) -> list[list[float]]:
    """Return this machine's curve: for each number of ranks that compute at once, the cores and the factor."""
    with torch.random.fork_rng(devices=[]):
        work = _Work(model, rows) if own else None
    alone = work.seconds() if work is not None else 0.0
    # Every rank computes until the slowest one has done its loops.
    wanted = group.gather_json(_LOOPS * alone / cores.get(group.rank, 1.0), number)
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, *wanted))
    counts = levels(len(own)) if own else []
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for turn in range(max(len(levels(len(ranks))) for ranks in machines)):
            group.barrier()
            if work is not None and turn < len(counts) and group.rank in own[: counts[turn]]:
                times[counts[turn]].append(work.repeat(seconds))
    medians = {count: statistics.median(found) for count, found in times.items() if found}
    first = medians.get(1, 0.0)
    if work is None or first <= 0:  # this rank is not the first on its machine, or its clock is too coarse
        return []
    computed = 1.0 if has_quota() else work.computed
    return [
        [sum(cores[rank] for rank in own[:count]), 1 + computed * (medians[count] / first - 1)]
        for count in counts
        if count in medians
    ]


class _Work:
    """Holds the first layers of a model, with inputs for them."""

    def __init__(self, model: Model, rows: int) -> None:
        size, stop = 0, 0
        for place in range(len(model.chain)):
            size += sum(parameter.nbytes for parameter in model.chain.slice(place, place + 1).parameters())
            if size > _MOST_BYTES and stop:
                break
            stop += 1
        self._layers = model.stage(0, stop).train()
        self._entered = model.chain.boundaries[0].example(rows)
        self.computed = 0.0  # the part of the time in which the layers compute, in the loop in which it was largest
        self.seconds()  # warms up
        self.computed = 0.0

    def seconds(self) -> float:
        """Return the processor's seconds to run the layers forward and backward once."""
        begun, start = time.perf_counter(), time.process_time()
        learned = tuple(value for value in flat(self._layers(*self._entered)) if value.requires_grad)
        if learned:
            backward(learned, tuple(torch.ones_like(value) for value in learned))
        seconds = time.process_time() - start
        self.computed = max(self.computed, min(1.0, seconds / max(1e-9, time.perf_counter() - begun)))
        return seconds

    def repeat(self, seconds: float) -> float:
        """Return the median of the processor's seconds over as many loops as there is time for, but at least one."""
        end, found = time.monotonic() + seconds, list[float]()
        while not found or time.monotonic() < end:
            found.append(self.seconds())
        return statistics.median(found)


def _path(model: Model, rows: int, cores: Sequence[float]) -> str:
    """Return the name under which the contention on this machine is kept, for this model and such ranks."""
    key = {
        "format": _FORMAT,
        "device": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "rows": rows,
        "cores": list(cores),
    }
    return f"{name_seed(0, json.dumps(key, sort_keys=True)):016x}.json"


def _kept(name: str) -> list[list[float]] | None:
    try:
        points = json.loads((cache_folder() / "contention" / name).read_text())["points"]
        return [[float(cores), float(factor)] for cores, factor in points] or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(name: str, curve: list[list[float]]) -> None:
    path = cache_folder() / "contention" / name
    try:
        write_atomically(path, json.dumps({"points": curve}).encode())
    except OSError as error:
        _log.info("the contention on this machine is not remembered: %s: %s", path, error.strerror or error)
