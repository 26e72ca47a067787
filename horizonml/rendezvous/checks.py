"""Checks messages from the network, because anyone who reaches the rendezvous may write them.

How requests and answers travel: one JSON object a line, an answer for each request, over TCP or TLS.

A connection begins with `hello`, which names the protocol, so that versions that do not understand each other say so.
An answer with `error` refuses the request, and the words after it are for people.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import NoReturn

from horizonml import __version__
from horizonml.text import printable

Fields = Mapping[str, object]  # of a JSON object

MOST_RANKS = 4096  # of a world: far more than gloo connects, and few enough to count
MOST_GENERATION = (1 << 53) - 1
_MOST_BYTES = 1 << 16  # of an event; a join takes about 500
_MOST_TEXT = 255  # characters of a name
_MOST_SECONDS = 1e9


def parse(message: bytes, most: int = _MOST_BYTES) -> Fields:
    """Return the fields of a message of at most so many bytes. Raises ValueError."""
    if len(message) > most:
        raise ValueError(f"{len(message)} bytes are too long for a message")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        value = json.loads(message, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def whole(values: Fields, name: str, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`. Raises ValueError."""
    value = values.get(name)
    if type(value) is not int or not low <= value <= high:  # True would be an int, too
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def seconds(values: Fields, name: str) -> float:
    """Return a time in seconds, which is neither negative nor endless. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:  # which no NaN is
        raise ValueError(f"{name} must be seconds from 0 to {_MOST_SECONDS:g}, not {shown(value)}")
    return float(value)


def text(values: Fields, name: str) -> str:
    """Return a short printable text. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, str) or len(value) > _MOST_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be at most {_MOST_TEXT} printable characters, not {shown(value)}")
    return value


def ranks(values: Fields, name: str) -> tuple[int, ...]:
    """Return a list of ranks. Raises ValueError."""
    value = values.get(name)
    if (
        not isinstance(value, list)
        or len(value) > MOST_RANKS
        or not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in value)
    ):
        raise ValueError(f"{name} must be a list of ranks")
    return tuple(value)


def shown(value: object) -> str:
    """Return a value from the network as it may stand in a message: short, on one line, and plain."""
    plain = type(value).__name__ if isinstance(value, dict | list) else ascii(value)
    return plain if len(plain) <= 60 else f"{plain[:60]} ..."


PROTOCOL = 1
MOST_REQUEST = 1 << 18  # bytes; the addresses of about 1,000 ranks
MOST_ANSWER = 1 << 23  # bytes; the fingerprints of the largest world
TLS_RECORDS = (0x15, 0x16)  # the first byte of an alert, and of a handshake: no JSON begins like this
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal: this version of the protocol is not spoken here
_MOST_PROTOCOL = 1 << 31


def encode(fields: Fields) -> bytes:
    """Return the line that stands for some fields."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def hello() -> Fields:
    """Return what a client says first."""
    return {"do": "hello", "protocol": PROTOCOL, "version": __version__}


def check_hello(fields: Fields) -> None:
    """Raise ValueError unless a client has said hello in this protocol."""
    if fields.get("do") != "hello":
        raise ValueError("a client says hello first")
    theirs = whole(fields, "protocol", 0, _MOST_PROTOCOL)
    if theirs != PROTOCOL:
        raise ValueError(
            f"the service speaks protocol {PROTOCOL} (HorizonML {__version__}), and this client speaks protocol "
            f"{theirs} (HorizonML {printable(str(fields.get('version')), 40)}); install the same version everywhere"
        )


def is_final(error: ssl.SSLError) -> bool:
    """Return whether another attempt would end in the same way, which one that was disturbed need not."""
    reason = (error.reason or "").upper()
    return any(words in reason for words in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "CERTIFICATE", "UNKNOWN_CA"))


def is_plain(error: ssl.SSLError) -> bool:
    """Return whether a handshake failed because the other side does not speak TLS."""
    return any(words in (error.reason or "").upper() for words in ("WRONG_VERSION_NUMBER", "HTTP"))


def explain_tls(error: ssl.SSLError) -> str:
    """Return in words why a service and a client could not agree on a connection."""
    reason = (error.reason or str(error)).upper()
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "it shows no token"
    if "WRONG_VERSION_NUMBER" in reason or "HTTP" in reason or "RECORD_LAYER" in reason:
        return "it does not encrypt, so it has no token (--insecure), or is something else"
    if "CERTIFICATE_VERIFY_FAILED" in reason or "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return "it has another token; copy the same one to all devices (`horizonml token`)"
    return f"no encrypted connection came about ({(error.reason or str(error)).lower().replace('_', ' ')})"
