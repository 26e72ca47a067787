"""Measures how speed grows with the number of workers.

In strong scaling they share one batch, in weak scaling each has as many samples as one worker alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.plan.plan import facts_of
from horizonml.report import charts
from horizonml.report.bench.compare import short_run, strategy_changes
from horizonml.report.bench.study import (
    Case,
    CaseResult,
    Factors,
    ScalingMode,
    Study,
    failures,
    typical,
    warnings,
    where,
)
from horizonml.report.section import Picture, ReportTable, Section
from horizonml.text import percent

Points = dict[int, list[float]]  # number of workers -> a value for each repeat


def cases(
    job: Job, mode: ScalingMode, strategies: Sequence[str], workers: Sequence[int], steps: int, repeats: int
) -> list[Case]:
    """Return a run of one worker alone, then of each strategy with each number of workers it can have. Raises JobError.

    Every rank has one thread, as a small device has one core for it. Weak scaling gives every worker
    `job.batch_size` samples of the batch, strong scaling shares `job.batch_size` among them.
    """
    found = []
    for repeat in range(repeats):
        for count in sorted({1, *workers}):
            for strategy in ["single"] if count == 1 else strategies:
                if count < facts_of(strategy).min_workers:
                    continue
                batch = job.batch_size * (count if mode is ScalingMode.WEAK else 1)
                changes = {**strategy_changes(strategy, count), **short_run(batch, steps, 64), "parallel.threads": 1}
                factors = Factors(strategy=strategy, workers=count, repeat=repeat)
                name = f"{strategy}-{count}" + (f"-repeat{repeat}" if repeats > 1 else "")
                found.append(Case(name, changed(job, changes), factors, float(batch * steps)))
    return found


def section(study: Study) -> Section:
    """Return what came out. A picture is written to the study's folder."""
    settings, job = study.settings, study.settings.job
    mode = settings.mode or ScalingMode.STRONG
    part = " and worker" if mode is ScalingMode.WEAK else ", shared among the workers"
    setting = (
        f"{job.model.name} on {job.data.name}, {job.batch_size} samples per batch{part}, {settings.steps} steps; every "
        f"worker has one thread. All share one machine: {where(study)}"
    )
    result = Section(f"{mode.capitalize()} scaling", setting, failures(study) + warnings(study))
    speeds: dict[str, Points] = {}
    runs: dict[str, dict[int, list[CaseResult]]] = {}
    for one in study.succeeded:
        name, count = one.factors.strategy or one.name, one.factors.workers or 1
        speeds.setdefault(name, {}).setdefault(count, []).append(one.summary.samples_per_second)
        runs.setdefault(name, {}).setdefault(count, []).append(one)
    alone = speeds.pop("single", {}).get(1)
    if alone is None or not speeds:
        return result
    base, cores = charts.middle(alone)[0], study.environment.cores
    for points in speeds.values():
        points[1] = alone
    gains = {name: {n: [v / base for v in points[n]] for n in points} for name, points in speeds.items()}
    efficiency = {name: {n: [v / n for v in points[n]] for n in points} for name, points in gains.items()}
    result.pictures.append(_picture(study, mode, base, speeds, gains, efficiency))
    result.findings += _findings(gains, runs, cores)
    rows = [
        [name, str(n), f"{charts.middle(speeds[name][n])[0]:,.0f}", f"{charts.middle(gains[name][n])[0]:.2f}",
         percent(charts.middle(efficiency[name][n])[0]), percent(charts.middle(gains[name][n])[0] / min(n, cores))]
        for name in speeds for n in sorted(speeds[name])
    ]  # fmt: skip
    header = ["", "workers", "samples/s", "speed-up", "efficiency", "of what the cores allow"]
    result.tables.append(ReportTable("Scaling", header, rows))
    return result


def _picture(
    study: Study,
    mode: ScalingMode,
    base: float,
    speeds: dict[str, Points],
    gains: dict[str, Points],
    efficiency: dict[str, Points],
) -> Picture:
    """Draw speed, speed-up and efficiency over the workers, and their ideals; `base` is one worker's speed."""
    cores = study.environment.cores
    counts = sorted({count for points in speeds.values() for count in points})
    own, here = "a core for each worker", f"limit: {cores:g} cores on this machine"
    ideals = [
        {own: {n: base * n for n in counts}, here: {n: base * min(n, cores) for n in counts}},
        {own: {n: float(n) for n in counts}, here: {n: min(n, cores) for n in counts}},
        {own: dict.fromkeys(counts, 1.0), here: {n: min(n, cores) / n for n in counts}},
    ]
    drawn = charts.draw_lines(
        [
            ("Samples per second", speeds, charts.plain_axis),
            ("Speed-up (times one worker)", gains, charts.plain_axis),
            ("Efficiency (% of speed-up / workers)", efficiency, charts.share_axis),
        ],
        x="workers",
        ideals=ideals,
        logarithmic=2,
    )
    return Picture(
        charts.save(drawn, study.folder / f"{mode}-scaling.png"),
        f"{mode.capitalize()} scaling. The dashed line is the ideal. The shaded part cannot be reached with the "
        f"{cores:g} cores of this machine.",
    )


def _findings(gains: dict[str, Points], runs: dict[str, dict[int, list[CaseResult]]], cores: float) -> list[str]:
    """Return how fast the most workers of each strategy are, and where they lose their time."""
    texts = []
    for name, points in gains.items():
        most = max(points)
        if most == 1:
            continue
        gain, one = charts.middle(points[most])[0], typical(runs[name][most]).summary
        lost = "transfer" if one.transfer > one.wait else "waiting"
        texts.append(
            f"{name}: {most} workers are {gain:.2f} times as fast as one, {percent(gain / min(most, cores))} of what "
            f"{min(most, cores):g} cores allow; {percent(one.compute)} of their time is compute, "
            f"{percent(max(one.transfer, one.wait))} {lost}."
        )
    if any(n > cores for points in gains.values() for n in points):
        texts.append(
            f"This machine has {cores:g} cores: with more workers they share them, and speed-up beyond {cores:g} "
            "cannot be seen here. Workers on devices of their own are not held up by that."
        )
    return texts
