"""The token: the secret that lets a process take part.

All devices of a cluster may have the same one, the shared token. A device that was paired has one of its own, which was
issued by a device that has the shared one (see `devices`), and can be revoked without the others noticing.

A token is always generated. One that people think up could be guessed offline from the certificate that the service
shows to everyone who connects (see `tls`); 160 random bits cannot.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horizonml.errors import SecurityError
from horizonml.files import write_atomically

TOKEN = "HORIZONML_TOKEN"  # noqa: S105  (the name of the environment variable that holds the token)
TOKEN_FILE = "HORIZONML_TOKEN_FILE"  # noqa: S105  (likewise, of the one that names the file)
INSECURE = "HORIZONML_INSECURE"  # set to 1 where ranks on several machines may meet without a token

_PREFIX = "hml-"
_SECRET_BYTES = 20
_CHECK_CHARACTERS = 4  # of base32, 5 bits each
_LENGTH = len(_PREFIX) + _SECRET_BYTES * 8 // 5 + _CHECK_CHARACTERS
_MOST_FILE = 4096  # bytes
_OWN_PREFIX = "hmd-"  # of a device's own token: its random bits, the identifier, two certificates, and a checksum
_ID_BYTES, _CHECK_BYTES = 4, 4


@dataclass(frozen=True)
class Token:
    """A token, which neither `repr` nor an error shows."""

    text: str = field(repr=False)

    @property
    def secret(self) -> bytes:
        """Return the 160 random bits."""
        if self.is_own:
            return self._content[:_SECRET_BYTES]
        return base64.b32decode(self.text[len(_PREFIX) : -_CHECK_CHARACTERS].upper())

    @property
    def id(self) -> str:
        """Return what tells two clusters apart, 8 hexadecimal characters, from which no token can be found."""
        if self.is_own:
            return self._content[_SECRET_BYTES : _SECRET_BYTES + _ID_BYTES].hex()
        return hashlib.sha256(b"horizonml token id\0" + self.secret).hexdigest()[:8]

    @property
    def is_own(self) -> bool:
        """Return whether it is one device's own, and not the shared token."""
        return self.text.startswith(_OWN_PREFIX)

    @property
    def certificates(self) -> tuple[bytes, bytes]:
        """Return the certificate of a device's own token and that of the shared token, which has signed it, as DER."""
        content = self._content[_SECRET_BYTES + _ID_BYTES : -_CHECK_BYTES]
        size = int.from_bytes(content[:2], "big")
        return content[2 : 2 + size], content[2 + size :]

    @property
    def _content(self) -> bytes:
        text = self.text[len(_OWN_PREFIX) :]
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def own_token(secret: bytes, shared: Token, certificate: bytes, signer: bytes) -> Token:
    """Return the token of one device, with its certificate and that of the shared token, as DER."""
    content = secret + bytes.fromhex(shared.id) + len(certificate).to_bytes(2, "big") + certificate + signer
    return Token(_OWN_PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("="))


def _check(content: bytes) -> bytes:
    return hashlib.sha256(b"horizonml token check\0" + content).digest()[:_CHECK_BYTES]


def make_token() -> Token:
    """Return a new token."""
    return _of(secrets.token_bytes(_SECRET_BYTES))


def parse_token(text: str, source: str = "the token") -> Token:
    """Return the token that a text stands for. Raises SecurityError, which names the `source` but not the text."""
    found = text.strip()
    if found.startswith(_OWN_PREFIX):
        return _parse_own(found, source)
    advice = "`horizonml token` makes one, and `horizonml token --show` prints it on the device that has it"
    if not found.startswith(_PREFIX):
        raise SecurityError(f"{source} does not begin with {_PREFIX}, so it is not a token of HorizonML; {advice}")
    if len(found) != _LENGTH:
        raise SecurityError(
            f"{source} has {len(found)} characters, and a token has {_LENGTH}; copy it again ({advice})"
        )
    try:
        token = _of(base64.b32decode(found[len(_PREFIX) : -_CHECK_CHARACTERS].upper()))
    except ValueError:
        token = None
    if token is None or not secrets.compare_digest(token.text.encode(), found.encode()):
        raise SecurityError(f"{source} is mistyped: its last characters do not fit the others; copy it again")
    return token


def _parse_own(text: str, source: str) -> Token:
    try:
        content = Token(text)._content
        intact = hmac.compare_digest(_check(content[:-_CHECK_BYTES]), content[-_CHECK_BYTES:])
    except ValueError:
        intact = False
    if not intact:
        raise SecurityError(f"{source} is mistyped or cut off: its end does not fit the rest; copy it again")
    return Token(text)


def find_token(env: Mapping[str, str] = os.environ) -> Token | None:
    """Return the token of this process: $HORIZONML_TOKEN, or else that in the file; None if there is neither.

    Raises SecurityError if it is malformed, or if others may read the file.
    """
    if env.get(TOKEN):
        return parse_token(env[TOKEN], f"${TOKEN}")
    file = token_file(env)
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            content = opened.read(_MOST_FILE)
    except FileNotFoundError:
        if env.get(TOKEN_FILE):
            raise SecurityError(f"${TOKEN_FILE} names {file}, and there is no such file") from None
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        raise SecurityError(f"the token in {file} cannot be read: {error.strerror or error}") from error
    # A Secret that Kubernetes mounts belongs to root and to the group of the pod, whose only user this is.
    if stat.S_IMODE(status.st_mode) & 0o007 or (status.st_uid == os.getuid() and status.st_mode & 0o070):
        raise SecurityError(
            f"others may read the token in {file}; run `chmod 600 {file}`, and `horizonml token --rotate`"
        )
    return parse_token(content.decode("ascii", errors="replace"), f"the content of {file}")


def token_file(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file that holds the token: $HORIZONML_TOKEN_FILE, or else one in the user's configuration."""
    if env.get(TOKEN_FILE):
        return Path(env[TOKEN_FILE])
    if env.get("XDG_CONFIG_HOME"):
        return Path(env["XDG_CONFIG_HOME"]) / "horizonml" / "token"
    try:
        return Path.home() / ".config" / "horizonml" / "token"
    except RuntimeError:  # a user without a home, as in some containers
        return Path("/nonexistent/horizonml/token")


def save_token(token: Token, file: Path | None = None) -> Path:
    """Write a token into a file that only its owner may read, and return the file. Raises SecurityError."""
    file = token_file() if file is None else file
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, f"{token.text}\n".encode(), mode=0o600)
    except OSError as error:
        raise SecurityError(
            f"the token cannot be written to {file}: {error.strerror or error}; ${TOKEN_FILE} can name another file"
        ) from error
    return file


def _of(secret: bytes) -> Token:
    """Return the token of some random bits."""
    check = base64.b32encode(hashlib.sha256(b"horizonml token check\0" + secret).digest()).decode()
    return Token(_PREFIX + (base64.b32encode(secret).decode() + check[:_CHECK_CHARACTERS]).lower())
