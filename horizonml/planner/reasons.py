"""Puts the rows of the table that explains a plan into sentences; `explain` makes the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from horizonml.plan.execution import Execution
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.cost import is_lossy
from horizonml.planner.problem import Problem
from horizonml.text import human_bytes, human_seconds

_SAME = 0.005  # of a step: times that differ by less are the same
_MOST_NAMED = 5  # devices


class Told(IntEnum):
    """Says who tells a reason first; those that come later tell it, too."""

    RUN = 0  # a run that begins
    WHAT_IF = 1
    PLAN = 2  # `horizonml plan`
    IN_FULL = 3  # `horizonml plan --why`


@dataclass(frozen=True)
class Reason:
    """Explains one choice of a plan: a row of the table."""

    about: str  # such as "link", "sum", "local steps", "stage", "device", "schedule", "layers", "threads", "accuracy"
    choice: str
    what: str  # the choice as the beginning of a sentence
    told: Told = Told.PLAN
    exact: bool = True
    stage: int | None = None  # that it is about; of a link, the one before it
    bytes_per_sample: tuple[float, ...] = ()  # of the choice, and of the first of the others
    seconds: float = 0.0  # of a step of the plan
    others: Mapping[str, float | None] | None = None  # a step's seconds with other choices; None for impossible ones
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        """Return the reason as a sentence."""
        details = []
        if self.bytes_per_sample:
            size, *instead = map(human_bytes, self.bytes_per_sample)
            details.append(f"{size} for each sample{f' instead of {instead[0]}' if instead else ''}")
        verb, words = " a step would take", []
        for name, seconds in (self.others or {}).items():
            if seconds is None:
                words.append(f"with {name} the memory or the batch would not suffice")
            else:
                words.append(f"with {name}{verb} {human_seconds(seconds)} ({longer(seconds, self.seconds)})")
                verb = ""
        details += [", ".join(words)] if words else []
        details += self.notes
        return f"{self.what}: {'; '.join(details)}." if details else f"{self.what}."

    def to_json(self) -> dict[str, object]:
        """Return the reason as a JSON object, without what it does not say."""
        found: dict[str, object] = {"about": self.about, "choice": self.choice, "text": self.text, "exact": self.exact}
        if self.stage is not None:
            found["stage"] = self.stage
        if self.bytes_per_sample:
            found["bytes_per_sample"] = self.bytes_per_sample[0]
        if self.saved is not None:
            found["seconds_saved"] = self.saved
        return found

    @property
    def saved(self) -> float | None:
        """Return the seconds of a step that a choice saves that is not exact, against the exact one."""
        exactly = next(iter(self.others.values())) if self.others and not self.exact else None
        return exactly - self.seconds if exactly is not None else None


def longer(seconds: float, than: float) -> str:
    """Return how much longer a time is than another one."""
    ratio = seconds / max(than, 1e-12)
    if abs(ratio - 1) < _SAME:
        return "as long"
    return f"{ratio:.1f} times as long" if ratio >= 2 else f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'less'}"


def devices(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the devices of some ranks in words; `names` are those of all ranks' devices."""
    who = [names[rank] if names[rank] == f"rank {rank}" else f"{names[rank]} (rank {rank})" for rank in ranks]
    return ", ".join(who[:_MOST_NAMED]) + (f" and {len(who) - _MOST_NAMED} more" if len(who) > _MOST_NAMED else "")


def mbit(bandwidth: float) -> str:
    """Return a rate in bytes per second as Mbit/s."""
    rate = 8 * bandwidth / 1e6
    return f"{rate:,.0f} Mbit/s" if rate >= 10 or rate == 0 else f"{rate:.1f} Mbit/s"


def span(part: Stage) -> str:
    """Return which layers a stage, or a run of layers, has."""
    return f"layers {part.start} to {part.stop - 1}" if part.stop - part.start > 1 else f"layer {part.start}"


def work_of(plan: Plan, rank: int) -> str:
    """Return which layers a rank works on, and on which part of every micro-batch."""
    if rank in plan.spare:
        return "nothing (it is left out)"
    parts = []
    for number in plan.stages_of(rank):
        stage = plan.stages[number]
        share = stage.shares[stage.ranks.index(rank)] / sum(stage.shares)
        if len(plan.stages) == 1 and plan.world_size > 1:
            parts.append(f"{share:.0%} of the samples through all layers")
        elif share < 1e-3:
            parts.append(f"no samples in {span(stage)}")
        else:
            parts.append(span(stage) + (f" for {share:.0%} of the samples" if len(stage.ranks) > 1 else ""))
    return " and ".join(parts) or "nothing"


def inexact_parts(plan: Plan) -> list[str]:
    """Return in words what of a plan is not exact."""
    parts = []
    for number, stage in enumerate(plan.stages):
        if number + 1 < len(plan.stages) and stage.send != "fp32" and stage.ranks != plan.stages[number + 1].ranks:
            parts.append(f"{stage.send} between stages {number} and {number + 1}")
        if is_lossy(stage) and not stage.sync.steps_alone:
            where = f" in stage {number}" if len(plan.stages) > 1 else ""
            parts.append(f"sums of gradients by {stage.sync.name}{where}")
    if plan.local is not None:
        parts.append(f"local steps (every {plan.local.every})")
    return parts


def inexact_layers(executions: Iterable[Execution]) -> list[str]:
    """Return in words whether layers run in fewer bits on a device; `executions` are those of each device."""
    return ["layers in bf16"] if any(one.precision != "fp32" for one in executions) else []


def asked_for(parts: Sequence[str]) -> list[Reason]:
    """Return the row of the `parts` of a plan that are not exact because the job asks for them; nothing for none."""
    what = f"Not everything is exact, because the job asks for this: {', '.join(parts)}"
    return [Reason("accuracy", "asked for", what, Told.RUN, exact=False)] if parts else []


def chosen_inexact(problem: Problem, plan: Plan) -> bool:
    """Return whether the planner itself has chosen something that is not exact, because the job allows it."""
    constraints = problem.constraints
    if constraints.is_exact:
        return False
    links = len(constraints.formats) > 1 and any(stage.send != constraints.formats[0] for stage in plan.stages[:-1])
    sums = any(stage.sync in constraints.syncs for stage in plan.stages)
    return links or sums or (plan.local is not None and constraints.local is None)
