"""Measures which batch size is fastest, and where memory would end."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.report import charts
from horizonml.report.bench.compare import short_run, strategy_changes
from horizonml.report.bench.study import Case, Factors, Study, failures, warnings, where
from horizonml.report.section import Picture, ReportTable, Section
from horizonml.text import count, human_bytes, human_seconds, percent

Points = dict[int, list[float]]  # batch size -> a value for each repeat


def cases(
    job: Job, models: Sequence[str], sizes: Sequence[int], strategy: str, workers: int, steps: int, repeats: int
) -> list[Case]:
    """Return a run for each repeat, model and batch size. Raises JobError."""
    found = []
    for repeat in range(repeats):
        for model in models:
            for size in sizes:
                changes = {**strategy_changes(strategy, workers), "model.name": model, **short_run(size, steps, 16)}
                factors = Factors(model=model, strategy=strategy, batch_size=size, repeat=repeat)
                name = f"{model}-{size}" + (f"-repeat{repeat}" if repeats > 1 else "")
                found.append(Case(name, changed(job, changes), factors, float(size * steps)))
    return found


def section(study: Study) -> Section:
    """Return what came out. Pictures are written to the study's folder."""
    settings, job = study.settings, study.settings.job
    setting = (
        f"{settings.strategy} with {count(settings.workers or 1, 'rank')} on {job.data.name} data of "
        f"{job.data.image_size or 'their own'} pixels, {settings.steps} steps each, of which the first half is "
        f"warm-up. {where(study)}"
    )
    result = Section("Batch sizes", setting, failures(study) + warnings(study))
    speeds: dict[str, Points] = {}
    memory: dict[str, Points] = {}
    step_times: dict[str, Points] = {}
    for one in study.succeeded:
        name, size = one.factors.model or one.name, one.factors.batch_size or job.batch_size
        speeds.setdefault(name, {}).setdefault(size, []).append(one.summary.samples_per_second)
        memory.setdefault(name, {}).setdefault(size, []).append(one.summary.rss_peak_bytes)
        step_times.setdefault(name, {}).setdefault(size, []).append(size / one.summary.samples_per_second)
    if not speeds:
        return result
    limit = study.environment.memory_limit / (settings.workers or 1)
    peaks = {name: _middles(points) for name, points in memory.items()}
    rows = []
    for name, points in speeds.items():
        middles = _middles(points)
        fastest = max(middles, key=middles.__getitem__)
        result.findings.append(_finding(name, middles, peaks[name], limit))
        for size, speed in middles.items():
            best = "fastest" if size == fastest else ""
            held = human_bytes(peaks[name][size])
            rows.append([name, f"{size:,}", f"{speed:,.0f}", human_seconds(size / speed), held, best])
    header = ["model", "batch size", "samples/s", "step", "memory, peak rank", ""]
    result.tables.append(ReportTable("Batch sizes", header, rows))
    drawn = charts.draw_lines(
        [
            ("Samples per second", speeds, charts.plain_axis),
            ("Time of a step", step_times, charts.seconds_axis),
            ("Memory of the largest rank", memory, charts.bytes_axis),
        ],
        x="samples per batch",
    )
    chart = charts.save(drawn, study.folder / "batch-sizes.png")
    result.pictures.append(Picture(chart, "Speed, time of a step and memory over the batch size."))
    fit = charts.memory_fit(peaks, limit, study.folder / "memory.png", x="samples per batch", form=charts.bytes_axis)
    result.pictures.append(
        Picture(fit, "Dots are measured, and lines are fitted to them, up to the memory of a rank here.")
    )
    return result


def _middles(points: Points) -> dict[int, float]:
    return {size: charts.middle(values)[0] for size, values in sorted(points.items())}


def _finding(name: str, speeds: dict[int, float], peaks: dict[int, float], limit: float) -> str:
    """Return which batch size is fastest, which is enough, and where memory would end."""
    fastest = max(speeds, key=speeds.__getitem__)
    enough = min(size for size, speed in speeds.items() if speed >= 0.95 * speeds[fastest])
    words = f"{name}: {fastest} samples per batch are fastest ({speeds[fastest]:,.0f} samples/s)"
    if enough != fastest:
        words += f"; {enough} already reach {percent(speeds[enough] / speeds[fastest])} of that"
    end = memory_end(peaks, limit)
    if end is not None:
        growth = human_bytes(charts.straight_line(peaks)[0])
        words += f". Memory grows by {growth} per sample and would end at about {end:,.0f} samples"
    return f"{words}."


def memory_end(peaks: dict[int, float], limit: float) -> float | None:
    """Return the batch size at which the straight line through the measured memory meets the limit, or None."""
    slope, base = charts.straight_line(peaks)
    return (limit - base) / slope if slope >= 1 else None  # a byte
