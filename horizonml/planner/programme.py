"""Finds which consecutive layers consecutive devices should take, by dynamic programming.

The recurrence is PipeDream's (SOSP 2019, section 3.1). Every constraint on stages restricts the stages that it may
join: a fixed group of ranks is a block that no stage may share with another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from horizonml.plan.plan import Stage, Sync
from horizonml.planner.cost import fastest_format, message_bytes, ring_seconds, synced_bytes
from horizonml.planner.evaluator import Evaluator

_SLACK = (1.0, 1.1, 1.3, 1.8, 3.0, np.inf)  # limits on the slowest stage, relative to the best
_FEW_RANKS = 8  # ranks, up to which shares are computed exactly
_MANY_RANKS = 16  # ranks, above which fewer numbers of stages are tried one by one
_MOST_STAGES = (12, 4)  # the largest number of stages tried by itself, with up to that many ranks and with more

StageBlocks = tuple[int, int, int, int]  # first layer, the one after the last; first block, the one after the last
Span = tuple[int, int]  # the first block of a stage, and the one after its last
StageCosts = Mapping[Span, np.ndarray]  # seconds of the stages on these blocks: `[first layer, layer after the last]`


class Programme:
    """Finds good plans for a problem; what the orders of the devices share is computed once."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Prepare the search among the plans that the evaluator's problem allows."""
        self._evaluator, self._problem = evaluator, evaluator.problem
        self._exact: dict[tuple[frozenset[int], int], np.ndarray] = {}

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
        fastest = _solve(costs, count, np.maximum, np.inf)
        if fastest is None:
            return
        best = max(costs[first, end][start, stop] for start, stop, first, end in fastest)
        found: list[list[StageBlocks] | None] = [fastest]
        if fewest < count:  # otherwise every block is a stage
            most = min(highest, count, max(fewest, _MOST_STAGES[problem.ranks > _MANY_RANKS]))
            found += [_solve(costs, count, np.maximum, np.inf, stages) for stages in range(fewest, most + 1)]
        found += [_solve(costs, count, np.add, best * slack * (1 + 1e-9)) for slack in _SLACK]
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
        costs: dict[Span, np.ndarray] = {}
        for first, end in _spans(self._evaluator, blocks):
            ranks = [rank for block in blocks[first:end] for rank in block]
            if fixed is not None or problem.constraints.ordered or len(ranks) == 1:
                cost = self._with_shares(ranks, fixed[first].shares if fixed else (1.0,) * len(ranks), rows)
            elif problem.ranks <= _FEW_RANKS:
                cost = self._with_best_shares(ranks, micro_batches, rows)
            else:  # with many devices, shares in proportion to their speeds are close enough
                cost = np.asarray(rows / (speeds[end] - speeds[first]))
            if end < count:
                cost = np.maximum(cost, self._sending(ranks[0], blocks[end][0], rows)[None, :])
            if len(ranks) > 1:
                summed = self._summed(fixed[first].sync if fixed else problem.constraints.sync)
                link = problem.network.between(ranks[0], ranks[1])
                cost = cost + ring_seconds(len(ranks), summed, link) / micro_batches
            cost = cost + impossible
            if end < count:
                cost[:, layers] = np.inf  # the later stages need layers, too
            if first > 0:
                cost[0, :] = np.inf
            costs[first, end] = cost
        return costs

    def _sending(self, sender: int, receiver: int, rows: int) -> np.ndarray:
        """Return the seconds of a message to the next stage, by the layer at which that stage begins."""
        problem = self._problem
        link, send = problem.network.between(sender, receiver), fastest_format(problem, sender, receiver)
        sizes = (rows * message_bytes(problem.profiles[0], stop, send) for stop in range(1, problem.layers + 1))
        return np.array([0.0, *(link.seconds(size) for size in sizes)])

    def _summed(self, sync: Sync) -> np.ndarray:
        """Return the bytes of gradients that the members of a stage sum, for all layers that it may have."""
        totals = np.array([synced_bytes(self._problem, sync, 0, stop) for stop in range(self._problem.layers + 1)])
        return np.asarray(totals[None, :] - totals[:, None])

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


def _solve(
    costs: StageCosts,
    blocks: int,
    join: Callable[[np.ndarray, np.ndarray], np.ndarray],
    limit: float,
    stages: int | None = None,
) -> list[StageBlocks] | None:
    """Return the stages that cover all layers and blocks with the least joined cost, none of them above `limit`.

    A stage is given by its first layer, the one after its last, its first block and the one after its last. There are
    exactly `stages` of them, or any number if that is None. Return None if there is no such way.
    """
    layers = next(iter(costs.values())).shape[0] - 1
    allowed = {span: np.where(cost <= limit, cost, np.inf) for span, cost in costs.items()}
    spans = sorted(allowed, key=lambda span: (span[1], span[0]))
    table = np.full((layers + 1, blocks + 1), np.inf)
    table[0, 0] = 0.0
    came: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []  # for each end: start layer and first block, by stop
    for _ in range(stages or 1):
        best = table.copy() if stages is None else np.full_like(table, np.inf)
        source = best if stages is None else table  # with any number, a stage may follow one found in this round
        starts, firsts = np.zeros((2, blocks + 1, layers + 1), dtype=int)
        for first, end in spans:
            if not np.isfinite(source[:, first]).any():
                continue
            joined = join(source[:, first][:, None], allowed[first, end])
            start = joined.argmin(axis=0)
            value = joined[start, np.arange(layers + 1)]
            better = value < best[:, end]
            best[better, end] = value[better]
            starts[end, better], firsts[end, better] = start[better], first
        table = best
        came.append({end: (starts[end], firsts[end]) for end in range(blocks + 1)})
    if not np.isfinite(table[layers, blocks]):
        return None
    found, stop, end, level = [], layers, blocks, len(came) - 1
    while (stop, end) != (0, 0):
        start, first = int(came[level][end][0][stop]), int(came[level][end][1][stop])
        found.append((start, stop, first, end))
        stop, end, level = start, first, level if stages is None else level - 1
    return found[::-1]
