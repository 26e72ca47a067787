"""The commands about who may take part: `horizonml token` and `horizonml devices`."""

from __future__ import annotations

from typing import Annotated

import typer


def token(
    show: Annotated[bool, typer.Option("--show", help="Print the token, and nothing else.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the token by a new one. Do this between runs, on one device.")
    ] = False,
    secret: Annotated[
        str | None,
        typer.Option(
            "--secret",
            metavar="JOB",
            help="Print a Kubernetes Secret with a new token for this job, for `kubectl create -f -`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make the token that lets devices train together, or say where it is.

    Devices with the same token find each other, encrypt what they send, and let nobody else in. `horizonml up` makes
    one if there is none, and `horizonml join CODE` gives another device a token of its own. To share one token instead,
    copy its file:

    \b
        horizonml token
        ssh pi@raspberry mkdir -p .config/horizonml
        scp ~/.config/horizonml/token pi@raspberry:.config/horizonml/token

    $HORIZONML_TOKEN, or a file that $HORIZONML_TOKEN_FILE names, takes precedence over that file.
    """
    import os

    from horizonml.errors import SecurityError
    from horizonml.security.token import TOKEN, TOKEN_FILE, find_token, make_token, save_token, token_file

    if show + rotate + (secret is not None) > 1:
        raise SecurityError("--show, --rotate and --secret exclude each other; give one of them")
    if rotate:
        if os.environ.get(TOKEN):
            raise SecurityError(f"the token is in ${TOKEN}, which this command cannot change; set a new one there")
        new = make_token()
        print(f"a new token ({new.id}) is in {save_token(new)}; copy that file to the other devices, or pair them anew")
        return
    if secret is not None:
        import yaml

        from horizonml.kube import render

        print(yaml.safe_dump(render.secret(f"{secret}-token", make_token()), sort_keys=False), end="")
        return
    found, made = find_token(), False
    if found is None:
        if show:
            raise SecurityError("there is no token yet; `horizonml token` makes one")
        found, made = make_token(), True
        save_token(found)
    if show:
        print(found.text)
    else:
        where = f"${TOKEN}" if os.environ.get(TOKEN) else str(token_file())
        kind = "this device's own" if found.is_own else "a new" if made else "the"
        print(f"{kind} token ({found.id}) is in {where}")
        if found.is_own:
            print("It is for this device alone: pair others by `horizonml join CODE`.")
            return
        print(f"Copy it to the other devices, to the same place or to a file that ${TOKEN_FILE} names, with mode 600.")


def devices(
    revoke: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Let this device, by its name or identifier, take part no more; the others notice nothing.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the devices that were paired with this one, or revoke the token of one of them.

    A device that joined by `horizonml join CODE` has a token of its own. Once that is revoked, this device shuts it out
    at once, and so do the others as soon as they have heard of it from this one's service.
    """
    import time

    from horizonml.cli.tables import print_table
    from horizonml.errors import SecurityError
    from horizonml.security.devices import PairedDevices
    from horizonml.security.token import find_token
    from horizonml.text import rough_time

    token = find_token()
    if token is None:
        raise SecurityError("this device has no token, so no other was paired with it; `horizonml up` makes one")
    known = PairedDevices(token)
    if revoke is not None:
        gone = known.revoke(revoke)
        print(f"the token of {gone.name} ({gone.id}) is revoked; `horizonml join CODE` lets it in again")
        return
    rows, now = list[list[str]](), time.time()
    for one in known.all():
        state = "revoked" if one.revoked else "valid"
        rows.append([one.name, one.id, f"{rough_time(max(0.0, now - one.since))} ago", state])
    if rows:
        print_table("", ["device", "identifier", "paired", "token"], rows, text=(0, 1, 3))
    else:
        print("no device was paired with this one; `horizonml up` shows a code for `horizonml join CODE`")
