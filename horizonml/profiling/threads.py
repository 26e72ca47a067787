"""Chooses how many threads a rank computes with, by trying several numbers.

More threads are not always faster. The layers of small networks finish before all threads have begun, and where other
programs compete for the cores, every layer waits for the most delayed thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from horizonml.comm.expected import optional, whole
from horizonml.comm.group import Group
from horizonml.engine.split_backward import backward
from horizonml.errors import is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.code import where
from horizonml.machine.host import processor_name
from horizonml.machine.resources import OtherWork, available_cores, threads_per_rank
from horizonml.models.boundary import Boundary, flat
from horizonml.models.zoo import Model
from horizonml.planner.profile import Host
from horizonml.profiling import kept

_log = logging.getLogger(__name__)
_MOST_THREADS = 4096
_FORMAT = 1
_REPEATS = 3
_MOST_ROWS = 64
_BUDGET_SECONDS = 2.5  # layers that have not been tried by then do not count
_WATCH_SECONDS = 0.2  # how long the use of the processor by other programs is measured
_BUSY = 0.25  # of the cores that a rank may use
_WORTH = 0.9  # more threads must reduce the time to this part


def choose_threads(job: Job, model: Model, group: Group, here: Host) -> int:
    """Return the number of threads for this rank; all ranks must call this together.

    The first rank on a machine decides for the other ranks on it while they wait, so that all of them use the same
    number. With one core or less for each rank there is nothing to decide.
    """
    most = threads_per_rank(here.cores, len(here.ranks))
    own = None
    if group.rank == here.ranks[0]:
        rows = max(2, min(_MOST_ROWS, job.batch_size // group.world_size))
        rows = 1 << (rows.bit_length() - 1)  # allows a group that loses a rank to find a cached answer
        own = 1 if most == 1 else _remembered(model, rows, most)
    return group.gather_json(own, optional(whole(1, _MOST_THREADS)))[here.ranks[0]] or 1


def _remembered(model: Model, rows: int, most: int) -> int:
    """Return the choice for this model on this device, from the cache if it was made before.

    Results depend in their last bits on the number of threads, so the choice for a run must not change because two
    numbers were equally fast. A busy device has a choice of its own.
    """
    others = OtherWork()
    time.sleep(_WATCH_SECONDS)
    key = {
        "format": _FORMAT,
        "device": processor_name(),
        "torch": torch.__version__,
        "waiting": {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")},
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "rows": rows,
        "most": most,
        "busy": others.cores_taken() > _BUSY * available_cores(),
    }
    threads = kept.read("threads", key).get("threads")
    if isinstance(threads, int) and 1 <= threads <= most:
        return threads
    seconds = try_threads(model, rows, most)
    threads = fewest(seconds)
    kept.write("threads", key, {"threads": threads, "seconds": seconds})
    return threads


def fewest(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of threads from which no larger number gains much."""
    chosen = min(seconds)
    for threads in sorted(seconds):
        if seconds[threads] < _WORTH * seconds[chosen]:
            chosen = threads
    return chosen


def try_threads(model: Model, rows: int, most: int) -> dict[int, float]:
    """Return the seconds of a forward and backward pass of `rows` samples with 1, 2, 4, ... `most` threads.

    Layers are tried one at a time, each as a new module, so that the model to train does not change.
    """
    before = torch.get_num_threads()
    candidates = sorted({*(1 << power for power in range(most.bit_length())), most})
    totals = dict.fromkeys(candidates, 0.0)
    deadline = time.perf_counter() + _BUDGET_SECONDS
    try:
        with torch.random.fork_rng(devices=[]):
            for index in _spread(len(model.chain)):
                if time.perf_counter() > deadline:
                    break
                for threads, seconds in _try(model, index, rows, candidates, deadline):
                    totals[threads] += seconds
    finally:
        torch.set_num_threads(before)
    return totals


def _try(model: Model, index: int, rows: int, candidates: list[int], deadline: float) -> list[tuple[int, float]]:
    """Return the seconds of a layer with each number of threads, or of the whole model if it does not run in layers.

    A plan that does not cut the model needs no layers that run by themselves.
    """
    try:
        return list(
            _try_layer(model.stage(index, index + 1).train(), model.chain.boundaries[index], rows, candidates, deadline)
        )
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        _log.info("the whole model is run to choose the number of threads: %s", where(error))
    whole = model.stage(0, len(model.chain)).train()
    return list(_try_layer(whole, model.chain.boundaries[0], rows, candidates, deadline))


def _try_layer(
    layer: nn.Module, boundary: Boundary, rows: int, candidates: list[int], deadline: float
) -> Iterator[tuple[int, float]]:
    """Yield the seconds of a layer with each number of threads.

    The numbers take turns, because other programs come and go.
    """
    entered = boundary.example(rows)
    times: dict[int, list[float]] = {threads: [] for threads in candidates}
    for turn in range(1 + _REPEATS):
        if turn > 1 and time.perf_counter() > deadline:
            break
        for threads in candidates:
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            left = tuple(value for value in flat(layer(*entered)) if value.requires_grad)
            if left:
                backward(left, tuple(torch.ones_like(value) for value in left))
            if turn:  # the first turn warms up
                times[threads].append(time.perf_counter() - begin)
    for threads, seconds in times.items():
        yield threads, kept.usual(seconds)


def _spread(count: int) -> list[int]:
    """Return the numbers below `count`, ordered so that the first few are spread over all: 0, 4, 2, 6, 1, 3, 5, 7."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
