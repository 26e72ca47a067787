"""Decides on all ranks alike whether a step is committed: whether its gradients are finite, and how they are clipped.

Clipping by the global norm needs the norm over all stages. Every parameter counts once: of the members of a stage,
which hold the same gradients after their sums, the first one counts; members that split channels add up their parts;
and of the copies of a tied parameter one counts.

Several layers may share a parameter, such as the embedding and the output of a language model. Every layer has a copy
of it, with optimizer state of its own. All copies begin with the same values and receive the sum of all copies'
gradients, so they stay equal, wherever the plan puts their layers.

One sum over all ranks carries what a step or an evaluation has found, and the flags that ranks raise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from horizonml.comm.expected import boolean, fields, items, text, whole
from horizonml.comm.group import Group, TreeSum
from horizonml.comm.work import Work
from horizonml.engine.clock import Clock, StepResult, StepSums, Totals
from horizonml.engine.stage import StageRuntime, StageStep, as_sent, is_none
from horizonml.engine.staging import Staging
from horizonml.engine.sync.base import APART, is_looked_at, projections
from horizonml.errors import Diverged, ModelError, PeerLost, PlanError
from horizonml.machine.host import cpu_seconds, rss_bytes
from horizonml.plan.plan import MOST_MICRO_BATCHES, Plan
from horizonml.state.follow import Following
from horizonml.tasks.task import Task

UNCHANGED = (
    "Parameters are as they were before this step; lower optimizer.lr, add lr_schedule.warmup_steps, clip gradients "
    "(optimizer.clip_norm), or look at the data"
)
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


# Which parameters of a model are tied: the name of each copy, and the layer that holds it.
TiedNames = Sequence[Sequence[tuple[str, int]]]


class TiedGradients:
    """Sums the gradients of a session's tied parameters."""

    def __init__(
        self,
        ties: TiedNames,
        plan: Plan,
        group: Group,
        clock: Clock,
        held: Mapping[int, Mapping[str, nn.Parameter]],
        staging: Staging,
    ) -> None:
        """Prepare; `held[s]` are the parameters of stage s, of which this rank is a member. Raises PlanError."""
        self._group, self._clock, self._staging = group, clock, staging
        self._plan, self._held, self._steps = plan, held, 0
        self._groups = [(copies, sorted({plan.stage_of(layer) for _, layer in copies})) for copies in ties]
        split = [stage for stage in plan.stages if stage.splits_channels]
        if split and self._groups:
            raise PlanError("parallel.strategy: tensor cannot split a model whose layers share parameters")
        # Boundaries have the numbers up to that of the last stage.
        self._first = group.channel("boundaries").tag((len(plan.stages) + 1) * 4 * MOST_MICRO_BATCHES)

    def sum(self) -> None:
        """Give all copies the sum of their gradients, which the members of each stage have summed. Raises PeerLost."""
        waiting: list[tuple[Work, int, Tensor]] = []
        totals: list[dict[int, Tensor]] = []
        for number, (copies, stages) in enumerate(self._groups):
            own = {stage: self._local(copies, stage) for stage in stages if stage in self._held}
            for stage, gradient in own.items():
                if gradient is not None:
                    waiting += self._exchange(number, stage, gradient, stages)
            totals.append({stage: gradient for stage, gradient in own.items() if gradient is not None})
            if own:
                waiting += self._expect(number, totals[-1], own, stages)
        self._wait(waiting)
        for (copies, _), parts in zip(self._groups, totals, strict=True):
            if parts:
                self._give(copies, parts)

    def refuse_unequal(self) -> None:
        """Raise ModelError if copies are no longer equal, because the model's own code changes one. Raises PeerLost.

        This is looked for in some steps only, and all ranks call it together.
        """
        self._steps += 1
        if not is_looked_at(self._steps):
            return
        for copies, stages in self._groups:
            own = [one for stage in stages for one in self._here(copies, stage)]
            if not own:
                continue
            values = self._staging.to_host(projections(own))
            ranks = tuple(sorted({rank for stage in stages for rank in self._plan.stages[stage].ranks}))
            self._clock.switch("transfer", "tied")
            others = self._group.all_gather(values[:, :1].contiguous(), ranks) if len(ranks) > 1 else []
            every = torch.cat([values, *others], 1)
            if float(every[0].max() - every[0].min()) > APART * float(every[1].max()):
                names = " and ".join(name for name, _ in copies)
                raise ModelError(
                    f"{names} are one parameter in the model, held as copies that are kept equal, and no longer are: "
                    "the model's own code changes one of them while it trains. Use the same module twice instead of "
                    "sharing a parameter, or let only the optimizer change it"
                )

    def _wait(self, waiting: Sequence[tuple[Work, int, Tensor]]) -> None:
        if waiting:
            self._clock.switch("transfer", "tied")
        for work, peer, _ in waiting:
            self._group.wait(work, peer)

    def _here(self, copies: Sequence[tuple[str, int]], stage: int) -> list[nn.Parameter]:
        """Return a stage's own copies; none if this rank is no member of it, or the parameter is frozen."""
        held = self._held.get(stage, {})
        return [held[name] for name, layer in copies if self._plan.stage_of(layer) == stage and name in held]

    def _local(self, copies: Sequence[tuple[str, int]], stage: int) -> Tensor | None:
        """Return the sum of the gradients of a stage's own copies; None if the parameter is frozen."""
        found = self._here(copies, stage)
        if not found:
            return None
        total: Tensor | None = None
        for gradient in [p.grad for p in found if p.grad is not None]:
            total = gradient if total is None else total + gradient
        return as_sent(total, found[0].detach())

    def _tag(self, number: int, stage: int) -> int:
        return self._first + number * len(self._plan.stages) + stage

    def _exchange(
        self, number: int, stage: int, gradient: Tensor, stages: Sequence[int]
    ) -> list[tuple[Work, int, Tensor]]:
        """Send a stage's gradient to the ranks that hold other copies, as the stage's first member."""
        if self._plan.stages[stage].ranks[0] != self._group.rank:
            return []
        # A copy where it lies in the memory of a sum, which the next step overwrites: messages may be kept.
        gradient = gradient.contiguous() if len(self._plan.stages[stage].ranks) == 1 else gradient.clone()
        others = {rank for other in stages if other != stage for rank in self._plan.stages[other].ranks}
        tag = self._tag(number, stage)
        gradient = self._staging.to_host(gradient)
        receivers = sorted(others - set(self._plan.stages[stage].ranks))
        return [(self._group.send(gradient, rank, tag), rank, gradient) for rank in receivers]

    def _expect(
        self, number: int, totals: dict[int, Tensor], own: Mapping[int, Tensor | None], stages: Sequence[int]
    ) -> list[tuple[Work, int, Tensor]]:
        """Post the receives for the gradients of the stages of which this rank is no member."""
        like = next((gradient for gradient in own.values() if gradient is not None), None)
        found: list[tuple[Work, int, Tensor]] = []
        for stage in stages:
            if stage in own or like is None:
                continue
            into = torch.empty_like(like, memory_format=torch.contiguous_format, device="cpu")
            sender = self._plan.stages[stage].ranks[0]
            totals[stage] = into
            found.append((self._group.receive(into, sender, self._tag(number, stage)), sender, into))
        return found

    def _give(self, copies: Sequence[tuple[str, int]], parts: Mapping[int, Tensor]) -> None:
        """Set the gradient of this rank's copies to the sum, which is added up in the same order everywhere."""
        total, *others = (
            parts[stage] if stage in self._held else self._staging.to_device(parts[stage]) for stage in sorted(parts)
        )
        for other in others:
            total = total + other
        without = is_none(total)  # no copy has a gradient, so that the optimizer leaves all alone
        for name, layer in copies:
            parameters = self._held.get(self._plan.stage_of(layer), {})
            if name in parameters:
                parameters[name].grad = None if without else total


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
        ties: TiedNames,
        group: Group,
        clock: Clock,
        stages: Mapping[int, StageRuntime],
        clip_norm: float | None,
        staging: Staging,
    ) -> None:
        """Prepare; all ranks of the group call this. Without `clip_norm`, gradients are not clipped."""
        self._plan, self._group, self._clock, self._stages = plan, group, clock, stages
        self._clip_norm, self._tied, self._staging = clip_norm, bool(ties), staging
        self._repeated = {name for names in ties for name, _ in names[1:]}
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
        if self._clip_norm is not None or (self._tied and len(self._plan.stages) == 1):
            return True  # the norm, or a look at the sums of tied gradients, will show it
        alone = [stage for stage in self._stages.values() if len(stage.stage.ranks) == 1]
        return all(stage.not_finite() is None for stage in alone)

    def after_sums(self) -> Verdict:
        """Return what all ranks agree on. Raises PeerLost."""
        if self._round is None:
            summed = [stage for stage in self._stages.values() if len(stage.stage.ranks) > 1 or self._tied]
            return Verdict(all(stage.not_finite(not self._tied) is None for stage in summed))
        if self._clip_norm is None:
            own = float(any(stage.not_finite(not self._tied) is not None for stage in self._stages.values()))
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
        lossy = any(not stage.sync.exact and not stage.sync.steps_alone for stage in self._plan.stages)
        hint = ", or set parallel.gradient_compression: none" if lossy else ""
        where = f"stage {number}, {self._group.name(rank)}"
        raise Diverged(f"step {step}: the gradient of {name} ({where}) is not finite. {UNCHANGED}{hint}")


