"""Predicts what the parts of a step cost, and local steps; the search and the simulation use no other formulas.

The costs are the seconds of layers, of messages between stages, of each way to sum gradients and of updates, and the
bytes of memory.

Members that take local steps do not wait for each other from one synchronisation to the next. Of each sum, only the
part that outlasts its delay is waited for, and it is divided among the steps in between. The processor time for
encoding and sending it is not hidden behind anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from horizonml.plan.local import FEWEST_SYNCHRONISATIONS, Local
from horizonml.plan.plan import Plan, Stage
from horizonml.plan.schedules import Action, most_bytes_held
from horizonml.plan.syncs import (
    BUCKET_BYTES,
    FORMATS,
    HEADED,
    TREE_BYTES,
    TREE_BYTES_ON_ONE_HOST,
    Sync,
    in_buckets,
    tree_messages,
)
from horizonml.planner.problem import Problem
from horizonml.planner.profile import MeasuredLink, Profile, Size


class LayerTimes:
    """Predicts the seconds of consecutive layers on each rank's device, on a dedicated core, and caches them."""

    def __init__(self, profiles: Sequence[Profile]) -> None:
        """Prepare predictions from `profiles[r]`, that of rank r's device; ranks with the same one share the cache."""
        first: dict[int, int] = {}
        self._profiles = profiles
        self._alike = [first.setdefault(id(profile), rank) for rank, profile in enumerate(profiles)]
        # Tuples, as the garbage collector need not look at their numbers again and again.
        self._known: dict[tuple[int, float], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def passes(self, rank: int, start: int, stop: int, rows: float) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of layers `start` to `stop - 1`."""
        if rows == 0:
            return 0.0, 0.0
        forward, backward = self.sums(rank, rows)
        return forward[stop] - forward[start], backward[stop] - backward[start]

    def sums(self, rank: int, rows: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the forward and backward seconds of the first 0, 1, ... layers for `rows` samples."""
        key = self._alike[rank], rows
        if key not in self._known:
            profile = self._profiles[rank]
            pairs = [profile.seconds(layer, rows) for layer in range(len(profile.layers))]
            forward = itertools.accumulate((pair[0] for pair in pairs), initial=0.0)
            backward = itertools.accumulate((pair[1] for pair in pairs), initial=0.0)
            self._known[key] = tuple(forward), tuple(backward)
        return self._known[key]


def message_bytes(profile: Profile, stop: int, send: str) -> float:
    """Return the bytes per sample that the stage before layer `stop` sends in the format `send`."""
    layer = profile.layers[stop - 1]
    return layer.coded[send][0] if send in layer.coded else layer.output_bytes * FORMATS[send].ratio


def gradient_message_bytes(profile: Profile, stop: int, send: str) -> float:
    """Return the bytes per sample that come back to the stage before layer `stop`."""
    layer = profile.layers[stop - 1]
    return layer.coded[send][1] if send in layer.coded else layer.gradients * FORMATS[send].ratio


def boundary_bytes(problem: Problem, stop: int, send: str) -> float:
    """Return the bytes that a sample takes in the format `send` across the cut before layer `stop`, both ways."""
    profile = problem.profiles[0]
    return message_bytes(profile, stop, send) + gradient_message_bytes(profile, stop, send)


def message_work(profile: Profile, size: float, send: str, messages: int, crossing: float = 0.0) -> float:
    """Return the processor's seconds to send or receive `size` bytes in `messages` messages, including coding.

    `crossing` of these bytes go to other machines, or come from them.
    """
    coding = size * profile.codec_seconds_per_byte.get(send, 0.0) + profile.codec_seconds_per_message.get(send, 0.0)
    carried = size * profile.transfer_seconds_per_byte + crossing * profile.crossing_seconds_per_byte
    if messages and size / messages * FORMATS[send].ratio >= HEADED:
        messages *= 2  # each has a header
    return messages * profile.message_seconds + coding + FORMATS[send].ratio * carried


def fastest_format(problem: Problem, sender: int, receiver: int) -> str:
    """Return the format in which a byte of float32 travels fastest from one rank to another, including coding."""
    formats = problem.constraints.formats
    if len(formats) == 1 or sender == receiver:
        return formats[0]
    bandwidth = problem.network.between(sender, receiver).bandwidth
    coding = [problem.profiles[rank].codec_seconds_per_byte for rank in (sender, receiver)]

    def seconds(name: str) -> float:
        return FORMATS[name].ratio / bandwidth + sum(costs.get(name, 0.0) for costs in coding)

    return min(formats, key=seconds)


def synced_bytes(problem: Problem, sync: Sync, start: int, stop: int) -> float:
    """Return the bytes of gradients of layers `start` to `stop - 1` that members sum, after compression."""
    if sync.name in problem.synced_bytes:
        return float(sum(problem.synced_bytes[sync.name][start:stop]))
    size = sum(layer.trained for layer in problem.profiles[0].layers[start:stop])
    return size * sync.ratio


def ring_seconds(members: int, size: Size, link: MeasuredLink) -> Size:
    """Return the seconds that a ring of `members` takes to sum `size` bytes if `link` is its slowest link."""
    return 2 * (members - 1) * link.seconds(size / members)


def slowest_link(problem: Problem, ranks: Sequence[int]) -> MeasuredLink:
    """Return a link as slow as the slowest ones along a ring of ranks."""
    return slowest_of(
        [problem.network.between(rank, ranks[(place + 1) % len(ranks)]) for place, rank in enumerate(ranks)]
    )


def slowest_of(links: Sequence[MeasuredLink]) -> MeasuredLink:
    """Return a link as slow as the slowest of some, in latency and in bandwidth."""
    return MeasuredLink(max(link.latency for link in links), min(link.bandwidth for link in links))


class Ring:
    """Predicts how long ranks take to sum bytes along a ring.

    The slowest link or the slowest processor decides, because every member sends and receives nearly all of the bytes
    twice. A link within a machine is also work for its processor, for which the machine's other ranks have to wait. One
    to another machine is the work of two tunnels.
    """

    def __init__(self, problem: Problem, ranks: Sequence[int]) -> None:
        """Find the slowest link and the slowest processor of a ring of `ranks`."""
        self._count = count = len(ranks)
        if count == 1:
            return
        self._slowest = slowest_link(problem, ranks)
        self._work, self._waiting = 0.0, 1.0  # seconds of a processor per byte; how often one works for one link
        self._taken: dict[int, float] = {}  # of the passes' own time, by rank
        members = set(ranks)
        for host in problem.hosts:
            here = [rank for rank in host.ranks if rank in members]
            for rank in here:
                work = problem.profiles[rank].transfer_seconds_per_byte
                if problem.profiles[rank].crossing_seconds_per_byte:
                    place = ranks.index(rank)
                    far = sum(problem.apart(rank, ranks[(place + step) % count]) for step in (-1, 1))
                    work += far / 2 * problem.profiles[rank].crossing_seconds_per_byte
                self._work = max(self._work, work * host.oversubscription)
                self._taken[rank] = 0.0 if host.cores > len(host.ranks) else work * problem.oversubscription[rank]
            if len(here) > 1:
                self._waiting = max(self._waiting, host.oversubscription)

    def seconds(self, size: float) -> float:
        """Return the seconds that the sum of `size` bytes takes."""
        if self._count == 1:
            return 0.0
        ring = ring_seconds(self._count, size, self._slowest)
        return max(ring * self._waiting, self._moved(size) * self._work)

    def taken(self, rank: int, size: float) -> float:
        """Return the seconds by which the sum of `size` bytes delays a rank's passes: all if no core is left for it."""
        return self._moved(size) * self._taken[rank] if self._count > 1 else 0.0

    def _moved(self, size: float) -> float:
        """Return the bytes that a member sends and receives for the sum of `size` bytes."""
        return 4 * (self._count - 1) / self._count * size


def coding_seconds(problem: Problem, sync: Sync, ranks: Sequence[int], size: float) -> float:
    """Return the seconds that the slowest member takes to encode and decode gradients of `size` bytes of float32."""
    if not sync.codings:
        return 0.0
    costs = (
        problem.profiles[rank].codec_seconds_per_byte.get(sync.codec, 0.0) * problem.oversubscription[rank]
        for rank in ranks
    )
    return sync.codings * size * max(costs)


@dataclass(frozen=True)
class LastBackward:
    """Tells when a member computes the last gradients of its stage, in seconds since the step began."""

    begin: float = 0.0
    end: float = 0.0


def reduced_at(problem: Problem, stage: Stage, last: Sequence[LastBackward], free: float) -> float:
    """Return when the gradients of a stage are summed: bucket by bucket, each once all members have its gradients.

    Sums run beside the last backward pass. Where they have no core for themselves, that takes so much longer.
    `last[i]` is the last backward pass of the stage's i-th member; before `free` the members are busy with another sum.
    """
    profile, span = problem.profiles[stage.ranks[0]], range(stage.start, stage.stop)
    done = max(one.end for one in last)
    if len(stage.ranks) == 1:
        return done
    # How far through its last backward pass a member is when a layer's gradients are ready; the same for all members.
    times = [profile.layers[layer].backward[-1] for layer in span]
    total, at, summed, ring = max(sum(times), 1e-12), free, 0.0, Ring(problem, stage.ranks)
    limit = BUCKET_BYTES if stage.sync.sums_in_buckets else float("inf")
    for bucket in in_buckets([profile.layers[layer].trained for layer in span], limit):
        if not any(profile.layers[span[index]].trained for index in bucket):
            continue
        part = sum(times[min(bucket) :]) / total
        ready = max(one.begin + part * (one.end - one.begin) for one in last)
        size = sum(synced_bytes(problem, stage.sync, span[index], span[index] + 1) for index in bucket)
        whole = sum(profile.layers[span[index]].trained for index in bucket)
        summed += size
        at = max(at, ready) + ring.seconds(size)
        at += coding_seconds(problem, stage.sync, stage.ranks, whole)
    return max(at, *(one.end + ring.taken(rank, summed) for rank, one in zip(stage.ranks, last, strict=True)))


def trained_bytes(profile: Profile, stage: Stage) -> int:
    """Return the bytes of a stage's parameters that are trained."""
    return sum(layer.trained for layer in profile.layers[stage.start : stage.stop])


def copies_for_sync(plan: Plan, stage: Stage) -> float:
    """Return how many numbers a member keeps for each trained parameter so that the stage's members can agree.

    Gradients lie in buckets. What is sent in fewer bits leaves an error, which is kept to be sent with the next: that
    of a member's own numbers, and that of the sums that it makes for the others. Members that take local steps instead
    keep the parameters of their last agreement, the outer momentum, what is on its way, and what that leads to.
    """
    members = len(stage.ranks)
    if members == 1:
        return 0.0
    if not stage.sync.steps_alone:
        own, summed = stage.sync.remainders
        return 1 + own + summed / members
    if plan.local is None:
        return 2.0
    under_way = 1 / plan.local.fragments
    return 2 + 4 * under_way + {"int4": 1 + 1 / members, "topk": 1 + 2 * under_way}.get(plan.local.format, 0.0)


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
        copies = 1 + problem.optimizer_copies + copies_for_sync(plan, stage)
        trained = sum(layer.trained for layer in layers)
        for rank, rows in zip(stage.ranks, most_rows(stage, size), strict=True):
            memory[rank] += parameters + trained * copies
            kept[rank][number] = rows * saved
    held: dict[tuple[int, tuple[int, ...]], int] = {}
    loaded = _rows_loaded(problem, plan, size)
    for rank, actions in lists.items():
        key = id(actions), tuple(kept[rank].values())
        if key not in held:
            held[key] = most_bytes_held(actions, kept[rank])
        memory[rank] += held[key] + problem.loading.held(*(rows.get(rank, 0) for rows in loaded))
    return memory


def most_rows(stage: Stage, size: int) -> list[int]:
    """Return of how many rows of a micro-batch of `size` each member of a stage keeps activations at a time, at most.

    A member that takes local steps collects rows until it has an equal part of a batch, or divides what it has more.
    """
    if not stage.sync.steps_alone:
        return [end - first for first, end in stage.rows(size)]
    parts = [pace * math.ceil(1 / pace) if 0 < pace < 1 else pace / max(1, math.floor(pace)) for pace in stage.paces]
    return [math.ceil(part * size / len(stage.ranks)) for part in parts]


def _rows_loaded(problem: Problem, plan: Plan, size: int) -> tuple[dict[int, int], dict[int, int]]:
    """Return of how many samples of a batch each rank reads inputs and targets; `size` is that of a micro-batch."""
    first, last = (
        {
            rank: min(problem.batch_size, (end - begin) * plan.micro_batches)
            for rank, (begin, end) in zip(stage.ranks, stage.rows(size), strict=True)
        }
        for stage in (plan.stages[0], plan.stages[-1])
    )
    return first, last


def syncs_of(problem: Problem) -> tuple[Sync, ...]:
    """Return the ways in which the members of a stage may sum, the most precise first."""
    return (problem.constraints.sync, *problem.constraints.syncs)


def fastest_sync(problem: Problem, start: int, stop: int, ranks: Sequence[int]) -> Sync:
    """Return the way in which `ranks` sum the gradients of layers `start` to `stop - 1` fastest."""
    syncs = syncs_of(problem)
    if len(ranks) == 1:
        return Sync.ALL_REDUCE
    if len(syncs) == 1:
        return syncs[0]
    slowest = slowest_link(problem, ranks)
    whole = synced_bytes(problem, Sync.ALL_REDUCE, start, stop)

    def seconds(sync: Sync) -> float:
        size = synced_bytes(problem, sync, start, stop)
        return ring_seconds(len(ranks), size, slowest) + coding_seconds(problem, sync, ranks, whole)

    return min(syncs, key=seconds)


def is_lossy(stage: Stage) -> bool:
    """Return whether the members of a stage agree in a way that is not exact."""
    return len(stage.ranks) > 1 and not stage.sync.exact


_MOST = 0.05  # of a step: members agree as seldom as it takes for that to cost no more
_FORMATS = ("fp32", "int4")  # of outer gradients, the most precise first
_SPARSE = "topk"  # what is tried last, and only with seldom synchronisations
_SPARSE_RATIO = 116 / 16384  # of float32, that each member sends to each other one
_SPARSE_EVERY = 16
_FRAGMENTS = (1, 4)
_DELAYS = (0, 1, 2, 4)


def outer_ratio(local: Local, members: int) -> float:
    """Return the bytes of outer gradients relative to those of float32, as if all were summed along a ring."""
    if local.format == _SPARSE:  # all members receive those of all others, and add them up
        return _SPARSE_RATIO * members / 2
    return FORMATS[local.format].ratio


def outer_bytes(problem: Problem, plan: Plan, stage: Stage) -> float:
    """Return the bytes of outer gradients of a stage that members sum, on average over the steps."""
    if plan.local is None or len(stage.ranks) == 1:
        return 0.0
    ratio = outer_ratio(plan.local, len(stage.ranks)) / plan.local.every
    return trained_bytes(problem.profiles[stage.ranks[0]], stage) * ratio


def summed_bytes(problem: Problem, plan: Plan, stage: Stage) -> list[float]:
    """Return the bytes that each member of a stage sends in a step, on average, so that the members agree."""
    count = len(stage.ranks)
    if count == 1 or stage.splits_channels:
        return [0.0] * count
    if stage.sync.steps_alone:
        size = outer_bytes(problem, plan, stage)
    else:
        size = synced_bytes(problem, stage.sync, stage.start, stage.stop)
    here = {problem.host_of[rank] for rank in stage.ranks}
    tree = TREE_BYTES_ON_ONE_HOST if len(here) == 1 else TREE_BYTES
    if stage.sync.sums_along_trees and math.isfinite(size) and size <= tree:
        return [size * tree_messages(place, count) for place in range(count)]
    return [2 * (count - 1) / count * size] * count


def fragment_bytes(problem: Problem, stage: Stage, fragments: int) -> list[float]:
    """Return the bytes of the parameters of each fragment of a stage: consecutive layers, as even as layers allow."""
    sizes = [layer.trained for layer in problem.profiles[stage.ranks[0]].layers[stage.start : stage.stop]]
    found, before, total = [0.0] * fragments, 0, sum(sizes)
    for size in sizes:
        if size:
            found[min(fragments - 1, int(fragments * (before + size / 2) / total))] += size
        before += size
    return found


def outer_cost(problem: Problem, plan: Plan, computing: float) -> tuple[float, float]:
    """Return what the synchronisations of local steps add to a step that takes `computing` seconds without them.

    That is waiting for what outlasts the delay, and the processor's seconds for coding, and for sending and receiving
    what does not outlast it.
    """
    local = plan.local
    if local is None:
        return 0.0, 0.0
    waiting = processor = 0.0
    for stage in plan.stages:
        count = len(stage.ranks)
        if count == 1:
            continue
        whole = trained_bytes(problem.profiles[stage.ranks[0]], stage)
        ratio, most = outer_ratio(local, count), local.delay * computing
        parts = [size * ratio for size in fragment_bytes(problem, stage, local.fragments) if size]
        ring = Ring(problem, stage.ranks)
        times = [ring.seconds(size) for size in parts]
        left = sum(max(0.0, seconds - most) for seconds in times)
        moved, hidden = 4 * (count - 1) / count * whole * ratio, 1 - left / max(sum(times), 1e-12)
        work = 0.0
        for rank in stage.ranks:
            profile = problem.profiles[rank]
            codings = Sync.INT4.codings if local.format != _SPARSE else 2 + count
            coding = codings * whole * profile.codec_seconds_per_byte.get(local.format, 0.0)
            carried = hidden * moved * (profile.transfer_seconds_per_byte + profile.crossing_seconds_per_byte)
            work = max(work, (coding + carried) * problem.oversubscription[rank])
        waiting, processor = max(waiting, left), max(processor, work)
    return waiting / local.every, processor / local.every


def gentlest(problem: Problem, plan: Plan, computing: float) -> Local | None:
    """Return the local steps that stay closest to training in step, among those whose sums cost little of a step.

    They synchronise as often as that allows; then as precisely; then with as little delay. Most of what members send is
    left out only if that saves as much. If all of them cost more, return those that cost least, or None if the
    constraints allow none. `computing` is what a step of the plan takes without synchronisations.
    """
    found = [(sum(outer_cost(problem, replace(plan, local=local), computing)), local) for local in _choices(problem)]
    most, chosen = _MOST * computing, None
    for is_sparse in (False, True):
        own = [one for one in found if (one[1].format == _SPARSE) == is_sparse]
        best = next((one for one in own if one[0] <= most), min(own, key=lambda one: one[0], default=None))
        if best is not None and (chosen is None or best[0] < chosen[0] - most):
            chosen = best
    return chosen[1] if chosen is not None else None


def _choices(problem: Problem) -> Iterator[Local]:
    """Yield the local steps that the constraints allow, those first that stay closest to training in step."""
    constraints = problem.constraints
    if constraints.local is not None:
        yield constraints.local
        return
    steps = problem.objective.steps  # of the run, if that is known
    allowed = [every for every in constraints.every if not steps or every * FEWEST_SYNCHRONISATIONS <= steps]
    formats = list(itertools.product(allowed, _FORMATS))
    formats += [(every, _SPARSE) for every in allowed if every >= _SPARSE_EVERY]
    for every, format in formats:
        for fragments, delay in itertools.product(_FRAGMENTS, _DELAYS):
            if fragments <= min(problem.layers, every) and delay < every // fragments:
                yield Local(every, fragments, delay, format)
