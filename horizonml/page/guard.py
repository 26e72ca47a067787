"""Decides who may ask what of the page's service, and tells browsers what they may do with its answers."""

from __future__ import annotations

import hmac
import ipaddress
import socket

from horizonml.machine.network import is_loopback
from horizonml.web.messages import Reply, Request

# Nothing is loaded from elsewhere, nothing inline runs, and no other site may show the page in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ACTIONS = "/api/actions/"
_COSTLY, _HEADER = "/api/what-if", "x-horizonml"  # takes seconds of the processor, and what its requests must have


def guarded(reply: Reply) -> Reply:
    """Return an answer with the headers that every answer has."""
    return Reply(reply.status, reply.body, reply.kind, {**_HEADERS, **reply.headers})


class Guard:
    """Refuses requests that a browser was tricked into, and those of people who may not ask."""

    def __init__(self, host: str, token: str | None) -> None:
        """`host` is the address that the service listens on; `token` allows actions."""
        self._host, self._token = host, token
        own = socket.gethostname().lower()
        self._names = {host.lower(), "localhost"}
        if not is_loopback(host):
            self._names |= {own, f"{own}.local", socket.getfqdn().lower()}

    def refuse(self, request: Request) -> Reply | None:
        """Return why a request is not answered, or None if it is."""
        if not self._is_for_us(request.headers.get("host", "")):
            # A name that an attacker's server has pointed here would make this page part of the attacker's site.
            return Reply.text(421, "this service does not answer under that name; use its address\n")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and request.path.startswith("/api/"):
            return Reply.text(403, "other sites may not ask this service\n")
        if request.path == _COSTLY and _HEADER not in request.headers:
            # Browsers say where a question comes from to trustworthy addresses only, so not on most local networks, but
            # let no other site add a header.
            return Reply.text(403, "ask this with the header X-HorizonML: 1, which other sites cannot send\n")
        if request.method == "POST" and request.path.startswith(ACTIONS):
            return self._refuse_action(request)
        if request.method != "GET":
            return Reply.text(405, "only GET, and POST for actions\n", {"Allow": "GET"})
        return None

    def may_act(self, request: Request) -> bool:
        """Return whether a client may send the token: without encryption it must not travel over a network."""
        return self._token is not None and is_loopback(request.peer)

    def _refuse_action(self, request: Request) -> Reply | None:
        if not self.may_act(request):
            words = "actions need the token, which is sent to 127.0.0.1 only; use `ssh -L` from another machine\n"
            return Reply.text(403, words)
        assert self._token is not None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token.encode())
        if kind.lower() == "bearer" and same:
            return None
        return Reply.text(401, "that is not the token of this service\n", {"WWW-Authenticate": "Bearer"})

    def _is_for_us(self, header: str) -> bool:
        """Return whether a Host header names this service. An address always does: no server can point it elsewhere."""
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        name = name.strip("[]").lower().rstrip(".")
        address = _address(name)
        if address is None:
            return name in self._names
        return address.is_loopback or not is_loopback(self._host)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
