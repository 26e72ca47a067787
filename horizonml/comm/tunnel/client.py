"""Controls a rank's tunnel: starts the side process, and sends it requests.

The side process gets the cipher that this machine's processor has instructions for. The ranks of a group exchange what
they need to know of one another's machines, so that those on different machines connect through their tunnels.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonml.comm.tunnel.addresses import is_portable, vouch
from horizonml.errors import SecurityError
from horizonml.files import own_temporary, write_atomically
from horizonml.security.token import Token

AES, CHACHA = "TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"
_CPU = Path("/proc/cpuinfo")
_AES = re.compile(r"^(flags|Features)\s*:.*\baes\b", re.MULTILINE)


def offered(processors: str | None) -> list[str]:
    """Return the ciphers that a machine offers to others, the best first, by the kernel's list of its processors.

    Without such a list, it offers both. A processor without instructions for AES offers ChaCha20 alone, so that its
    stronger peers use that, too: the weaker one of two machines decides how fast they are together.
    """
    return [AES, CHACHA] if processors is None or _AES.search(processors) else [CHACHA]


def configuration(ciphers: list[str]) -> str:
    """Return OpenSSL's configuration for a process that offers these; Python's ssl cannot choose those of TLS 1.3."""
    return (
        "openssl_conf = init\n[init]\nssl_conf = ssl\n[ssl]\nsystem_default = tls\n"
        f"[tls]\nCiphersuites = {':'.join(ciphers)}\n"
    )


LINK_PORT = "HORIZONML_LINK_PORT"  # overrides `security.port` on this machine
_START_SECONDS = 60.0  # for the process to start; a small board that is busy takes long to load what it needs
_ANSWER_SECONDS = 10.0
_SERVE_SECONDS = 20.0
_LOOK_SECONDS = 0.02
_GONE = "the side process of the tunnel has ended, or does not answer"
_PACKAGE = Path(__file__).resolve().parents[3]
Fields = dict[str, Any]


class TunnelGone(RuntimeError):
    """Raised when the side process cannot be started, has ended, or does not answer."""


@dataclass(frozen=True)
class TunnelUsage:
    """Says what a tunnel has carried so far, and what it took."""

    sent: int = 0  # bytes
    received: int = 0
    seconds: float = 0.0  # of the processor
    connections: int = 0
    refused: int = 0  # connections of strangers
    cipher: str = ""


def link_port(port: int, env: Mapping[str, str] = os.environ) -> int:
    """Return the port of this machine's tunnel: that of the job, unless the environment has another.

    Raises SecurityError.
    """
    text = env.get(LINK_PORT)
    if not text:
        return port
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise SecurityError(f"${LINK_PORT} must be a port from 1 to 65535, not {text[:20]!r}")
    return int(text)


class Tunnel:
    """Carries this rank's connections to other machines, through a process of its own."""

    def __init__(self, token: Token, address: str, port: int, encrypt: bool = True) -> None:
        """Start the process, which accepts other machines' connections at `address` and `port`.

        If another rank of this machine does so already, this one stands by. Raises SecurityError if the port cannot be
        had.
        """
        self._token, self._encrypt, self._at = token, encrypt, (address, port)
        self._lock = threading.Lock()
        self._ensuring = threading.Lock()  # a thread that connected the last group may still be at it
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._last = TunnelUsage()
        self.ensure()

    def ensure(self) -> None:
        """Start the process again if it has ended, and serve again if that has failed.

        Raises SecurityError, TunnelGone.
        """
        with self._ensuring:
            try:
                serving = self._serving()[0]
            except TunnelGone:
                self.close()
                serving = "gone"
            try:
                if serving == "gone":
                    self._start()
                if serving not in ("yes", "standby"):
                    self._serve()
            except TunnelGone:
                self.close()
                raise

    def _serving(self) -> tuple[str, str]:
        """Return whether the process serves: "yes", "standby", "no" or "failed"; and why not. Raises TunnelGone."""
        state, reason = self._ask({"do": "state", "numbers": []})["serving"]
        return state, reason

    def _serve(self) -> None:
        """Accept other machines' connections, or stand by. Raises SecurityError, TunnelGone."""
        address, port = self._at
        self._ask({"do": "serve", "address": address, "port": port})
        until = time.monotonic() + _SERVE_SECONDS
        while (state := self._serving())[0] == "no":
            if time.monotonic() > until:
                state = "failed", f"no answer from what listens there within {_SERVE_SECONDS:.0f} s"
                break
            time.sleep(_LOOK_SECONDS)
        if state[0] == "failed":
            self.close()
            raise SecurityError(
                f"this machine cannot take other machines' data at {address}:{port}: {state[1]}; free the port, or "
                f"choose another one with security.port, or ${LINK_PORT} for this machine alone"
            )

    def _start(self) -> None:
        """Start the process, and tell it the token. Raises TunnelGone."""
        try:
            process, line = _spawn()
        except OSError as error:
            raise TunnelGone(f"the side process of the tunnel cannot be started: {error.strerror or error}") from error
        self._process = process
        line.settimeout(_START_SECONDS)
        begin = {"do": "begin", "token": self._token.text, "encrypt": self._encrypt, "rank": os.getpid()}
        try:
            reply = _answer(line, begin)
        except OSError as error:
            line.close()
            raise TunnelGone(_GONE) from error
        if "error" in reply:
            line.close()
            raise TunnelGone(f"the side process of the tunnel cannot begin: {reply['error']}")
        line.settimeout(_ANSWER_SECONDS)
        self._line = line  # from now on other threads may ask, too

    def open(
        self, host: str, port: int, stand_in: str, target: tuple[str, int], own_port: int
    ) -> tuple[int, tuple[str, int]]:
        """Return the number and the address of a socket that stands for a rank on another machine. Raises TunnelGone.

        Whoever of this user connects to it first is connected to `target` there. This rank listens at `own_port`.
        """
        where = {"host": host, "port": port, "stand_in": stand_in, "own_port": own_port}
        reply = self._ask({"do": "open", **where, "target": target})
        if "error" in reply:
            raise TunnelGone(f"the tunnel cannot listen at {stand_in}: {reply['error']}")
        address, port = reply["at"]
        return int(reply["number"]), (address, port)

    def vouch(self, address: str, port: int) -> ExitStack:
        """Let other machines' ranks reach a listener of this one until what is returned is closed.

        Raises OSError.
        """
        return vouch(self._token, address, port)

    def failures(self, numbers: Sequence[int], seconds: float) -> dict[int, str]:
        """Return why some of these could not be connected, once all are connected or have failed. Raises TunnelGone."""
        until = time.monotonic() + seconds
        while True:
            states = self._ask({"do": "state", "numbers": list(numbers)})["states"]
            if time.monotonic() > until or all(state in ("connected", "failed") for state, _ in states):
                break
            time.sleep(_LOOK_SECONDS)
        found = zip(numbers, states, strict=True)
        return {number: reason or "no answer" for number, (state, reason) in found if state != "connected"}

    def forget(self, numbers: Sequence[int]) -> None:
        """Wait no longer for connections to these. What is connected stays."""
        with suppress(TunnelGone):
            self._ask({"do": "close", "numbers": list(numbers)})

    def usage(self) -> TunnelUsage:
        """Return what was carried so far; what was known last, if the process does not answer."""
        with suppress(TunnelGone):
            self._last = TunnelUsage(**self._ask({"do": "stats"}))
        return self._last

    def close(self, seconds: float = 0.0) -> None:
        """Let go of the process, which ends with its last connection; wait for that no longer than `seconds`."""
        line, process = self._line, self._process
        self._line = self._process = None
        if line is not None:
            line.close()
        if process is None:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:  # its end is noted whenever it comes
            threading.Thread(target=process.wait, name="tunnel-end", daemon=True).start()

    def _ask(self, request: Fields) -> Fields:
        """Return the reply of the process. Raises TunnelGone."""
        with self._lock:
            if self._line is None:
                raise TunnelGone("the tunnel is closed")
            try:
                return _answer(self._line, request)
            except OSError as error:
                self._line.close()
                self._line = None
                raise TunnelGone(_GONE) from error


