"""Predicts what the parts of a step cost; the search and the simulation use no other formulas.

The costs are the seconds of layers, of messages between stages, of sums of gradients and of updates, and the bytes of
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horizonml.plan.actions import Action, most_bytes_held
from horizonml.plan.gradients import BUCKET_BYTES, in_buckets
from horizonml.plan.plan import FORMATS, Plan, Stage, Sync
from horizonml.planner.hardware import Link, Size
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Profile

_HALF = (Sync.FP16, Sync.HOROVOD_FP16)


class LayerTimes:
    """Predicts the seconds of consecutive layers on each rank's device, on a dedicated core, and caches them."""

    def __init__(self, profiles: Sequence[Profile]) -> None:
        """Prepare predictions from `profiles[r]`, that of rank r's device; ranks with the same one share the cache."""
        first: dict[int, int] = {}
        self._profiles = profiles
        self._alike = [first.setdefault(id(profile), rank) for rank, profile in enumerate(profiles)]
        self._known: dict[tuple[int, int], tuple[list[float], list[float]]] = {}

    def passes(self, rank: int, start: int, stop: int, rows: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of layers `start` to `stop - 1`."""
        if rows == 0:
            return 0.0, 0.0
        forward, backward = self.sums(rank, rows)
        return forward[stop] - forward[start], backward[stop] - backward[start]

    def sums(self, rank: int, rows: int) -> tuple[list[float], list[float]]:
        """Return the forward and backward seconds of the first 0, 1, ... layers for `rows` samples."""
        key = self._alike[rank], rows
        if key not in self._known:
            profile = self._profiles[rank]
            pairs = [profile.seconds(layer, rows) for layer in range(len(profile.layers))]
            forward = itertools.accumulate((pair[0] for pair in pairs), initial=0.0)
            backward = itertools.accumulate((pair[1] for pair in pairs), initial=0.0)
            self._known[key] = list(forward), list(backward)
        return self._known[key]


def message_bytes(profile: Profile, stop: int, send: str) -> float:
    """Return the bytes per sample that the stage before layer `stop` sends in the format `send`."""
    return profile.layers[stop - 1].output_bytes * FORMATS[send]


def gradient_message_bytes(profile: Profile, stop: int, send: str) -> float:
    """Return the bytes per sample that come back to the stage before layer `stop`."""
    return profile.layers[stop - 1].gradients * FORMATS[send]


def message_work(profile: Profile, size: float, send: str, messages: int, crossing: float = 0.0) -> float:
    """Return the processor's seconds to send or receive `size` bytes in `messages` messages, including coding.

    `crossing` of these bytes go to other machines, or come from them.
    """
    coding = size * profile.codec_seconds_per_byte.get(send, 0.0)
    carried = size * profile.transfer_seconds_per_byte + crossing * profile.crossing_seconds_per_byte
    return messages * profile.message_seconds + coding + FORMATS[send] * carried


def fastest_format(problem: Problem, sender: int, receiver: int) -> str:
    """Return the format in which a byte of float32 travels fastest from one rank to another, including coding."""
    formats = problem.constraints.formats
    if len(formats) == 1 or sender == receiver:
        return formats[0]
    bandwidth = problem.network.between(sender, receiver).bandwidth
    coding = [problem.profiles[rank].codec_seconds_per_byte for rank in (sender, receiver)]
    return min(formats, key=lambda name: FORMATS[name] / bandwidth + sum(costs.get(name, 0.0) for costs in coding))


def synced_bytes(problem: Problem, sync: Sync, start: int, stop: int) -> float:
    """Return the bytes of gradients of layers `start` to `stop - 1` that members sum, after compression."""
    if sync is Sync.POWERSGD and problem.powersgd_bytes:
        return float(sum(problem.powersgd_bytes[start:stop]))
    size = sum(layer.trained for layer in problem.profiles[0].layers[start:stop])
    return size / 2 if sync in _HALF else float(size)


def ring_seconds(members: int, size: Size, link: Link) -> Size:
    """Return the seconds that a ring of `members` takes to sum `size` bytes if `link` is its slowest link."""
    return 2 * (members - 1) * link.seconds(size / members)


def all_reduce_seconds(problem: Problem, ranks: Sequence[int], size: float) -> float:
    """Return the seconds that `ranks` take to sum `size` bytes along a ring.

    The slowest link or the slowest processor decides, because every member sends and receives nearly all of the bytes
    twice. A link within a machine is also work for its processor, for which the machine's other ranks have to wait. One
    to another machine is the work of two tunnels.
    """
    count = len(ranks)
    if count == 1:
        return 0.0
    links = [problem.network.between(rank, ranks[(place + 1) % count]) for place, rank in enumerate(ranks)]
    ring = ring_seconds(count, size, Link(max(link.latency for link in links), min(link.bandwidth for link in links)))
    moved = 4 * (count - 1) / count * size
    found, members = [ring], set(ranks)
    for host in problem.hosts:
        here = members.intersection(host.ranks)
        for rank in here:
            work = problem.profiles[rank].transfer_seconds_per_byte
            if problem.profiles[rank].crossing_seconds_per_byte:
                place = ranks.index(rank)
                far = sum(problem.apart(rank, ranks[(place + step) % count]) for step in (-1, 1))
                work += far / 2 * problem.profiles[rank].crossing_seconds_per_byte
            found.append(moved * work * host.oversubscription)
        if len(here) > 1:
            found.append(ring * host.oversubscription)
    return max(found)


@dataclass(frozen=True)
class LastBackward:
    """Tells when a member computes the last gradients of its stage, in seconds since the step began."""

    begin: float = 0.0
    end: float = 0.0


def reduced_at(problem: Problem, stage: Stage, last: Sequence[LastBackward], free: float) -> float:
    """Return when the gradients of a stage are summed: bucket by bucket, each once all members have its gradients.

    `last[i]` is the last backward pass of the stage's i-th member; before `free` the members are busy with another sum.
    """
    profile, span = problem.profiles[stage.ranks[0]], range(stage.start, stage.stop)
    done = max(one.end for one in last)
    if len(stage.ranks) == 1:
        return done
    # How far through its last backward pass a member is when a layer's gradients are ready; the same for all members.
    times = [profile.layers[layer].backward[-1] for layer in span]
    total, at = max(sum(times), 1e-12), free
    limit = float("inf") if stage.sync is Sync.POWERSGD else BUCKET_BYTES
    for bucket in in_buckets([profile.layers[layer].trained for layer in span], limit):
        if not any(profile.layers[span[index]].trained for index in bucket):
            continue
        part = sum(times[min(bucket) :]) / total
        ready = max(one.begin + part * (one.end - one.begin) for one in last)
        size = sum(synced_bytes(problem, stage.sync, span[index], span[index] + 1) for index in bucket)
        at = max(at, ready) + all_reduce_seconds(problem, stage.ranks, size)
    return max(at, done)


def trained_bytes(profile: Profile, stage: Stage) -> int:
    """Return the bytes of a stage's parameters that are trained."""
    return sum(layer.trained for layer in profile.layers[stage.start : stage.stop])


def memory_needed(problem: Problem, plan: Plan, lists: Mapping[int, Sequence[Action]]) -> dict[int, float]:
    """Return the bytes of parameters, gradients, optimizer state, activations and samples that each rank needs.

    `lists[r]` are the actions of rank r in a step with a full batch; ranks of one lane may share a list.
    """
    size = max(plan.micro_sizes(problem.batch_size, problem.batch_size))
    kept: dict[int, dict[int, int]] = {rank: {} for rank in lists}  # bytes of a micro-batch, by rank and stage
    memory = dict.fromkeys(lists, 0.0)
    for number, stage in enumerate(plan.stages):
        layers = problem.profiles[stage.ranks[0]].layers[stage.start : stage.stop]
        saved, parameters = sum(layer.saved_bytes for layer in layers), sum(layer.parameter_bytes for layer in layers)
        # Only what is trained has gradients, optimizer state, and a place in a bucket.
        copies = 1 + problem.optimizer_copies + (len(stage.ranks) > 1)
        trained = sum(layer.trained for layer in layers)
        for rank, (first, end) in zip(stage.ranks, stage.rows(size), strict=True):
            memory[rank] += parameters + trained * copies
            kept[rank][number] = (end - first) * saved
    held: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank, actions in lists.items():
        key = id(actions), tuple(kept[rank].values())
        if key not in held:
            held[key] = most_bytes_held(actions, kept[rank])
        memory[rank] += held[key] + problem.loading.held(*_rows_loaded(problem, plan, rank, size))
    return memory


def _rows_loaded(problem: Problem, plan: Plan, rank: int, size: int) -> tuple[int, int]:
    """Return of how many samples of a batch a rank reads inputs and targets; `size` is that of a micro-batch."""
    read = []
    for stage in (plan.stages[0], plan.stages[-1]):
        first, end = stage.rows(size)[stage.ranks.index(rank)] if rank in stage.ranks else (0, 0)
        read.append(min(problem.batch_size, (end - first) * plan.micro_batches))
    return read[0], read[1]
