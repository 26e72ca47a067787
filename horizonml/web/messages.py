"""Reads what a web client asks for, and writes what it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

TEXT = "text/plain; charset=utf-8"
_MOST_FIELDS = 64  # of a query


@dataclass(frozen=True)
class Request:
    """Holds what a client asks for. A header's name is in lower case; of several with the same name the last counts."""

    method: str
    path: str  # without the query, and with escapes undone
    query: Mapping[str, str]
    headers: Mapping[str, str]
    peer: str  # the client's address
    time: float  # when it was complete, of `time.monotonic`


@dataclass(frozen=True)
class Reply:
    """Holds an answer, after which the connection is closed."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, status: int, words: str, headers: Mapping[str, str] | None = None) -> Reply:
        """Return an answer in words."""
        return cls(status, words.encode(), TEXT, headers or {})

    def encode(self) -> bytes:
        """Return the bytes that are sent."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "Server: horizonml",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            "Connection: close",
        ]
        assert not any("\r" in line or "\n" in line for line in lines), "a header must not begin another one"
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + self.body


@dataclass(frozen=True)
class Later:
    """Is returned by a handler whose answer takes long: the server has a thread make it, and serves others meanwhile.

    `make` must come to an end by itself, within `seconds`; the client waits no longer.
    """

    make: Callable[[], Reply]
    seconds: float


def parse(received: bytes, peer: str) -> Request | Reply:
    """Return the request that begins with these bytes, up to its empty line, or the answer that refuses it."""
    first, *lines = received.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return Reply.text(400, "not a request\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        return Reply.text(413, "a request must have no body\n")
    path, _, query = words[1].partition("?")
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        return Reply.text(400, "the query has too many fields\n")
    return Request(words[0], unquote(path), fields, headers, peer, time.monotonic())
