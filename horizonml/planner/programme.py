"""Finds which consecutive layers consecutive devices should take, by dynamic programming.

The recurrence is PipeDream's (SOSP 2019, section 3.1). Every constraint on stages restricts the stages that it may
join: a fixed group of ranks is a block that no stage may share with another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from horizonml.plan.plan import Stage, Sync
from horizonml.planner.cost import (
    coding_seconds,
    fastest_format,
    message_bytes,
    ring_seconds,
    slowest_of,
    synced_bytes,
    syncs_of,
)
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.profile import MeasuredLink, Network

_SLACK = (1.0, 1.1, 1.3, 1.8, 3.0, np.inf)  # limits on the slowest stage, relative to the best
_MOST_EXACT = 5000  # sets of ranks times pairs of layers, up to which shares are computed exactly
_MANY_RANKS = 16  # ranks, above which fewer numbers of stages are tried one by one
_MOST_STAGES = (12, 4)  # the largest number of stages tried by itself, with up to that many ranks and with more

StageBlocks = tuple[int, int, int, int]  # first layer, the one after the last; first block, the one after the last
Span = tuple[int, int]  # the first block of a stage, and the one after its last
# For every end of a stage, the first blocks that it may have, and the seconds of the stages between these and the end:
# `[first block's place, first layer, layer after the last]`.
StageCosts = Sequence[tuple[np.ndarray, np.ndarray]]
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Programme:
    """Finds good plans for a problem; what the orders of the devices share is computed once."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Prepare the search among the plans that the evaluator's problem allows."""
        self._evaluator, self._problem = evaluator, evaluator.problem
        self._exact: dict[tuple[frozenset[int], int], np.ndarray] = {}
        self._sums: dict[Sync, np.ndarray] = {}
        self._sent: dict[str, np.ndarray] = {}

    def splits(
        self, blocks: Sequence[Sequence[int]], micro_batches: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield cuts and group ends of good plans, whose groups of ranks are consecutive `blocks`.

        These are, for each number of stages, the plan whose slowest stage is fastest; and, for several limits on the
        slowest stage relative to the best, the plan that takes the least time to fill.
        """
        problem, count = self._problem, len(blocks)
        fewest = problem.constraints.fewest_stages(problem.ranks)
        highest = problem.constraints.highest_stages(problem.ranks, problem.layers)
        costs = self._stage_costs(blocks, micro_batches)
        fastest = _solve(costs, np.maximum)
        if fastest is None:
            return
        best = max(costs[end][1][list(costs[end][0]).index(first), start, stop] for start, stop, first, end in fastest)
        found: list[list[StageBlocks] | None] = [fastest]
        if fewest < count:  # otherwise every block is a stage
            most = min(highest, count, max(fewest, _MOST_STAGES[problem.ranks > _MANY_RANKS]))
            found += _solve_each(costs, np.maximum, most)[fewest - 1 :]
        found += [_solve(_below(costs, best * slack * (1 + 1e-9)), np.add) for slack in _SLACK]
        splits = {
            (tuple(stop for _, stop, _, _ in stages[:-1]), tuple(end for _, _, _, end in stages)): None
            for stages in found
            if stages is not None and fewest <= len(stages) <= highest
        }
        yield from splits

    def _stage_costs(self, blocks: Sequence[Sequence[int]], micro_batches: int) -> StageCosts:
        """Return the seconds per micro-batch of every stage that the constraints allow.

        They are the computation of the slowest member, or the time on the link behind it where that is longer, plus the
        micro-batch's part of the sum of gradients.
        """
        problem, layers, count = self._problem, self._problem.layers, len(blocks)
        rows = -(-problem.batch_size // micro_batches)
        impossible = np.tril(np.full((layers + 1, layers + 1), np.inf))
        fixed, speeds = problem.constraints.stages, self._speeds(blocks, rows)
        costs: list[dict[int, np.ndarray]] = [{} for _ in range(count + 1)]  # by end, then by first block
        rings = _Rings(problem.network, blocks)
        for first, end in _spans(self._evaluator, blocks):
            ranks = [rank for block in blocks[first:end] for rank in block]
            if fixed is not None or problem.constraints.ordered or len(ranks) == 1:
                cost = self._with_shares(ranks, fixed[first].shares if fixed else (1.0,) * len(ranks), rows)
            elif layers**2 << min(problem.ranks, 32) <= _MOST_EXACT:
                cost = self._with_best_shares(ranks, micro_batches, rows)
            else:  # shares in proportion to the devices' speeds are close enough
                cost = np.asarray(rows / (speeds[end] - speeds[first]))
            if end < count:
                cost = np.maximum(cost, self._sending(ranks[0], blocks[end][0], rows)[None, :])
            if len(ranks) > 1:
                ring = rings.slowest(first, end)
                syncs = (fixed[first].sync,) if fixed else syncs_of(problem)
                cost = cost + np.minimum.reduce([self._summing(ranks, sync, ring) for sync in syncs]) / micro_batches
            cost = cost + impossible
            if end < count:
                cost[:, layers] = np.inf  # the later stages need layers, too
            if first > 0:
                cost[0, :] = np.inf
            costs[end][first] = cost
        shape = (0, layers + 1, layers + 1)
        return [
            (np.array(list(found), dtype=int), np.stack(list(found.values())) if found else np.empty(shape))
            for found in costs
        ]

    def _sending(self, sender: int, receiver: int, rows: int) -> np.ndarray:
        """Return the seconds of a message to the next stage, by the layer at which that stage begins."""
        problem = self._problem
        link, send = problem.network.between(sender, receiver), fastest_format(problem, sender, receiver)
        if send not in self._sent:
            stops = range(1, problem.layers + 1)
            self._sent[send] = np.array([message_bytes(problem.profiles[0], stop, send) for stop in stops])
        return np.concatenate(([0.0], link.seconds(rows * self._sent[send])))

    def _summing(self, ranks: Sequence[int], sync: Sync, slowest: MeasuredLink) -> np.ndarray:
        """Return the seconds in which `ranks` sum the gradients of their stage, for all layers that it may have."""
        seconds = ring_seconds(len(ranks), self._summed(sync), slowest)
        coding = coding_seconds(self._problem, sync, ranks[:2], 1.0)
        return seconds + coding * self._summed(Sync.ALL_REDUCE) if coding else seconds

    def _summed(self, sync: Sync) -> np.ndarray:
        """Return the bytes of gradients that the members of a stage sum, for all layers that it may have."""
        if sync not in self._sums:
            totals = np.array([synced_bytes(self._problem, sync, 0, stop) for stop in range(self._problem.layers + 1)])
            self._sums[sync] = np.asarray(totals[None, :] - totals[:, None])
        return self._sums[sync]

    def _speeds(self, blocks: Sequence[Sequence[int]], rows: int) -> np.ndarray:
        """Return the rows per second of the first 0, 1, ... blocks together, for all layers that they may hold."""
        problem = self._problem
        typical = max(1, rows // max(1, problem.ranks // min(problem.layers, problem.ranks)))
        speeds = [len(block) * typical / np.maximum(self._alone(block[0], typical), 1e-12) for block in blocks]
        return np.cumsum([np.zeros_like(speeds[0]), *speeds], axis=0)

    def _with_shares(self, ranks: Sequence[int], shares: tuple[float, ...], rows: int) -> np.ndarray:
        """Return the seconds of the slowest of the ranks that share a stage, for all layers that it may have."""
        parts = Stage(0, self._problem.layers, tuple(ranks), shares).parts(rows)
        alone = [self._alone(rank, end - begin) for rank, (begin, end) in zip(ranks, parts, strict=True)]
        return np.asarray(np.maximum.reduce(alone))

    def _with_best_shares(self, ranks: Sequence[int], micro_batches: int, rows: int) -> np.ndarray:
        """Return the seconds of the slowest of the ranks if they share a stage in the best way."""
        key = frozenset(ranks), rows
        if key not in self._exact:
            members, layers = sorted(ranks), self._problem.layers
            exact = np.zeros((layers + 1, layers + 1))
            for start, stop in itertools.combinations(range(layers + 1), 2):
                stage = self._evaluator.stage(start, stop, members, micro_batches)
                exact[start, stop] = self._evaluator.slowest(stage, rows)
            self._exact[key] = exact
        return self._exact[key]

    def _alone(self, rank: int, rows: int) -> np.ndarray:
        """Return a rank's seconds for all layers that it may hold alone."""
        if rows == 0:
            return np.zeros((self._problem.layers + 1,) * 2)
        totals = np.array(self._evaluator.totals(rank, rows))
        return np.asarray(totals[None, :] - totals[:, None])


def _spans(evaluator: Evaluator, blocks: Sequence[Sequence[int]]) -> Iterator[Span]:
    """Yield the blocks that may form a stage."""
    problem, count = evaluator.problem, len(blocks)
    constraints = problem.constraints
    for first, end in itertools.combinations(range(count + 1), 2):
        if constraints.stages is not None and end - first > 1:
            continue
        members = sum(len(block) for block in blocks[first:end])
        if constraints.most_members is not None and members > constraints.most_members:
            continue
        if end - first < count or constraints.fewest_stages(problem.ranks) == 1:
            yield first, end


class _Rings:
    """Finds the slowest links along rings of consecutive blocks of ranks."""

    def __init__(self, network: Network, blocks: Sequence[Sequence[int]]) -> None:
        self._network, self._blocks = network, blocks
        ends = [[*block, *after[:1]] for block, after in itertools.zip_longest(blocks, blocks[1:], fillvalue=())]
        links = [[network.between(a, b) for a, b in itertools.pairwise(ranks)] for ranks in ends]  # also to the next
        self._slowest = [slowest_of(own) if own else None for own in links]
        self._inside = [
            slowest_of(own[: len(block) - 1]) if len(block) > 1 else None
            for own, block in zip(links, blocks, strict=True)
        ]
        self._known: dict[Span, MeasuredLink | None] = {}

    def _chain(self, first: int, end: int) -> MeasuredLink | None:
        """Return the slowest link from the first rank of the block `first` to that of the block `end`."""
        if end == first:
            return None
        if (first, end) not in self._known:
            found = [link for link in (self._chain(first, end - 1), self._slowest[end - 1]) if link is not None]
            self._known[first, end] = slowest_of(found) if found else None
        return self._known[first, end]

    def slowest(self, first: int, end: int) -> MeasuredLink:
        """Return a link as slow as the slowest ones along the ring of the blocks `first` to `end - 1`."""
        closing = self._network.between(self._blocks[end - 1][-1], self._blocks[first][0])
        found = (self._chain(first, end - 1), self._inside[end - 1], closing)
        return slowest_of([link for link in found if link is not None])


def _below(costs: StageCosts, limit: float) -> StageCosts:
    """Return the costs without those of stages that are above the limit."""
    return [(firsts, np.where(cost <= limit, cost, np.inf)) for firsts, cost in costs]


class _Table:
    """Holds the least joined costs of stages that cover the first layers and blocks, and the last stage of each."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.costs = np.full((layers + 1, blocks + 1), np.inf)
        self.starts, self.firsts = np.zeros((2, blocks + 1, layers + 1), dtype=int)  # of the last stage, by end

    def extend(self, source: np.ndarray, costs: StageCosts, join: Join) -> _Table:
        """Let a stage follow each of those whose costs are in `source`, which may be this table's own."""
        reached, every = np.isfinite(source).any(axis=0), np.arange(len(source))
        for end, (firsts, cost) in enumerate(costs):
            if source is self.costs:  # an earlier end may have been reached by now
                reached = np.isfinite(source).any(axis=0)
            kept = reached[firsts]
            if not kept.all():
                firsts, cost = firsts[kept], cost[kept]
            if not len(firsts):
                continue
            joined = join(source.T[firsts][:, :, None], cost).reshape(-1, len(every))
            place = joined.argmin(axis=0)
            value = joined[place, every]
            better = value < self.costs[:, end]
            self.costs[better, end] = value[better]
            which, start = np.divmod(place[better], len(every))
            self.starts[end, better], self.firsts[end, better] = start, firsts[which]
        return self


def _solve(costs: StageCosts, join: Join) -> list[StageBlocks] | None:
    """Return any number of stages that cover all layers and blocks with the least joined cost, or None.

    A stage is given by its first layer, the one after its last, its first block and the one after its last.
    """
    table = _Table(costs[0][1].shape[1] - 1, len(costs) - 1)
    table.costs[0, 0] = 0.0
    table.extend(table.costs, costs, join)
    return _followed([table], several=True)


def _solve_each(costs: StageCosts, join: Join, most: int) -> list[list[StageBlocks] | None]:
    """Return what `_solve` does for exactly 1, 2, ..., `most` stages."""
    layers, blocks = costs[0][1].shape[1] - 1, len(costs) - 1
    source = np.full((layers + 1, blocks + 1), np.inf)
    source[0, 0] = 0.0
    tables: list[_Table] = []
    found = []
    for _ in range(most):
        tables.append(_Table(layers, blocks).extend(source, costs, join))
        source = tables[-1].costs
        found.append(_followed(tables))
    return found


def _followed(tables: Sequence[_Table], several: bool = False) -> list[StageBlocks] | None:
    """Return the stages of the last table's best way, which are one of each table, or `several` of the only one."""
    stop, end = (size - 1 for size in tables[-1].costs.shape)
    if not np.isfinite(tables[-1].costs[stop, end]):
        return None
    found, level = [], len(tables) - 1
    while (stop, end) != (0, 0):
        start, first = int(tables[level].starts[end, stop]), int(tables[level].firsts[end, stop])
        found.append((start, stop, first, end))
        stop, end, level = start, first, level if several else level - 1
    return found[::-1]
