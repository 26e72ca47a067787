"""The commands that serve the rendezvous and make the token: `horizonml rendezvous` and `horizonml token`."""

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
    from horizonml.runtime.command import become_service, serve_command

    if not command:
        become_service(host, 29400 if port is None else port, inherited, insecure)
    code = serve_command(host, port or 0, advertise, command, insecure)
    if code:
        raise typer.Exit(code)


def token(
    show: Annotated[bool, typer.Option("--show", help="Print the token, and nothing else.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the token by a new one. Do this between runs, on one device.")
    ] = False,
    secret: Annotated[
        bool, typer.Option("--secret", help="Print a Kubernetes Secret with the token, for `kubectl apply -f -`.")
    ] = False,
) -> None:
    """Make the token that lets devices train together, or say where it is.

    Devices with the same token find each other, encrypt what they send, and let nobody else in. Make it once, on any
    of them, and copy the file to the others:

    \b
        horizonml token
        ssh pi@raspberry mkdir -p .config/horizonml
        scp ~/.config/horizonml/token pi@raspberry:.config/horizonml/token

    $HORIZONML_TOKEN, or a file that $HORIZONML_TOKEN_FILE names, takes precedence over that file.
    """
    import os

    from horizonml.errors import SecurityError
    from horizonml.security.token import TOKEN, TOKEN_FILE, find_token, make_token, save_token, token_file

    if show + rotate + secret > 1:
        raise SecurityError("--show, --rotate and --secret exclude each other; give one of them")
    if rotate:
        if os.environ.get(TOKEN):
            raise SecurityError(f"the token is in ${TOKEN}, which this command cannot change; set a new one there")
        new = make_token()
        print(f"a new token ({new.id}) is in {save_token(new)}; copy that file to the other devices")
        return
    found, made = find_token(), False
    if found is None:
        if show:
            raise SecurityError("there is no token yet; `horizonml token` makes one")
        found, made = make_token(), True
        save_token(found)
    if show:
        print(found.text)
    elif secret:
        print(_MANIFEST.format(token=found.text), end="")
    else:
        where = f"${TOKEN}" if os.environ.get(TOKEN) else str(token_file())
        print(f"{'a new' if made else 'the'} token ({found.id}) is in {where}")
        print(f"Copy it to the other devices, to the same place or to a file that ${TOKEN_FILE} names, with mode 600.")


_MANIFEST = """\
apiVersion: v1
kind: Secret
metadata:
  name: horizonml-token
type: Opaque
stringData:
  token: {token}
"""
