"""The command that says what is wrong with a device: `horizonml doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from horizonml.machine.checkup import Finding

_WIDTH = 20  # columns before what was found


def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Look at the way to this device, too, and at its service.", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--run-folder", metavar="FOLDER", help="Where this device keeps its part of runs.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Say what keeps this device from training, or makes it slow, and what to do about it.

    It looks at the processor, PyTorch (a step in a process of its own), memory, disk, heat and voltage, limits of a
    container, the token, interfaces, ports, firewalls and multicast, and changes nothing. It ends with 1 if there is a
    problem, which is what keeps this device from training or from meeting the others.
    """
    import json
    from dataclasses import asdict

    from horizonml import __version__
    from horizonml.machine.checkup import Finding, Level
    from horizonml.text import count

    found = list[Finding]()
    for one in _findings(peer, folder):
        found.append(one)
        if not as_json:
            _show(one)
    if as_json:
        print(json.dumps({"horizonml": __version__, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        numbers = [
            count(sum(one.level is level for one in found), level)
            for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
        ]
        print(f"\n{', '.join(numbers)}")
    if any(one.level is Level.PROBLEM for one in found):
        raise typer.Exit(1)


def _findings(peer: str | None, folder: Path) -> Iterator[Finding]:
    from horizonml.machine.checkup import DEVICE_CHECKS, Patient
    from horizonml.rendezvous.discovery import checkup
    from horizonml.rendezvous.discovery.finding import at

    patient = Patient(folder=folder)
    place = at(peer) if peer is not None else None
    for check in (*DEVICE_CHECKS, *checkup.NETWORK_CHECKS):
        yield from check(patient)
    if place is not None:
        yield from checkup.peer(patient, place.hosts[0], place.port)


def _show(one: Finding) -> None:
    """Print a finding as it comes."""
    from horizonml.cli.tables import print_text

    print_text(one.what, f"{one.level:<8} {one.check:<{_WIDTH - 9}}")
    for name, words in (("why", one.why), ("do", one.fix)):
        if words:
            print_text(words, f"{'':{_WIDTH}}{name + ':':<5}")
