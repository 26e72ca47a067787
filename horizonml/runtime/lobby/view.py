"""Shows who is at a lobby: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from horizonml.rendezvous.discovery.device import Device
from horizonml.runtime.lobby.lobby import Guest
from horizonml.runtime.lobby.messages import Standing, rate_words
from horizonml.text import human_bytes, printable


class View(Protocol):
    """Shows a lobby."""

    def show(self, own: Device, guests: Sequence[Guest], hint: str) -> None:
        """Show who is there now; called again and again."""

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def close(self) -> None:
        """End the view; what it has shown last stays."""


def speed_words(device: Device) -> str:
    """Return a device's speed for people."""
    return f"{device.gflops:.0f} GFLOP/s" if device.gflops else "-"


def model_words(device: Device) -> str:
    """Return what a device is for people: its model, or else its processor."""
    return device.model or device.processor.rpartition(" (")[0] or "-"


def device_words(device: Device) -> str:
    """Return what a device is and has, in one line."""
    parts = [model_words(device), f"{device.cores:g} cores", human_bytes(device.memory), device.architecture]
    return printable(", ".join(part for part in [*parts, speed_words(device)] if part not in ("", "-")))


def rows(own: Device, own_state: str, guests: Sequence[Guest]) -> list[dict[str, str]]:
    """Return what is shown of this device and of those that have come, by heading."""
    entries = [(own, "this device", own_state)]
    entries += [(guest.sign.device, rate_words(guest.sign.link), _state(guest)) for guest in guests]
    return [
        {
            "device": printable(device.name),
            "model": printable(model_words(device)),
            "cores": f"{device.cores:g}",
            "memory": human_bytes(device.memory),
            "architecture": printable(device.architecture),
            "speed": speed_words(device),
            "link": link,
            "state": printable(state),
        }
        for device, link, state in entries
    ]


def _state(guest: Guest) -> str:
    """Return a device's state for people."""
    words = f": {guest.sign.words}" if guest.sign.words else ""
    return f"{guest.sign.standing}{words}"


class LiveTable:
    """Draws a table that changes in its place."""

    def __init__(self, own_state: str) -> None:
        self._console, self._own_state = Console(), own_state
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, own: Device, guests: Sequence[Guest], hint: str) -> None:
        found = rows(own, self._own_state, guests)
        table = Table(*found[0], box=None, pad_edge=False)
        for row in found:
            table.add_row(*map(Text, row.values()))  # what devices say is text, and never markup
        self._live.update(Group(table, Text(hint)))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


class Lines:
    """Prints a line whenever a device comes, goes, or changes its state."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Standing]] = {}
        self._hint = ""

    def show(self, own: Device, guests: Sequence[Guest], hint: str) -> None:
        here = {guest.sign.id: guest for guest in guests}
        for id, guest in here.items():
            before = self._known.get(id)
            name, standing = printable(guest.sign.device.name), guest.sign.standing
            if before is None:
                self.say(f"{name} is here: {device_words(guest.sign.device)}")
            if standing is not Standing.PREPARING and (before is None or before[1] is not standing):
                link = f", link {rate_words(guest.sign.link)}" if guest.sign.link is not None else ""
                self.say(f"{name}: {printable(_state(guest))}{link}")
            self._known[id] = name, standing
        for id in [id for id in self._known if id not in here]:
            self.say(f"{self._known.pop(id)[0]} is gone")
        if hint != self._hint:
            self._hint = hint
            self.say(hint)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        sys.stdout.flush()


def view(own_state: str) -> View:
    """Return the view that suits standard output."""
    return LiveTable(own_state) if sys.stdout.isatty() else Lines()
