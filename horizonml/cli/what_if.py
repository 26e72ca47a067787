"""The command that plans a run again with other devices: `horizonml what-if`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def what_if(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder (runs/NAME); the run may still be training.", show_default=False
        ),
    ],
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="Add a device (repeatable): like:RANK, and then what differs, after commas: speed=0.5 (relative to "
            "that rank's), memory=1GiB, rate=100Mbit and latency=2ms of its links, watts=2.5/6 "
            "(idle/busy), name=NAME. Without like, give speed (relative to rank 0's), memory and rate.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK", help="Remove a device, by its rank or its name (repeatable)."),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK=RATE",
            help="Change how fast a link is (repeatable): 0-1=100Mbit between two ranks, 2=20Mbit for all links of a "
            "rank, all=50Mbit for all links; with a latency, 0-1=100Mbit,5ms.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan by another strategy than the job's: auto, ddp, hybrid, pipeline.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Give up after S seconds of planning.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Predict what other devices or links would change about a run.

    Shows the plan and the time of a step that are predicted for the run's devices after the changes, how both differ
    from the present ones, and why. Nothing is measured, and the run is not disturbed: everything comes from what rank 0
    has recorded in the run's folder. Planning takes some seconds.
    """
    import json

    from horizonml.errors import JobError
    from horizonml.report.what_if import what_if as ask

    rates: dict[str, str] = {}
    for text in rate or []:
        link, sign, value = text.partition("=")
        if not sign:
            raise JobError(f"--rate: {ascii(text)[:60]} lacks a rate; write for example 0-1=100Mbit")
        rates[link] = value
    answer = ask(run, add or (), remove or (), rates, strategy, seconds)
    if as_json:
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _print(answer)


def _print(answer: dict[str, Any]) -> None:
    from horizonml.cli.tables import print_table, print_text
    from horizonml.text import count, human_bytes, human_seconds

    present, predicted = answer["present"], answer["predicted"]
    rows = []
    for number, stage in enumerate(predicted["stages"]):
        names = [stage["layers"][0], stage["layers"][-1]]
        span = f"{stage['start']}-{stage['stop'] - 1} ({names[0]} .. {names[1]})"
        if len(stage["layers"]) == 1:
            span = f"{stage['start']} ({names[0]})"
        for rank, share in zip(stage["ranks"], stage["shares"], strict=True):
            device = predicted["devices"][rank]
            has = f" of {human_bytes(device['memory'])}" if device["memory"] is not None else ""
            rows.append(
                [
                    str(number),
                    span,
                    str(rank),
                    device["name"],
                    f"{share:.0%}",
                    f"{human_bytes(device['needs'])}{has}",
                    f"{device['busy']:.0%}",
                ]
            )
    ranks = count(len(predicted["devices"]), "rank")
    micro_batches = count(predicted["micro_batches"], "micro-batch")
    print_table(
        f"{answer['run']}, predicted plan for {ranks}: {predicted['schedule']}, {micro_batches}",
        ["stage", "layers", "rank", "device", "samples", "memory", "busy"],
        rows,
        text=(1, 3),
    )
    print()
    for line in answer["changes"]:
        print_text(line)
    print_text(f"That is {predicted['samples_per_second']:,.0f} samples/s: {predicted['parts_text']}.")
    if present["measured_seconds"] is not None:
        print_text(
            f"Measured until now: {human_seconds(present['measured_seconds'])} a step. If the prediction errs as much "
            f"after the change, that becomes {human_seconds(predicted['scaled_seconds'])}."
        )
    print()
    for line in [*answer["why"], *answer["notes"]]:
        print_text(line)
