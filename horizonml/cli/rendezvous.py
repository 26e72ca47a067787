"""The command that serves the rendezvous: `horizonml rendezvous`."""

from __future__ import annotations

from typing import Annotated

import typer


def rendezvous(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="A command that starts ranks, after `--`; the service ends with it.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 for other machines, which needs a token (`horizonml token`).",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Port to listen on; 0 for any free one. Default: 29400, or with COMMAND any free one.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Name or address under which COMMAND's ranks reach this machine. Default: its host name.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do without a token: any stranger who reaches the port can take part.")
    ] = False,
    inherited: Annotated[int | None, typer.Option("--inherited", hidden=True)] = None,
) -> None:
    """Serve the rendezvous, where the ranks of a job meet.

    Without a command, it serves until it is stopped. With a command that starts ranks, it serves for as long as the
    command runs, and passes the address to it in HORIZONML_RENDEZVOUS, whatever the launcher:

        horizonml rendezvous -- mpirun -n 4 horizonml train digits

    Connections are encrypted, and nobody gets in without the token that `horizonml token` makes. Ranks on this machine
    alone need none; a command's ranks get one that is made for them.
    """
    from horizonml.runtime.serve import become_service, serve_command

    if not command:
        become_service(host, 29400 if port is None else port, inherited, insecure)
    code = serve_command(host, port or 0, advertise, command, insecure)
    if code:
        raise typer.Exit(code)
