"""Which batch size is fastest, and where memory would end."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.bench.compare import strategy_changes
from horizonml.bench.section import Picture, Section, Table, failures, percent, warnings, where
from horizonml.bench.study import Case, Study
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.report import charts, style
from horizonml.text import human_bytes, human_seconds


def cases(
    job: Job, models: Sequence[str], sizes: Sequence[int], strategy: str, workers: int, steps: int, repeats: int
) -> list[Case]:
    """One run for each model and batch size. Raises JobError."""
    found = []
    for repeat in range(repeats):
        for model in models:
            for size in sizes:
                changes = {
                    **strategy_changes(strategy, workers),
                    "model.name": model,
                    "batch_size": size,
                    "epochs": 1,
                    "data.samples": size * steps,
                    "data.holdout": min(0.9, max(1e-6, 16 / (size * steps))),
                    "checkpoint.enabled": False,
                }
                factors = {"model": model, "strategy": strategy, "batch_size": size, "repeat": repeat}
                name = f"{model}-{size}" + (f"-repeat{repeat}" if repeats > 1 else "")
                found.append(Case(name, changed(job, changes), factors, float(size * steps)))
    return found


def section(study: Study) -> Section:
    """What came out; pictures are written to the study's folder."""
    job = study.settings["job"]
    setting = (
        f"{study.settings['strategy']} with {study.settings['workers']} rank(s) on {job['data']['name']} data of "
        f"{job['data']['image_size'] or 'their own'} pixels, {study.settings['steps']} steps each, of which the first "
        f"half "
        f"is warm-up. {where(study)}"
    )
    result = Section("Batch sizes", setting, failures(study) + warnings(study))
    speeds: dict[str, dict[int, list[float]]] = {}
    memory: dict[str, dict[int, list[float]]] = {}
    step_times: dict[str, dict[int, list[float]]] = {}
    for one in study.succeeded:
        name, size = one.factors["model"], one.factors["batch_size"]
        speeds.setdefault(name, {}).setdefault(size, []).append(one.summary.samples_per_second)
        memory.setdefault(name, {}).setdefault(size, []).append(one.summary.rss_peak_bytes)
        step_times.setdefault(name, {}).setdefault(size, []).append(size / one.summary.samples_per_second)
    if not speeds:
        return result
    limit = float(study.environment["memory_limit"]) / study.settings["workers"]
    rows = []
    for name, points in speeds.items():
        middles = {size: charts.middle(values)[0] for size, values in sorted(points.items())}
        peaks = {size: charts.middle(values)[0] for size, values in sorted(memory[name].items())}
        fastest = max(middles, key=middles.__getitem__)
        enough = min(size for size, speed in middles.items() if speed >= 0.95 * middles[fastest])
        end = memory_end(peaks, limit)
        words = f"{name}: {fastest} samples per batch are fastest ({middles[fastest]:,.0f} samples/s)"
        words += (
            f"; {enough} already reach {percent(middles[enough] / middles[fastest])} of that"
            if enough != fastest
            else ""
        )
        if end is not None:
            growth = human_bytes(charts.straight_line(peaks)[0])
            words += f". Memory grows by {growth} per sample and would end at about {end:,.0f} samples"
        result.findings.append(f"{words}.")
        for size, speed in middles.items():
            best = "fastest" if size == fastest else ""
            rows.append(
                [name, f"{size:,}", f"{speed:,.0f}", human_seconds(size / speed), human_bytes(peaks[size]), best]
            )
    result.tables.append(
        Table("Batch sizes", ["model", "batch size", "samples/s", "step", "memory, peak rank", ""], rows)
    )
    chart = charts.lines(
        [
            ("Samples per second", speeds, style.plain_axis),
            ("Time of a step", step_times, style.seconds_axis),
            ("Memory of the largest rank", memory, style.bytes_axis),
        ],
        study.folder / "batch-sizes.png",
        x="samples per batch",
    )
    result.pictures.append(Picture(chart, "Speed, time of a step and memory over the batch size."))
    medians = {name: {size: charts.middle(v)[0] for size, v in points.items()} for name, points in memory.items()}
    fit = charts.memory_fit(medians, limit, study.folder / "memory.png", x="samples per batch", form=style.bytes_axis)
    result.pictures.append(
        Picture(fit, "Dots are measured, lines are fitted to them, up to the memory of a rank here.")
    )
    return result


def memory_end(peaks: dict[int, float], limit: float) -> float | None:
    """The batch size at which the straight line through the measured memory meets the limit; None if it never does."""
    slope, base = charts.straight_line(peaks)
    return (limit - base) / slope if slope >= 1 else None  # a byte
