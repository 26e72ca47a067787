"""The fastest plan for unequal devices and links: which layers, which members, which shares, how many micro-batches.

Devices are put into a few orders, and consecutive ones form a stage, as in Asteroid (MobiCom 2024, section 4.3). For
every number of micro-batches, dynamic programming over layers and devices finds the plans whose slowest stage is fast
(PipeDream's recurrence, SOSP 2019) and whose other stages, which have to be filled once, are short. The simulation then
judges the candidates, and the best are improved by small moves: a cut, a device at a boundary, the micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from horizonml.plan.plan import FORMATS, Plan, Stage
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile
from horizonml.planner.simulate import Prediction, predict

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
_MOST_BLOCKS = 48  # devices that the dynamic programme tells apart
_PRECISION_IS_WORTH = 0.02  # of a step's time
_SLACK = (1.0, 1.1, 1.3, 1.8, 3.0, np.inf)  # of the slowest stage above the best


@dataclass(frozen=True)
class Found:
    """A plan, and what it is predicted to cost."""

    plan: Plan
    prediction: Prediction
    too_few: bool = False  # a member would get fewer samples than its layers can train on, and more than none

    @property
    def cost(self) -> tuple[bool, float, float]:
        """What makes one better than another: that it can run; that nobody lacks memory, or less of it; its speed."""
        return self.too_few, max(self.prediction.lacking.values(), default=0.0), self.prediction.seconds


@dataclass
class Problem:
    """Devices, links and a model, for which plans are made.

    `profiles[r]` is that of rank r's device; `optimizer_copies` and `gradient_ratio` are as for `predict`; `formats`
    are those that may travel between stages, the most precise first. `last_batch` is the size of an epoch's last batch
    where that is smaller, else 0.
    """

    profiles: Sequence[Profile]
    hosts: Sequence[Host]
    network: Network
    batch_size: int
    optimizer_copies: int
    schedule: str = "1f1b"
    micro_batches: list[int] = field(default_factory=lambda: list(MICRO_BATCHES))
    formats: Sequence[str] = ("fp32",)
    gradient_ratio: float = 1.0
    last_batch: int = 0

    def __post_init__(self) -> None:
        self.micro_batches = [count for count in self.micro_batches if count <= self.batch_size]
        self.layers, self.ranks = len(self.profiles[0].layers), len(self.profiles)
        self.crowd = {rank: max(1.0, len(host.ranks) / host.cores) for host in self.hosts for rank in host.ranks}
        self.memory = {rank: host.memory for host in self.hosts for rank in host.ranks}
        self.evaluations = 0
        self._known: dict[Plan, Found] = {}
        self._stages: dict[tuple[int, int, tuple[int, ...], int], Stage] = {}
        self._sums: dict[tuple[int, int], list[float]] = {}

    def judge(self, plan: Plan) -> Found:
        """What a plan costs."""
        if plan not in self._known:
            self.evaluations += 1
            self._known[plan] = Found(
                plan,
                predict(
                    plan,
                    self.profiles,
                    self.batch_size,
                    self.hosts,
                    self.network,
                    self.optimizer_copies,
                    self.gradient_ratio,
                ),
                self._too_few(plan),
            )
        return self._known[plan]

    def _too_few(self, plan: Plan) -> bool:
        least = self.profiles[0].least_rows
        if least == 1:
            return False
        batches = [batch for batch in (self.batch_size, self.last_batch) if batch]
        sizes = {size for batch in batches for size in plan.micro_sizes(batch, self.batch_size)}
        return any(
            0 < end - first < least for stage in plan.stages for size in sizes for first, end in stage.rows(size)
        )

    def seconds(self, rank: int, start: int, stop: int, rows: int) -> float:
        """Forward and backward of layers `start` to `stop - 1` on a rank's device, its share of the cores included."""
        if rows == 0:
            return 0.0
        if (rank, rows) not in self._sums:
            profile = self.profiles[rank]
            times = [self.crowd[rank] * sum(profile.seconds(layer, rows)) for layer in range(self.layers)]
            self._sums[rank, rows] = list(itertools.accumulate(times, initial=0.0))
        sums = self._sums[rank, rows]
        return sums[stop] - sums[start]

    def stage(self, start: int, stop: int, ranks: Sequence[int], micro_batches: int) -> Stage:
        """A stage with the shares that let its members finish together; `ranks` in their order."""
        key = (start, stop, tuple(ranks), -(-self.batch_size // micro_batches))
        if key not in self._stages:
            shares = self._share_out(start, stop, ranks, key[3])
            self._stages[key] = Stage(start, stop, tuple(ranks), tuple(shares))
        return self._stages[key]

    def _share_out(self, start: int, stop: int, ranks: Sequence[int], rows: int) -> list[float]:
        """Rows of each rank: in proportion to its speed, then moved from the slowest to the fastest while it helps."""
        if len(ranks) == 1:
            return [1.0]
        fair = max(1, rows // len(ranks))
        speeds = [fair / max(1e-12, self.seconds(rank, start, stop, fair)) for rank in ranks]
        total = sum(speeds)
        ends = [round(rows * done / total) for done in itertools.accumulate(speeds)]
        own = [end - begin for begin, end in itertools.pairwise([0, *ends])]
        if len(ranks) <= 64:
            times = [self.seconds(rank, start, stop, count) for rank, count in zip(ranks, own, strict=True)]
            after = [self.seconds(rank, start, stop, count + 1) for rank, count in zip(ranks, own, strict=True)]
            for _ in range(4 * len(ranks)):
                slow = max(range(len(ranks)), key=times.__getitem__)
                fast = min((place for place in range(len(ranks)) if place != slow), key=after.__getitem__)
                if own[slow] == 0 or after[fast] >= times[slow]:
                    break
                for place, change in ((slow, -1), (fast, 1)):
                    own[place] += change
                    times[place] = self.seconds(ranks[place], start, stop, own[place])
                    after[place] = self.seconds(ranks[place], start, stop, own[place] + 1)
        least = self.profiles[0].least_rows
        for place, count in enumerate(own):
            if 0 < count < least:  # better none
                own[max(range(len(own)), key=own.__getitem__)] += count
                own[place] -= count
        # A member needs a share, if only for form: so small that it gets no rows.
        return [float(count) if count else 1e-9 for count in own]

    def plan(self, cuts: Sequence[int], groups: Sequence[Sequence[int]], micro_batches: int) -> Plan:
        """A plan whose stages begin at layer 0 and at the `cuts`, and send what takes least time."""
        bounds = [0, *cuts, self.layers]
        stages = [
            self.stage(start, stop, group, micro_batches)
            for (start, stop), group in zip(itertools.pairwise(bounds), groups, strict=True)
        ]
        for number, (stage, after) in enumerate(itertools.pairwise(stages)):
            stages[number] = replace(stage, send=self.fastest_format(stage.ranks[0], after.ranks[0]))
        return Plan(tuple(stages), self.schedule, micro_batches)

    def summed_bytes(self, start: int, stop: int) -> float:
        """What of the gradients of layers `start` to `stop - 1` is summed, compression included."""
        return self.gradient_ratio * sum(layer.parameter_bytes for layer in self.profiles[0].layers[start:stop])

    def fastest_format(self, sender: int, receiver: int) -> str:
        """The format in which a byte of float32 gets from one rank to another soonest, encoding included."""
        bandwidth = self.network.between(sender, receiver)[1]
        coding = [self.profiles[rank].codec_seconds_per_byte for rank in (sender, receiver)]
        return min(
            self.formats,
            key=lambda format: FORMATS[format] / bandwidth + sum(costs.get(format, 0.0) for costs in coding),
        )


def search(problem: Problem, evaluations: int | None = None) -> Found:
    """The best plan that is found within so many simulations (by default fewer, the more devices there are)."""
    budget = evaluations or max(60, 4000 // problem.ranks)
    plans = set(candidates(problem)) | set(_simple(problem))
    ranked = sorted(plans, key=lambda plan: _estimate(problem, plan))
    judged = sorted((problem.judge(plan) for plan in ranked[: max(8, budget // 3)]), key=lambda found: found.cost)
    starts: list[Found] = []  # the best few of each number of stages, with other groups of devices
    for found in judged:
        groups = [[stage.ranks for stage in one.plan.stages] for one in starts]
        alike = [one for one in starts if len(one.plan.stages) == len(found.plan.stages)]
        if len(alike) < 3 and [stage.ranks for stage in found.plan.stages] not in groups:
            starts.append(found)
    best = judged[0]
    for found in starts[: 10 if problem.ranks <= 16 else 3 if problem.ranks <= 64 else 1]:
        best = min(best, _improve(problem, found, budget), key=lambda one: one.cost)
    return _precise(problem, best)


def _precise(problem: Problem, found: Found) -> Found:
    """The same plan, which sends more precise formats wherever that costs next to nothing."""
    limit = found.prediction.seconds * (1 + _PRECISION_IS_WORTH)
    for number in range(len(found.plan.stages) - 1):
        stages = list(found.plan.stages)
        for format in problem.formats[: problem.formats.index(stages[number].send)]:
            stages[number] = replace(stages[number], send=format)
            other = problem.judge(replace(found.plan, stages=tuple(stages)))
            if other.prediction.seconds <= limit and len(other.prediction.lacking) <= len(found.prediction.lacking):
                found = other
                break
    return found


def data_parallel(problem: Problem) -> Plan:
    """Everybody holds all layers, equal shares."""
    ranks = tuple(range(problem.ranks))
    return Plan((Stage(0, problem.layers, ranks, (1.0,) * problem.ranks),), problem.schedule, 1)


def equal_split(problem: Problem, micro_batches: int) -> Plan | None:
    """A pipeline with the same number of layers for everybody; None with more ranks than layers."""
    if problem.ranks > problem.layers:
        return None
    bounds = [problem.layers * rank // problem.ranks for rank in range(problem.ranks + 1)]
    stages = tuple(Stage(bounds[r], bounds[r + 1], (r,), (1.0,)) for r in range(problem.ranks))
    return Plan(stages, problem.schedule, micro_batches)


def _simple(problem: Problem) -> Iterator[Plan]:
    """Plans that are good starting points whatever the devices."""
    ranks = list(range(problem.ranks))
    for micro_batches in problem.micro_batches[:1] + problem.micro_batches[3:4]:
        yield problem.plan([], [ranks], micro_batches)
    yield data_parallel(problem)


def orders(problem: Problem) -> list[list[int]]:
    """Orders of the devices, of which consecutive ones form stages."""
    ranks = list(range(problem.ranks))
    speed = {rank: problem.seconds(rank, 0, problem.layers, 8) for rank in ranks}
    link = {rank: max((problem.network.between(rank, other)[1] for other in ranks[:8] if other != rank), default=0.0)
            for rank in ranks}  # fmt: skip
    if problem.ranks <= 3:
        return [list(order) for order in itertools.permutations(ranks)]
    keys: list[Callable[[int], float]] = [lambda r: speed[r], lambda r: problem.memory[r], lambda r: link[r]]
    found = [ranks]
    for key in keys:
        found += [sorted(ranks, key=key), sorted(ranks, key=lambda r, key=key: -key(r))]  # type: ignore[misc]
    fast = sorted(ranks, key=lambda r: speed[r])
    found.append([*fast[::2], *fast[1::2][::-1]])  # the slow ones in the middle
    return [list(order) for order in dict.fromkeys(map(tuple, found))]


def candidates(problem: Problem) -> Iterator[Plan]:
    """Good plans by the dynamic programme: every order of devices and number of micro-batches, several of stages."""
    for order in orders(problem) if problem.ranks <= 200 else orders(problem)[:2]:
        blocks = [[int(rank) for rank in part] for part in np.array_split(order, min(len(order), _MOST_BLOCKS))]
        counts = problem.micro_batches if problem.ranks <= 16 else problem.micro_batches[::3]
        for micro_batches in counts:
            for cuts, ends in _programme(problem, blocks, micro_batches):
                bounds = [0, *ends]
                groups = [[rank for block in blocks[a:b] for rank in block] for a, b in itertools.pairwise(bounds)]
                yield problem.plan(cuts, groups, micro_batches)


def _programme(
    problem: Problem, blocks: Sequence[Sequence[int]], micro_batches: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Cuts and group ends of good plans: for each number of stages the one whose slowest stage is fastest; and those
    whose slowest stage is within some slack of the best of all, with the least to fill."""
    cost = _stage_costs(problem, blocks, micro_batches)
    most = min(problem.layers, len(blocks), 12 if problem.ranks <= 16 else 4)
    found = [_solve(cost, np.maximum, np.inf, stages) for stages in range(1, most + 1)]
    fastest = _solve(cost, np.maximum, np.inf)
    if fastest is None:
        return
    best = max(cost[stage] for stage in fastest)
    found += [_solve(cost, np.add, best * slack * (1 + 1e-9)) for slack in _SLACK]
    seen = set()
    for stages_ in found:
        if stages_ is None:
            continue
        cuts, ends = tuple(stop for _, stop, _, _ in stages_[:-1]), tuple(end for _, _, _, end in stages_)
        if (cuts, ends) not in seen:
            seen.add((cuts, ends))
            yield list(cuts), list(ends)


def _stage_costs(problem: Problem, blocks: Sequence[Sequence[int]], micro_batches: int) -> np.ndarray:
    """Seconds per micro-batch of every possible stage: first layer, end, first block, end (infinite: impossible).

    Computation of the slowest member, or the link behind it where that takes longer; and this micro-batch's part of the
    sum of gradients.
    """
    layers, count = problem.layers, len(blocks)
    rows = -(-problem.batch_size // micro_batches)
    cost = np.full((layers, layers + 1, count, count + 1), np.inf)
    typical = max(1, rows // max(1, problem.ranks // min(layers, problem.ranks)))
    members = np.concatenate([[0], np.cumsum([len(block) for block in blocks])])
    for start in range(layers):
        for stop in range(start + 1, layers + 1):
            seconds = [problem.seconds(block[0], start, stop, typical) * rows / typical for block in blocks]
            power = [len(block) / max(1e-12, time) for block, time in zip(blocks, seconds, strict=True)]
            total = np.concatenate([[0.0], np.cumsum(power)])
            size = problem.summed_bytes(start, stop)
            out = problem.profiles[0].layers[stop - 1].output_bytes * rows if stop < layers else 0
            for first in range(count):
                compute = 1.0 / (total[first + 1 :] - total[first])
                if problem.ranks <= 8:
                    ends = range(first + 1, count + 1)
                    compute = np.array([_slowest(problem, start, stop, blocks[first:end], rows) for end in ends])
                many = members[first + 1 :] - members[first]
                latency, bandwidth = problem.network.between(blocks[first][0], blocks[first - count + 1][0])
                reduce = np.where(many > 1, 2 * (many - 1) * (latency + size / many / bandwidth), 0.0)
                format = problem.fastest_format(blocks[first][0], blocks[first - count + 1][0])
                link = latency + out * FORMATS[format] / bandwidth if stop < layers else 0.0
                cost[start, stop, first, first + 1 :] = np.maximum(compute, link) + reduce / micro_batches
    return cost


def _slowest(problem: Problem, start: int, stop: int, blocks: Sequence[Sequence[int]], rows: int) -> float:
    """Seconds of the slowest of some ranks that share a stage as well as they can."""
    micro_batches = problem.batch_size // rows
    stage = problem.stage(start, stop, [rank for block in blocks for rank in block], micro_batches)
    parts = stage.parts(rows)
    return max(problem.seconds(rank, start, stop, b - a) for rank, (a, b) in zip(stage.ranks, parts, strict=True))


def _solve(
    cost: np.ndarray,
    join: Callable[[np.ndarray, np.ndarray], np.ndarray],
    limit: float,
    stages: int | None = None,
) -> list[tuple[int, int, int, int]] | None:
    """The stages that cover all layers and blocks with the least joined cost, none of them above `limit`.

    Exactly so many `stages`, or any number; None if there is no such way.
    """
    layers, count = cost.shape[0], cost.shape[2]
    allowed = np.where(cost <= limit, cost, np.inf)
    table = [np.full((layers + 1, count + 1), np.inf)]
    table[0][0, 0] = 0.0
    came: list[dict[tuple[int, int], tuple[int, int]]] = [{}]
    for _ in range(stages or 1):
        before = table[-1]
        best = before.copy() if stages is None else np.full_like(before, np.inf)
        source = best if stages is None else before  # with any number, a stage may follow one found in this round
        steps: dict[tuple[int, int], tuple[int, int]] = {}
        for stop in range(1, layers + 1):
            for end in range(1, count + 1):
                joined = join(source[:stop, :end], allowed[:stop, stop, :end, end])
                start, first = divmod(int(np.argmin(joined)), end)
                if joined[start, first] < np.inf:
                    best[stop, end] = joined[start, first]
                    steps[stop, end] = (start, first)
        table.append(best)
        came.append(steps)
    if not np.isfinite(table[-1][layers, count]):
        return None
    found, here, level = [], (layers, count), len(came) - 1
    while here != (0, 0):
        origin = came[level][here]
        found.append((origin[0], here[0], origin[1], here[1]))
        here, level = origin, level if stages is None else level - 1
    return found[::-1]


def _estimate(problem: Problem, plan: Plan) -> float:
    """A closed formula's step time, to tell which candidates are worth a simulation (planner.md's dominant step)."""
    rows = -(-problem.batch_size // plan.micro_batches)
    times, after = [], 0.0
    for number, stage in enumerate(plan.stages):
        parts = stage.parts(rows)
        members = zip(stage.ranks, parts, strict=True)
        compute = max(problem.seconds(rank, stage.start, stage.stop, b - a) for rank, (a, b) in members)
        if len(stage.ranks) > 1:
            size = problem.summed_bytes(stage.start, stage.stop)
            latency, bandwidth = problem.network.between(stage.ranks[0], stage.ranks[1])
            after = max(after, 2 * (len(stage.ranks) - 1) * (latency + size / len(stage.ranks) / bandwidth))
        times.append(compute)
        if number + 1 < len(plan.stages):
            latency, bandwidth = problem.network.between(stage.ranks[0], plan.stages[number + 1].ranks[0])
            bytes_ = problem.profiles[0].layers[stage.stop - 1].output_bytes * FORMATS[stage.send] * rows
            times.append(2 * (latency + bytes_ / bandwidth / min(len(stage.ranks), 4)))
    slowest = max(times)
    return (plan.micro_batches - 1) * slowest + sum(times) + after


def _improve(problem: Problem, found: Found, budget: int) -> Found:
    """Make the best of small moves, again and again, until none helps."""
    best, end = found, problem.evaluations + budget // 3
    while True:
        before = best
        for plan in _moves(problem, best.plan):
            if problem.evaluations >= end:
                return best
            best = min(best, problem.judge(plan), key=lambda one: one.cost)
        if best is before:
            return best


def _moves(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans that differ from this one in a cut, a device or the number of micro-batches."""
    cuts = [stage.start for stage in plan.stages[1:]]
    groups = [list(stage.ranks) for stage in plan.stages]
    counts = problem.micro_batches
    place = counts.index(plan.micro_batches) if plan.micro_batches in counts else 0
    for near in (place - 1, place + 1, place + 2):
        if 0 <= near < len(counts):
            yield problem.plan(cuts, groups, counts[near])
    yield problem.plan(cuts, groups, plan.micro_batches)  # with the shares of this search
    for number in range(len(cuts)):
        lowest, highest = [0, *cuts][number] + 1, [*cuts, problem.layers][number + 1] - 1
        reach = 16 if problem.ranks <= 16 else 2
        for cut in range(max(lowest, cuts[number] - reach), min(highest, cuts[number] + reach) + 1):
            if cut != cuts[number]:
                yield problem.plan([*cuts[:number], cut, *cuts[number + 1 :]], groups, plan.micro_batches)
    if problem.ranks > 200:
        return
    for source, target in itertools.permutations(range(len(groups)), 2):
        for rank in groups[source] if problem.ranks <= 16 else groups[source][:1] + groups[source][-1:]:
            moved_groups = [[r for r in group if r != rank] for group in groups]
            moved_groups[target] = [*moved_groups[target], rank]
            if moved_groups[source]:
                yield problem.plan(cuts, moved_groups, plan.micro_batches)
            else:  # its stage ends with it: the neighbour takes the layers
                gone = source if source < len(cuts) else source - 1
                left = [cut for index, cut in enumerate(cuts) if index != gone]
                yield problem.plan(left, [group for group in moved_groups if group], plan.micro_batches)
    for one, other in itertools.combinations(range(len(groups)), 2):
        exchanged = list(groups)
        exchanged[one], exchanged[other] = groups[other], groups[one]
        for near in range(max(0, place - 2), min(len(counts), place + 3)):
            yield problem.plan(cuts, exchanged, counts[near])
        if problem.ranks > 16:
            continue
        for a, b in itertools.product(groups[one], groups[other]):
            swap = {a: b, b: a}
            yield problem.plan(cuts, [[swap.get(r, r) for r in group] for group in groups], plan.micro_batches)
    if problem.ranks <= 16:
        for number, group in enumerate(groups):  # a new stage from part of one
            start, stop = [0, *cuts][number], [*cuts, problem.layers][number]
            for cut in range(start + 1, stop):
                for rank in group if len(group) > 1 else ():
                    rest = [r for r in group if r != rank]
                    for pair in ([rank], rest), (rest, [rank]):
                        yield problem.plan(
                            [*cuts[:number], cut, *cuts[number:]],
                            [*groups[:number], *pair, *groups[number + 1 :]],
                            plan.micro_batches,
                        )
