"""Shows the devices of a run that gathers: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from horizonml.rendezvous.device_messages import DeviceInfo, DeviceState
from horizonml.rendezvous.devices import Device
from horizonml.text import human_bytes, printable


def speed_words(device: DeviceInfo) -> str:
    """Return a device's speed for people."""
    return f"{device.gflops:.0f} GFLOP/s" if device.gflops else "-"


def model_words(device: DeviceInfo) -> str:
    """Return what a device is for people: its model, or else its processor."""
    return device.model or device.processor.rpartition(" (")[0] or "-"


def device_words(device: DeviceInfo) -> str:
    """Return what a device is and has, in one line."""
    parts = [model_words(device), f"{device.cores:g} cores", human_bytes(device.memory), device.architecture]
    return printable(", ".join(part for part in [*parts, speed_words(device)] if part not in ("", "-")))


def rows(own: DeviceInfo, own_state: str, devices: Sequence[Device]) -> list[dict[str, str]]:
    """Return what is shown of this device and of those that have come, by heading."""
    entries = [(own, "this device", own_state)]
    entries += [(one.beat.device, _link(one), _state(one)) for one in devices]
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


def _state(device: Device) -> str:
    words = f": {device.beat.words}" if device.beat.words else ""
    return f"{device.beat.state}{words}"


def _link(device: Device) -> str:
    return str(device.beat.link) if device.beat.link is not None else "-"


class LiveTable:
    """Draws a table of the devices of a run, which changes in its place."""

    def __init__(self, own_state: str) -> None:
        self._console, self._own_state = Console(), own_state
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, own: DeviceInfo, devices: Sequence[Device], hint: str) -> None:
        """Show who is there now; called again and again."""
        found = rows(own, self._own_state, devices)
        table = Table(*found[0], box=None, pad_edge=False)
        for row in found:
            table.add_row(*map(Text, row.values()))  # what devices say is text, and never markup
        self._live.update(Group(table, Text(hint)))

    def say(self, text: str) -> None:
        """Show a message that stays."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """End the view; what it has shown last stays."""
        self._live.stop()


class DeviceLines:
    """Does the same on plain output: prints a line whenever a device comes, goes, or changes its state."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, DeviceState]] = {}
        self._hint = ""

    def show(self, own: DeviceInfo, devices: Sequence[Device], hint: str) -> None:
        here = {device.beat.id: device for device in devices}
        for id, device in here.items():
            before = self._known.get(id)
            name, state = printable(device.beat.device.name), device.beat.state
            if before is None:
                self.say(f"{name} is here: {device_words(device.beat.device)}")
            if state is not DeviceState.PREPARING and (before is None or before[1] is not state):
                link = f", link {device.beat.link}" if device.beat.link is not None else ""
                self.say(f"{name}: {printable(_state(device))}{link}")
            self._known[id] = name, state
        for id in [id for id in self._known if id not in here]:
            self.say(f"{self._known.pop(id)[0]} is gone")
        if hint != self._hint:
            self._hint = hint
            self.say(hint)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        sys.stdout.flush()


View = LiveTable | DeviceLines


def view(own_state: str) -> View:
    """Return the view that suits standard output."""
    return LiveTable(own_state) if sys.stdout.isatty() else DeviceLines()
