"""What the results of a study have to say, in tables and in words."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from horizonml.bench.study import Result, Study, is_busy
from horizonml.report.section import NOTE, Table, number_rows, write_numbers
from horizonml.report.summary import traffic
from horizonml.text import human_bytes, percent

_DIFFERENT = 0.2  # repeats that differ by more of their median than this were disturbed
_ENVIRONMENT = {"machine", "versions", "cores", "memory", "threads"}


def summary_table(title: str, columns: Mapping[str, Sequence[Result]]) -> Table:
    """Return the numbers of some runs side by side; among repeats the one with the median speed is shown."""
    shown = {name: typical(results).summary for name, results in columns.items()}
    rows = number_rows(shown)
    if any(len(results) > 1 for results in columns.values()):
        ranges = ("{:,.0f} to {:,.0f}".format(*spread(results)) for results in columns.values())
        rows.append(["samples/s, slowest to fastest repeat", *ranges])
    idle = human_bytes(max(summary.idle_rss_bytes for summary in shown.values()))
    note = f"{NOTE} A process that has only imported torch has {idle} of memory."
    return Table(title, ["", *shown], rows, note)


def typical(results: Sequence[Result]) -> Result:
    """Return the repeat with the median speed."""
    return sorted(results, key=lambda result: result.summary.samples_per_second)[(len(results) - 1) // 2]


def spread(results: Sequence[Result]) -> tuple[float, float]:
    """Return the samples per second of the slowest and the fastest repeat; without repeats, of a run's parts."""
    if len(results) == 1:
        return results[0].summary.slowest_part, results[0].summary.fastest_part
    speeds = [result.summary.samples_per_second for result in results]
    return min(speeds), max(speeds)


def where(study: Study) -> str:
    """Return the machine and the versions, in a sentence."""
    environment = study.environment
    machine, versions = environment.machine, environment.versions
    revision = f", revision {versions['revision']}" if "revision" in versions else ""
    return (
        f"{machine.processor}, {environment.cores:g} usable, {human_bytes(environment.memory_limit)} of memory; "
        f"{machine.system}; Python {versions['python']}, torch {versions['torch']}, "
        f"HorizonML {versions['horizonml']}{revision}; {environment.time}."
    )


def failures(study: Study) -> list[str]:
    """Return what did not work, as findings."""
    return [f"{result.name} failed: {(result.error or '').splitlines()[0]}" for result in study.failed]


def warnings(study: Study) -> list[str]:
    """Return why the times should not be trusted, as findings: a machine with other work, or repeats that disagree."""
    texts, cores = [], study.environment.cores
    disturbed = {one.name: one.cores_taken for one in study.succeeded if is_busy(one.cores_taken, cores)}
    if disturbed:
        few = len(disturbed) < len(study.succeeded)
        which = f"{', '.join(disturbed)} ran" if few and len(disturbed) <= 6 else "the runs were measured"
        texts.append(
            f"Warning: the machine was busy. Other processes had up to {max(disturbed.values()):.1f} of its {cores:g} "
            f"cores while {which}, so these speeds are too low, most of all those with several threads or ranks."
        )
    repeats: dict[str, list[Result]] = {}
    for one in study.succeeded:
        repeats.setdefault(one.factors.label, []).append(one)
    for label, results in repeats.items():
        low, high = spread(results)
        middle = statistics.median(result.summary.samples_per_second for result in results)
        if len(results) > 1 and high - low > _DIFFERENT * middle:
            texts.append(
                f"Warning: the repeats of {label} differ by {percent((high - low) / middle)} in speed ({low:,.0f} to "
                f"{high:,.0f} samples/s). Something disturbed them: repeat them on a quiet machine (--fresh)."
            )
    return texts


def write_data(study: Study) -> list[Path]:
    """Write `results.csv`, one run per line, and `results.json`, with the environment and every link.

    Return the paths of both. Raises JobError.
    """
    rows = [{**result.factors.to_json(), **dataclasses.asdict(result.summary)} for result in study.succeeded]
    document = {
        "kind": study.kind,
        "settings": study.settings.model_dump(mode="json", exclude_unset=True),
        "environment": study.environment.model_dump(mode="json"),
        "runs": [
            {
                "name": result.name,
                "factors": result.factors.to_json(),
                "summary": dataclasses.asdict(result.summary),
                "links": [dataclasses.asdict(link) for link in traffic(result.run)],
                "environment": result.run.lead.run.model_dump(mode="json", include=_ENVIRONMENT),
            }
            for result in study.succeeded
        ],
        "failed": {result.name: result.error for result in study.failed},
    }
    return write_numbers(study.folder / "results", rows, document)
