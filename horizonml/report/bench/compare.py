"""Compares ways of training on the same samples, updates and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from horizonml.errors import JobError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.plan.plan import facts_of
from horizonml.planner.worth import Worth
from horizonml.report import charts, run_plots
from horizonml.report.bench.study import (
    Case,
    CaseResult,
    Factors,
    Study,
    failures,
    spread,
    summary_table,
    typical,
    warnings,
    where,
)
from horizonml.report.section import Picture, ReportTable, Section, rank_tables
from horizonml.report.summary import Summary
from horizonml.text import count, human_bytes, human_seconds, percent


def cases(job: Job, strategies: Sequence[str], samples: Sequence[int], workers: int, repeats: int) -> list[Case]:
    """Return a run for each repeat, number of samples and strategy. Raises JobError.

    Without numbers of samples, all that the job has are used.
    """
    few = [size for size in samples if size < job.batch_size]
    if few:
        raise JobError(
            f"--samples: {few[0]} is less than a batch, which has {job.batch_size} samples; take more samples, or "
            f"--set batch_size={few[0]}"
        )
    found = []
    sizes: list[int | None] = list(samples) or [None]
    for repeat in range(repeats):
        for size in sizes:
            for strategy in strategies:
                changes = {
                    **strategy_changes(strategy, workers),
                    "seed": job.seed + repeat,
                    "data.samples": size or job.data.samples,
                    **MEASURED,
                    "telemetry.timeline_every": 10,
                }
                factors = Factors(strategy=strategy, samples=size, repeat=repeat)
                name = "-".join(
                    [strategy, *([str(size)] if size else []), *([f"repeat{repeat}"] if repeats > 1 else [])]
                )
                work = float((size or 1) * job.epochs)
                found.append(Case(name, changed(job, changes), factors, work))
    return found


# A run that is measured goes to its end, and saves nothing.
MEASURED: dict[str, object] = {"early_stop.patience": None, "checkpoint.enabled": False, "checkpoint.keep_best": None}


def short_run(batch: int, steps: int, held_out: int) -> dict[str, object]:
    """Return the changes that make a job one epoch of so many steps, with about as many held-out samples as given."""
    samples = batch * steps
    share = min(0.9, max(1e-6, held_out / samples))
    sizes = {"batch_size": batch, "epochs": 1, "steps": None, "data.samples": samples, "data.holdout": share}
    return {**sizes, **MEASURED}


def strategy_changes(strategy: str, workers: int) -> dict[str, object]:
    """Return the changes that give a job another strategy, and change nothing else that matters to the result."""
    limits = facts_of(strategy)
    changes: dict[str, object] = {
        "parallel.strategy": strategy,
        "parallel.workers": min(workers, limits.max_workers or workers),
        "parallel.stages": None,
    }
    if not limits.micro_batches:
        changes["parallel.micro_batches"] = None
    return changes


def section(study: Study) -> Section:
    """Return what came out. Pictures are written to the study's folder."""
    by_size: dict[str, dict[str, list[CaseResult]]] = {}
    for result in study.succeeded:
        size = f"{result.factors.samples:,}" if result.factors.samples is not None else "all"
        by_size.setdefault(size, {}).setdefault(result.factors.strategy or result.name, []).append(result)
    settings, job = study.settings, study.settings.job
    title = f"Ways of training {job.model.name} on {job.data.name}"
    repeats = f", {settings.repeats} repeats with seeds of their own" if settings.repeats > 1 else ""
    length = count(job.epochs, "epoch") if job.steps is None else count(job.steps, "step")
    setting = (
        f"Batch size {job.batch_size}, {length}, {settings.workers} ranks{repeats}; every "
        f"strategy trains on the same samples in the same order, and makes the same number of updates. "
        f"{_places(settings.emulated)}: {where(study)}"
    )
    part = Section(title, setting, failures(study) + warnings(study))
    if not by_size:
        return part
    largest = next(reversed(by_size))
    for size, runs in by_size.items():
        label = f"{size} samples: " if len(by_size) > 1 else ""
        texts = findings(runs, study)
        part.findings += [label + text for text in (texts if size == largest else texts[:1])]
        part.tables.append(summary_table(f"{size} training samples" if size != "all" else "All samples", runs))
    part.brief = _brief(title, by_size)
    last = next(reversed(by_size.values()))
    part.tables += rank_tables({name: typical(results).run for name, results in last.items()})
    part.pictures = list(_pictures(study.folder, by_size))
    return part


