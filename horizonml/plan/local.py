"""Defines local steps: members train independently, and synchronise their parameters every so many steps.

The members of a stage, or whole replicas of a pipeline, each update their own copy of the parameters (the inner
optimizer). After `every` steps, the difference between the parameters that all began with and a member's own is its
*outer gradient*. The mean of the members' outer gradients, weighted by the samples that each has worked on, is applied
by the outer optimizer, which is SGD with Nesterov momentum, and everyone goes on from the result (DiLoCo; Douillard et
al., arXiv 2311.08105). With several fragments, groups of layers are synchronised in turn; with a delay, each travels
while the next steps are computed (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from horizonml.errors import PlanError
from horizonml.text import count

LOCAL_FORMATS = ("fp32", "int4", "topk")
MOST_LOCAL_STEPS = 1 << 20
FEWEST_SYNCHRONISATIONS = 16
"""How often the members of a run should synchronise at least."""
_FEWEST_WITH_MOMENTUM = 48
_RATE_WITH_MOMENTUM = 0.7  # as in DiLoCo
_MANY = 32  # synchronisations


@dataclass(frozen=True)
class Local:
    """Says how often members that take local steps synchronise, in which pieces and format, and by which optimizer."""

    every: int  # steps (global batches) from one synchronisation of a fragment to the next
    fragments: int = 1  # groups of layers that are synchronised in turn, one every `every / fragments` steps
    delay: int = 0  # steps after which a fragment's outer update is applied, while it travels in the background
    format: str = "fp32"  # of outer gradients, one of LOCAL_FORMATS; all but fp32 with error feedback
    learning_rate: float | None = None  # of the outer optimizer; see `outer`
    momentum: float | None = None
    late: int = 0  # further steps for which replicas go on while another one is late with its outer gradient

    def problem(self) -> str | None:
        """Return what is wrong with these values, beginning with the name of a field, or None."""
        if not 1 <= self.every <= MOST_LOCAL_STEPS:
            return f"every: {self.every} is not from 1 to {MOST_LOCAL_STEPS}"
        if not 1 <= self.fragments <= self.every:
            return f"fragments: {self.fragments} is not from 1 to `every`, {self.every}; one is synchronised at a time"
        if not 0 <= self.delay < max(1, self.every // self.fragments):
            most = max(1, self.every // self.fragments) - 1
            return (
                f"delay: {self.delay} is not from 0 to {most}; a fragment arrives before the next one is sent, which "
                f"is {self.every // self.fragments} steps later"
            )
        most = self.every // self.fragments - self.delay - 1
        if self.late and not 0 < self.late <= most:
            return (
                f"late: {self.late} is not from 0 to {most}; replicas wait for one that is late before the next "
                "fragment is sent"
            )
        if self.format not in LOCAL_FORMATS:
            return f"format: {self.format!r} is unknown; there are {', '.join(LOCAL_FORMATS)}"
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            return f"learning_rate: {self.learning_rate} must be above 0"
        if self.momentum is not None and not 0 <= self.momentum < 1:
            return f"momentum: {self.momentum} must be at least 0 and below 1"
        return None

    def check(self) -> None:
        """Raise PlanError if these values cannot be."""
        problem = self.problem()
        if problem is not None:
            raise PlanError(f"the plan's local steps: {problem}")

    def outer(self, members: int, is_adam: bool) -> tuple[float, float]:
        """Return the learning rate and the momentum of the outer optimizer, for so many members.

        By default members that train by SGD go on from their mean. Adam divides a gradient by its noise, which is
        sqrt(members) times as large for a member's part of the batch as for the whole batch, so that the members' mean
        moves so much less. A momentum of 1 - 1 / sqrt(members) multiplies it by sqrt(members) again, without larger
        steps that would drive the members apart. Sparse sums carry on what they have left out, and need none.
        """
        rate, momentum = _RATE_WITH_MOMENTUM if self.momentum else 1.0, self.momentum
        if momentum is None:
            momentum = 1 - 1 / math.sqrt(members) if is_adam and self.format != "topk" else 0.0
        return rate if self.learning_rate is None else self.learning_rate, momentum

    def sent(self, step: int) -> int | None:
        """Return the fragment whose outer gradient is taken after `step` steps, or None."""
        return next((f for f in range(self.fragments) if step > 0 and step % self.every == self._offset(f)), None)

    def applied(self, step: int) -> int | None:
        """Return the fragment whose outer update is applied after `step` steps, or None."""
        return self.sent(step - self.delay) if step > self.delay else None

    def synchronises(self, step: int) -> bool:
        """Return whether a fragment's outer gradient is taken, or its outer update is applied, after `step` steps."""
        return self.sent(step) is not None or self.applied(step) is not None

    def next_applied(self, step: int) -> int:
        """Return the first step after `step` in which an outer update is applied, and with it all members agree."""
        steps = (step + 1 + (self._offset(f) + self.delay - step - 1) % self.every for f in range(self.fragments))
        return min(found if found > self.delay else found + self.every for found in steps)

    def stops_by(self, step: int) -> int:
        """Return the last step that a run takes in which someone wants to stop after `step` steps."""
        first = self.next_applied(step)
        return first if not self.late else next(n for n in itertools.count(first + 1) if self.sent(n) is not None)

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments % self.every

    def may_be_full(self, step: int) -> bool:
        """Return whether evaluations and checkpoints that are due may take place after `step` steps.

        All fragments are synchronised then, so that there is one set of parameters.
        """
        return step % self.every == 0

    def falls_due(self, period: int, step: int) -> bool:
        """Return whether what is due every `period` steps takes place after `step` steps: as soon as it may."""
        return self.may_be_full(step) and step // period > (step - self.every) // period

    def taken_up(self, step: int, steps: int) -> float:
        """Return with which part of what a sparse sum has left out a member goes on, after `step` of a run's `steps`.

        The rest is added to its next outer gradient. With error feedback alone (0), members would go back behind most
        of their steps each time: on the harder set of the benchmarks, with 128 synchronisations, that cost 4 points of
        accuracy more. With all of it (1), most of what was learned last is in no parameters that all agree on: on the
        digits, with 12, that cost 4 to 20 points. So members take up the more, the more synchronisations are to come.
        """
        left = max(0, steps - step) // self.every
        return left / (left + _MANY)

    @staticmethod
    def updates(share: float, step: int) -> int:
        """Return how many local updates a member makes in the step that follows `step` others.

        `share` is the member's share of the batch, relative to the mean share: with 1, it makes one update per step.
        """
        return math.floor((step + 1) * share + 1e-9) - math.floor(step * share + 1e-9)

    def notes(self, steps: int, members: int, is_adam: bool) -> list[str]:
        """Return what the user should know of these values in a run of so many steps, with so many replicas."""
        times = -(-steps // self.every)
        rate, momentum = self.outer(members, is_adam)
        what = "the plain mean of all replicas" if (rate, momentum) == (1.0, 0.0) else "SGD"
        named = [name for name in ("learning_rate", "momentum") if getattr(self, name) is not None]
        kind = "topk" if self.format == "topk" else "Adam" if is_adam else "SGD"
        why = f"the job sets {' and '.join(named)}" if named else f"the default for {kind}"
        found = [
            f"local steps: the outer optimizer is {what} (learning rate {rate:g}, momentum {momentum:.2g}; {why}), and "
            f"the replicas agree after every {count(self.every, 'step')}, {count(times, 'time')} in this run"
        ]
        if self.every > steps:
            found.append(
                f"warning: parallel.sync.every: {self.every} is longer than the run of {count(steps, 'step')}, so the "
                f"replicas agree only at its end; make it {max(1, steps // FEWEST_SYNCHRONISATIONS)} or less"
            )
        elif times < FEWEST_SYNCHRONISATIONS:
            found.append(
                f"warning: parallel.sync.every: {self.every} leaves {count(times, 'synchronisation')} in a run of "
                f"{count(steps, 'step')}, which may cost accuracy; make it "
                f"{max(1, steps // FEWEST_SYNCHRONISATIONS)} or less, or train longer"
            )
        if self.momentum and times < _FEWEST_WITH_MOMENTUM:
            found.append(
                f"warning: parallel.sync.momentum: {self.momentum:g} needs {_FEWEST_WITH_MOMENTUM} or more "
                f"synchronisations, and this run has {times}; leave learning_rate and momentum out"
            )
        return found

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Local:
        """Return what `to_json` was called on."""
        return cls(
            int(value["every"]),
            int(value["fragments"]),
            int(value["delay"]),
            str(value["format"]),
            None if value["learning_rate"] is None else float(value["learning_rate"]),
            None if value["momentum"] is None else float(value["momentum"]),
            int(value.get("late", 0)),
        )

    def describe(self) -> str:
        """Return a description for people."""
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        delay = f", {self.delay} steps late" if self.delay else ""
        delay += f", up to {self.late} steps ahead of others" if self.late else ""
        return f"local steps, synchronised every {self.every} steps{parts} ({self.format}{delay})"
