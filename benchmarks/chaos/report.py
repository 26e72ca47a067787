"""Reports what a campaign has measured: as tables, as JSON, and as CSV with a row for each fault."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.accounting import Aftermath, Injected
from benchmarks.chaos.campaign import Result
from horizonml.files import write_atomically
from horizonml.text import human_seconds, percent

KINDS_HEADER = ("fault", "number", "noticed after", "others step again", "all step again", "steps repeated")
_DRIFT = 1.1  # between the references before and after, beyond which the goodput is in doubt
_COLUMNS: dict[str, Callable[[Aftermath], Any]] = {
    "fault": lambda found: found.fault.kind,
    "rank": lambda found: found.fault.rank,
    "time": lambda found: found.fault.time,
    "until": lambda found: found.fault.until,
    "detail": lambda found: found.fault.detail,
    "struck": lambda found: found.fault.struck,
    "seconds_to_notice": lambda found: found.noticed,
    "seconds_to_step": lambda found: found.stepped,
    "seconds_to_whole": lambda found: found.whole,
    "steps_repeated": lambda found: found.repeated,
    "generations": lambda found: found.generations,
}


def briefly(seconds: float) -> str:
    """Return a time that somebody has chosen, without the zeros: 30 s, 10 min, 1 min 30 s."""
    return (
        human_seconds(round(seconds)).replace(".0 s", " s").removesuffix(" 0 s")
        if seconds >= 1
        else human_seconds(seconds)
    )


def kinds_table(result: Result) -> list[list[str]]:
    """Return a row for each kind of fault: medians, and the worst in brackets."""
    rows = []
    for kind in dict.fromkeys(_kind(found.fault) for found in result.aftermaths):
        some = [found for found in result.aftermaths if _kind(found.fault) == kind]
        repeated = [found.repeated for found in some]
        rows.append(
            [
                kind,
                str(len(some)),
                _typical([found.noticed for found in some]),
                _typical([found.stepped for found in some]),
                _typical([found.whole for found in some]),
                f"{sum(repeated)} (at most {max(repeated)})" if any(repeated) and len(some) > 1 else f"{sum(repeated)}",
            ]
        )
    return rows


def _kind(fault: Injected) -> str:
    """Return the kind of a fault in words."""
    return fault.kind if fault.struck else f"{fault.kind} (survived)"


def _typical(values: Sequence[float | None]) -> str:
    """Return the median and the largest of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = human_seconds(statistics.median(known))
    return f"{middle} ({human_seconds(max(known))})" if len(known) > 1 else middle


def facts(result: Result) -> list[tuple[str, str]]:
    """Return what there is to say of the whole campaign, as names and values."""
    ledger, settings = result.ledger, result.settings
    kinds = [_kind(fault) for fault in result.faults]
    by_kind = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    difference = ledger.loss_difference()
    unasked = _unasked(result)
    found = [
        ("goodput", f"{percent(result.goodput, 1)} of the samples without faults{_doubt(result)}"),
        ("samples/s", f"{result.speed(result.faulted):,.0f} with faults; without: {_reference(result)}"),
        ("faults", f"{len(kinds)} in {briefly(result.faulted.seconds)}: {by_kind or 'none'}"),
        ("ranks", f"{settings.ranks}, each restarted {briefly(settings.restart_after)} after its death"),
        ("groups formed", f"{len(ledger.groups):,}"),
        ("steps", f"{max((made.step for made in ledger.made), default=0):,}; repeated: {ledger.repeated():,}"),
        ("unexpected ends of a rank", f"{unasked:,}" if unasked else "none"),
    ]
    if difference is not None:
        differs = f"differs from the first time by at most {difference:.2g} of its value"
        found.append(("loss of repeated steps", differs if difference else "the same as the first time"))
    return found


def _reference(result: Result) -> str:
    """Return the speeds of the reference before and after the faults."""
    spans = zip(("before", "after"), result.references, strict=False)
    return ", ".join(f"{result.speed(span):,.0f} {when}" for when, span in spans) or "-"


def _doubt(result: Result) -> str:
    """Return within which bounds the goodput is, where the machine's speed has drifted."""
    speeds = [speed for span in result.references if (speed := result.speed(span))]
    if not speeds or max(speeds) < _DRIFT * min(speeds):
        return ""
    faulted = result.speed(result.faulted)
    low, high = percent(faulted / max(speeds), 1), percent(faulted / min(speeds), 1)
    return f" ({low} to {high}: the machine's speed changed during the run)"


def _unasked(result: Result) -> int:
    """Return how many processes ended although no fault had ended them."""
    deadly = sum(fault.kind == "oom" and fault.struck for fault in result.faults)
    return max(0, sum(not end.killed for end in result.exits) - deadly)


def to_json(result: Result) -> dict[str, Any]:
    """Return all numbers of a campaign."""
    settings, ledger = result.settings, result.ledger
    return {
        "settings": {**asdict(settings), "job": str(settings.job), "folder": str(settings.folder)},
        "goodput": result.goodput,
        "samples_per_second": {
            "faulted": result.speed(result.faulted),
            "reference": [result.speed(span) for span in result.references],
        },
        "faulted": asdict(result.faulted),
        "references": [asdict(span) for span in result.references],
        "generations": len(ledger.groups),
        "steps_repeated": ledger.repeated(),
        "loss_difference": ledger.loss_difference(),
        "exits": [asdict(end) for end in result.exits],
        "ended_unasked": _unasked(result),
        "faults": [{name: column(found) for name, column in _COLUMNS.items()} for found in result.aftermaths],
        "failures": result.failures,
    }


def write(result: Result) -> list[Path]:
    """Write the numbers as JSON and CSV beside the records, and return the files."""
    folder = result.settings.folder
    numbers, table = folder / "chaos.json", folder / "chaos.csv"
    write_atomically(numbers, json.dumps(to_json(result), indent=1).encode())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([column(found) for column in _COLUMNS.values()] for found in result.aftermaths)
    write_atomically(table, text.getvalue().encode())
    return [numbers, table]
