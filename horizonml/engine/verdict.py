"""Decides on all ranks alike whether a step is committed: whether its gradients are finite, and how they are clipped.

Clipping by the global norm needs the norm over all stages. Every parameter counts once: of the members of a stage,
which hold the same gradients after their sums, the first one speaks; members that split channels add up their parts;
and of the copies of a tied parameter one counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from horizonml.comm.expected import boolean, fields, items, text, whole
from horizonml.comm.group import Group
from horizonml.comm.tree import TreeSum
from horizonml.engine.clock import Clock
from horizonml.engine.stage import StageRuntime
from horizonml.engine.staging import Staging
from horizonml.engine.tied import Ties
from horizonml.errors import Diverged
from horizonml.plan.plan import SYNCS, Plan, Sync

UNCHANGED = (
    "Parameters are as they were before this step; lower optimizer.lr, add lr_schedule.warmup_steps, clip gradients "
    "(optimizer.clip_norm), or look at the data"
)
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Verdict:
    """Holds what all ranks agree on once the gradients are summed."""

    finite: bool
    norm: float | None = None  # of the gradients of all stages, before clipping; None if they are not clipped
    scale: float = 1.0  # by which all gradients are multiplied


class GradientCheck:
    """Checks the gradients of a session's steps, as one rank of its group."""

    def __init__(
        self,
        plan: Plan,
        ties: Ties,
        group: Group,
        clock: Clock,
        stages: Mapping[int, StageRuntime],
        clip_norm: float | None,
        staging: Staging,
    ) -> None:
        """Prepare; all ranks of the group call this. Without `clip_norm`, gradients are not clipped."""
        self._plan, self._group, self._clock, self._stages = plan, group, clock, stages
        self._clip_norm, self._tied, self._staging = clip_norm, bool(ties.groups), staging
        self._repeated = {name for names in ties.groups for name, _ in names[1:]}
        # Members of one stage see the same sums; other stages must be told if a sum is not finite. The norm of a single
        # stage has a round, too: processors that round differently would scale by different factors.
        summing = [stage for stage in plan.stages if len(stage.ranks) > 1]
        several = len(plan.stages) > 1 and (bool(summing) or self._tied)
        self._round: TreeSum | None = None
        if clip_norm is not None or several or any(stage.splits_channels for stage in summing):
            everyone, tag = range(group.world_size), group.channel("finite").tag()
            self._round = TreeSum(group, everyone, tag, torch.zeros(1, dtype=torch.float64))

    @property
    def has_round(self) -> bool:
        """Return whether all ranks meet after the sums of gradients."""
        return self._round is not None

    def post(self) -> None:
        """Post the receives of the round early."""
        if self._round is not None:
            self._round.post()

    def before_sums(self) -> bool:
        """Return whether the gradients that no sum follows are finite, as far as only this moment shows it."""
        if self._clip_norm is not None:
            return True  # the norm will show it
        alone = [stage for stage in self._stages.values() if len(stage.stage.ranks) == 1]
        return all(stage.not_finite() is None for stage in alone)

    def after_sums(self) -> Verdict:
        """Return what all ranks agree on. Raises PeerLost."""
        if self._round is None:
            summed = [stage for stage in self._stages.values() if len(stage.stage.ranks) > 1 or self._tied]
            return Verdict(all(stage.not_finite() is None for stage in summed))
        if self._clip_norm is None:
            own = float(any(stage.not_finite() is not None for stage in self._stages.values()))
        else:
            own = sum(map(self._square, self._stages.values()))
        self._clock.switch("wait", "others")
        total = float(self._round.sum(torch.tensor([own], dtype=torch.float64)))
        self._clock.switch("compute", "update")
        if self._clip_norm is None:
            return Verdict(total == 0)
        if not math.isfinite(total):
            return Verdict(False, math.inf)
        norm = math.sqrt(total)
        return Verdict(True, norm, min(1.0, self._clip_norm / (norm + _TINY)))

    def _square(self, stage: StageRuntime) -> float:
        """Return the sum of squares of those of a stage's gradients for which this rank speaks.

        In 64 bits it is finite exactly if all gradients are.
        """
        counted = [
            parameter.grad
            for name, parameter in stage.parameters.items()
            if parameter.grad is not None and name not in self._repeated
            if stage.member == 0 or name in stage.sync.parts
        ]
        if not counted:
            return 0.0
        wide = torch.float64 if self._staging.has_float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=wide))
        return float(self._staging.to_host(norms).double().square().sum())

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        if factor == 1:
            return
        own: dict[int, Tensor] = {}  # copies of a tied parameter have one gradient
        for stage in self._stages.values():
            own |= {p.grad.data_ptr(): p.grad for p in stage.parameters.values() if p.grad is not None}
        if own:
            torch._foreach_mul_(list(own.values()), factor)

    def refuse(self, step: int) -> NoReturn:
        """Raise Diverged, naming a gradient that is not finite; all ranks call this."""
        own = [(number, name) for number, stage in self._stages.items() if (name := stage.not_finite()) is not None]
        everyone = self._group.gather_json(own[:1], items(fields(whole(), text)))
        nowhere = (self._group.rank, (0, "a rank that does not say which"))
        rank, (number, name) = next(((rank, found[0]) for rank, found in enumerate(everyone) if found), nowhere)
        lossy = any(not SYNCS[stage.sync].exact and stage.sync is not Sync.LOCAL for stage in self._plan.stages)
        hint = ", or set parallel.gradient_compression: none" if lossy else ""
        where = f"stage {number}, rank {self._group.origin(rank)}"
        raise Diverged(f"step {step}: the gradient of {name} ({where}) is not finite. {UNCHANGED}{hint}")

    def refuse_loss(self, step: int, loss: float, own: float) -> NoReturn:
        """Raise Diverged for a loss that is not finite, naming a rank on which it is not; all ranks call this.

        `own` is the sum over this rank's rows.
        """
        raise Diverged(f"step {step}: the loss is {loss}{self._where(own)}. {UNCHANGED}")

    def check_held_out(self, step: int, loss: float, own: float) -> None:
        """Raise Diverged on all ranks if the loss of an evaluation after `step` steps is not finite."""
        if not math.isfinite(loss):
            raise Diverged(
                f"after step {step}: the loss on held-out data is {loss}{self._where(own)}. Lower optimizer.lr, clip "
                "gradients (optimizer.clip_norm), or look at the held-out data"
            )

    def _where(self, own: float) -> str:
        """Return the rank whose part of the loss is not finite, in words."""
        broken = self._group.gather_json(not math.isfinite(own), boolean)
        return next((f" (rank {self._group.origin(rank)})" for rank, found in enumerate(broken) if found is True), "")
