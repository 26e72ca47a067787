"""The command by which devices in different networks meet: `horizonml relay`."""

from __future__ import annotations

from typing import Annotated

import typer


def relay(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on.")] = 29410,
) -> None:
    """Pass sealed bytes between devices that cannot reach each other, as behind the routers of two flats.

    Run it on a host that all of them reach: a small rented server, or one whose port a router forwards. It needs no
    token and can read nothing. On the devices:

    \b
        horizonml up digits --relay HOST
        horizonml join 7-lantern-orbit --relay HOST
    """
    from horizonml.machine.signals import stop_on_signal
    from horizonml.rendezvous.relay import serve_relay

    with stop_on_signal() as stop:
        serve_relay(host, port, lambda: stop.wanted)
