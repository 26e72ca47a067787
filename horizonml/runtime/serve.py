"""Runs the rendezvous service, alone or around a command that starts ranks; without PyTorch, in little memory."""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from horizonml.machine.code import python_module
from horizonml.machine.network import listen
from horizonml.machine.signals import StopRequest, handling
from horizonml.rendezvous.service import SETTLE_SECONDS, Service
from horizonml.runtime.command import Command, insecure, token_of_service, warn_of_strangers
from horizonml.runtime.process import run_and_exit
from horizonml.security.token import INSECURE, TOKEN, Token, find_token, make_token

RENDEZVOUS = "HORIZONML_RENDEZVOUS"


def serve(host: str, port: int, inherited: int | None, without_token: bool) -> None:
    """Serve the rendezvous on an address, or on an inherited listening socket, until SIGTERM or SIGINT.

    Raises RendezvousError or SecurityError.
    """
    stop = StopRequest()
    with handling(stop.note):
        token = token_of_service(host if inherited is None else "localhost", without_token)
        if token is None:
            warn_of_strangers(f"{host}:{port}")
        listener = listen(host, port) if inherited is None else socket.socket(fileno=inherited)
        # If ranks have met earlier at a service at this address, the service waits for those.
        service = Service(listener, tls_of(token), settle=SETTLE_SECONDS if inherited is None else 0.0)
        print(f"rendezvous service on {host}:{service.port}", flush=True)
        service.run(lambda: stop.wanted)


def become_service(host: str, port: int, inherited: int | None, without_token: bool) -> NoReturn:
    """Let this process be one that does nothing but `serve`, in half the memory that the command line takes."""
    options = json.dumps([host, port, inherited, without_token])
    sys.stdout.flush()
    os.execv(sys.executable, python_module(__name__, options))  # noqa: S606  (no shell is involved)


def serve_command(host: str, port: int, advertise: str | None, command: Sequence[str], without_token: bool) -> int:
    """Serve the rendezvous until a command that starts ranks has ended, and return its exit code.

    The command finds the service's address, with `advertise` as the host, in HORIZONML_RENDEZVOUS, and the token in
    HORIZONML_TOKEN, which is made for it if there is none. A signal asks the command, and all that it has started, to
    end. Raises RendezvousError, SecurityError or JobError.
    """
    stop = StopRequest()
    with handling(stop.note):
        token = None if without_token or insecure() else find_token() or make_token()
        if token is None:
            warn_of_strangers(f"{host}:{port}")
        listener = listen(host, port)
        wildcard = host in ("0.0.0.0", "::")  # noqa: S104
        address = f"{advertise or (socket.gethostname() if wildcard else host)}:{listener.getsockname()[1]}"
        print(f"rendezvous service at {address}", file=sys.stderr, flush=True)
        env = {**os.environ, RENDEZVOUS: address, **({TOKEN: token.text} if token is not None else {INSECURE: "1"})}
        # The socket listens already, so the ranks need not wait for the service.
        with Command(command, env, stop) as running:
            service, done = Service(listener, tls_of(token)), threading.Event()
            thread = threading.Thread(target=service.run, args=(done.is_set,), name="rendezvous", daemon=True)
            thread.start()
            code = running.wait()
            done.set()
            thread.join(5)
            return code


def tls_of(token: Token | None) -> ssl.SSLContext | None:
    """Return how a service protects its connections with a token, if it has one."""
    if token is None:
        return None
    from horizonml.security.tls import server_context

    return server_context(token)


if __name__ == "__main__":
    run_and_exit(lambda: serve(*json.loads(sys.argv[1])))
