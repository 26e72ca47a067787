"""Sums the gradients of parameters that several layers share, such as the embedding and the output of a language model.

Every layer has a copy of a tied parameter, with optimizer state of its own. All copies begin with the same values and
receive the sum of all copies' gradients, so they stay equal, wherever the plan puts their layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.engine.clock import Clock
from horizonml.engine.stage import as_sent, is_none
from horizonml.engine.staging import Staging
from horizonml.engine.sync.base import APART, is_looked_at, projections
from horizonml.errors import ModelError, PlanError
from horizonml.plan.plan import MOST_MICRO_BATCHES, Plan


@dataclass(frozen=True)
class Ties:
    """Describes which parameters of a model are tied, and the layers that hold them."""

    groups: Sequence[Sequence[tuple[str, int]]]  # the name and the layer of each copy

    def stages(self, plan: Plan) -> list[list[int]]:
        """Return the stages that hold copies, for each group."""
        return [sorted({plan.stage_of(layer) for _, layer in group}) for group in self.groups]

    def span(self, plan: Plan) -> bool:
        """Return whether the copies of any parameter are in several stages."""
        return any(len(stages) > 1 for stages in self.stages(plan))


class TiedGradients:
    """Sums the gradients of a session's tied parameters."""

    def __init__(
        self,
        ties: Ties,
        plan: Plan,
        group: Group,
        clock: Clock,
        held: Mapping[int, Mapping[str, nn.Parameter]],
        staging: Staging,
    ) -> None:
        """Prepare; `held[s]` are the parameters of stage s, of which this rank is a member. Raises PlanError."""
        self._group, self._clock, self._staging = group, clock, staging
        self._plan, self._held, self._steps = plan, held, 0
        self._groups = list(zip(ties.groups, ties.stages(plan), strict=True))
        split = [stage for stage in plan.stages if stage.splits_channels]
        if split and self._groups:
            raise PlanError("parallel.strategy: tensor cannot split a model whose layers share parameters")
        # Boundaries have the numbers up to that of the last stage.
        self._first = group.channel("boundaries").tag((len(plan.stages) + 1) * 4 * MOST_MICRO_BATCHES)

    @property
    def any(self) -> bool:
        """Return whether the model has tied parameters."""
        return bool(self._groups)

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
