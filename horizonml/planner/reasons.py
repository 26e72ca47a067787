"""Lists the reasons why a plan is as it is, and what would be faster, fit, or could be cut, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from horizonml.plan.plan import Execution, Plan, Stage
from horizonml.plan.syncs import Sync
from horizonml.planner.cost import is_lossy
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import MICRO_BATCHES, Constraints, Problem
from horizonml.planner.search import equal_split, fastest_alone, outnumbers_cores, plain_ddp, search
from horizonml.text import count, human_bytes, human_seconds

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


_WORTH_A_WARNING = 0.05  # of a step: what a simpler plan saves at least
_MOST_OF_THE_TIME = 0.5  # a layer that takes more than this part leaves little to share out


def alternatives(problem: Problem, names: Sequence[str]) -> dict[str, Candidate]:
    """Return simpler plans: data parallelism, an equal split of the layers, and the best single device."""
    evaluator = Evaluator(problem)
    found = {"ddp and equal shares": evaluator.judge(plain_ddp(problem))}
    splits = [plan for number in problem.micro_batches if (plan := equal_split(problem, number)) is not None]
    if splits and problem.ranks > 1:
        best = min((evaluator.judge(plan) for plan in splits), key=lambda one: one.prediction.seconds)
        found[f"an equal split of the layers and {count(best.plan.micro_batches, 'micro-batch')}"] = best
    alone = fastest_alone(problem, evaluator)
    found[f"{names[alone.plan.stages[0].ranks[0]]} alone"] = alone
    return found


def compare(problem: Problem, found: Candidate, names: Sequence[str]) -> Reason:
    """Return the row of the simpler plans that a plan can be compared with."""
    others, best = _comparable(problem, found, names)
    working = {rank for stage in found.plan.stages for rank in stage.ranks}
    others = {  # without the plan itself
        name: other
        for name, other in others.items()
        if not other.plan.spare or set(other.plan.stages[0].ranks) != working
    }
    seconds = {name: other.prediction.seconds if other.usable else None for name, other in others.items()}
    advice = ["do not distribute this job"] if best is not None and others.get(best, found).plan.spare else []
    return Reason("plan", "simpler", "Simpler plans", seconds=found.prediction.seconds, others=seconds, notes=advice)


def drawback(problem: Problem, found: Candidate, names: Sequence[str]) -> str | None:
    """Return which simpler plan is predicted to be clearly faster, in words; None if none is."""
    others, best = _comparable(problem, found, names)
    if best is None or others[best].prediction.seconds >= (1 - _WORTH_A_WARNING) * found.prediction.seconds:
        return None
    advice = ": do not distribute this job" if others[best].plan.spare else ""
    return f"slower than {best}, which takes {human_seconds(others[best].prediction.seconds)} a step{advice}"


def _comparable(problem: Problem, found: Candidate, names: Sequence[str]) -> tuple[dict[str, Candidate], str | None]:
    """Return simpler plans by name, and which of them is faster than the plan, if one is.

    Those that were not chosen because their ranks outnumber the cores do not count.
    """
    others, crowded = alternatives(problem, names), outnumbers_cores(problem, found.plan)
    if found.plan.spare and not crowded:
        others = {name: other for name, other in others.items() if not outnumbers_cores(problem, other.plan)}
    usable = {name: other.prediction.seconds for name, other in others.items() if other.usable}
    best = min(usable, key=usable.__getitem__, default=None)
    return others, best if best is not None and round(found.prediction.seconds / usable[best], 2) > 1 else None


def shortage(problem: Problem, found: Candidate, names: Sequence[str]) -> str | None:
    """Return which device lacks how many bytes or samples for a plan, or None if the plan can be used."""
    short = found.prediction.lacking
    if not short:
        if not found.too_few_rows:
            return None
        return (
            f"a rank would get a single sample of a micro-batch, but the model needs {problem.profiles[0].least_rows}, "
            "as BatchNorm does"
        )
    worst = max(short, key=lambda rank: short[rank])
    others = len(short) - 1
    more = f" ({count(others, 'other rank')} also {'lacks' if others == 1 else 'lack'} memory)" if others else ""
    has = problem.memory[worst]
    there = (
        f"has {human_bytes(has)}"
        if has >= 0
        else f"its process already takes {human_bytes(-has)} more than there is for a rank"
    )
    return (
        f"{devices(names, [worst])} lacks {human_bytes(short[worst])} of memory: it needs "
        f"{human_bytes(found.prediction.memory[worst])} and {there}{more}"
    )


def remedy(problem: Problem, found: Candidate) -> str:
    """Return the smallest change that would make an unusable plan usable."""
    if min(problem.memory.values()) < 0:
        return (
            "The processes alone take more memory than there is: fewer ranks on a machine, or more memory, are needed."
        )
    ahead = problem.loading.memory
    while ahead:
        ahead //= 2
        if Evaluator(replace(problem, loading=replace(problem.loading, memory=ahead))).judge(found.plan).usable:
            return f"With data.memory: {ahead} the plan fits, as fewer samples are loaded ahead of the step."
    own, evaluator = found.plan.micro_batches, Evaluator(problem)
    for other in sorted(MICRO_BATCHES, key=lambda number: abs(number - own)):
        if other <= problem.batch_size and evaluator.judge(replace(found.plan, micro_batches=other)).usable:
            return f"With parallel.micro_batches: {other} the same stages fit."
    own_constraints = problem.constraints
    unconstrained = Constraints(
        formats=own_constraints.formats,
        syncs=own_constraints.syncs,
        schedules=own_constraints.schedules,
        sync=Sync.ALL_REDUCE if own_constraints.sync.alone else own_constraints.sync,
    )
    problem = replace(problem, constraints=unconstrained)
    if search(problem, 60).usable:
        return "With parallel.strategy: auto there is a plan that fits."
    batch = problem.batch_size
    while batch > 1:
        batch //= 2
        if search(replace(problem, batch_size=batch), 60).usable:
            return f"With a batch_size of {batch} there is a plan that fits."
    return "No batch size would fit: more devices, or more memory, are needed."


def uncut(problem: Problem, bond: Callable[[int], str | None], layer_names: Sequence[str]) -> str | None:
    """Return a sentence about the largest layer if it leaves little for other stages to do, or None.

    `bond` returns what prevents a cut of a layer, as `Chain.bond` does.
    """
    profile = problem.profiles[0]
    times = [sum(profile.seconds(layer, profile.sizes[-1])) for layer in range(problem.layers)]
    layer = max(range(problem.layers), key=times.__getitem__)
    share, why = times[layer] / max(sum(times), 1e-12), bond(layer)
    if problem.ranks == 1 or why is None or share <= _MOST_OF_THE_TIME:
        return None
    ddp = judge(problem, plain_ddp(problem)).prediction.seconds
    return (
        f"layer {layer} ({layer_names[layer]}) takes {share:.0%} of the time and cannot be cut, because {why}: "
        f"stages would be unequal. With ddp a step is predicted to take {human_seconds(ddp)}"
    )
