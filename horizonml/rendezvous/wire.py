"""How requests and answers travel: one JSON object a line, an answer for each request, over TCP or TLS.

A connection begins with `hello`, which names the protocol, so that versions that do not understand each other say so.
An answer with `error` refuses the request, and the words after it are for people.
"""

from __future__ import annotations

import json
import ssl

from horizonml import __version__
from horizonml.rendezvous.checks import Fields, whole
from horizonml.text import printable

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
