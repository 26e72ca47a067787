"""Explains a plan: its stages as a table for people, and a row of reasons for each choice.

A row tells what was chosen, what a step would take with something else, what travels, and whether that is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from horizonml.job.schema import Job
from horizonml.plan.plan import PLAIN, Execution, Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.syncs import FORMATS
from horizonml.planner.choose import energy_of
from horizonml.planner.cost import (
    boundary_bytes,
    is_lossy,
    message_bytes,
    summed_bytes,
    synced_bytes,
    syncs_of,
    trained_bytes,
)
from horizonml.planner.evaluator import Candidate, Evaluator, with_stage
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Profile
from horizonml.planner.reasons import (
    Reason,
    Told,
    asked_for,
    chosen_inexact,
    devices,
    inexact_layers,
    inexact_parts,
    mbit,
    span,
    work_of,
)
from horizonml.planner.search import outnumbers_cores
from horizonml.text import count, human_bytes, human_seconds

_AS_GOOD_AS_NOTHING = 0.02  # of a step
_WORTH_TELLING = 0.05  # of a step: what another plan could save
_MOST_COMPARED = 64  # ranks for which a plan is compared with others like it
_MOST_LINKED = 200  # ranks whose links are compared with one another


COLUMNS = ("stage", "layers", "rank", "rows", "sends", "memory", "busy")


def rows(problem: Problem, found: Candidate, names: Sequence[str], layer_names: Sequence[str]) -> list[list[str]]:
    """Return a plan as a table with these `COLUMNS`, and a row for each member of each stage."""
    plan, prediction = found.plan, found.prediction
    size = max(plan.micro_sizes(problem.batch_size, problem.batch_size))
    table = []
    for number, stage in enumerate(plan.stages):
        first, last = layer_names[stage.start], layer_names[stage.stop - 1]
        layers = f"{stage.start}-{stage.stop - 1} ({first} .. {last})" if first != last else f"{stage.start} ({first})"
        sent = message_bytes(problem.profiles[0], stage.stop, stage.send)
        for rank, (start, stop) in zip(stage.ranks, stage.mean_rows(size), strict=True):
            is_last = number + 1 == len(plan.stages)
            table.append(
                [
                    str(number),
                    layers,
                    str(rank) if names[rank] == f"rank {rank}" else f"{rank} ({names[rank]})",
                    f"{round(stop - start, 1):g} of {size}",
                    "-" if is_last else f"{human_bytes(sent * (stop - start))} {stage.send}",
                    f"{human_bytes(prediction.memory[rank])} of {human_bytes(problem.memory[rank])}",
                    f"{min(1.0, problem.oversubscription[rank] * prediction.busy[rank] / prediction.seconds):.0%}",
                ]
            )
    return table


def explain_parts(found: Candidate) -> str:
    """Return what the time of a step consists of, in its order."""
    parts = {name: seconds for name, seconds in found.prediction.parts.items() if seconds >= 5e-4}
    return ", then ".join(f"{human_seconds(seconds)} {name}" for name, seconds in parts.items())


def explain(evaluator: Evaluator, found: Candidate, names: Sequence[str], told: Told = Told.IN_FULL) -> list[Reason]:
    """Return the rows of a plan that are `told`; `names` are those of the ranks' devices."""
    table = _Table(evaluator, found, names)
    ranks, splits_channels = evaluator.problem.ranks, any(stage.splits_channels for stage in found.plan.stages)
    is_known, several = not splits_channels, not splits_channels and ranks > 1
    makers = (
        (Told.WHAT_IF, is_known, table.bottleneck),
        (Told.WHAT_IF, several and ranks <= _MOST_LINKED, table.traffic),
        (Told.WHAT_IF, several, table.crowded),
        (Told.WHAT_IF, several, table.idle),
        (Told.RUN, several, table.accuracy),
        (Told.RUN, is_known, table.energy),
        (Told.RUN, several, table.left_out),
        (Told.RUN, several, table.links),
        (Told.RUN, several, table.sums),
        (Told.RUN, several and ranks <= _MOST_COMPARED, table.fewer_bits),
        (Told.PLAN, several and ranks <= _MOST_COMPARED, table.order),
        (Told.IN_FULL, several and ranks <= _MOST_COMPARED, table.cuts),
        (Told.IN_FULL, several, table.devices),
        (Told.RUN, True, table.layers),
    )
    return [row for first, is_due, rows in makers if is_due and first <= told for row in rows() if row.told <= told]


