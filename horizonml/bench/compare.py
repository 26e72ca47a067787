"""Trains the same job in several ways on this machine, and compares them."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizonml.bench.results import Run, Summary, load_run, summarise
from horizonml.files import write_atomically
from horizonml.job import Job, Strategy
from horizonml.launch import train_here
from horizonml.text import human_bytes, human_seconds


@dataclass(frozen=True)
class Comparison:
    """What was compared, and the files written about it."""

    runs: list[Run]
    summaries: list[Summary]
    files: list[Path]


def compare(
    job: Job, strategies: Sequence[Strategy], workers: int, folder: Path, say: Callable[[str], None]
) -> Comparison | None:
    """Run the job once with each strategy, on the same samples and updates; None if interrupted.

    Records go to `folder/STRATEGY`, tables and pictures to `folder`. Raises HorizonError.
    """
    runs = []
    for strategy in strategies:
        ranks = 1 if strategy == "single" else workers
        say(f"\n{strategy}: {ranks} rank{'s' if ranks > 1 else ''}")
        if not train_here(variant(job, strategy, ranks, folder / strategy), fresh=True):
            return None
        runs.append(load_run(strategy, folder / strategy))
    summaries = [summarise(run) for run in runs]
    return Comparison(runs, summaries, write_report(runs, summaries, folder))


def variant(job: Job, strategy: Strategy, workers: int, folder: Path) -> Job:
    """The job with another strategy and nothing else changed that matters to the result."""
    parallel = job.parallel.model_copy(update={"strategy": strategy, "workers": workers, "stages": None})
    return job.model_copy(update={"parallel": parallel, "folder": str(folder)})


def write_report(runs: Sequence[Run], summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """CSV, pictures, and a page that shows them; returns their paths."""
    from horizonml.bench import plots  # matplotlib takes half a second

    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "comparison.csv"
    write_atomically(table, _csv(summaries).encode())
    pictures = [folder / "learning-curves.png", folder / "time-split.png"]
    plots.learning_curves(runs, pictures[0])
    plots.time_split(runs, pictures[1])
    for run in runs:
        path = folder / f"timeline-{run.name}.png"
        if len(run.lead.run["plan"]["stages"]) > 1 and plots.timeline(run, path):
            pictures.append(path)
    report = folder / "report.md"
    write_atomically(report, _report(runs, summaries, pictures).encode())
    return [report, table, *pictures]


def _csv(summaries: Sequence[Summary]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Summary)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(summary) for summary in summaries)
    return text.getvalue()


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "": lambda s: s.name,
    "ranks": lambda s: str(s.ranks),
    "members per stage": lambda s: s.plan,
    "micro-batches": lambda s: str(s.micro_batches),
    "updates": lambda s: str(s.updates),
    "accuracy": lambda s: f"{s.accuracy:.2%}",
    "loss": lambda s: f"{s.loss:.4f}",
    "epoch": lambda s: human_seconds(s.epoch_seconds),
    "samples/s": lambda s: f"{s.samples_per_second:,.0f}",
    "compute": lambda s: f"{s.compute:.0%}",
    "transfer": lambda s: f"{s.transfer:.0%}",
    "wait": lambda s: f"{s.wait:.0%}",
    "CPU cores": lambda s: f"{s.cpu_cores:.2f}",
    "RSS, largest rank": lambda s: human_bytes(s.rss_bytes),
    "sent per step": lambda s: human_bytes(s.bytes_per_step),
}


def _report(runs: Sequence[Run], summaries: Sequence[Summary], pictures: Sequence[Path]) -> str:
    job, cores = runs[0].lead.run["job"], runs[0].lead.run["cores"]
    lines = [
        f"# {job['model']['name']} on {job['data']['name']}",
        "",
        f"Batch size {job['batch_size']}, {job['epochs']} epochs, seed {job['seed']}; "
        f"{summaries[0].samples:,} samples and {summaries[0].updates} updates in every run. "
        f"All ranks on one machine with {cores:g} cores.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(column(summary) for column in COLUMNS.values()) + " |" for summary in summaries),
        "",
        "compute, transfer and wait are shares of all ranks' time and add up to it; accuracy and loss are on held-out "
        "data; CPU cores and bytes are of all ranks together. A process that has only imported torch has "
        f"{human_bytes(summaries[0].idle_rss_bytes)}.",
        "",
    ]
    for picture in pictures:
        lines += [f"![{picture.stem}]({picture.name})", ""]
    return "\n".join(lines)