def _places(emulated: Sequence[float]) -> str:
    """Return where the ranks run, in a sentence without its end."""
    if not emulated:
        return "All ranks share one machine"
    cores = ", ".join(f"{one:g}" for one in emulated)
    return (
        f"Every rank stands for a device of its own, with {cores} cores in this order, and a single one for the "
        "fastest. The devices are emulated: a rank waits as long as its device would still compute, and links between "
        "them are not slowed down. All of this is on one machine"
    )


def _brief(title: str, by_size: dict[str, dict[str, list[CaseResult]]]) -> ReportTable:
    """Return what fits into 80 columns; the page has the rest."""
    many = len(by_size) > 1
    rows = []
    for runs in by_size.values():
        for name, results in runs.items():
            one = typical(results).summary
            rows.append(
                [
                    name,
                    *([f"{one.samples // one.epochs:,}"] if many else []),
                    percent(one.accuracy, 1),
                    f"{one.samples_per_second:,.0f}",
                    human_seconds(one.epoch_seconds),
                    *(percent(share) for share in (one.compute, one.transfer, one.wait)),
                    *([] if many else [human_bytes(one.rss_peak_bytes)]),
                ]
            )
    header = ["", "accuracy", "samples/s", "epoch", "compute", "transfer", "wait", "memory"]
    return ReportTable(title, ["", "samples", *header[1:-1]] if many else header, rows)


def findings(runs: dict[str, list[CaseResult]], study: Study) -> list[str]:
    """Return who wins where, and why, in sentences made from the numbers."""
    shown = {name: typical(results).summary for name, results in runs.items()}
    ranking = sorted(shown, key=lambda name: -shown[name].samples_per_second)
    texts = []
    if len(ranking) > 1:
        texts.append(_fastest(ranking, shown, runs))
    losses = [_loss(name, one) for name, one in shown.items() if one.ranks > 1]
    if losses:
        texts.append("; ".join(losses) + ".")
    if not study.settings.emulated:
        texts += _alone(shown[ranking[0]], shown, study.environment.cores)
    texts += _accuracies(shown, runs)
    least = min(shown, key=lambda name: shown[name].rss_peak_bytes)
    most = max(shown, key=lambda name: shown[name].rss_peak_bytes)
    if least != most:
        texts.append(
            f"The largest rank of {least} needs least memory, {human_bytes(shown[least].rss_peak_bytes)}; {most} needs "
            f"{human_bytes(shown[most].rss_peak_bytes)}."
        )
    worth = typical(runs[ranking[0]]).run.worth
    if worth is not None:
        texts.append(f"With {ranking[0]}, {worth.words}.")
    return texts


def _fastest(ranking: list[str], shown: dict[str, Summary], runs: dict[str, list[CaseResult]]) -> str:
    """Return which strategy is fastest, by how much, and whether that is certain."""
    first, best = ranking[0], shown[ranking[0]]
    others = ", ".join(
        f"{best.samples_per_second / shown[name].samples_per_second:.2f} times {name}" for name in ranking[1:]
    )
    slowest, fastest = spread(runs[first])
    speed = f"{best.samples_per_second:,.0f} samples/s ({slowest:,.0f} to {fastest:,.0f})"
    near = [name for name in ranking[1:] if spread(runs[name])[1] >= slowest]
    doubt = f" The ranges of {first} and of {', '.join(near)} overlap, so their order is not certain."
    return f"{first} is fastest with {speed}: {others}.{doubt if near else ''}"


