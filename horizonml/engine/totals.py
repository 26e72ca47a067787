"""Adds up, over all ranks, what a step or an evaluation has found, and the flags that ranks raise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.comm.tree import TreeSum
from horizonml.engine.stage import StageRuntime, StageStep
from horizonml.engine.step import Told, Totals
from horizonml.errors import PeerLost
from horizonml.state.follow import Following
from horizonml.tasks.task import Task

_MOST = 1 << 53  # samples or units
_FLAGS = 6  # that ranks raise in the agreement on a step
_MOST_TELL = 16  # ranks that tell one another of their steps: for more of them, the messages would grow too long


class TotalsSum:
    """Agrees with the other ranks on the totals of a step.

    Where ranks are on several machines, each also tells the others how it fared in the step before, so that one of them
    can show how all fare. `own` is what this rank tells; `told` is what all have told, after an agreement.
    """

    def __init__(self, group: Group, task: Task, stages: Mapping[int, StageRuntime], last: int) -> None:
        """Prepare; `stages` are those of this rank, and `last` is the number of the plan's last stage."""
        self._task, self._stages, self._last = task, stages, last
        tell = group.world_size if group.world_size <= _MOST_TELL and len(set(group.hosts)) > 1 else 0
        self._rank, self.own, self.told = group.rank, Told(), (Told(),) * tell
        self._size = 3 + _FLAGS + len(task.metrics)
        size, tag = self._size + tell * len(Told()), group.channel("totals").tag()
        self._sum = TreeSum(group, range(group.world_size), tag, torch.zeros(size, dtype=torch.float64))

    def post(self) -> None:
        """Post the receives of the next sum."""
        self._sum.post()

    def found(self, runs: Mapping[int, StageStep]) -> Tensor:
        """Return this rank's part of a batch's sums: its loss, its units, and each metric; float64."""
        if self._last not in runs or not self._stages[self._last].speaks:
            return torch.zeros(2 + len(self._task.metrics), dtype=torch.float64)
        run = runs[self._last]
        return torch.cat([torch.tensor([run.loss, run.units], dtype=torch.float64), run.sums])

    def nothing(self) -> Totals:
        """Return the totals of no samples."""
        means = dict.fromkeys(self._task.metrics, 0.0)
        return Totals(0.0, self._task.report(0.0, means), 0, unit=self._task.unit)

    def agree(
        self,
        found: Tensor,
        samples: int,
        following: Following | None,
        stop: bool = False,
        newcomers: bool = False,
        finite: bool = True,
        look: bool = False,
    ) -> Totals:
        """Return the totals over all ranks; a flag is raised in them if any rank raises it. Raises PeerLost."""
        if 0 not in self._stages or self._stages[0].member:
            samples = 0
        behind = following is not None and following.behind
        hurry = following is not None and following.hurry
        flags = [float(flag) for flag in (samples, stop, newcomers, not finite, behind, hurry, look)]
        board = torch.zeros(len(self.told), len(Told()), dtype=torch.float64)
        if self.told:
            board[self._rank] = torch.tensor(self.own, dtype=torch.float64)
        summed = self._sum.sum(torch.cat([torch.tensor(flags, dtype=torch.float64), found, board.flatten()]))
        self.told = tuple(Told(*row) for row in summed[self._size :].view_as(board).tolist())
        total, *rest = summed[: self._size].tolist()
        stops, comers, broken, behind, hurry, look = (count > 0 for count in rest[:_FLAGS])
        loss, units, *sums = rest[_FLAGS:]
        if not (0 <= total < _MOST and 0 <= units < _MOST):  # which holds for no NaN
            raise PeerLost(
                f"the ranks' totals cannot be: {total} samples and {units} units in a batch; one of them lies"
            )
        loss = loss / units if units else 0.0
        means = {name: value / units if units else 0.0 for name, value in zip(self._task.metrics, sums, strict=True)}
        metrics, unit = self._task.report(loss, means), self._task.unit
        return Totals(
            loss,
            metrics,
            int(total),
            stops,
            comers,
            behind,
            hurry,
            finite=not broken,
            look=look,
            units=int(units),
            unit=unit,
        )
