"""The devices that have a token of their own: who they are, and which of these tokens are revoked.

The device that has the shared token keeps a list of them, and signs the list of those that are revoked. Whoever
connects to its rendezvous service gets this list, and keeps it beside the own token; nobody else can make one. Each
connection is checked against the newest list that this process knows.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from horizonml.errors import SecurityError
from horizonml.files import write_atomically
from horizonml.security import tls
from horizonml.security.token import Token, find_token, token_file
from horizonml.text import nearest, printable

MOST_REVOKED = 32 << 10  # characters of a list
_MOST_NAME = 63
_LIST = "revoked.pem"
_SERIALS = 1 << 28, 1 << 31  # of 8 hexadecimal digits


@dataclass(frozen=True)
class PairedDevice:
    """A device to which a token of its own was issued."""

    id: str  # the serial number of its certificate, 8 hexadecimal digits
    name: str  # as the device called itself
    since: float  # Unix time
    revoked: bool = False


class PairedDevices:
    """The list that the device with the shared token keeps, beside that token."""

    def __init__(self, shared: Token, folder: Path | None = None) -> None:
        """Keep it for this token. Raises SecurityError if it is one device's own."""
        if shared.is_own:
            raise SecurityError(
                "this device was paired itself; the device whose code it was given keeps the list, and can revoke it"
            )
        self._shared = shared
        self._file = (folder or token_file().parent) / "devices.json"

    def all(self) -> list[PairedDevice]:
        """Return the devices of this token, the oldest first. Raises SecurityError."""
        try:
            found = json.loads(self._file.read_text())
            return [PairedDevice(**one) for one in found["devices"]] if found["token"] == self._shared.id else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise SecurityError(f"{self._file} cannot be read: {error}") from None

    def issue(self, name: str) -> Token:
        """Return a token for a device, and remember it. Raises SecurityError."""
        known = self.all()
        taken = {one.id for one in known}
        serial = next(one for one in iter(_draw, None) if f"{one:08x}" not in taken)
        token = tls.issue(self._shared, serial)
        self._save([*known, PairedDevice(f"{serial:08x}", printable(name, _MOST_NAME), time.time())])
        return token

    def revoke(self, words: str) -> PairedDevice:
        """Revoke the token of the device with this name or identifier. Raises SecurityError."""
        known = self.all()
        found = [one for one in known if words in (one.id, one.name) and not one.revoked]
        if len(found) != 1:
            some = {one.name for one in known} | {one.id for one in known}
            what = f"{len(found)} devices are" if found else "no device that has a token of its own is"
            advice = "; name one by its identifier" if found else nearest(words, some)
            raise SecurityError(f"{what} called {words!r} ({'`horizonml devices` lists them'}){advice}")
        gone = replace(found[0], revoked=True)
        self._save([gone if one.id == gone.id else one for one in known])
        number, revoked = 0, frozenset[int]()
        with suppress(OSError, ValueError):  # the list may know more than the devices' file, if that was lost
            number, revoked = tls.read_revoked(self._shared, self._file.with_name(_LIST).read_bytes())
        self._write(_LIST, tls.sign_revoked(self._shared, revoked | {int(gone.id, 16)}, number + 1))
        return gone

    def _save(self, known: list[PairedDevice]) -> None:
        content = {"token": self._shared.id, "devices": [asdict(one) for one in known]}
        self._write(self._file.name, json.dumps(content, indent=2).encode())

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self._file.with_name(name), content, mode=0o600)
        except OSError as error:
            raise SecurityError(f"{self._file.with_name(name)} cannot be written: {error.strerror or error}") from None


def _draw() -> int:
    return _SERIALS[0] + secrets.randbelow(_SERIALS[1] - _SERIALS[0])


class Revoked:
    """The newest list of revoked tokens that this process knows. Any thread may use it."""

    def __init__(self, file: Callable[[], Path]) -> None:
        self._file, self._lock = file, threading.Lock()
        self._seen: int | None = None  # when the file that was read had been written
        self._content: bytes | None = None
        self._number, self._serials = 0, frozenset[int]()

    def __contains__(self, serial: object) -> bool:
        """Return whether the token with this serial number is revoked."""
        return serial in self._serials

    def refresh(self) -> None:
        """Look whether the file has changed, and let all connections that are made from now on comply with it."""
        with self._lock:
            with suppress(OSError):
                file = self._file()
                written = file.stat().st_mtime_ns
                if written != self._seen:
                    self._seen = written
                    self._take(file.read_bytes())
            for context in tls.contexts_without(self._content) if self._content is not None else ():
                tls.refuse_revoked(context, self._content or b"")

    def text(self) -> str | None:
        """Return the list for others, or None if nothing is revoked."""
        return self._content.decode() if self._content is not None else None

    def learn(self, text: object) -> None:
        """Take over a list from elsewhere, if it is newer than the one that is known here."""
        if not isinstance(text, str) or len(text) > MOST_REVOKED:
            return
        with self._lock:
            newer = self._take(text.encode())
        if newer:
            with suppress(OSError):  # a folder that cannot be written to; this process knows it all the same
                write_atomically(self._file(), text.encode(), mode=0o600)
            self.refresh()

    def _take(self, content: bytes) -> bool:
        """Take over a list if it is signed, and newer; return whether it is."""
        with suppress(ValueError, SecurityError):
            token = tls.any_token() or find_token()
            if token is not None:
                number, serials = tls.read_revoked(token, content)
                if number > self._number:
                    self._number, self._serials, self._content = number, serials, content
                    return True
        return False


REVOKED = Revoked(lambda: token_file().with_name(_LIST))