def _loss(name: str, one: Summary) -> str:
    """Return where a strategy of several ranks loses its time."""
    kind = "transfer" if one.transfer > one.wait else "waiting for other ranks"
    return (
        f"{name} computes for {percent(one.compute)} of its time and loses most to {kind} "
        f"({percent(max(one.transfer, one.wait))}), sending {human_bytes(one.bytes_per_step)} a step"
    )


def _alone(best: Summary, shown: dict[str, Summary], cores: float) -> list[str]:
    """Return what the comparison with a single process means on one machine, if there is one."""
    if "single" not in shown:
        return []
    if best.ranks > 1:
        return [
            f"The {best.ranks} ranks share {cores:g} cores here, which one process alone could use, too; on devices of "
            "their own each rank would have its own."
        ]
    if len(shown) == 1:
        return []
    return [
        f"One process alone could use the same {cores:g} cores (it used {shown['single'].cpu_cores:.1f}) without "
        "sending anything: on one machine it is hard to beat; ranks pay where each has a device of its own, or where "
        "memory is short."
    ]


def _accuracies(shown: dict[str, Summary], runs: dict[str, list[CaseResult]]) -> list[str]:
    """Return how far the strategies' accuracies differ, and whether that is more than their repeats do."""
    accuracies = {name: one.accuracy for name, one in shown.items() if one.accuracy is not None}
    if len(accuracies) < 2 or len(accuracies) < len(shown):
        return []
    high, low = max(accuracies, key=accuracies.__getitem__), min(accuracies, key=accuracies.__getitem__)
    text = (
        f"Held-out accuracy lies between {percent(accuracies[low], 1)} ({low}) and {percent(accuracies[high], 1)} "
        f"({high})"
    )
    repeats = [
        [r.summary.accuracy for r in results if r.summary.accuracy is not None]
        for results in runs.values()
        if len(results) > 1
    ]
    apart = max((max(values) - min(values) for values in repeats), default=None)
    if apart is not None:
        verdict = "no more than" if accuracies[high] - accuracies[low] <= apart else "more than"
        text += f", {verdict} the {100 * apart:.1f} points by which repeats of one strategy differ"
    return [f"{text}."]


def radar_values(runs: dict[str, list[CaseResult]]) -> dict[str, dict[str, float]]:
    """Return each run's values from 0 to 1 on every axis; none is 0 for being the last.

    Shares and accuracy stand for themselves. Speed, memory and work per processor second are ratios to the best of the
    runs shown, so that half as good is 0.5.
    """
    shown = {name: typical(results).summary for name, results in runs.items()}
    fastest = max(one.samples_per_second for one in shown.values())
    smallest = min(one.rss_peak_bytes for one in shown.values())
    per_cpu = {name: one.samples_per_second / one.cpu_cores for name, one in shown.items()}
    return {
        name: {
            "accuracy\n(held out)": one.accuracy or 0.0,
            "speed\n(/ fastest)": one.samples_per_second / fastest,
            "not waiting\n(share of time)": 1 - one.wait,
            "not in transfer\n(share of time)": 1 - one.transfer,
            "small memory\n(least / own peak)": smallest / one.rss_peak_bytes,
            "samples per CPU second\n(/ best)": per_cpu[name] / max(per_cpu.values()),
        }
        for name, one in shown.items()
    }


RADAR = (
    "The rim is 1, the centre 0. Accuracy and the two shares of time stand for themselves; speed, memory and samples "
    "per CPU second are ratios to the best run shown (half as good is 0.5), so that the last place is not 0 by "
    "construction."
)