class _Table:
    """Makes the rows of one plan."""

    def __init__(self, evaluator: Evaluator, found: Candidate, names: Sequence[str]) -> None:
        self.evaluator, self.problem = evaluator, evaluator.problem
        self.found, self.plan, self.names = found, found.plan, names
        self.seconds = found.prediction.seconds

    def other(self, plan: Plan) -> float | None:
        """Return the seconds of a step of another plan, or None if ranks cannot train with it."""
        other = self.evaluator.judge(plan)
        return other.prediction.seconds if other.usable else None

    def busy(self, rank: int) -> float:
        """Return the share of a step in which a rank computes; above 1 where it lacks the cores for that."""
        return self.problem.oversubscription[rank] * self.found.prediction.busy[rank] / self.seconds

    def slowest(self, one: Stage, other: Stage) -> float:
        """Return the least bandwidth between members of two stages; it is infinite if all data stays on one rank."""
        links = (self.problem.network.between(a, b) for a in one.ranks for b in other.ranks if a != b)
        return min((link.bandwidth for link in links), default=math.inf)

    def bottleneck(self) -> Iterator[Reason]:
        """Yield what the step waits for most."""
        problem, plan = self.problem, self.plan
        busiest = max(self.found.prediction.busy, key=self.busy)
        shares = {f"{devices(self.names, [busiest])} computes": self.busy(busiest)}
        for number, stage in enumerate(plan.stages):
            if len(stage.ranks) > 1:
                summed = synced_bytes(problem, stage.sync, stage.start, stage.stop)
                moved = 2 * (len(stage.ranks) - 1) / len(stage.ranks) * summed
                words = f"the members of stage {number} sum their gradients ({human_bytes(moved)} each)"
                shares[words] = moved / self.slowest(stage, stage) / self.seconds
            if number + 1 < len(plan.stages):
                after = plan.stages[number + 1]
                moved = message_bytes(problem.profiles[0], stage.stop, stage.send) * problem.batch_size
                back = ", and back" if problem.profiles[0].layers[stage.stop - 1].returns_gradients else ""
                words = f"activations go from stage {number} to {number + 1} ({human_bytes(moved)}{back})"
                side_by_side = min(len(stage.ranks), len(after.ranks))
                shares[words] = moved / self.slowest(stage, after) / side_by_side / self.seconds
        words = max(shares, key=shares.__getitem__)
        what = f"The bottleneck: {words} for {min(1.0, shares[words]):.0%} of a step"
        yield Reason("bottleneck", words, what, Told.WHAT_IF)

    def traffic(self) -> Iterator[Reason]:
        """Yield what would travel with ddp, where the plan cuts the model."""
        problem, plan = self.problem, self.plan
        if len(plan.stages) == 1:
            return
        each = 2 * (problem.ranks - 1) / problem.ranks * synced_bytes(problem, Sync.ALL_REDUCE, 0, problem.layers)
        pairs = itertools.combinations(range(problem.ranks), 2)
        a, b = min(pairs, key=lambda pair: problem.network.between(*pair).bandwidth)
        slowest = problem.network.between(a, b).bandwidth
        cut = sum(
            boundary_bytes(problem, stage.stop, stage.send) * problem.batch_size
            for stage, after in itertools.pairwise(plan.stages)
            if set(stage.ranks) != set(after.ranks)
        )
        what = (
            f"With ddp every rank would send {human_bytes(each)} of gradients a step, which the slowest link "
            f"({self.names[a]} to {self.names[b]}, {mbit(slowest)}) takes {human_seconds(each / slowest)} for; "
            f"between stages of this plan {human_bytes(cut)} travel in all"
        )
        yield Reason("traffic", "ddp", what, Told.WHAT_IF)

    def crowded(self) -> Iterator[Reason]:
        """Yield the machines whose ranks slow one another down by sharing caches and memory."""
        slower = {rank: host.crowded for host in self.problem.hosts for rank in host.ranks}
        for first, *more in self.problem.machines.values():
            if more and slower[first] >= 1 + _AS_GOOD_AS_NOTHING:
                who = f"{self.names[first]} {'and' if len(more) == 1 else 'to'} {self.names[more[-1]]}"
                what = (
                    f"{who} share the caches and the memory of a machine: while all of them compute, each takes "
                    f"{slower[first]:.2f} times as long as alone, as was measured"
                )
                yield Reason("machine", who, what, Told.WHAT_IF)

    def idle(self) -> Iterator[Reason]:
        """Yield the devices that have next to nothing to do."""
        size = max(self.plan.micro_sizes(self.problem.batch_size, self.problem.batch_size))
        rows = dict.fromkeys((rank for stage in self.plan.stages for rank in stage.ranks), 0.0)
        for stage in self.plan.stages:
            for rank, (first, end) in zip(stage.ranks, stage.mean_rows(size), strict=True):
                rows[rank] += end - first
        idle = [rank for rank, own in rows.items() if not own or self.busy(rank) < _AS_GOOD_AS_NOTHING]
        if idle:
            who = f"{devices(self.names, idle)} {'has' if len(idle) == 1 else 'have'}"
            what = (
                f"{who} as good as nothing to do, because sending work there, or waiting for it, would take longer "
                "than doing it elsewhere"
            )
            yield Reason("device", "idle", what, Told.WHAT_IF)

    def accuracy(self) -> Iterator[Reason]:
        """Yield what of the plan is not exact, what that may cost in accuracy, and what an exact plan costs."""
        layers = inexact_layers(profile.execution for profile in self.problem.profiles)
        parts = [*inexact_parts(self.plan), *layers]
        if not parts or not chosen_inexact(self.problem, self.plan):
            yield from asked_for(parts)
            return
        fields = "parallel.exact: true and precision: fp32" if layers else "parallel.exact: true"
        others = {fields: self.found.exact_seconds} if self.found.exact_seconds is not None and not layers else None
        notes = [self.problem.constraints.trial] if others else [self.problem.constraints.trial, f"exact with {fields}"]
        if self.plan.local is not None:
            notes[0] = "a warm-up is too short to show what local steps cost, so watch the held-out accuracy"
        what = f"Not exact are {', '.join(parts)}"
        yield Reason("accuracy", "chosen", what, Told.RUN, False, None, (), self.seconds, others, notes)

    def energy(self) -> Iterator[Reason]:
        """Yield what the plan's energy is, and what the objective costs in time, where watts are known."""
        problem, fastest, objective = self.problem, self.found.fastest, self.problem.objective
        energy = energy_of(problem, self.found.prediction)
        if energy is None:
            return
        what = (
            f"A step takes {energy.joules:.3g} J ({energy.joules / problem.batch_size:.3g} J a sample, "
            f"{energy.joules / self.seconds:.3g} W on average)"
        )
        idle = energy.joules - energy.working
        note = f"{idle:.3g} J for devices that are on, and {energy.working:.3g} J for their work"
        yield Reason("energy", f"{energy.joules:.4g} J", what, Told.RUN, notes=[note])
        before = energy_of(problem, fastest.prediction) if fastest is not None else None
        if fastest is None or before is None:
            return
        note = f"a step may take {objective.slowdown:g} times as long as the fastest (parallel.slowdown)"
        others: dict[str, float | None] = {}
        if self.plan == fastest.plan:
            what = "The fastest plan that was found also uses the least energy"
        else:
            what = f"This plan uses {1 - energy.joules / before.joules:.0%} less energy than the fastest"
            others = {f"that and {before.joules:.3g} J": fastest.prediction.seconds}
        if objective.kind == "deadline" and objective.deadline is not None:
            note = f"the run's {objective.steps:,} steps take {human_seconds(self.seconds * objective.steps)}"
            note += f" of {human_seconds(objective.deadline)}"
            if self.seconds > objective.limit(fastest.prediction.seconds) * (1 + 1e-9):
                what = "No plan was found that meets the deadline, so the fastest was chosen"
        yield Reason("energy", objective.kind, what, Told.RUN, seconds=self.seconds, others=others, notes=[note])

    def left_out(self) -> Iterator[Reason]:
        """Yield which devices the plan leaves out, and why."""
        problem, spare, everyone = self.problem, self.plan.spare, self.found.everyone_seconds
        if not spare:
            return
        others, notes = None, []
        if everyone is not None:
            others = {"all devices": everyone if everyone < math.inf else None}
            if everyone < self.seconds and outnumbers_cores(problem, replace(self.plan, spare=())):
                notes.append("ranks that outnumber the cores wait for one another longer than is predicted")
        elif problem.objective.kind == "time":
            notes.append("the others would wait for them")
        else:
            notes.append("the others need fewer joules for the work")
        watts = {rank: own.idle for rank in spare if problem.watts and (own := problem.watts[rank]) is not None}
        if len(watts) == len(spare):
            notes.append(f"while they wait, they draw {sum(watts.values()):.3g} W, which counts here")
            groups = [ranks for ranks in problem.machines.values() if set(ranks) <= set(spare)]
            off = [watts[rank] for ranks in groups for rank in ranks]
            if off:
                which = "they" if len(off) == len(spare) else "those on machines where no rank works"
                notes.append(f"switched off, {which} would save {sum(off) * self.seconds:.3g} J a step more")
        what = f"Left out {'is' if len(spare) == 1 else 'are'} {devices(self.names, spare)}"
        yield Reason("device", "left out", what, Told.RUN, seconds=self.seconds, others=others, notes=notes)

    def carried(
        self,
        about: str,
        choice: str,
        what: str,
        stage: int | None,
        exactly: Mapping[str, Plan],
        size: Callable[[Plan], float],
        notes: Sequence[str],
    ) -> Reason:
        """Return the row of what travels, whose bytes in a plan are its `size`; `exactly` is what is exact instead."""
        others = {name: self.evaluator.judge(plan).prediction.seconds for name, plan in exactly.items()}
        sizes = tuple(size(plan) for plan in (self.plan, *exactly.values()))
        told = Told.RUN if exactly else Told.PLAN
        notes = [note for note in notes if note]
        return Reason(about, choice, what, told, not exactly, stage, sizes, self.seconds, others, notes)

    def links(self) -> Iterator[Reason]:
        """Yield the format on each link between stages."""
        may = "fewer bits would save next to nothing" if len(self.problem.constraints.formats) > 1 else ""
        for number, (stage, after) in enumerate(itertools.pairwise(self.plan.stages)):
            if stage.ranks == after.ranks:
                continue
            exact, format = stage.send == "fp32", FORMATS[stage.send]

            def size(plan: Plan, number: int = number) -> float:
                return boundary_bytes(self.problem, plan.stages[number].stop, plan.stages[number].send)

            sent = f"exact {format.what}" if exact else f"{stage.send} ({format.what})"
            what = f"Stages {number} and {number + 1} exchange {sent}"
            exactly = {} if exact else {"fp32": with_stage(self.plan, number, replace(stage, send="fp32"))}
            notes = (f"their slowest link has {mbit(self.slowest(stage, after))}", format.error, may if exact else "")
            yield self.carried("link", stage.send, what, number, exactly, size, notes)

    def sums(self) -> Iterator[Reason]:
        """Yield the way in which the members of each stage agree."""
        problem, plan = self.problem, self.plan
        may = "fewer bits would save next to nothing" if len(syncs_of(problem)) > 1 else ""
        if plan.local is not None:
            yield self.local()
            return
        for number, stage in enumerate(plan.stages):
            if len(stage.ranks) == 1 or not trained_bytes(problem.profiles[0], stage):
                continue
            exact, sync = not is_lossy(stage), stage.sync

            def size(plan: Plan, number: int = number) -> float:
                return sum(summed_bytes(problem, plan, plan.stages[number])) / problem.batch_size

            who = f"The {len(stage.ranks)} members of stage {number}" if len(plan.stages) > 1 else "The ranks"
            what = f"{who} sum {'exact gradients' if exact else f'gradients as {sync.what}'}"
            exactly = {} if exact else {sync.exactly.name: with_stage(plan, number, replace(stage, sync=sync.exactly))}
            link = f"the slowest link among them has {mbit(self.slowest(stage, stage))}"
            notes = (link, sync.error, may if exact else "")
            yield self.carried("sum", sync.name, what, number, exactly, size, notes)

    def local(self) -> Reason:
        """Return the row of local steps."""
        plan, local = self.plan, self.plan.local
        assert local is not None

        def size(plan: Plan) -> float:
            return sum(sum(summed_bytes(self.problem, plan, one)) for one in plan.stages) / self.problem.batch_size

        together = replace(plan, local=None, stages=tuple(replace(s, sync=Sync.ALL_REDUCE) for s in plan.stages))
        carry = {"fp32": "32-bit floats", "int4": "4-bit numbers"}.get(local.format, f"largest values ({local.format})")
        parts = f", in {local.fragments} fragments" if local.fragments > 1 else ""
        late = f", and are applied {count(local.delay, 'step')} late" if local.delay else ""
        slowest = min(self.slowest(stage, stage) for stage in plan.stages)
        notes = (
            f"changes of parameters travel as {carry}{parts}{late}",
            f"the slowest link among them has {mbit(slowest)}",
        )
        who = "Ranks" if len(plan.stages) == 1 else f"{len(plan.stages[0].ranks)} replicas of the pipeline"
        what = f"{who} train independently, and synchronise every {local.every} steps"
        exactly = {"sums in every step": together}
        return self.carried("local steps", f"every {local.every} steps", what, None, exactly, size, notes)

    def fewer_bits(self) -> Iterator[Reason]:
        """Yield what fewer bits on links would save in an exact plan of strategy auto, where that is worth telling."""
        plan, constraints = self.plan, self.problem.constraints
        if constraints.ordered or constraints.stages is not None or inexact_parts(plan) or len(plan.stages) == 1:
            return
        other = self.other(replace(plan, stages=tuple(replace(stage, send="int8") for stage in plan.stages)))
        if other is not None and other <= (1 - _WORTH_TELLING) * self.seconds:
            others = {"8 bits on all links (parallel.exact: false)": other}
            yield Reason("accuracy", "exact", "All of this is exact", Told.RUN, seconds=self.seconds, others=others)

    def order(self) -> Iterator[Reason]:
        """Yield the number of micro-batches and the schedule."""
        plan, counts, schedules = self.plan, self.problem.micro_batches, self.problem.constraints.schedules
        others = {}
        if plan.micro_batches in counts:
            place = counts.index(plan.micro_batches)
            near = [counts[other] for other in (place - 1, place + 1) if 0 <= other < len(counts)]
            others = {str(number): self.other(replace(plan, micro_batches=number)) for number in near}
        what = f"A batch has {count(plan.micro_batches, 'micro-batch')}"
        yield self.chosen("micro-batches", str(plan.micro_batches), what, others, len(counts) == 1)
        if len(plan.stages) > 1:
            each = SCHEDULES[plan.schedule].stages_per_rank
            like = [name for name in schedules if name != plan.schedule and SCHEDULES[name].stages_per_rank == each]
            others = {name: self.other(replace(plan, schedule=name)) for name in like}
            what = f"The schedule is {plan.schedule}"
            yield self.chosen("schedule", plan.schedule, what, others, len(schedules) == 1)

    def cuts(self) -> Iterator[Reason]:
        """Yield the layers of stages, with what a step would take if each ended a layer earlier or later."""
        plan, fixed = self.plan, self.problem.constraints.cuts is not None
        for number, (stage, after) in enumerate(itertools.pairwise(plan.stages)):
            others = {}
            for name, cut in (("its end a layer earlier", stage.stop - 1), ("its end a layer later", stage.stop + 1)):
                if stage.start < cut < after.stop and not fixed:
                    moved = with_stage(plan, number, replace(stage, stop=cut))
                    others[name] = self.other(with_stage(moved, number + 1, replace(after, start=cut)))
            what = f"Stage {number} ends with layer {stage.stop - 1}"
            row = self.chosen("stage", span(stage), what, others, fixed)
            yield replace(row, told=Told.IN_FULL, stage=number)

    def chosen(self, about: str, choice: str, what: str, others: Mapping[str, float | None], fixed: bool) -> Reason:
        """Return the row of a choice among `others`, which is hardly worth telling if there are none."""
        told, why = (Told.PLAN if others else Told.IN_FULL), ", as the job says" if fixed else ""
        return Reason(about, choice, what + why, told, seconds=self.seconds, others=others)

    def devices(self) -> Iterator[Reason]:
        """Yield what each device does, and how fast it is compared with the others."""
        problem, plan, busy = self.problem, self.plan, self.found.prediction.busy
        rows = max(1, problem.batch_size // (plan.micro_batches * problem.ranks))
        times = {rank: self.evaluator.seconds(rank, 0, problem.layers, rows) for rank in busy}
        for rank in sorted(busy):
            part, speed = min(1.0, self.busy(rank)), min(times.values()) / times[rank]
            pace = "the fastest" if speed > 0.99 else f"at {speed:.2f} of the fastest's speed"
            what = (
                f"{devices(self.names, [rank])}, {pace}, takes {work_of(plan, rank)}, and computes for {part:.0%} of a "
                f"step ({human_seconds(part * self.seconds)})"
            )
            yield Reason("device", str(rank), what, Told.IN_FULL)

    def layers(self) -> Iterator[Reason]:
        """Yield how layers run on each kind of device."""
        yield from layer_reasons(self.problem.profiles, self.names)


def layer_reasons(profiles: Sequence[Profile], names: Sequence[str]) -> Iterator[Reason]:
    """Yield how layers run on each kind of device; `names` are those of the profiles' devices."""
    alike: dict[tuple[Execution, str], list[int]] = {}
    for number, profile in enumerate(profiles):
        alike.setdefault((profile.execution, f"{profile.gain:.2f}"), []).append(number)
    for (execution, gain), (first, *more) in alike.items():
        where = "" if len(alike) == 1 else f" on {names[first]}"
        where += f" and {count(len(more), 'other device')}" if more and where else ""
        if execution == PLAIN:
            text = f"All layers run as PyTorch runs them by default{where}"
            yield Reason("layers", "plain", text, Told.IN_FULL)
            continue
        exact = execution.precision == "fp32"
        notes = [f"they are {gain} times as fast as if none ran so"] if profiles[first].gain > 1 else []
        what = f"all layers run in {execution.words}"
        yield Reason("layers", what, f"A{what[1:]}{where}", Told.PLAN if exact else Told.RUN, exact, notes=notes)


def run_reasons(job: Job, threads: int | None, untried: str | None) -> Iterator[Reason]:
    """Yield what a run decides when it begins.

    `threads` are the most that a rank of this machine has cores for, None for devices on paper; `untried` says why a
    run of the job is not able to try what changes accuracy, if it is not.
    """
    own = job.parallel.threads
    if own is not None:
        what = f"Each rank computes with {count(own, 'thread')}, as the job says"
    elif threads == 1:
        what = "Each rank computes with one thread, because it has only one core"
    else:
        most = f" (1 to {threads})" if threads is not None else ""
        what = f"When the run begins, each device measures how many threads{most} make its ranks fastest"
    yield Reason("threads", str(own or (1 if threads == 1 else "tried")), what, Told.IN_FULL)
    if job.precision == "auto" and untried is not None:
        yield Reason("precision", "fp32", f"With precision: auto, all layers run in fp32, because {untried}")
    elif job.precision == "auto":
        what = "With precision: auto, this plan is for fp32"
        note = "the run tries bf16 on a warm-up, and uses it where it is faster and held-out accuracy does not suffer"
        yield Reason("precision", "tried", what, notes=[note])
