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
_MOST_TELL = 16  # ranks that tell of their steps in one agreement: of more of them, each does it less often


class TotalsSum:
    """Agrees with the other ranks on the totals of a step.

    Each rank also tells the others how it fared in the steps before, because ranks may record in folders of their own:
    so one of them can show how all fare. Of many ranks, so many as an agreement has room for take turns.
    """

    def __init__(self, group: Group, task: Task, stages: Mapping[int, StageRuntime], last: int) -> None:
        """Prepare; `stages` are those of this rank, and `last` is the number of the plan's last stage."""
        self._task, self._stages, self._last = task, stages, last
        self._rank, self._ranks, self._turn = group.rank, group.world_size, 0
        self._room = min(group.world_size, _MOST_TELL) if group.world_size > 1 else 0
        self._own, self._heard = Told(), self._nothing_heard()
        self._size = 3 + _FLAGS + len(task.metrics)
        size, tag = self._size + self._room * len(Told()), group.channel("totals").tag()
        self._sum = TreeSum(group, range(group.world_size), tag, torch.zeros(size, dtype=torch.float64))

    def post(self) -> None:
        """Post the receives of the next sum."""
        self._sum.post()

    def tell(self, own: Told) -> None:
        """Tell the others in the next agreement in which it is this rank's turn."""
        self._own = self._own.plus(own)

    def heard(self) -> tuple[Told, ...]:
        """Return what the ranks have told since the last call; nothing if there are no others."""
        found, self._heard = self._heard, self._nothing_heard()
        return found

    def _nothing_heard(self) -> tuple[Told, ...]:
        return (Told(),) * self._ranks if self._room else ()

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
        board = torch.zeros(self._room, len(Told()), dtype=torch.float64)
        first = self._turn * self._room
        if first <= self._rank < first + self._room:
            board[self._rank - first] = torch.tensor(self._own, dtype=torch.float64)
            self._own = Told()
        summed = self._sum.sum(torch.cat([torch.tensor(flags, dtype=torch.float64), found, board.flatten()]))
        told = dict(enumerate((Told(*row) for row in summed[self._size :].view_as(board).tolist()), first))
        self._heard = tuple(one.plus(told.get(rank, Told())) for rank, one in enumerate(self._heard))
        self._turn = (self._turn + 1) % -(-self._ranks // max(1, self._room))
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