def _pictures(folder: Path, by_size: dict[str, dict[str, list[CaseResult]]]) -> list[Picture]:
    last_size, last = next(reversed(by_size.items()))
    many = len(by_size) > 1
    label = f" ({last_size} samples)" if last_size != "all" else ""
    seed = f"{label}, first seed" if _repeated(last) else label
    runs = {name: results[0].run for name, results in last.items()}  # of one seed

    def values(field: str) -> dict[str, dict[str, list[float]]]:
        found: dict[str, dict[str, list[float]]] = {}
        for size, strategies in by_size.items():
            for name, results in strategies.items():
                repeats = [getattr(result.summary, field) for result in results]
                if all(value is not None for value in repeats):
                    found.setdefault(name, {})[size] = repeats
        return found

    panels = [
        ("Samples per second", values("samples_per_second"), charts.plain_axis),
        ("Time of an epoch", values("epoch_seconds"), charts.seconds_axis),
        ("Held-out accuracy (%)", values("accuracy"), charts.percent_axis),
        ("Training accuracy (%)", values("train_accuracy"), charts.percent_axis),
        ("Held-out loss (cross-entropy)", values("loss"), charts.plain_axis),
        ("Gradient divergence (of the mean)", values("divergence"), charts.plain_axis),
    ]
    costs = [
        ("Compute (% of time)", values("compute"), charts.share_axis),
        ("Transfer (% of time)", values("transfer"), charts.share_axis),
        ("Wait (% of time)", values("wait"), charts.share_axis),
        ("Idle, per rank and epoch", values("idle_seconds"), charts.seconds_axis),
        ("CPU (% of the cores)", values("cpu_utilisation"), charts.share_axis),
        ("Memory of the largest rank", values("rss_peak_bytes"), charts.bytes_axis),
        ("Memory of the mean rank", values("rss_mean_bytes"), charts.bytes_axis),
        ("Sent per step, all ranks", values("bytes_per_step"), charts.bytes_axis),
        ("Sent per second, all ranks", values("bytes_per_second"), charts.byte_rate_axis),
    ]
    energy = values("joules_per_sample")
    if energy:
        costs.append(("Energy per sample (J)", energy, charts.plain_axis))
    note = " Bars are medians of the repeats, lines reach from the least to the most." if _repeated(last) else ""
    category = "training samples" if many else ""
    found = [
        Picture(
            charts.radar(radar_values(last), folder / "radar.png", f"Six measures of each strategy{label}"),
            f"Six measures of each strategy{label}. {RADAR}",
        ),
        Picture(charts.bars(panels, folder / "results-bars.png", category=category), f"What training achieved.{note}"),
        Picture(charts.bars(costs, folder / "costs-bars.png", category=category), f"What it took.{note}"),
        Picture(
            charts.save(run_plots.draw_learning_curves(runs), folder / "learning-curves.png"),
            f"How they learned{seed}.",
        ),
        Picture(
            run_plots.time_split(runs, folder / "time-split.png"),
            f"Where the time of an average step went, rank by rank{label}.",
        ),
    ]
    best = max(last, key=lambda name: typical(last[name]).summary.samples_per_second)
    worth = typical(last[best]).run.worth
    if worth is not None and len(worth.alone) > 1:
        found.insert(0, _worth_picture(worth, last, folder / "worth.png"))
    for name, run in runs.items():
        path = run_plots.timeline(name, run, folder / f"timeline-{name}.png") if len(run.stages) > 1 else None
        if path is not None:
            found.append(Picture(path, f"One step of {name}{label}: who worked on which micro-batch, and who waited."))
    return found


def _worth_picture(worth: Worth, runs: dict[str, list[CaseResult]], path: Path) -> Picture:
    """Draw what the devices do together, in each way, beside what each of them does alone."""
    speeds = {name: [one.summary.samples_per_second for one in results] for name, results in runs.items()}
    speeds.pop("single", None)  # which is one of them alone, too
    alone = {f"{name}, alone": [rate] for name, rate in zip(worth.names, worth.alone, strict=True) if rate}
    everything = {"each of them alone, added up": [sum(rate for rate in worth.alone if rate)]}
    best = max(speeds, key=lambda name: max(speeds[name]))
    title = f"Samples per second of {len(worth.alone)} devices, together and alone"
    picture = charts.ranking({**everything, **speeds, **alone}, path, title=title, own=best, unit="")
    return Picture(picture, f"{title}: {worth.words}.")


def _repeated(runs: dict[str, list[CaseResult]]) -> bool:
    return any(len(results) > 1 for results in runs.values())