def refuse_loss(group: Group, step: int, loss: float, own: float) -> NoReturn:
    """Raise Diverged for a loss that is not finite, naming a rank on which it is not; all ranks call this.

    `own` is the sum over this rank's rows.
    """
    raise Diverged(f"step {step}: the loss is {loss}{_where(group, own)}. {UNCHANGED}")


def check_held_out(group: Group, step: int, loss: float, own: float) -> None:
    """Raise Diverged on all ranks if the loss of an evaluation after `step` steps is not finite."""
    if not math.isfinite(loss):
        raise Diverged(
            f"after step {step}: the loss on held-out data is {loss}{_where(group, own)}. Lower optimizer.lr, clip "
            "gradients (optimizer.clip_norm), or look at the held-out data"
        )


def _where(group: Group, own: float) -> str:
    """Return the rank whose part of the loss is not finite, in words."""
    broken = group.gather_json(not math.isfinite(own), boolean)
    return next((f" ({group.name(rank)})" for rank, found in enumerate(broken) if found is True), "")


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
        self._own, self._heard = StepSums(), self._nothing_heard()
        self._size = 3 + _FLAGS + len(task.metrics)
        size, tag = self._size + self._room * len(StepSums()), group.channel("totals").tag()
        self._sum = TreeSum(group, range(group.world_size), tag, torch.zeros(size, dtype=torch.float64))

    def post(self) -> None:
        """Post the receives of the next sum."""
        self._sum.post()

    def tell(self, step: StepResult, cpu_before: float) -> None:
        """Tell the others of a step in the next agreement in which it is this rank's turn.

        `cpu_before` is `cpu_seconds()` as it was when the step began.
        """
        self._own = self._own.plus(StepSums.of(step, cpu_seconds() - cpu_before, rss_bytes()))

    def heard(self) -> tuple[StepSums, ...]:
        """Return what the ranks have told since the last call; nothing if there are no others."""
        found, self._heard = self._heard, self._nothing_heard()
        return found

    def _nothing_heard(self) -> tuple[StepSums, ...]:
        return (StepSums(),) * self._ranks if self._room else ()

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
        board = torch.zeros(self._room, len(StepSums()), dtype=torch.float64)
        first = self._turn * self._room
        if first <= self._rank < first + self._room:
            board[self._rank - first] = torch.tensor(self._own, dtype=torch.float64)
            self._own = StepSums()
        summed = self._sum.sum(torch.cat([torch.tensor(flags, dtype=torch.float64), found, board.flatten()]))
        told = dict(enumerate((StepSums(*row) for row in summed[self._size :].view_as(board).tolist()), first))
        self._heard = tuple(one.plus(told.get(rank, StepSums())) for rank, one in enumerate(self._heard))
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
        return Totals(loss, metrics, int(total), stops, comers, behind, hurry, look, not broken, int(units), unit)