def _answer(line: socket.socket, request: Fields) -> Fields:
    """Send a request, and return its reply. Raises OSError."""
    line.sendall(json.dumps(request).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        more = line.recv(64 << 10)
        if not more:
            raise ConnectionResetError
        answer += more
    reply: Fields = json.loads(answer)
    return reply


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process with the configuration of OpenSSL that this processor calls for. Raises OSError."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_PACKAGE)]))
    try:
        with theirs, ExitStack() as held:
            if is_portable():
                configured, given = own_temporary() / "openssl.cnf", []
                write_atomically(configured, configuration(offered(None)).encode())
            else:  # Linux keeps this file in memory: a container may have no other place to write to.
                memory = held.enter_context(os.fdopen(os.memfd_create("openssl"), "wb"))
                memory.write(configuration(offered(_CPU.read_text(errors="replace"))).encode())
                memory.flush()
                configured, given = Path(f"/proc/self/fd/{memory.fileno()}"), [memory.fileno()]
            env = {**os.environ, "PYTHONPATH": path, "OPENSSL_CONF": str(configured)}
            for name in ("HORIZONML_TOKEN", "HORIZONML_TOKEN_FILE"):  # the token comes by the line
                env.pop(name, None)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "horizonml.comm.tunnel.process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=env,
                pass_fds=given,
                start_new_session=True,  # Ctrl-C is for the rank
            )
    except OSError:
        ours.close()
        raise
    return process, ours


@dataclass(frozen=True)
class TunnelPeer:
    """Says which machine a rank of a group runs on, and where that machine's tunnel accepts connections."""

    host_id: str
    address: str
    port: int


@dataclass(frozen=True)
class Links:
    """Holds the peers of a group in the order of their ranks, this rank among them, and this rank's tunnel."""

    peers: Sequence[TunnelPeer]
    tunnel: Tunnel

    def far(self, one: int, other: int) -> bool:
        """Return whether two ranks are on different machines."""
        return self.peers[one].host_id != self.peers[other].host_id
