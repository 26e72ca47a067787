"""Decides with which token a process meets the others, and refuses to be reached from other machines without one."""

from __future__ import annotations

import os
import sys

from horizonml.errors import SecurityError
from horizonml.machine.network import is_loopback
from horizonml.rendezvous.client import Endpoint
from horizonml.security.token import INSECURE, TOKEN, Token, find_token

_CURES = (
    "run `horizonml token` on this machine and copy the file that it names to the others, "
    f"or accept that any stranger may take part: --insecure, or {INSECURE}=1"
)


def endpoint_for(address: tuple[str, int]) -> Endpoint:
    """Return how a rank reaches the rendezvous service at an address. Raises SecurityError."""
    host, port = address
    token = token_of_rank()
    if token is not None:
        from horizonml.security.tls import client_context

        return Endpoint(host, port, client_context(token))
    if not (insecure() or is_loopback(host)):
        raise SecurityError(
            f"the rendezvous service at {host}:{port} is on another machine, and this process has no token; get it "
            f"from the device that runs the service (`horizonml token` says where it is) into ${TOKEN} or the same "
            f"file here, or accept that any stranger may take part: {INSECURE}=1"
        )
    warn_of_strangers(f"{host}:{port}")
    return Endpoint(host, port)


def token_of_rank() -> Token | None:
    """Return the token with which this process takes part, None if the user accepts strangers. Raises SecurityError."""
    return None if insecure() else find_token()


def token_of_service(host: str, without: bool) -> Token | None:
    """Return the token of a service that listens at `host`, None if it may do without. Raises SecurityError.

    `without` says that the user accepts a service without a token.
    """
    if without or insecure():
        return None
    token = find_token()
    if token is None and not is_loopback(host):
        raise SecurityError(f"--host {host}: other machines reach this address, and there is no token; {_CURES}")
    return token


def insecure() -> bool:
    """Return whether the user accepts strangers."""
    return os.environ.get(INSECURE, "").lower() in ("1", "true", "yes")


def warn_of_strangers(address: str) -> None:
    """Say aloud that an address has no token, unless only this machine reaches it."""
    if not is_loopback(address.rpartition(":")[0].strip("[]")):
        words = f"warning: {address} has no token: any stranger who reaches it can take part, and read what is sent"
        print(words, file=sys.stderr, flush=True)
