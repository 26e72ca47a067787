"""How requests and answers travel: one JSON object a line, an answer for each request, over TCP or TLS.

A connection begins with `hello`, which names the protocol, so that versions that do not understand each other say so.
An answer with `error` refuses the request, and the words after it are for people.

Messages are dataclasses whose annotations state what each field may hold; `read` checks all of it before anybody
believes it, because anyone who reaches the service may write anything. Fields that a message does not have are
ignored: a newer release may send more. This is done by hand because pydantic would add 9 MB to the service's 27 MB.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from horizonml import __version__
from horizonml.text import printable, shown

Fields = Mapping[str, object]  # of a JSON object
T = TypeVar("T")
Reader = Callable[[object], Any]  # returns a checked value. Raises ValueError, whose words follow the name of a field

MOST_RANKS = 4096  # of a world: far more than gloo connects, and few enough to count
MOST_REQUEST = 1 << 18  # bytes; the addresses of about 1,000 ranks
MOST_ANSWER = 1 << 23  # bytes; the fingerprints of the largest world
_MOST_BYTES = 1 << 16  # of any other message; a join takes about 500


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


def encode(fields: Fields) -> bytes:
    """Return the line that stands for some fields."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def whole(low: int, high: int) -> Reader:
    """Read a whole number within bounds."""

    def read_whole(value: object) -> int:
        if type(value) is not int or not low <= value <= high:  # True would be an int, too
            raise ValueError(f"must be a whole number from {low} to {high}, not {shown(value)}")
        return value

    return read_whole


def number(high: float, kind: str = "a number") -> Reader:
    """Read a number from 0 to `high`."""

    def read_number(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:  # which no NaN is
            raise ValueError(f"must be {kind} from 0 to {high:g}, not {shown(value)}")
        return float(value)

    return read_number


def text(most: int, least: int = 0) -> Reader:
    """Read a printable text of bounded length."""

    def read_text(value: object) -> str:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise ValueError(f"must be at most {most} printable characters, not {shown(value)}")
        if len(value.strip()) < least:
            raise ValueError("must not be empty")
        return value

    return read_text


def any_text(most: int) -> Reader:
    """Read a text of bounded length that may have any characters, such as lines."""

    def read_any(value: object) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"must be a text of at most {most} characters, not {shown(value)[:60]}")
        return value

    return read_any


def cleaned(most: int) -> Reader:
    """Read words for people, whatever they are: on one line, and not too long."""
    return lambda value: printable(str(value), most)


def matching(pattern: str, words: str) -> Reader:
    """Read a text that matches a pattern, which is called `words`."""
    compiled = re.compile(pattern)

    def read_matching(value: object) -> str:
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            raise ValueError(f"must be {words}, not {shown(value)}")
        return value

    return read_matching


def listed(most: int, entry: Reader, words: str) -> Reader:
    """Read a list of bounded length, whose entries are called `words`; it becomes a tuple."""

    def read_list(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"must be a list of at most {most} {words}")
        return tuple(map(entry, value))

    return read_list


def by_rank(entry: Reader) -> Reader:
    """Read an object whose keys are ranks."""

    def read_by_rank(value: object) -> dict[int, Any]:
        if not isinstance(value, dict) or len(value) > MOST_RANKS or not all(rank.isdecimal() for rank in value):
            raise ValueError("must be an object with ranks")
        return {int(rank): entry(one) for rank, one in value.items()}

    return read_by_rank


def read(kind: type[T], value: object) -> T:
    """Return the message that a JSON object stands for. Raises ValueError, which names the path to what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {shown(value)}")
    found, known = {}, cast(Any, kind)
    for name, (reader, required) in _readers(known).items():
        if name not in value and not required:
            continue
        try:
            found[name] = reader(value.get(name))
        except ValueError as error:
            words = str(error)
            raise ValueError(f"{name}{' ' if words.startswith('must ') else '.'}{words}") from None
    made = kind(**found)
    getattr(made, "check_fields", lambda: None)()  # of a message whose fields depend on one another
    return made


def message(kind: type[T]) -> Reader:
    """Read a message within another one."""
    return lambda value: read(kind, value)


def fields_of(message: Any, do: str | None = None) -> dict[str, object]:
    """Return a message as plain JSON values; of a request, `do` says what it asks for."""
    return ({"do": do} if do is not None else {}) | asdict(message)


@cache
def _readers(kind: Any) -> dict[str, tuple[Reader, bool]]:
    """Return how each field of a message is read, and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: (_reader(hints[one.name]), one.default is MISSING) for one in fields(kind)}


def _reader(hint: Any) -> Reader:
    if get_origin(hint) is Annotated:
        reader: Reader = hint.__metadata__[0]
        return reader
    if isinstance(hint, UnionType) or NoneType in get_args(hint):
        inner = _reader(next(one for one in get_args(hint) if one is not NoneType))
        return lambda value: None if value is None else inner(value)
    if hint is bool:
        return lambda value: value is True
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _one_of(hint)
    assert isinstance(hint, type), f"{hint} does not say what it may hold"
    return message(hint)


def _one_of(kind: type[StrEnum]) -> Reader:
    def read_one_of(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in {*kind}:
            raise ValueError(f"must be one of {', '.join(kind)}, not {shown(value)}")
        return kind(value)

    return read_one_of


PROTOCOL = 3  # of this connection, and of what ranks say to each other: releases with the same one train together
TLS_RECORDS = (0x15, 0x16)  # the first byte of an alert, and of a handshake: no JSON begins like this
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal: this version of the protocol is not spoken here


def hello() -> Fields:
    """Return what a client says first."""
    return {"do": "hello", "protocol": PROTOCOL, "version": __version__}


def check_hello(fields: Fields) -> None:
    """Raise ValueError unless a client has said hello in this protocol."""
    if fields.get("do") != "hello":
        raise ValueError("a client says hello first")
    theirs = fields.get("protocol")
    if theirs != PROTOCOL:
        raise ValueError(
            f"the service speaks protocol {PROTOCOL} (HorizonML {__version__}), and this client speaks protocol "
            f"{shown(theirs)} (HorizonML {printable(str(fields.get('version')), 40)}); install the same version "
            "everywhere"
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
    if "REVOKED" in reason or "revoked" in str(error):
        return "a token that was revoked; `horizonml join CODE` gives this device another one"
    if "WRONG_VERSION_NUMBER" in reason or "HTTP" in reason or "RECORD_LAYER" in reason:
        return "it does not encrypt, so it has no token (--insecure), or is something else"
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return "it has another token; copy the same one to all devices (`horizonml token`)"
    return f"no encrypted connection came about ({(error.reason or str(error)).lower().replace('_', ' ')})"
